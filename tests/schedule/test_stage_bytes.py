"""The bytes of a stage in parts: held to its memory line, and what a rank with several stages has at every moment."""

import random
from itertools import product

import pytest
import zoo
from random_plans import LAPTOP, random_choice
from sampling import parametrize_or_slow
from staged_plans import even_cuts

from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.pipeline import Flight, RankMoment, RankMoments, rank_moments
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import StageBytes
from autoddl.core.recompute import policy_blocks
from autoddl.core.stages import cut_graph
from autoddl.cost_models import load_cluster
from autoddl.planner.peaks import draft_of
from autoddl.pricing.build_problem import CostNetwork, network_of
from autoddl.pricing.kept_tensors import with_kept_tensors
from autoddl.pricing.lifetimes import BETWEEN, TURN
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables
from autoddl.schedule.memory_line import predict_memory, with_memory_peak
from autoddl.schedule.stage_bytes import alone_bytes, rank_bytes, rank_kinds, rank_peak_bytes, resting_bytes

CLUSTER = load_cluster(LAPTOP)


def network_of_stage(name: str, stage: int, flight: Flight, microbatches: int, recompute: str) -> CostNetwork:
    graph = capture(*zoo.named(name, B=8)).graph
    part = add_hubs(cut_graph(graph, even_cuts(graph, 3))[stage].graph)
    pricing = Pricing(part, Mesh.parse("pair=2"), CLUSTER, "adamw", microbatches,
                      recompute=policy_blocks(part, recompute), in_flight=flight.in_flight, waiting=flight.waiting)
    return network_of(pricing, variables(part, pricing.mesh, microbatches=microbatches,
                                         in_flight=flight.in_flight + flight.waiting))


@parametrize_or_slow("name,stage,recompute", [("gpt-4", 1, "none")], [
    (name, stage, policy) for name in ("gpt-4", "llama-4", "t5", "mixture") for stage in range(3)
    for policy in ("none", "full", "selective", "light")])
def test_parts_of_a_stage_are_no_less_than_its_line_and_rows_no_more_than_parts(name: str, stage: int, recompute: str
                                                                               ) -> None:
    """With 1 to 6 microbatches in flight, some of which wait, of as many or more in a step."""
    for (k, w), m in product(((1, 0), (2, 0), (5, 0), (3, 2)), (5, 12)):
        flight = Flight(k, w, most=(k, w))
        network = network_of_stage(name, stage, flight, m, recompute)
        graph, kept = network.pricing.graph, with_kept_tensors(network)
        for seed in range(3):
            choice = random_choice(network.problem(None), random.Random(seed))
            plan = with_memory_peak(draft_of(network, choice), graph, "adamw", CLUSTER)
            peak, parts = predict_memory(plan, graph, "adamw", CLUSTER).peak, plan.predicted.parts
            assert parts is not None and plan.predicted.peak_bytes == pytest.approx(peak)
            ends = [flight, flight._replace(begun=False)]
            assert max(alone_bytes(plan, one) for one in ends) >= peak * (1 - 1e-9)
            assert max(alone_bytes(plan, one) for one in ends) <= peak + sum(parts.sums.values()) + sum(
                parts.base.values()) * 0.05 + sum(parts.kept.values())
            for moment, one in ((TURN, ends[1]), (BETWEEN, flight if m > k else ends[1])):
                row = kept.network.row_bytes(kept.settled(choice), {moment: 1.0})
                assert 0 < row <= resting_bytes(plan, one) * (1 + 1e-9), (k, w, m, seed, moment)


def stage_of(base: float, kept: float, sums: float = 0.0, running: float = 0.0, update: float = 0.0, late: float = 0.0
             ) -> StageBytes:
    return StageBytes({"parameters": base}, {"gradients": sums}, {"activations": kept}, {"transient": late},
                      *({"transient": running},) * 3, {"optimizer": update})


@pytest.mark.parametrize("name", ["interleaved:2", "interleaved:3", "zb-v", "dualpipe-v", "chimera:1"])
@pytest.mark.parametrize("seed", range(3))
def test_a_rank_has_most_at_the_fullest_of_all_its_moments(name: str, seed: int) -> None:
    """Every action of every rank again, with stages of random sizes."""
    rng, schedule = random.Random(seed), generate(name, 4, 12)
    sizes = [stage_of(*(rng.uniform(0, 9) for _ in range(6))) for _ in range(schedule.stages)]
    late = {action._replace(kind="B") for action in schedule if action.kind == "W"}
    for moments in rank_moments(schedule).values():
        most, update = 0.0, sum(sum(sizes[s].update.values()) for s in moments.stages)
        for actions in schedule.actions:
            if {one.stage for one in actions} != set(moments.stages):
                continue
            flight, waits, begun = (dict.fromkeys(moments.stages, 0) for _ in range(3))
            for stage, kind, microbatch, pipe in actions:
                flight[stage] += kind == "F"
                now = sum(sizes[s].forward["transient"] for s in (stage,))
                for s in moments.stages:
                    one = sizes[s]
                    now += (one.base["parameters"] + flight[s] * one.kept["activations"]
                            + waits[s] * one.late["transient"] + (one.sums["gradients"] if begun[s] else 0.0))
                most = max(most, now)
                flight[stage] -= kind == "B"
                waits[stage] += ((stage, "B", microbatch, pipe) in late) * (kind == "B") - (kind == "W")
                begun[stage] = begun[stage] or kind == "B"
        found, at = rank_bytes([sizes[s] for s in moments.stages], moments)
        assert found == pytest.approx(max(most, update)) and (at is None) == (update >= most)


def test_kinds_of_a_rank_add_up_to_its_bytes() -> None:
    network = network_of_stage("gpt-4", 1, Flight(3), 8, "none")
    plan = with_memory_peak(draft_of(network, random_choice(network.problem(None), random.Random(0))),
                            network.pricing.graph, "adamw", CLUSTER)
    one, two = Flight(3), Flight(1, begun=False)
    moments = RankMoments((0, 1), (RankMoment(0, "B", (one, two)), RankMoment(1, "F", (one, two))))
    kinds = rank_kinds([plan, plan], moments)
    assert sum(kinds.values()) == pytest.approx(rank_peak_bytes([plan, plan], moments))
    assert min(kinds.values()) >= -1e-6
    assert kinds["parameters"] == pytest.approx(2 * plan.predicted.nbytes["parameters"])
    assert rank_kinds([plan], None) == plan.predicted.nbytes


def test_a_stage_alone_on_its_ranks_counts_its_own_peak() -> None:
    network = network_of_stage("gpt-4", 1, Flight(3), 8, "none")
    plan = with_memory_peak(draft_of(network, random_choice(network.problem(None), random.Random(0))),
                            network.pricing.graph, "adamw", CLUSTER)
    assert alone_bytes(plan, Flight(3)) == resting_bytes(plan, Flight(3)) == plan.predicted.peak_bytes
    fewer = Flight(1, most=(3, 0))
    assert resting_bytes(plan, fewer) < alone_bytes(plan, fewer) < plan.predicted.peak_bytes
