"""Linear bounds of the cuts of a chain into pipeline stages: paths, their mixtures, and the options that they rule out.

The goal is the best cut's seconds * (1 - tolerance). A mixture of paths rules out an option with which it is nowhere
below the goal. The best weights for a set of cuts are a linear program:

    maximise z  subject to  z <= sum over paths of weight * path(cut)  for each cut,  weights >= 0, their sum 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp  # type: ignore[attr-defined]

from autoddl.core.cost_table import Array
from autoddl.core.pipeline_cuts import CutProblem, Mixture, PathBound, Trail
from autoddl.search.cut_boxes import Box, Mask, least_cut, least_with_options

__all__ = ["Blend", "CutPlanes", "Evaluate", "Trace", "best_mixture", "blended"]

TOGETHER = (1, 1, 1, 0, 0, 0)
"""The weights of F + B + W."""

Blend = tuple[tuple[PathBound, float], ...]
"""Paths with their weights >= 0, of sum 1."""

SAME = 1e-9
"""Relative differences of sums in another order."""

TOP = 10
"""Paths that may be mixed for each cut."""

Evaluate = Callable[[tuple[int, ...]], float]
"""A cut -> its exact seconds."""

Trace = Callable[[tuple[int, ...]], tuple[float, PathBound]]
"""A cut -> (its seconds if its stages take their least seconds, a path that takes as long)."""


@dataclass(slots=True)
class CutPlanes:
    """The cuts that were traced, and the paths that are known.

        problem      the chain
        trace        finds a critical path of a cut
        exact        finds the exact seconds of a cut, if those of `trace` are not
        tolerance    relative gap that need not be closed
        paths        the paths and blends
        trails       for each its tasks, or the numbers and weights of its parts
        known        by its counts, the number of each
        tables       for each path [stage, blocks] seconds
        fixed        for each path the seconds of its transfers
        seen         cut -> exact seconds
        traced       cut -> seconds as traced
        stacked      tables and fixed seconds as arrays
    """

    problem: CutProblem
    trace: Trace
    exact: Evaluate | None
    tolerance: float
    paths: list[PathBound] = field(default_factory=list)
    trails: list[Trail] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    tables: list[Array] = field(default_factory=list)
    fixed: list[float] = field(default_factory=list)
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)
    traced: dict[tuple[int, ...], float] = field(default_factory=dict)
    stacked: tuple[Array, Array] | None = None

    @property
    def possible(self) -> Mask:
        """[stage, blocks] whether the stage can have so many blocks."""
        fits: Mask = np.logical_and.reduce(np.isfinite(self.problem.seconds), axis=2)
        return np.pad(fits, ((0, 0), (1, 0)))

    @property
    def best(self) -> tuple[int, ...]:
        """The cut of least seconds, of those evaluated."""
        return min(self.seen, key=lambda cut: (self.seen[cut], cut))

    @property
    def goal(self) -> float:
        """Seconds that a bound need not exceed."""
        return self.seen[self.best] * (1 - self.tolerance)

    @property
    def all(self) -> tuple[Array, Array]:
        """(tables, fixed seconds) of all paths."""
        if self.stacked is None or len(self.stacked[1]) < len(self.fixed):
            self.stacked = np.stack(self.tables), np.array(self.fixed, dtype=float)
        return self.stacked

    def add(self, path: PathBound, parts: Mixture = ()) -> int:
        """Adds a path, or a blend of some, unless one with its counts is known; returns its number."""
        key = path.stages, path.transfers
        if key not in self.known:
            self.known[key] = len(self.paths)
            self.paths.append(path)
            self.trails.append(parts or path.path)
            self.tables.append(_table(self.problem, path))
            self.fixed.append(sum(n * x for n, x in zip(path.transfers, self.problem.transfers, strict=True)))
        return self.known[key]

    def add_blend(self, blend: Blend) -> None:
        """Adds the paths of a blend, and the blend."""
        self.add(blended(blend), tuple((self.add(path), weight) for path, weight in blend))

    def evaluate(self, cut: tuple[int, ...]) -> None:
        """Traces the cut, once, and finds its exact seconds where it may be the best."""
        if cut not in self.traced:
            self.traced[cut], path = self.trace(cut)
            self.add(path)
        if cut not in self.seen and (not self.seen or self.traced[cut] < self.seen[self.best]):
            self.seen[cut] = self.exact(cut) if self.exact else self._likely(cut)

    def _likely(self, cut: tuple[int, ...]) -> float:
        """Seconds of a cut as traced, or of a path with all that is known, where these are clearly more."""
        most = float(self.at([cut]).max())
        return most if most > self.traced[cut] * (1 + SAME) else self.traced[cut]

    def even(self, box: Box) -> tuple[int, ...]:
        """The cut whose stages' F + B + W have the least sum of squares."""
        whole = np.nan_to_num(self.problem.seconds[:, :, :3].sum(axis=2), posinf=0.0)
        return least_cut(box, np.concatenate([np.zeros((len(whole), 1)), whole ** 2], axis=1))[1]

    def at(self, cuts: Sequence[Sequence[int]] | NDArray[np.intp]) -> Array:
        """[path, cut] seconds of every path at these cuts."""
        tables, fixed = self.all
        chosen = np.asarray(cuts)
        total = np.repeat(fixed[:, None], len(chosen), axis=1)
        for stage in range(chosen.shape[1]):
            total += tables[:, stage, chosen[:, stage]]
        return total

    def improve(self, cut: tuple[int, ...], most: int = 60) -> None:
        """Moves a block from one stage to another, where no path says that this takes longer or is above the goal.

        Each of at most `most` steps is evaluated.
        """
        for _ in range(most):
            value, other = self._neighbour(cut)
            if other in self.traced or value >= max(self.goal, self.traced[cut]):
                return
            self.evaluate(other)
            if self.traced[other] < self.traced[cut]:
                cut = other

    def _neighbour(self, cut: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """(greatest path there, the neighbour of a cut where that is least), of those not traced."""
        tables, fixed = self.all
        stages, at, possible = np.arange(len(cut)), np.array(cut), self.possible
        here = tables[:, stages, at]
        above, below = np.minimum(at + 1, self.problem.blocks), at - 1
        more = np.where(possible[stages, above] & (above > at), tables[:, stages, above] - here, np.inf)
        less = np.where(possible[stages, below], tables[:, stages, below] - here, np.inf)
        values = ((fixed + here.sum(axis=1))[:, None, None] + more[:, :, None] + less[:, None, :]).max(axis=0)
        values[stages, stages] = np.inf
        for flat in np.argsort(values, axis=None, kind="stable")[:2 * len(cut)].tolist():
            to, of = divmod(flat, len(cut))
            other = tuple(n + (s == to) - (s == of) for s, n in enumerate(cut))
            if other not in self.traced:
                return float(values[to, of]), other
        return np.inf, cut

    def rule_out(self, box: Box) -> tuple[list[Array], list[Mixture]]:
        """(for each group and option the greatest least seconds of some paths, these paths).

        They are few that rule out what any path rules out, and the best for each option of the group that bounds best.
        """
        tables, fixed = self.all
        least = [one + fixed[:, None] for one in least_with_options(box, tables)]
        left, used = np.concatenate(least, axis=1) >= self.goal, set()
        while (counts := left.sum(axis=1)).any():
            used.add(path := int(counts.argmax()))
            left = left & ~left[path]
        bounding = max(least, key=lambda one: float(one.max(axis=0).min()))
        used |= set(bounding.argmax(axis=0).tolist())
        chosen = sorted(used)
        return [one[chosen].max(axis=0) for one in least], [((path, 1.0),) for path in chosen]

    def mix(self, cuts: Sequence[tuple[int, ...]], used: Mixture = ()) -> tuple[Mixture, float]:
        """(the mixture whose least over these cuts is greatest, that least).

        It is of the TOP paths at each cut and those `used` before.
        """
        values = self.at(cuts)
        top = np.argsort(-values, axis=0, kind="stable")[:TOP].ravel()
        rows = np.unique(np.concatenate([top, np.array([q for q, _ in used], dtype=np.intp)]))
        found = best_mixture(values[rows])
        least = sum(weight * values[rows[q]] for q, weight in found).min()
        return tuple((int(rows[q]), weight) for q, weight in found), float(least)

    def mixed(self, mixture: Mixture) -> tuple[Array, float]:
        """(table, fixed seconds) of a mixture."""
        return (sum((weight * self.tables[q] for q, weight in mixture), np.zeros_like(self.tables[0])),
                sum(weight * self.fixed[q] for q, weight in mixture))


def blended(blend: Blend) -> PathBound:
    """The counts of a blend."""
    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sum(weight * row[i] for row, (_, weight) in zip(rows, blend, strict=True))
                     for i in range(len(rows[0])))

    stages = tuple(mean(rows) for rows in zip(*(path.stages for path, _ in blend), strict=True))
    return PathBound((), stages, mean([path.transfers for path, _ in blend]))


