"""Blocks that are computed again: what they cost, what they free, and how the search chooses among policies."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf

import pytest
import zoo
from random_plans import LAPTOP, random_plan
from sampling import parametrize_or_slow
from tiny import tiny

import autoddl
from autoddl.capture.capture import capture
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import Op
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.plan import Plan
from autoddl.explain.explain import proved
from autoddl.operators.recomputed import recomputed_ops
from autoddl.planner.question import rebuild
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.schedule.traffic import traffic

POLICIES = ("none", "first-1", "full")


@cache
def planned(policies: tuple[str, ...], budget: float | None = None, name: str = "gpt", **options: str) -> Plan:
    """A plan for a model of two blocks, with attention or without, or of one block."""
    model, sample = (zoo.gpt(layers=2, d=32, T=64, B=16) if name == "gpt" else
                     (tiny(1 if name == "one" else 2, batch=256), None))
    return autoddl.plan(model, LAPTOP, sample, budget=budget, recompute=policies, **options)  # type: ignore[arg-type]


def seconds_alone(policies: tuple[str, ...], budget: float, name: str) -> dict[str, float]:
    """Seconds of the best plan under each of the policies that fit the budget."""
    found = {}
    for policy in policies:
        try:
            found[policy] = planned((policy,), budget, name, mesh="all=4").predicted.seconds
        except Infeasible:
            continue
    return found


def test_without_a_budget_that_binds_nothing_is_computed_again() -> None:
    free = planned(POLICIES)
    assert not free.recompute and free.predicted.seconds == planned(("none",)).predicted.seconds and free.gap < 1e-9


@parametrize_or_slow("name,share", [("one", 0.8)], [("tiny", 0.8), ("gpt", 0.6)])
def test_the_plan_is_the_best_of_all_policies(name: str, share: float) -> None:
    budget = share * planned(("none",), name=name, mesh="all=4").predicted.peak_bytes
    alone = seconds_alone(POLICIES, budget, name)
    best = planned(POLICIES, budget, name, mesh="all=4")
    assert best.recompute and best.predicted.peak_bytes <= budget
    assert best.predicted.seconds <= min(alone.values()) * (1 + 1e-3) and best.bound <= min(alone.values())
    assert best.predicted.seconds < alone.get("none", inf)
    everywhere = proved(best, everywhere=True)
    assert any("recompute" in name for name in everywhere.meshes) and everywhere.gap <= best.gap + 1e-3


def test_a_policy_costs_the_forward_of_its_blocks() -> None:
    plans = {policy: planned((policy,), mesh="all=4") for policy in (*POLICIES, "selective")}
    made = rebuild(plans["full"])
    assert plans["full"].recompute == ("blocks.0", "blocks.1")
    flows, again = made.pricing.graph.differentiable(), made.pricing.again
    forward = sum(sum(pass_seconds(made.pricing, v.item, v.choices[k], flows)[0])
                  for v, k in zip(made.variables, made.choice, strict=True)
                  if isinstance(v.item, Op) and v.item.target != HUB and v.name in again)
    seconds = {policy: one.predicted.seconds for policy, one in plans.items()}
    assert seconds["full"] == pytest.approx(seconds["none"] + forward, rel=1e-3)
    assert seconds["first-1"] == pytest.approx(seconds["none"] + forward / 2, rel=1e-3)
    assert plans["selective"].recompute == ("blocks.0:selective", "blocks.1:selective")
    assert seconds["none"] < seconds["selective"] < seconds["full"]
    peaks = [plans[policy].predicted.peak_bytes for policy in ("full", "selective", "none")]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1] < peaks[2]


def test_blocks_send_their_forward_again() -> None:
    """The same layouts with and without: what differs are the conversions in front of ops that are computed again."""
    captured = capture(*zoo.gpt())
    graph = add_hubs(captured.graph)
    kept, found = (random_plan(captured, 2, "machine=2,pair=2", recompute=again) for again in (False, True))
    assert kept.decisions == found.decisions and not kept.recompute and found.recompute
    again = recomputed_ops(graph, found.recompute)
    more = Counter((one.kind, one.axes, one.nbytes) for one in traffic(found, graph))
    more.subtract((one.kind, one.axes, one.nbytes) for one in traffic(kept, graph))
    forward = Counter((one.kind, one.axes, one.nbytes) for one in traffic(kept, graph)
                      if one.direction == "forward" and one.origin.rpartition(" ")[2] in again)
    assert forward and all(more[key] >= count for key, count in forward.items())


def test_a_plan_for_other_blocks_is_refused() -> None:
    plan = replace(planned(("full",)), recompute=("blocks.7",))
    with pytest.raises(InputError, match=r"blocks\.7 is no block of this model"):
        traffic(plan, add_hubs(capture(*zoo.gpt()).graph))


@parametrize_or_slow("name,share", [("tiny", 0.7)], [("gpt", 0.6)])
def test_the_search_chooses_the_blocks_itself(name: str, share: float) -> None:
    """No uniform choice is faster, none is below the bound, and the certificate is of all choices."""
    budget = share * planned(("none",), name=name, mesh="all=4").predicted.peak_bytes
    best = planned(("search",), budget, name, mesh="all=4")
    assert best.recompute and best.predicted.peak_bytes <= budget
    others = seconds_alone((*POLICIES, "selective"), budget, name)
    assert others and all(best.bound <= other for other in others.values())
    assert best.predicted.seconds <= min(others.values()) * (1 + 1e-3)
    checked = proved(best)
    assert checked.bound <= best.predicted.seconds and checked.gap <= best.gap + 1e-3


def test_without_a_budget_that_binds_the_search_computes_nothing_again() -> None:
    found, none = planned(("search",)), planned(("none",))
    assert not found.recompute and found.predicted.seconds == none.predicted.seconds and found.gap < 1e-9
