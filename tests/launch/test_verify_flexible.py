"""`verify` of models with FlexAttention: found and random plans compute what one process does."""

from pathlib import Path

import flexible
import pytest
from random_plans import random_plan
from sampling import parametrize_or_slow
from verified import planned, verified

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.core.layout import Split
from autoddl.core.plan import Plan

FILE = str(Path(flexible.__file__))
KINDS = ("documents", "given", "outside", "biased", "sinks", "compiled")


def splits(plan: Plan) -> set[int]:
    """The dims of queries that a plan splits: 0 batch, 1 heads, 2 queries."""
    found = [d for d in plan.decisions if d.target == "autoddl.flex_attention"]
    assert found
    return {state.dim for d in found for state in d.inputs[0] if isinstance(state, Split)}


@pytest.mark.ranks
@parametrize_or_slow("kind", ["sinks"], ["documents", "outside", "biased", "compiled", "given"])
def test_a_found_plan_computes_what_one_process_does(kind: str) -> None:
    made = Factory(FILE, "model", {"kind": kind})
    plan = planned(made)
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mine", ["pp=2", "dp=2,tp=2,zero=3"])
def test_a_plan_of_stages_or_of_split_heads_computes_what_one_process_does(mine: str) -> None:
    made = Factory(FILE, "model", {"kind": "documents", "layers": 2, "batch": 4})
    plan = planned(made, mine=mine)
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("given", ["", "padding", "positions"])
def test_a_model_of_transformers_computes_what_one_process_does(given: str) -> None:
    made = Factory(FILE, "library", {"given": given})
    captured = capture(*made.build())
    plan = next(plan for plan in (random_plan(captured, seed) for seed in range(100)) if splits(plan))
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@parametrize_or_slow("kind,dim", [("documents", 2)],
                     [(kind, dim) for kind in KINDS for dim in (0, 1, 2)])
def test_random_plans_that_split_batch_heads_or_queries_compute_what_one_process_does(kind: str, dim: int) -> None:
    made = Factory(FILE, "model", {"kind": kind})
    captured = capture(*made.build())
    plan = next(plan for plan in (random_plan(captured, seed) for seed in range(100)) if dim in splits(plan))
    checked = verified(plan, made)
    assert checked.passed and checked.collective_mismatches == 0, checked