def _table(problem: CutProblem, path: PathBound) -> Array:
    """[stage, blocks] seconds of a path; no blocks, and sizes that a stage cannot have, are 0 and never read.

    What is known of weighted terms counts as often as each of them does. It is applied one after the other, each first
    once, behind it those without weights of messages: the greatest sum holds.
    """
    known = [*problem.known, *([(TOGETHER, problem.whole)] if problem.whole is not None else [])]
    terms, (stages, blocks) = np.nan_to_num(problem.seconds, posinf=0.0), problem.seconds.shape[:2]
    sent = np.array([0.0, *path.transfers, 0.0])
    left = np.concatenate([np.array(path.stages, dtype=float), sent[:-1, None], sent[1:, None]], axis=1)
    seconds: Array = (left[:, None, :6] * terms).sum(axis=2)
    for k, (weights, values) in enumerate(known):
        order = [known[k], *(one for j, one in enumerate(known) if j != k and len(one[0]) == 6)]
        cells = np.nonzero(np.nan_to_num(values, posinf=0.0) > (np.array(weights[:6]) * terms).sum(axis=2))
        more = _more(terms[cells], left[cells[0]], [(each, array[cells]) for each, array in order])
        seconds[cells] = np.maximum(seconds[cells], (left[cells[0], :6] * terms[cells]).sum(axis=1) + more)
    return np.concatenate([np.zeros((stages, 1)), seconds.reshape(stages, blocks)], axis=1)


