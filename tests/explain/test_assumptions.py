"""A plan says in the user's units what it takes for granted; idle ranks and odd clusters are named."""

from dataclasses import replace

import pytest
import zoo
from planmaker import cluster_of, random_plans
from shell import FACTORY, ROOT, shell

from autoddl.api import plan
from autoddl.cli.tables.assumption_rows import assumption_rows, idle_rows
from autoddl.core.layout import B, Layout, Split
from autoddl.core.pipeline_proofs import TIME_OVER
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.explain.assumptions import batch_of, idle_axes, odd_values, throughput, untried, unweighed

SLOW_LINKS = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s}}
levels:
  - {name: net, size: 2, bandwidth: 10 kB/s, latency: 1 ms}
  - {name: hall, size: 2, bandwidth: 5 kB/s, latency: 1 s}
"""
SOLD = """name: sold
device: {name: card, memory: 80 GB, bandwidth: 2 TB/s, peak: {bfloat16: 312 TFLOP/s}}
levels:
  - {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}
  - {name: net, size: 4, bandwidth: 400 Gb/s, latency: 8 us}
"""


@pytest.fixture(scope="module")
def alone() -> Plan:
    module, sample = zoo.gpt()
    return plan(module, parse_cluster(SLOW_LINKS, "slow"), sample)


def test_a_batch_is_counted_in_rows_and_tokens_of_all_microbatches(alone: Plan) -> None:
    assert batch_of(alone) == (4, 64)
    assert batch_of(replace(alone, microbatches=3)) == (12, 192)
    assert throughput(alone) == {"samples": 4 / alone.predicted.seconds, "tokens": 64 / alone.predicted.seconds}
    shorter = replace(alone, predicted=replace(alone.predicted, line_seconds=0.5))
    assert throughput(shorter)["samples"] == 4 / 0.5
    image = {"args": [{"tensor": [8, 3, 32, 32], "dtype": "float32"}], "kwargs": {"flag": True}}
    assert batch_of(replace(alone, sample=image)) == (8, None)
    assert batch_of(replace(alone, sample={"args": [], "kwargs": {"x": 3}})) is None


def test_ranks_that_repeat_each_other_are_named(alone: Plan) -> None:
    assert idle_axes(alone) == alone.mesh.names
    module, sample = zoo.gpt()
    split = random_plans(module, sample, "a=2,b=2", 1, roles={"a": "data", "b": "data"})[0]
    assert idle_axes(split) == ()


def test_options_that_a_search_was_not_given_are_named(alone: Plan) -> None:
    assert untried(alone) == ("--stages 1,2,4 --microbatches 4,8 has pipelines too",)  # nothing is sent, all repeat
    assert idle_rows(alone)[0][1].endswith("may change that, and so may stages (--stages)")
    weighed = replace(alone, source=alone.source | {"asked": {"stages": [1, 2]}})
    assert untried(weighed) == () and idle_rows(weighed)[0][1].endswith("may change that")
    sent = replace(alone, predicted=replace(alone.predicted, communication={"net": 0.5 * alone.predicted.seconds},
                                           compute=0.0),
                   precision="bf16-mixed", backend="nccl")
    first = [text.split()[0] for text in untried(sent)]
    computed = replace(sent, predicted=replace(sent.predicted, compute=sent.predicted.seconds))
    assert untried(computed) == untried(sent)[::-1]
    assert first == ["--overlap", "--stages", "--precision", "--compress", "--compiled"]
    given = replace(sent, precision="bf16-mixed,reduce=bfloat16", predicted=replace(sent.predicted, line_bound=0.0),
                    source=sent.source | {"compress": ["hybrid"], "software": "torchtitan", "mine": "dp=2"})
    assert untried(given) == () and untried(replace(sent, source={})) == ()


def test_a_plan_for_no_program_names_the_option_where_published_runs_are_of_such_devices(alone: Plan) -> None:
    sold = parse_cluster(SOLD, "sold")
    plain = replace(alone, backend="nccl", source=alone.source | {"cluster": sold.to_yaml()})

    def named(one: Plan, **more: str) -> list[str]:
        return [said for said in untried(replace(one, source=one.source | more)) if "--software" in said]

    said, = named(plain)
    assert said.startswith("--software eager (or torchtitan") and "8 of 10 steps" in said
    assert untried(plain)[-1] == said
    alike = replace(sold, device=replace(sold.device, compiled=True))
    assert named(plain, cluster=alike.to_yaml())[0].startswith("--software compiled, without --compiled,")
    assert not named(plain, software="torchtitan") and not named(plain, cluster=alone.source["cluster"])
    assert not named(replace(plain, backend="gloo")) and not named(replace(plain, sample={}))


def test_pipelines_for_which_the_time_was_too_short_are_named(alone: Plan) -> None:
    seconds = alone.predicted.seconds
    rows = [{"seconds": found, "bound": bound, "detail": detail} for found, bound, detail in (
        (None, 0.5 * seconds, TIME_OVER), (None, 0.5 * seconds, "7 cuts were solved"),
        (seconds, 0.5 * seconds, TIME_OVER), (None, 2 * seconds, TIME_OVER), (None, None, "no plan fits"))]
    asked = alone.source | {"alternatives": rows, "asked": {"stages": [1, 2]}}
    sent = replace(alone, source=asked, predicted=replace(alone.predicted, communication={"net": 0.5 * seconds}))
    said = [text.split(":")[0] for text in untried(sent)]
    assert "a larger --stages-limit" in said and not any(text.startswith("--stages ") for text in said)
    assert unweighed(sent) == 1 and unweighed(alone) == 0


def test_a_cluster_unlike_any_that_is_sold_is_named() -> None:
    found = odd_values(parse_cluster(SLOW_LINKS, "slow"))
    assert [text.partition(" is ")[0] for text in found] == [
        "level net: a bandwidth of 10 kB/s", "level hall: a bandwidth of 5 kB/s", "level hall: a latency of 1 s"]
    assert "less than any that is sold, by a factor of 12,500" in found[0] and "more" in found[2]
    assert len(odd_values(cluster_of("a=2"))) == 4  # peaks of 1 MFLOP/s, memory of 1 GB/s


@pytest.mark.parametrize(("old", "new", "said"), [
    ("400 Gb/s, latency: 8 us", "400 GB/s, latency: 8 us, protocol: direct", ""),
    ("400 Gb/s", "400 GB/s", "no network that is sold has 400 GB/s in each direction; if the 400 Gb/s of "
                             "InfiniBand-NDR were meant, write 400 Gb/s"),
    ("300 GB/s", "300 Gb/s", "if the 300 GB/s of NVLink3 were meant, write 300 GB/s"),
    ("300 GB/s", "1.8 TB/s", "if both directions of NVLink5 were meant, write one, 900 GB/s"),
    ("8 us", "8 ms", "a latency of 8 ms is more than any that is sold; if 8 us was meant"),
    ("312 TFLOP/s", "312 GFLOP/s", "is less than any that is sold; if 312 TFLOP/s was meant"),
    ("80 GB,", "80 MB,", "a memory of 80 MB is less than any that is sold; if 80 GB was meant"),
    ("2 TB/s", "2 GB/s", "if 2 TB/s was meant, write that"), ("8 us", "9 us", "")])
def test_a_slip_of_a_unit_is_named_with_what_was_meant(old: str, new: str, said: str) -> None:
    found = odd_values(parse_cluster(SOLD.replace(old, new), "slip"))
    assert len(found) == bool(said) and said in "".join(found)


@pytest.mark.parametrize(("device", "rate", "said"), [
    ("A100-80GB", "600 GB/s", "if both directions of NVLink3 were meant, write one, 300 GB/s"),
    ("H100-80GB", "900 GB/s", "if both directions of NVLink4 were meant, write one, 450 GB/s"),
    ("A100-80GB", "300 GB/s", ""), ("B200-180GB", "900 GB/s", ""), ("TPU-v5p-95GB", "600 GB/s", "")])
def test_a_rate_that_only_another_device_has_is_a_slip(device: str, rate: str, said: str) -> None:
    levels = f"levels: [{{name: node, size: 8, bandwidth: {rate}, latency: 3 us}}]"
    found = odd_values(parse_cluster(f"name: one\ndevice: {device}\n{levels}", "slip"))
    assert len(found) == bool(said) and said in "".join(found)


def test_no_cluster_of_the_examples_is_odd() -> None:
    for path in (ROOT / "examples" / "clusters").glob("*.yaml"):
        assert odd_values(load_cluster(path)) == (), path


def test_a_budget_above_what_the_device_has_is_named(alone: Plan) -> None:
    rows = assumption_rows(replace(alone, budget=1024.0**3))
    assert ("unusual", "a budget of 1.07 GB is more than the 1 GB that a core has: such a plan may not run") in rows
    assert not any("budget" in text for _, text in assumption_rows(alone))


def test_rows_in_pieces_of_different_sizes_are_named(alone: Plan) -> None:
    (mesh, (first, *_)) = alone.mesh, alone.inputs
    split = replace(alone, inputs={first: Layout((Split(0),) + (B,) * (len(mesh.axes) - 1))})
    pieces = mesh.sizes[0]
    assert pieces > 1
    for rows, said in ((pieces, False), (pieces + 1, True), (3 * pieces, False), (3 * pieces - 1, True)):
        sample = {"args": [{"tensor": [rows, 2], "dtype": "int64"}]}
        text = dict(assumption_rows(replace(split, sample=sample)))["assumes"]
        assert (f"in {pieces} uneven pieces of up to {-(-rows // pieces)}" in text) == said, text
        whole = replace(split, sample=sample, inputs={first: Layout.broadcast(mesh)})
        assert "uneven" not in dict(assumption_rows(whole))["assumes"]


def test_the_first_lines_of_a_plan_say_it() -> None:
    shown = shell("plan", FACTORY, "examples/clusters/laptop.yaml").out
    assert "assumes" in shown and "adamw, whose state and update count" in shown and "samples/s" in shown
