"""Stages that share the memory of a rank: bounds with a price of bytes, against every cut and every plan of stages."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest
from random_pipelines import draw_transfers, makespan

from autoddl.core.pipeline import first_ranks
from autoddl.core.pipeline_cuts import CutProblem, CutSolution, PricedPath, PricedStages, StageSeconds
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.timelines.pipeline_bounds import closed_paths, critical_path, trace_cut
from autoddl.search.certify.pipeline_cuts import check_pipeline_bound
from autoddl.search.pipeline_cuts import least_over_cuts

NAMES = ("interleaved:2", "zb-v", "dualpipe-v", "interleaved:3")
ONCE = ("gather", "reduce", "update")
Planned = tuple[StageSeconds, float]


@dataclass(frozen=True, slots=True)
class Shared:
    """A chain whose stages have plans of some seconds and bytes, by [stage][blocks - 1], and the budget of a rank."""

    problem: CutProblem
    plans: list[list[list[Planned]]]
    budget: float

    def groups(self) -> list[tuple[int, ...]]:
        place = first_ranks(self.problem.schedule.placement)
        every = [tuple(s for s, at in enumerate(place) if at == rank) for rank in sorted(set(place))]
        return [group for group in every if len(group) > 1]

    def cuts(self) -> Iterator[tuple[int, ...]]:
        blocks = self.problem.blocks
        for inner in combinations(range(1, blocks), self.problem.schedule.stages - 1):
            yield tuple(b - a for a, b in pairwise((0, *inner, blocks)))

    def best(self) -> float:
        """Seconds of the fastest pipeline of all cuts and plans that fit together."""
        found, place = inf, first_ranks(self.problem.schedule.placement)
        for cut in self.cuts():
            for chosen in product(*(self.plans[s][n - 1] for s, n in enumerate(cut))):
                used = [sum(b for (_, b), at in zip(chosen, place, strict=True) if at == rank) for rank in set(place)]
                if max(used) <= self.budget:
                    found = min(found, makespan(self.problem.schedule, [one for one, _ in chosen],
                                                self.problem.transfers))
        return found

    def priced(self, group: tuple[int, ...], weights: tuple[float, ...], price: float) -> PricedStages:
        least = [[min(sum(w * x for w, x in zip(weights, one, strict=True)) + price * nbytes for one, nbytes in plans)
                  for plans in self.plans[s]] for s in group]
        return PricedStages(group, (weights,) * len(group), price, self.budget, np.array(least))


def draw(seed: int, name: str = "") -> Shared:
    """Two ranks, two to six stages, at most one block more; a stage is fast and large, slow and small, or between."""
    rng, name = random.Random(seed), name or NAMES[seed % len(NAMES)]
    schedule = generate(name, 2, rng.choice((4, 6)) if "v" in name else 4)
    blocks = schedule.stages + (rng.random() < 0.5 and schedule.stages < 5)
    plans: list[list[list[Planned]]] = []
    for _ in range(schedule.stages):
        sizes = []
        for n in range(1, blocks + 1):
            each = []
            for kind in range(2 if schedule.stages > 4 else 3):
                slow, small = 1 + 0.4 * kind * rng.uniform(0.5, 1.5), 1 - 0.3 * kind
                each.append((StageSeconds(*(n * slow * rng.uniform(0.3, 0.4) for _ in range(3)), *(
                    rng.uniform(0, 0.5) for _ in ONCE)), n * small * rng.uniform(0.9, 1.1)))
            sizes.append(each)
        plans.append(sizes)
    seconds = np.array([[[min(column) for column in zip(*(one for one, _ in each), strict=True)] for each in sizes]
                        for sizes in plans])
    return Shared(CutProblem(schedule, seconds, tuple(draw_transfers(rng, schedule.stages))), plans,
                  rng.uniform(0.7, 1.0) * blocks / 2 * 1.1)


def solve(problem: CutProblem, blends: bool = False) -> CutSolution:
    return least_over_cuts(problem, closed_paths(problem.schedule, ONCE), partial(trace_cut, problem), tolerance=1e-9,
                           stages=partial(critical_path, problem.schedule) if blends else None)


def with_prices(one: Shared) -> CutProblem:
    """The problem, with the least of m (f + b + w) of the stages of each rank under three prices."""
    m = float(one.problem.schedule.microbatches // one.problem.schedule.pipes)
    return replace(one.problem, priced=tuple(
        one.priced(group, (m, m, m, 0.0, 0.0, 0.0), price * m) for group in one.groups() for price in (0.5, 1.0, 1.8)))


def check(seed: int, name: str = "") -> tuple[float, float]:
    """How much of the gap to the best of all is left without prices, and with them; all is proved, and true."""
    one = draw(seed, name)
    best = one.best()
    problem = with_prices(one)
    plain, priced = solve(one.problem), solve(problem)
    assert plain.bound <= priced.bound * (1 + 1e-8)
    for found in (priced, solve(problem, blends=True)):
        assert found.bound <= best * (1 + 1e-9), seed
        check_pipeline_bound(problem, found.proof, found.bound)
        with pytest.raises(AssertionError):
            check_pipeline_bound(problem, found.proof, found.bound * 1.01)
    return 1 - plain.bound / best, 1 - priced.bound / best


def test_bounds_with_prices_are_true_and_nearer_to_the_best_of_every_cut_and_plan() -> None:
    gaps = [check(seed) for seed in range(6)]
    assert sum(priced < 0.9 * plain for plain, priced in gaps) >= 3, gaps


def test_bounds_with_prices_are_proved_where_pipes_run_in_both_directions() -> None:
    """Every rank has both stages, though no pipe has both on one rank."""
    gaps = [check(seed, "chimera:1") for seed in range(6)]
    assert sum(priced < 0.9 * plain for plain, priced in gaps) >= 1, gaps


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_bound_with_prices_is_above_the_best_of_every_cut_and_plan() -> None:
    """As many chains as AUTODDL_CASES says, of the seeds from AUTODDL_SEED on."""
    begin, cases = int(os.environ.get("AUTODDL_SEED", "100")), int(os.environ.get("AUTODDL_CASES", "40"))
    for seed in range(begin, begin + cases):
        check(seed)


def test_prices_that_count_too_often_or_stages_of_other_ranks_are_rejected() -> None:
    one = draw(4)
    problem = with_prices(one)
    found = solve(problem)
    at, path = next((q, path) for q, path in enumerate(found.proof.paths) if isinstance(path, PricedPath))
    often = PricedPath(path.path, tuple((k, 1.1 * times) for k, times in path.prices))
    trails = found.proof.paths
    with pytest.raises(AssertionError, match="more than is on the path"):
        check_pipeline_bound(problem, replace(found.proof, paths=(*trails[:at], often, *trails[at + 1:])), found.bound)
    k = path.prices[0][0]
    for stages in ((0, 1), (0, 0)):
        apart = replace(problem.priced[k], stages=stages)
        with pytest.raises(AssertionError, match="do not share the memory"):
            check_pipeline_bound(replace(problem, priced=(*problem.priced[:k], apart, *problem.priced[k + 1:])),
                                 found.proof, found.bound)
    richer = replace(problem, priced=tuple(replace(each, budget=1.2 * each.budget) for each in problem.priced))
    with pytest.raises(AssertionError):
        check_pipeline_bound(richer, found.proof, found.bound)
