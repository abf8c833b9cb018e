"""What is known of a stage: a bound under a budget that binds is that of one number of microbatches in flight."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import pytest
import zoo

from autoddl.core.errors import Infeasible
from autoddl.core.pipeline import Flight
from autoddl.planner.options import PlanOptions
from autoddl.planner.stage_parts import StageParts, places_of
from autoddl.planner.stage_plans import search_stage
from autoddl.planner.task import PlanTask, task_of
from autoddl.pricing.price import Counts

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"
WEIGHTS = (4.0, 4.0, 0.0, 1.0, 1.0, 1.0, 4.0, 4.0)


@lru_cache(maxsize=1)
def _task() -> PlanTask:
    model, sample = zoo.named("gpt2", layers=1, B=8)
    return task_of(model, TWO_BY_TWO, sample, PlanOptions(microbatches=(4,), max_axes=2, workers=1), "gpt2", None)


def _parts(budget: float) -> StageParts:
    task = replace(_task(), budget=budget)
    return StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()))


def _peak(parts: StageParts, in_flight: int) -> float:
    return parts.planned(parts.alone(0, 2)[0], Flight(in_flight)).predicted.peak_bytes


@pytest.fixture(scope="module")
def peaks() -> tuple[float, float]:
    """The peak bytes of the first stage without a budget, with one and with three microbatches in flight."""
    parts = _parts(_task().cluster.device.memory)
    return _peak(parts, 1), _peak(parts, 3)


def test_a_bound_under_a_budget_says_nothing_of_other_microbatches_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(0.9 * peaks[1])
    parts.bound(0, 2, Flight(3))
    free = _parts(_task().cluster.device.memory)
    free.bound(0, 2, Flight(3))
    under = [parts.wholes([Flight(k)])[Flight(k)][0, 2] for k in (2, 3, 4)]
    without = [free.wholes([Flight(k)])[Flight(k)][0, 2] for k in (2, 3, 4)]
    assert under[0] == without[0] and under[2] == without[2] and under[1] > without[1]
    parts.sharpen(0, 2, Flight(3))
    parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0])
    others = [parts.counted(Flight(k), WEIGHTS)[0, 2] for k in (2, 4)]
    assert parts.counted(Flight(3), WEIGHTS)[0, 2] > 0.0 and others == [0.0, 0.0]


def test_a_stage_that_fits_no_rank_so_may_fit_with_others_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(0.2 * peaks[0])
    parts.bound(0, 2, Flight(3))
    wholes = parts.wholes([Flight(3), Flight(4)])
    assert wholes[Flight(3)][0, 2] == float("inf") > wholes[Flight(4)][0, 2]
    with pytest.raises(Infeasible):
        parts.planned(parts.alone(0, 2)[0], Flight(3))


def test_a_bound_without_a_budget_is_true_for_all_microbatches_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(2 * peaks[1])
    parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0])
    known = [parts.counted(Flight(k), WEIGHTS)[0, 2] for k in range(1, 5)]
    assert known[0] > 0.0 and all(a == b for a, b in pairwise(known))


def test_no_plan_under_other_counts_is_none(peaks: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(task: PlanTask, *args: object) -> object:
        if task.counts not in (None, Counts(4, 4, 0.0, 0.0, 0.0)):
            raise Infeasible(1.0, 1.0)
        return search_stage(task, *args)  # type: ignore[arg-type]

    parts = _parts(2 * peaks[1])
    parts.bound(0, 2, Flight(3))
    monkeypatch.setattr("autoddl.planner.stage_parts.search_stage", searched)
    assert parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0]) is None
    assert parts.counted(Flight(3), WEIGHTS)[0, 2] == 0.0
