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
from autoddl.core.pipeline_cuts import CutProblem, Mixture, PathBound
from autoddl.search.cut_boxes import Box, Mask, least_cut, least_with_options

__all__ = ["CutPlanes", "Evaluate", "Trace"]

TOGETHER = (1, 1, 1, 0, 0, 0)
"""The weights of F + B + W."""

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
        paths        the paths
        known        their numbers
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
    known: set[tuple[object, ...]] = field(default_factory=set)
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
            self.stacked = np.stack(self.tables), np.array(self.fixed)
        return self.stacked

    def add(self, path: PathBound) -> None:
        """Adds a path, unless one with its numbers is known."""
        key = path.stages, path.transfers
        if key not in self.known:
            self.known.add(key)
            self.paths.append(path)
            self.tables.append(_table(self.problem, path))
            self.fixed.append(sum(n * x for n, x in zip(path.transfers, self.problem.transfers, strict=True)))

    def evaluate(self, cut: tuple[int, ...]) -> None:
        """Traces the cut, once, and finds its exact seconds where it may be the best."""
        if cut not in self.traced:
            self.traced[cut], path = self.trace(cut)
            self.add(path)
        if cut not in self.seen and (not self.seen or self.traced[cut] < self.seen[self.best]):
            self.seen[cut] = self.exact(cut) if self.exact else self.traced[cut]

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
        found = _best_mixture(values[rows])
        least = sum(weight * values[rows[q]] for q, weight in found).min()
        return tuple((int(rows[q]), weight) for q, weight in found), float(least)

    def mixed(self, mixture: Mixture) -> tuple[Array, float]:
        """(table, fixed seconds) of a mixture."""
        return (sum((weight * self.tables[q] for q, weight in mixture), np.zeros_like(self.tables[0])),
                sum(weight * self.fixed[q] for q, weight in mixture))


def _table(problem: CutProblem, path: PathBound) -> Array:
    """[stage, blocks] seconds of a path; no blocks, and sizes that a stage cannot have, are 0 and never read.

    What is known of weighted terms counts as often as each of them does, one after the other, each of them first once:
    the greatest holds.
    """
    known = [*problem.known, *([(TOGETHER, problem.whole)] if problem.whole is not None else [])]
    orders = [[known[k], *known[:k], *known[k + 1:]] for k in range(len(known))] or [[]]
    seconds = np.max([_with_known(problem, path, order) for order in orders], axis=0)
    return np.concatenate([np.zeros((len(seconds), 1)), seconds], axis=1)


def _with_known(problem: CutProblem, path: PathBound, known: Sequence[tuple[tuple[int, ...], Array]]) -> Array:
    """[stage, blocks - 1] seconds of a path by what is known, in this order."""
    terms = np.nan_to_num(problem.seconds, posinf=0.0)
    left = np.broadcast_to(np.array(path.stages, dtype=float)[:, None, :], terms.shape)
    seconds: Array = (left * terms).sum(axis=2)
    for weights, values in known:
        each = np.array(weights, dtype=float)
        more = np.nan_to_num(values, posinf=0.0) - (each * terms).sum(axis=2)
        times = np.where(more > 0, (left[:, :, each > 0] / each[each > 0]).min(axis=2), 0.0)
        seconds = seconds + times * np.maximum(more, 0.0)
        left = left - times[:, :, None] * each
    return seconds


def _best_mixture(values: Array) -> Mixture:
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