def _more(terms: Array, left: Array, known: Sequence[tuple[tuple[float, ...], Array]]) -> Array:
    """[cell] seconds that a path takes above those of its [cell, term], by what is known, in this order."""
    seconds: Array = np.zeros(len(terms))
    for weights, values in known:
        each = np.array((*weights, *(0.0,) * (8 - len(weights))), dtype=float)
        more = np.nan_to_num(values, posinf=0.0) - (each[:6] * terms).sum(axis=1)
        times = np.where(more > 0, (left[:, each > 0] / each[each > 0]).min(axis=1), 0.0)
        seconds = seconds + times * np.maximum(more, 0.0)
        left = left - times[:, None] * each
    return seconds


def best_mixture(values: Array) -> Mixture:
    """Weights of the rows whose least mixed column is greatest: max z with z <= weights . column, for each column."""
    scale = float(values.max()) or 1.0
    solver = pywraplp.Solver.CreateSolver("GLOP")
    weights = [solver.NumVar(0.0, 1.0, "") for _ in values]
    least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    one = solver.Constraint(1.0, 1.0)
    for weight in weights:
        one.SetCoefficient(weight, 1.0)
    for column in (values / scale).T.tolist():
        row = solver.Constraint(0.0, solver.infinity())
        row.SetCoefficient(least, -1.0)
        for weight, value in zip(weights, column, strict=True):
            row.SetCoefficient(weight, value)
    solver.Objective().SetCoefficient(least, 1.0)
    solver.Objective().SetMaximization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return ((int(values.min(axis=1).argmax()), 1.0),)
    found = [(q, max(0.0, weight.solution_value())) for q, weight in enumerate(weights)]
    total = sum(weight for _, weight in found)
    return tuple((q, weight / total) for q, weight in found if weight > 1e-9 * total)
