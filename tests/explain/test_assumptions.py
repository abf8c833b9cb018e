"""A plan says in the user's units what it takes for granted; idle ranks and odd clusters are named."""

from dataclasses import replace

import pytest
import zoo
from planmaker import cluster_of, random_plans
from shell import FACTORY, shell

from autoddl.api import plan
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.explain.assumptions import batch_of, idle_axes, odd_values, throughput

SLOW_LINKS = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s}}
levels:
  - {name: net, size: 2, bandwidth: 10 kB/s, latency: 1 ms}
  - {name: hall, size: 2, bandwidth: 5 kB/s, latency: 1 s}
"""


@pytest.fixture(scope="module")
def alone() -> Plan:
    module, sample = zoo.gpt()
    return plan(module, parse_cluster(SLOW_LINKS, "slow"), sample)


def test_a_batch_is_counted_in_rows_and_tokens_of_all_microbatches(alone: Plan) -> None:
    assert batch_of(alone) == (4, 64)
    assert batch_of(replace(alone, microbatches=3)) == (12, 192)
    assert throughput(alone) == {"samples": 4 / alone.predicted.seconds, "tokens": 64 / alone.predicted.seconds}
    image = {"args": [{"tensor": [8, 3, 32, 32], "dtype": "float32"}], "kwargs": {"flag": True}}
    assert batch_of(replace(alone, sample=image)) == (8, None)
    assert batch_of(replace(alone, sample={"args": [], "kwargs": {"x": 3}})) is None


def test_ranks_that_repeat_each_other_are_named(alone: Plan) -> None:
    assert idle_axes(alone) == alone.mesh.names
    module, sample = zoo.gpt()
    split = random_plans(module, sample, "a=2,b=2", 1, roles={"a": "data", "b": "data"})[0]
    assert idle_axes(split) == ()


def test_a_cluster_unlike_any_that_is_sold_is_named() -> None:
    found = odd_values(parse_cluster(SLOW_LINKS, "slow"))
    assert [text.partition(" is ")[0] for text in found] == [
        "level net: a bandwidth of 10 kB/s", "level hall: a bandwidth of 5 kB/s", "level hall: a latency of 1 s"]
    assert "less than any that is sold, by a factor of 12,500" in found[0] and "more" in found[2]
    assert len(odd_values(cluster_of("a=2"))) == 3  # peaks of 1 MFLOP/s


def test_the_first_lines_of_a_plan_say_it() -> None:
    shown = shell("plan", FACTORY, "examples/clusters/laptop.yaml").out
    assert "assumes" in shown and "adamw, whose state and update count" in shown and "samples/s" in shown
