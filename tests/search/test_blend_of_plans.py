"""Blends of mixtures of plans that were found: what they say is the least of these plans, and no blend says more."""

import itertools
import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import one_f_one_b, zb_v
from autoddl.cost_models.timelines.pipeline_bounds import critical_path
from autoddl.search.cut_planes import blended
from autoddl.search.path_tables import Blend, FoundPlans, blend_of_plans

CLOSE = 1e-3


def _found(rng: random.Random, stages: int) -> list[list[FoundPlans]]:
    """Three plans of each stage, of 1 or 2 parts, that trade forward, backward, what comes once, and bytes."""
    def terms() -> list[float]:
        share = rng.random()
        return [1 + share, 2 - share, 1 + rng.random(), rng.random(), 2 * rng.random(), 0.1, 0.0, 0.0]

    return [[FoundPlans(float(rng.choice((1, 2))), np.array([terms() for _ in range(3)]),
                        np.array([rng.uniform(0.1, 0.6) for _ in range(3)]))
             for _ in range(rng.choice((1, 2)))] for _ in range(stages)]


def _least(found: list[list[FoundPlans]], blend: Blend, transfers: list[float],
           groups: Sequence[tuple[int, ...]], prices: tuple[float, ...]) -> float:
    """What a blend says of all plans, with prices of the budgets."""
    mean = blended(blend)
    price = {s: paid for group, paid in zip(groups, prices, strict=True) for s in group}
    total = sum(n * x for n, x in zip(mean.transfers, transfers, strict=True)) - sum(prices)
    for s, own in enumerate(found):
        total += sum(one.times * float((one.terms[:, :6] @ np.array(mean.stages[s]) + price.get(s, 0.0) * one.nbytes
                                        ).min()) for one in own)
    return total


@pytest.mark.parametrize("seed", range(12))
def test_says_the_least_of_the_plans(seed: int) -> None:
    rng = random.Random(seed)
    schedule: Schedule = zb_v(2, 4) if seed % 2 else one_f_one_b(3, 4)
    found, transfers = _found(rng, schedule.stages), [0.1] * (schedule.stages - 1)
    groups = [(0, schedule.stages - 1)] if seed % 3 == 0 else []
    own = [[one._replace(nbytes=one.nbytes / sum(p.times for p in own)) for one in own] for own in found]
    seconds, blend, prices = blend_of_plans(own, transfers, partial(critical_path, schedule), groups)
    assert _least(own, blend, transfers, groups, prices) == pytest.approx(seconds, rel=CLOSE)
    if groups:
        return
    ends = [critical_path(schedule, [StageSeconds(*np.sum([one.times * one.terms[k, :6] for one in parts], axis=0)
                                                  .tolist()) for parts, k in zip(own, each, strict=True)], transfers)[0]
            for each in itertools.product(range(3), repeat=len(own))]
    assert seconds <= min(ends) * (1 + CLOSE)


def test_a_budget_costs() -> None:
    """One stage has a fast plan of many bytes, and a slow one of few: half of each just fits."""
    schedule = one_f_one_b(2, 2)
    fast, slow = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    plans = FoundPlans(1.0, np.array([fast, slow]), np.array([1.5, 0.5]))
    found = [[plans], [FoundPlans(1.0, np.array([fast]), np.array([0.5]))]]
    seconds, blend, (price,) = blend_of_plans(found, [0.0], partial(critical_path, schedule), [(0,)])
    path = critical_path(schedule, [StageSeconds(1.5, 1.5, 0, 0, 0, 0), StageSeconds(1, 1, 0, 0, 0, 0)], [0.0])[0]
    assert seconds == pytest.approx(path)
    assert price > 0
    assert _least(found, blend, [0.0], [(0,)], (price,)) == pytest.approx(seconds)


def test_tells_that_no_mixture_fits() -> None:
    schedule = one_f_one_b(2, 2)
    one = [FoundPlans(1.0, np.ones((1, 8)), np.array([2.0]))]
    seconds, blend, prices = blend_of_plans([one, one], [0.0], partial(critical_path, schedule), [(0,)])
    assert seconds == float("inf")
    assert len(blend) == 1
    assert prices == (0.0,)
