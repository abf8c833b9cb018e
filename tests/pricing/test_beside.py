"""Messages that a program sends beside a product cost what is left of them: in the search, a plan and its steps."""

from dataclasses import replace

import pytest
import zoo
from planmaker import cluster_of

import autoddl
from autoddl.core.conversion import Step
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.planner.question import question_of
from autoddl.pricing.beside import computed_beside
from autoddl.pricing.price import Pricing, left_seconds
from autoddl.schedule.actions import Compute, Start
from autoddl.schedule.issue_order import list_actions


def hiding(place: Cluster, *roles: str) -> Cluster:
    return replace(place, device=replace(place.device, hides=roles))


def test_as_much_is_hidden_as_is_computed_but_for_what_slows_down() -> None:
    assert left_seconds("all-gather", 1.0, 2.0) == pytest.approx(0.2)
    assert left_seconds("reduce-scatter", 3.0, 2.0) == pytest.approx(3.0 - 0.8 * 2.0)
    assert left_seconds("all-gather", 1.0, 0.0) == left_seconds("all-reduce", 1.0, 2.0) == 1.0


def planned(place: Cluster) -> Plan:
    model, sample = zoo.llama(B=8, T=64)
    return autoddl.plan(model, place, sample, mine="tp=4,sp", workers=1)


def sent(plan: Plan, place: Cluster) -> dict[str, float]:
    """Seconds of the collectives of activations, by where they are from."""
    graph, found = add_hubs(question_of(plan).graph), dict[str, float]()
    for one in list_actions(plan, graph, place):
        if isinstance(one, Start) and " for " in one.sent.origin:
            found[one.sent.origin] = found.get(one.sent.origin, 0.0) + one.seconds
    return found


def test_a_plan_its_bound_and_its_steps_know_what_is_hidden() -> None:
    place = cluster_of("tp=4")
    alone, beside = planned(place), planned(hiding(place, "tp"))
    assert beside.predicted.seconds < alone.predicted.seconds and beside.gap < 1e-6
    assert sum(beside.predicted.communication.values()) < sum(alone.predicted.communication.values())
    hidden, whole = sent(beside, hiding(place, "tp")), sent(beside, place)
    assert all(hidden[origin] <= whole[origin] for origin in whole) and sum(hidden.values()) < sum(whole.values())
    graph = add_hubs(question_of(beside).graph)
    known = computed_beside(Pricing(graph, beside.mesh, hiding(place, "tp")))
    changed = {origin for origin in whole if hidden[origin] < whole[origin]}
    assert changed <= {f"{tensor} for {op}" for tensor, op in known}


def test_the_steps_of_a_plan_take_what_the_search_counted() -> None:
    place = hiding(cluster_of("tp=4"), "tp")
    plan = planned(place)
    steps = list_actions(plan, add_hubs(question_of(plan).graph), place, as_searched=True)
    seconds = sum(one.seconds for one in steps if isinstance(one, Start | Compute))
    assert seconds == pytest.approx(plan.predicted.seconds - plan.predicted.update, rel=1e-9)


def test_coding_is_computation_and_is_not_hidden() -> None:
    mesh = Mesh.parse("tp=4")
    pricing = Pricing(Graph((), (), ()), mesh, hiding(cluster_of("tp=4"), "tp"))
    step = Step.parse("tp: S(0)->B", mesh).coded("int8")
    coding = sum(pricing.coding(step, 1 << 20, 4))
    alone, beside = (pricing.step_seconds(step, 1 << 20, 0, 4, seconds) for seconds in (0.0, 1e6))
    assert coding > 0 and beside - coding == pytest.approx(0.2 * (alone - coding))


def test_nothing_is_hidden_without_a_program_that_hides() -> None:
    place = cluster_of("tp=4")
    graph = add_hubs(question_of(planned(place)).graph)
    assert not computed_beside(Pricing(graph, planned(place).mesh, place))
