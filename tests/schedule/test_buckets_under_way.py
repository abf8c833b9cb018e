"""Reductions of gradients under way: few at once, in the order that the time line has, always the same bits."""

from dataclasses import replace

import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from precise import Precise
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.actions import Action, Start, Wait
from autoddl.schedule.buckets import IN_FLIGHT, frees_memory, gradient_buckets, overdue_buckets
from autoddl.schedule.issue_order import list_actions

ROWS = 8
USUAL = [("a=2", {"a": "zero"}, 1)]
SLOW = [("a=2,b=2", {"a": "data", "b": "zero"}, 2),
        ("a=4", {"a": "zero"}, 1), ("a=2,b=2", {"a": "zero", "b": "zero"}, 1), ("a=4", {"a": "data"}, 2)]
"""A mesh, the roles of its axes, microbatches."""


def built() -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    module, sample = zoo.gpt(B=ROWS, dtype=torch.float64)
    return Precise(module), sample


@shared
def captured(microbatches: int) -> Captured:
    module, sample = built()
    return capture(module, parted(sample, microbatches))


def plan_of(mesh: str, roles: dict[str, str], microbatches: int) -> Plan:
    """A bucket for each parameter."""
    module, sample = built()
    (plan,) = random_plans(module, parted(sample, microbatches), mesh, 1, roles=roles, microbatches=microbatches,
                           captured=captured(microbatches))
    return replace(plan, bucket_bytes=1)


def ran(plan: Plan) -> tuple[list[tuple[str, int]], dict[str, Tensor]]:
    """One rank: collectives by number, as they are started and waited for in a step; the gradients."""
    module, sample = built()
    parallel = parallelize(module, plan, captured=captured(plan.microbatches))
    parallel.recorder.timed = True
    parallel.step(parallel.local_batch(sample.args))
    times = [(time, kind, k) for k, mark in enumerate(parallel.recorder.marks)
             for kind, time in (("start", mark.start), ("wait", mark.waited))]
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return [(kind, k) for _, kind, k in sorted(times)], {
        name: getattr(g, "_local_tensor", g).clone() for name, g in gradients.items() if g is not None}


def words(actions: tuple[Action, ...]) -> list[tuple[str, int]]:
    starts = iter(range(len(actions)))
    return [("start", next(starts)) if isinstance(one, Start) else ("wait", one.k)
            for one in actions if isinstance(one, Start | Wait)]


def most(actions: tuple[Action, ...]) -> int:
    """How many reductions that free what they send are under way at once."""
    started, under_way, found = 0, set[int](), 0
    for one in actions:
        if isinstance(one, Start):
            if one.sent.kind == "reduce-scatter" and one.sent.origin.startswith("the gradients of"):
                under_way.add(started)
            started += 1
        elif isinstance(one, Wait):
            under_way.discard(one.k)
        found = max(found, len(under_way))
    return found


@pytest.mark.ranks
@parametrize_or_slow("mesh,roles,microbatches", USUAL, SLOW)
def test_starts_and_waits_are_those_of_the_time_line(mesh: str, roles: dict[str, str], microbatches: int) -> None:
    plan, graph = plan_of(mesh, roles, microbatches), add_hubs(captured(microbatches).graph)
    buckets = gradient_buckets(plan, graph)
    assert len(buckets) > 4 * IN_FLIGHT
    before, after = (on_ranks(plan.mesh.size, ran, plan) for _ in range(2))
    for rank, ((order, one), (again, other)) in enumerate(zip(before, after, strict=True)):
        actions = list_actions(plan, graph, cluster_of(mesh), rank)
        assert order == again == words(actions)
        if all(len(bucket.steps) == 1 for bucket in buckets):
            assert most(actions) == (IN_FLIGHT if any(map(frees_memory, buckets)) else 0)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_overdue() -> None:
    assert [[*overdue_buckets("abc"[:n], another)] for n in range(4) for another in (False, True)] == [
        [], [], [], [], [], ["a"], ["a"], ["a", "b"]]
