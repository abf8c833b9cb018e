"""Finds the least seconds of paths over the stages and numbers of blocks of a chain (`core.pipeline_cuts`).

    path_tables     the seconds of each stage on some paths, with all that is known of them
    counts_of       whether a path counts stages of a rank as often as what is known of them together
    priced_table    the same where stages of a rank are counted together, under a price of its bytes
    best_blend      the blend of paths that says most of a box of cuts

The last is a linear program over fractional cuts. Let y[g, o] be the share of option o of group g, and x[s] the seconds
of stage s, one of each term. With all that is known, of terms weighted w and of stages of a rank under a price,

    minimise T   subject to   T >= path(x)  for each path          w . x[s] >= sum over o of y[g, o] known[s, o]
                              sum over s of a rank of w . x[s] + price * budget >= the same sum of its priced values
                              sum of y[g] = 1                      sum of blocks * y = L

Paths are generated: those that are critical where stages take the seconds x, and half-way from there to the x of the
shortest pipeline met. Both points may be had, and the second settles sooner. The dual values of the paths are the
weights of the blend. That its terms are those of one plan of a stage on all of its paths is what mixtures do not know.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp  # type: ignore[attr-defined]

from autoddl.core.cost_table import Array
from autoddl.core.pipeline_cuts import CutProblem, Mixture, PathBound, PricedStages, StageSeconds

__all__ = ["Blend", "TraceStages", "best_blend", "counts_of", "path_tables", "priced_table"]

Blend = tuple[tuple[PathBound, float], ...]
"""Paths with their weights >= 0, of sum 1."""

TraceStages = Callable[[Sequence[StageSeconds], Sequence[float]], tuple[float, PathBound]]
"""Seconds of the stages, and of transfers -> (seconds of the pipeline, a path that takes as long)."""

NEAR = 1e-3
"""The part by which a pipeline may be above the paths of a linear program that are enough."""

GENERATED = 50
"""Paths that are generated for a blend, at most."""

TOGETHER = (1, 1, 1, 0, 0, 0)
"""The weights of F + B + W."""

TABLES = 64
"""Paths whose tables are made at once."""

LESS = 1 - 1e-9
"""The part of how often something could count that it does, so that no count that is left is below 0."""


def path_tables(problem: CutProblem, paths: Sequence[PathBound], bare: bool = False) -> list[Array]:
    """[stage, blocks] seconds of each path; no blocks, and sizes that a stage cannot have, are 0 and never read.

    What is known of weighted terms counts as often as each of them does. It is applied one after the other, each first
    once, behind it those without weights of messages: the greatest sum holds. To a blend that of `directions` is too.
    Where they are `bare`, nothing of weighted terms is applied.
    """
    found = list[Array]()
    for begin in range(0, len(paths), TABLES):
        some = paths[begin:begin + TABLES]
        counts, blends = np.stack([_counts(path) for path in some]), [not path.path for path in some]
        if bare:
            found += list(np.pad((counts[:, :, None, :6] * _terms(problem)).sum(axis=3), ((0, 0), (0, 0), (1, 0))))
            continue
        seconds = _seconds(problem, counts, blends=False)
        if any(blends):
            seconds[blends] = _seconds(problem, counts[blends], blends=True)
        found += list(np.pad(seconds, ((0, 0), (0, 0), (1, 0))))
    return found


def priced_table(problem: CutProblem, path: PathBound, table: Array, cut: Sequence[int]
                 ) -> tuple[Array, float, Mixture]:
    """([stage, blocks] seconds of a priced path, seconds of every cut, its prices): by those that say most at a cut.

    `table` is that of the path. There are no prices where none says more at the cut. Then the table is the path's.
    """
    counts, found, more, prices = _counts(path), np.array(table), 0.0, list[tuple[int, float]]()
    for group in dict.fromkeys(one.stages for one in problem.priced):
        best, at, rest = 0.0, list(group), dict[tuple[object, ...], Array]()
        for k, one in enumerate(problem.priced):
            times = LESS * _times(one, counts) if one.stages == group else 0.0
            if times > 0:
                if one.weights not in rest:
                    rest[one.weights] = _seconds(problem, (counts[at] - times * _weights(one))[None], at,
                                                 blends=not path.path)[0]
                rows = np.maximum(table[at, 1:], times * one.values + rest[one.weights])
                less = times * one.price * one.budget
                gain = sum(float(row[cut[s] - 1] - table[s, cut[s]]) for s, row in zip(at, rows, strict=True)) - less
                if gain > best:
                    best, chosen = gain, (k, times, rows, less)
        if best > 0:
            k, times, rows, less = chosen
            found[at, 1:] = rows
            more -= less
            prices.append((k, times))
    return found, more, tuple(prices)


def counts_of(one: PricedStages, path: PathBound) -> bool:
    """Whether a path counts all that is known of stages together at least once."""
    return _times(one, _counts(path)) >= 1.0


def _times(one: PricedStages, counts: Array) -> float:
    """How often the counts of a path hold those of stages of a rank."""
    weights = _weights(one)
    return float((counts[list(one.stages)][weights > 0] / weights[weights > 0]).min())


def _weights(one: PricedStages) -> Array:
    """[stage of the rank, term], with those of messages, which may be left out where they are 0."""
    return np.array([(*row, 0.0, 0.0)[:8] for row in one.weights])


def _counts(path: PathBound) -> Array:
    """[stage, term] how often the terms of a stage count, and last those of the messages before and behind it."""
    sent = np.array([0.0, *path.transfers, 0.0])
    return np.concatenate([np.array(path.stages, dtype=float), sent[:-1, None], sent[1:, None]], axis=1)


def _terms(problem: CutProblem) -> Array:
    """[stage, blocks - 1, term] least seconds, 0 where a stage cannot have so many blocks."""
    return np.nan_to_num(problem.seconds, posinf=0.0)


def _stated(problem: CutProblem) -> list[tuple[tuple[float, ...], Array]]:
    """All that is known of weighted terms of single stages."""
    return [*problem.known, *([(TOGETHER, problem.whole)] if problem.whole is not None else [])]


def _seconds(problem: CutProblem, left: Array, stages: Sequence[int] | slice = slice(None), *, blends: bool) -> Array:
    """[path, stage, blocks - 1] seconds whose terms count so often, [path, stage, term], by all that is known.

    Where these are blends, that are all `directions` too, each before all else.
    """
    known = [(weights, values[stages]) for weights, values in _stated(problem)]
    first = [*known, *((weights, values[stages]) for weights, values in problem.directions if blends)]
    terms = _terms(problem)[stages]
    least: Array = (left[:, :, None, :6] * terms).sum(axis=3)
    seconds = np.array(least)
    for k, (weights, values) in enumerate(first):
        order = [first[k], *(one for j, one in enumerate(known) if j != k and len(one[0]) == 6)]
        s, n = np.nonzero(np.nan_to_num(values, posinf=0.0) > (np.array(weights[:6]) * terms).sum(axis=2))
        more = _more(terms[s, n], left[:, s], [(each, array[s, n]) for each, array in order])
        seconds[:, s, n] = np.maximum(seconds[:, s, n], least[:, s, n] + more)
    return seconds


def _more(terms: Array, left: Array, known: Sequence[tuple[tuple[float, ...], Array]]) -> Array:
    """[path, cell] seconds that paths take above those of their [path, cell, term], by what is known, in this order.

    `terms` are the [cell, term] seconds.
    """
    seconds: Array = np.zeros(left.shape[:2])
    for weights, values in known:
        each = np.array((*weights, *(0.0,) * (8 - len(weights))), dtype=float)
        more = np.nan_to_num(values, posinf=0.0) - (each[:6] * terms).sum(axis=1)
        times = np.where(more > 0, (left[:, :, each > 0] / each[each > 0]).min(axis=2), 0.0)
        seconds = seconds + times * np.maximum(more, 0.0)
        left = left - times[:, :, None] * each
    return seconds


def best_blend(problem: CutProblem, groups: Sequence[Sequence[int]], options: Sequence[NDArray[np.intp]],
               paths: Sequence[PathBound], trace: TraceStages) -> tuple[float, Blend, tuple[float, ...]]:
    """(seconds, the blend of paths that says most of the cuts of some groups' options, the fractional cut), as found.

    The seconds are those of the fractional cuts of these options, and no bound of cuts with others. `options` are
    [option, stage of the group] -> blocks; `paths` are those to begin with. The cut has the mean blocks of each stage.
    """
    program, used = _Fractional(problem, groups, options), [*paths]
    for path in paths:
        program.add(path)
    most, weights, cut, within, ends = 0.0, [1.0], tuple[float, ...](), None, inf
    for _ in range(GENERATED):
        found = program.solve()
        if found is None:
            break
        most, now = found
        weights, cut = program.weights(), program.cut()
        inner = now if within is None else (now + within) / 2
        traced = [trace(*_split(inner)), trace(*_split(now))]
        if traced[0][0] < ends:
            ends, within = traced[0][0], inner
        new = [path for _, path in traced if path not in used and path.seconds(*_split(now)) > most * (1 + NEAR)]
        if not new or ends <= most * (1 + NEAR):
            break
        for path in dict.fromkeys(new):
            program.add(path)
            used.append(path)
    return most, tuple((path, weight) for path, weight in zip(used, weights, strict=False) if weight > 0), cut


def _split(values: Array) -> tuple[list[StageSeconds], list[float]]:
    """(seconds of the stages, of the transfers) of a point of the linear program."""
    stages = (len(values) + 1) // 7
    return [StageSeconds(*row) for row in values[:6 * stages].reshape(stages, 6).tolist()], values[6 * stages:].tolist()


class _Fractional:
    """The linear program of `best_blend`."""

    def __init__(self, problem: CutProblem, groups: Sequence[Sequence[int]], options: Sequence[NDArray[np.intp]]
                 ) -> None:
        self.problem, self.solver = problem, pywraplp.Solver.CreateSolver("GLOP")
        self.seconds = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.terms = [[self.solver.NumVar(0.0, self.solver.infinity(), "") for _ in range(8)] for _ in problem.seconds]
        self.shares = [[self.solver.NumVar(0.0, 1.0, "") for _ in own] for own in options]
        self.sizes = {s: (shares, own[:, i]) for group, own, shares in zip(groups, options, self.shares, strict=True)
                      for i, s in enumerate(group)}
        self.paths: list[Any] = []
        for shares in self.shares:
            self._row([(share, 1.0) for share in shares], 1.0, 1.0)
        self._row([(share, float(n)) for shares, own in zip(self.shares, options, strict=True)
                   for share, n in zip(shares, own.sum(axis=1), strict=True)], *(float(problem.blocks),) * 2)
        for s in range(len(problem.seconds)):
            stated = (*_stated(problem), *problem.directions)
            for weights, values in (*_single_terms(problem, s), *((w, known[s]) for w, known in stated)):
                self._row([*self._weighted(s, weights), *self._known(s, values)], 0.0)
        for one in problem.priced:
            self._row([pair for s, weights, values in zip(one.stages, one.weights, one.values, strict=True)
                       for pair in (*self._weighted(s, weights), *self._known(s, values))], -one.price * one.budget)
        self.solver.Minimize(self.seconds)

    def _row(self, pairs: Sequence[tuple[Any, float]], least: float, most: float | None = None) -> Any:
        """Adds least <= sum of variable * value <= most; returns it."""
        row = self.solver.Constraint(least, self.solver.infinity() if most is None else most)
        for variable, value in pairs:
            row.SetCoefficient(variable, value)
        return row

    def _weighted(self, s: int, weights: Sequence[float]) -> list[tuple[Any, float]]:
        return [(term, float(weight)) for term, weight in zip(self.terms[s], weights, strict=False) if weight]

    def _known(self, s: int, values: Array) -> list[tuple[Any, float]]:
        """Less what is known of the stage, by the shares of its sizes."""
        shares, sizes = self.sizes[s]
        return [(share, -float(values[n - 1])) for share, n in zip(shares, sizes, strict=True) if values[n - 1] > 0]

    def add(self, path: PathBound) -> None:
        """Adds a path: the pipeline takes no less."""
        fixed = sum(n * x for n, x in zip(path.transfers, self.problem.transfers, strict=True))
        pairs = [(term, -weight) for s, row in enumerate(_counts(path)) for term, weight in self._weighted(s, row)]
        self.paths.append(self._row([(self.seconds, 1.0), *pairs], fixed))

    def solve(self) -> tuple[float, Array] | None:
        """(the least seconds, those of the stages and of the transfers); None where rounding keeps GLOP from an end."""
        if self.solver.Solve() != pywraplp.Solver.OPTIMAL:
            anew = pywraplp.MPSolverParameters()
            anew.SetIntegerParam(anew.INCREMENTALITY, anew.INCREMENTALITY_OFF)
            if self.solver.Solve(anew) != pywraplp.Solver.OPTIMAL:
                return None
        terms = [[max(0.0, term.solution_value()) for term in own] for own in self.terms]
        sent = [x + before[7] + behind[6] for x, before, behind in zip(
            self.problem.transfers, terms[:-1], terms[1:], strict=True)]
        return self.seconds.solution_value(), np.array([x for own in terms for x in own[:6]] + sent)

    def cut(self) -> tuple[float, ...]:
        """The mean blocks of each stage."""
        return tuple(sum(share.solution_value() * float(n) for share, n in zip(*self.sizes[s], strict=True))
                     for s in range(len(self.terms)))

    def weights(self) -> list[float]:
        """The weights of the paths, of sum 1; those of next to no weight have none."""
        found = [max(0.0, row.dual_value()) for row in self.paths]
        found = [weight if weight > 1e-7 else 0.0 for weight in found]
        return [weight / sum(found) for weight in found] if any(found) else [1.0]


def _single_terms(problem: CutProblem, s: int) -> list[tuple[tuple[float, ...], Array]]:
    """What is known of each term of a stage by itself."""
    every = np.eye(problem.seconds.shape[2])
    return [(tuple(every[k]), problem.seconds[s, :, k]) for k in range(len(every)) if problem.seconds[s, 0, k] > 0]
