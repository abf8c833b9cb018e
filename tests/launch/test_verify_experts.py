"""`verify` of mixtures: gradients of plans that split tokens, experts or inner widths are those of one process."""

from pathlib import Path

import pytest
import torch
import zoo
from random_plans import random_plan
from ranks import on_ranks
from sampling import parametrize_or_slow
from verified import planned, verified

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.core.layout import Split
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize

ZOO = str(Path(zoo.__file__))
EXPERTS = ["*.experts.gate_up_proj: machine=S(0)", "*.experts.down_proj: machine=S(0)", "experts: machine=P"]
"""Experts are stored in parts by machines, which compute partial sums."""


def factory(family: str, layers: int = 1) -> Factory:
    return Factory(ZOO, "routed", {"family": family, "layers": layers})


def splits(plan: Plan) -> bool:
    """Whether an operator of experts is split on some axis."""
    decisions = plan.index().decisions
    found = [decisions[name] for name in decisions if name.startswith("experts")]
    assert found
    return any(isinstance(state, Split) for one in found for layout in one.inputs for state in layout)


def sends(plan: Plan) -> bool:
    """Whether tokens are sent to the ranks of their experts."""
    found = [d for name, d in plan.index().decisions.items() if name.startswith("experts")]
    return any(tokens == Split(0) == weights for d in found
               for tokens, weights in zip(d.inputs[0], d.inputs[4], strict=True))


@pytest.mark.ranks
@parametrize_or_slow("family,mesh", [("GptOss", "all=2")], [
    (family, None) for family in ("GptOss", "DeepseekV3", "Mixtral", "Qwen3Moe", "Olmoe")])
def test_tokens_that_are_sent_to_their_experts_compute_what_one_process_does(family: str, mesh: str | None) -> None:
    made = factory(family)
    captured = capture(*made.build())
    plan = next(plan for plan in (random_plan(captured, seed, mesh) for seed in range(100)) if sends(plan))
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_tokens_are_sent_to_their_experts_in_every_stage(family: str) -> None:
    """Stages that have no experts are weighed too, under the role that takes experts apart."""
    made = factory(family, layers=2)
    plan = planned(made, stages=(2,), microbatches=(2,), pins=("pair=expert data", "*experts: pair=S(0)"), workers=1)
    assert plan.pipeline is not None and all(sends(stage.plan) for stage in plan.pipeline.stages)
    assert plan.bound > 0.99 * plan.predicted.seconds
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in ("switch", "qwen3_next") for seed in range(4)])
def test_experts_with_a_capacity_and_beside_delta_rules_compute_what_one_process_does(name: str, seed: int) -> None:
    """The first of twenty random plans that splits a layer of experts."""
    made = Factory(ZOO, name, {"layers": 1} if name == "switch" else {})
    captured = capture(*made.build())
    plan = next(plan for plan in (random_plan(captured, 20 * seed + more) for more in range(20)) if splits(plan))
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["switch", "qwen3_next"])
def test_found_plans_of_these_compute_what_one_process_does(name: str) -> None:
    made = Factory(ZOO, name, {})
    assert verified(planned(made), made).passed


def loads_of(plan: Plan) -> list[float]:
    """On one rank: the load of every message of tokens, of a mixture whose router prefers the first experts."""
    model, sample = factory("Mixtral").build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp.gate" in name:
                parameter[2:] = 0.0
    parallel = parallelize(model, plan, sample)
    parallel.recorder.timed = True
    parallel.step(sample)
    return [float(mark.origin.partition(", load ")[2]) for mark in parallel.recorder.marks if "load" in mark.origin]


@pytest.mark.ranks
@pytest.mark.slow
def test_the_record_says_the_load_of_every_rank() -> None:
    captured = capture(*factory("Mixtral").build())
    plan = next(plan for plan in (random_plan(captured, seed, "all=4") for seed in range(100)) if sends(plan))
    ranks = on_ranks(4, loads_of, plan)
    rows = [loads[1:] for loads in ranks]
    assert all(len(one) == 6 and max(one) == min(one) for one in rows)
    assert sum(one[0] for one in rows) == pytest.approx(4, abs=0.03) and max(one[0] for one in rows) > 1.2


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.ROUTED)
def test_split_experts_compute_what_one_process_does(family: str) -> None:
    made = factory(family)
    plan = planned(made, mesh="machine=2,pair=2", pins=EXPERTS)
    weights = [d for name, d in plan.index().decisions.items() if name.startswith("experts")]
    assert all(one.inputs[4][0] == Split(0) for one in weights)
    assert verified(plan, made).passed


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.ROUTED)
def test_found_and_random_plans_compute_what_one_process_does(family: str) -> None:
    made = factory(family, layers=2)
    assert verified(planned(made), made).passed
    captured = capture(*made.build())
    plans = [plan for plan in (random_plan(captured, seed) for seed in range(8)) if splits(plan)][:4]
    assert len(plans) == 4 and all(verified(plan, made).passed for plan in plans)
