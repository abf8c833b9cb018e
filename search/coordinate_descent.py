"""Solves by coordinate descent, for comparison: one variable at a time takes its best option, until none changes.

    better = lexicographic (forbidden cells, bytes above the budget, seconds), so a start may break any rule
    starts = the greedy choice first, then seeded random ones

The greedy choice takes the variables in order; a factor counts by its least cell over the variables still open.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoddl.core.problem import Array, Problem
from autoddl.search.limits import Clock

__all__ = ["choose_greedily", "descend", "descend_from_starts"]

SWEEPS = 100
RESTARTS = 20


@dataclass(frozen=True, slots=True)
class _Index:
    """A problem with the factors of every variable."""

    problem: Problem
    incident: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem) -> "_Index":
        incident: list[list[int]] = [[] for _ in problem.sizes]
        for i, factor in enumerate(problem.factors):
            for v in factor.variables:
                incident[v].append(i)
        return cls(problem, tuple(tuple(i) for i in incident))

    def slices(self, i: int, v: int, choice: Sequence[int]) -> tuple[Array, Array, Array]:
        """Seconds, retained and transient bytes of one factor for every option of v; an open variable is minimised."""
        factor = self.problem.factors[i]
        table = self.problem.tables[factor.table]
        open_ = [u == v or choice[u] < 0 for u in factor.variables]
        cell = tuple([c if free else c[choice[u]:choice[u] + 1]
                      for c, free, u in zip(table.classes, open_, factor.variables, strict=True)])
        others = tuple(a for a, u in enumerate(factor.variables) if u != v)
        if sum(open_) > 1:
            seconds, retained, transient = (core[np.ix_(*cell)].min(axis=others) for core in table.core)
        else:
            seconds, retained, transient = (core[cell] for core in table.core)
        return seconds, retained, transient

    def total(self, v: int, choice: Sequence[int]) -> Array:
        """The sum of the seconds of all factors of v, for every option of v; all other variables have chosen."""
        found = np.zeros(self.problem.sizes[v])
        for i in self.incident[v]:
            factor = self.problem.factors[i]
            table = self.problem.tables[factor.table]
            found += table.core[0][tuple([c if u == v else c[choice[u]]
                                          for c, u in zip(table.classes, factor.variables, strict=True)])]
        return found

    def neighbours(self) -> list[set[int]]:
        """By variable, those that share a factor with it."""
        return [{u for i in factors for u in self.problem.factors[i].variables} - {v}
                for v, factors in enumerate(self.incident)]


def choose_greedily(problem: Problem) -> tuple[int, ...]:
    """A choice made in the order of variables, each with least seconds given those before it."""
    index, choice = _Index.of(problem), [-1] * len(problem.sizes)
    for v in range(len(choice)):
        total = np.zeros(problem.sizes[v])
        forbidden = np.zeros(problem.sizes[v])
        for i in index.incident[v]:
            seconds = index.slices(i, v, choice)[0]
            forbidden += np.isinf(seconds)
            total += np.where(np.isinf(seconds), 0.0, seconds)
        choice[v] = _first(forbidden, total)
    return tuple(choice)


def descend(problem: Problem, start: Sequence[int], clock: Clock) -> tuple[int, ...]:
    """The choice after sweeps over the variables from one start, until a sweep changes nothing."""
    index, choice = _Index.of(problem), list(start)
    if problem.budget is None:
        return _descend_freely(index, choice, clock)
    retained = problem.retained(choice)
    transient = np.array([t.transient.item(cell) for t, cell in problem.cells(choice)])
    for _ in range(SWEEPS):
        changed = False
        for v in range(len(choice)):
            old = choice[v]
            scores, gain = _scores(index, v, choice, retained, transient)
            choice[v] = _improved(scores, old)
            if choice[v] != old:
                changed, retained = True, retained + gain[choice[v]] - gain[old]
                for i in index.incident[v]:
                    transient[i] = index.slices(i, v, choice)[2][choice[v]]
        if not changed or clock.expired:
            break
    return tuple(choice)


def _descend_freely(index: _Index, choice: list[int], clock: Clock) -> tuple[int, ...]:
    """The choice of `descend` without a budget: a variable is looked at again where a neighbour has changed."""
    neighbours, stale = index.neighbours(), set(range(len(choice)))
    for _ in range(SWEEPS):
        changed = False
        for v in range(len(choice)):
            if v not in stale:
                continue
            stale.remove(v)
            scores: tuple[Array, ...] = (index.total(v, choice),)
            if not np.isfinite(scores[0]).all():
                scores, _ = _scores(index, v, choice, 0.0, np.zeros(0))
            new = _improved(scores, choice[v])
            if new != choice[v]:
                choice[v], changed = new, True
                stale |= neighbours[v]
        if not changed or clock.expired:
            break
    return tuple(choice)


def _scores(
    index: _Index, v: int, choice: Sequence[int], retained: float, transient: Array
) -> tuple[tuple[Array, Array, Array], Array]:
    """(forbidden cells, excess bytes, seconds) of every option of v, and its retained bytes."""
    problem = index.problem
    forbidden, seconds, gain, peak = (np.zeros(problem.sizes[v]) for _ in range(4))
    for i in index.incident[v]:
        t, m, x = index.slices(i, v, choice)
        forbidden += np.isinf(t)
        seconds += np.where(np.isinf(t), 0.0, t)
        gain += m
        np.maximum(peak, x, out=peak)
    if problem.budget is None:
        return (forbidden, np.zeros_like(seconds), seconds), gain
    others = transient.copy()
    others[list(index.incident[v])] = 0.0
    held = retained - gain[choice[v]] + gain + np.maximum(peak, others.max(initial=0.0))
    return (forbidden, np.maximum(0.0, problem.fixed_bytes + held - problem.budget), seconds), gain


def _improved(scores: tuple[Array, ...], old: int) -> int:
    """The best option; the old one unless another is better by more than rounding."""
    new = _first(*scores)
    for score in scores:
        if not math.isclose(score[new], score[old], rel_tol=1e-12, abs_tol=0.0):
            return new
    return old


def _first(*scores: NDArray[np.float64]) -> int:
    """The lexicographically least option, the lowest of equal ones."""
    return int(np.lexsort(scores[::-1])[0])


def descend_from_starts(problem: Problem, seed: int, clock: Clock, count: int = RESTARTS) -> tuple[int, ...] | None:
    """The best feasible choice over all starts, if any start led to one."""
    random = np.random.default_rng(seed)
    best: tuple[float, tuple[int, ...]] | None = None
    for attempt in range(count):
        start = choose_greedily(problem) if attempt == 0 else tuple(int(random.integers(n)) for n in problem.sizes)
        choice = descend(problem, start, clock)
        if problem.is_feasible(choice) and (best is None or problem.cost(choice) < best[0]):
            best = problem.cost(choice), choice
        if clock.expired:
            break
    return None if best is None else best[1]
