"""Rows of bytes are made again from the layouts of a plan, and held to its memory line."""

import random

import pytest
import zoo
from random_plans import ALONE, LAPTOP, random_choice
from sampling import parametrize_or_slow

from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.pipeline import Flight
from autoddl.core.recompute import policy_blocks
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.explain.rows.memory_rows import check_row, line_at_moments, numbers_of
from autoddl.explain.rows.row_bytes import bytes_at_moments
from autoddl.planner.peaks import draft_of
from autoddl.pricing.build_problem import CostNetwork, network_of
from autoddl.pricing.kept_tensors import with_kept_tensors
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables

CLUSTER = load_cluster(LAPTOP)
SLOW_LINKS = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 100 GB/s, peak: {float32: 1 TFLOP/s}}
levels:
  - {name: pair, size: 2, bandwidth: 1 MB/s, latency: 1 us}
  - {name: machine, size: 2, bandwidth: 500 kB/s, latency: 1 us}
"""


def made(name: str, mesh: str, microbatches: int, recompute: str = "none", flight: Flight = ALONE) -> CostNetwork:
    graph = add_hubs(capture(*getattr(zoo, name)()).graph)
    pricing = Pricing(graph, Mesh.parse(mesh), CLUSTER, "adamw", microbatches,
                      recompute=policy_blocks(graph, recompute), in_flight=flight.in_flight, waiting=flight.waiting)
    return network_of(pricing, variables(graph, pricing.mesh, microbatches=microbatches, 
                                         in_flight=flight.in_flight + flight.waiting))


@parametrize_or_slow("name,mesh,microbatches,recompute", [
    ("regression", "machine=2,pair=2", 1, "none"), ("gpt", "machine=2,pair=2", 1, "blocks.0:selective+blocks.1"),
    ("neox", "all=4", 1, "first-1"), ("llama", "machine=2,pair=2", 1, "first-1:light")], [
    ("vgg_bn", "pair=2", 2, "none"), ("gpt", "pair=2", 2, "every-2"),
    *((name, mesh, m, policy) for name in ("gpt", "t5", "mixture", "routed", "deepseek", "resnet", "neox", "phi3")
      for mesh, m in (("machine=2,pair=2", 1), ("all=4", 2))
      for policy in ("none", "full", "selective", "first-1:selective", "light"))])
def test_rows_come_out_again_from_the_layouts(name: str, mesh: str, microbatches: int, recompute: str) -> None:
    network = made(name, mesh, microbatches, recompute)
    graph, problem, kept = network.pricing.graph, network.problem(None), with_kept_tensors(network)
    for seed in range(2):
        choice = random_choice(problem, random.Random(seed))
        plan = draft_of(network, choice)
        again = bytes_at_moments(plan, graph, "adamw", CLUSTER)
        line = line_at_moments(plan, graph, "adamw", CLUSTER)
        assert all(row <= most * (1 + 1e-9) for row, most in zip(again, line, strict=True) if most)
        for op in graph.ops[::5]:
            for kind in ("before", "forward", "backward"):
                moment = f"{kind} {op.name}"
                (number,) = numbers_of(graph, moment)
                row = kept.network.row_bytes(kept.settled(choice), {moment: 1.0})
                assert row == pytest.approx(again[number], rel=1e-9), moment


@parametrize_or_slow("name,recompute,flight", [("gpt", "blocks.0:selective+blocks.1", Flight(2, 3))], [
    (name, policy, flight) for name in ("gpt", "t5", "mixture", "resnet", "phi3", "llama")
    for policy, flight in (("none", Flight(1, 4)), ("full", Flight(3, 2)))])
def test_rows_of_a_stage_with_microbatches_that_wait_come_out_again(name: str, recompute: str, flight: Flight) -> None:
    network = made(name, "machine=2,pair=2", 6, recompute, flight)
    graph, kept = network.pricing.graph, with_kept_tensors(network)
    for seed in range(2):
        choice = random_choice(network.problem(None), random.Random(seed))
        plan = draft_of(network, choice)
        for op in graph.ops[seed::15]:
            row = {f"forward {op.name}": 0.5, f"backward {op.name}": 0.5}
            claimed = {moment: kept.network.row_bytes(kept.settled(choice), {moment: 1.0}) for moment in row}
            assert 0 < check_row(plan, graph, "adamw", CLUSTER, row, claimed) <= 1


def test_rows_of_a_coded_plan_come_out_again() -> None:
    """While a gradient is sent coded a rank has less of it than either of its pieces."""
    words, place = ("gradients=int4", "weights=int8", "activations=int4"), parse_cluster(SLOW_LINKS, "slow")
    graph = add_hubs(capture(*zoo.gpt()).graph)
    pricing = Pricing(graph, Mesh.parse("machine=2,pair=2"), place, "adamw", codecs=words)
    network = network_of(pricing, variables(graph, pricing.mesh))
    kept = with_kept_tensors(network)
    for seed in range(3):
        choice = random_choice(network.problem(None), random.Random(seed))
        plan = draft_of(network, choice)
        assert plan.codecs
        for op in reversed(graph.ops[::5]):
            row = {f"backward {op.name}": 1.0}
            claimed = {moment: kept.network.row_bytes(kept.settled(choice), row) for moment in row}
            assert 0 < check_row(plan, graph, "adamw", place, row, claimed, words) <= 1
    with pytest.raises(AssertionError, match="claims"):
        check_row(plan, graph, "adamw", place, row, claimed)


def test_no_row_of_tied_weights_is_above_the_line() -> None:
    """One reader may send on what another one gathered: the gathered copy is gone then."""
    graph = add_hubs(capture(*zoo.tied()).graph)
    pricing = Pricing(graph, Mesh.parse("machine=2,pair=2"), CLUSTER, "adamw", 1)
    network = network_of(pricing, variables(graph, pricing.mesh))
    for seed in range(50, 62):
        plan = draft_of(network, random_choice(network.problem(None), random.Random(seed)))
        rows, line = bytes_at_moments(plan, graph, "adamw", CLUSTER), line_at_moments(plan, graph, "adamw", CLUSTER)
        assert all(row <= most * (1 + 1e-9) for row, most in zip(rows, line, strict=True) if most), seed


def test_a_falsified_row_is_refused() -> None:
    network = made("regression", "machine=2,pair=2", 1)
    graph, choice = network.pricing.graph, random_choice(network.problem(None), random.Random(0))
    plan, middle = draft_of(network, choice), graph.ops[len(graph.ops) // 2].name
    row = {"update": 0.25, f"forward {middle}": 0.5, f"around {middle}": 0.25}
    kept = with_kept_tensors(network)
    claimed = {moment: kept.network.row_bytes(kept.settled(choice), {moment: 1.0}) for moment in row}
    assert 0 < check_row(plan, graph, "adamw", CLUSTER, row, claimed) <= 1
    for moment in row:
        false = claimed | {moment: 1.02 * claimed[moment] + 10_000}
        with pytest.raises(AssertionError, match=f"the row of '{moment}' claims"):
            check_row(plan, graph, "adamw", CLUSTER, row, false)
    with pytest.raises(AssertionError, match="add up to one"):
        check_row(plan, graph, "adamw", CLUSTER, {"update": 0.5}, claimed)


def test_rows_of_a_sparse_plan_have_its_residuals() -> None:
    """A residual is as large as the piece of the gradient that is stored, and is there at every moment."""
    place, graph = parse_cluster(SLOW_LINKS, "slow"), add_hubs(capture(*zoo.gpt()).graph)
    pricing = Pricing(graph, Mesh.parse("machine=2,pair=2"), place, "adamw", sparse="0.01,momentum=0.9")
    network = network_of(pricing, variables(graph, pricing.mesh, sparse="0.01,momentum=0.9"))
    kept = with_kept_tensors(network)
    for seed in range(3):
        choice = random_choice(network.problem(None), random.Random(seed))
        plan = draft_of(network, choice)
        assert plan.sparse_sums
        for op in reversed(graph.ops[::5]):
            row = {f"backward {op.name}": 1.0}
            claimed = {moment: kept.network.row_bytes(kept.settled(choice), row) for moment in row}
            assert 0 < check_row(plan, graph, "adamw", place, row, claimed) <= 1
        with pytest.raises(AssertionError, match="claims"):
            check_row(plan.without_codecs(), graph, "adamw", place, row, claimed)
