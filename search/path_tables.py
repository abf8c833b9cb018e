"""Finds the least seconds of paths over the stages and numbers of blocks of a chain (`core.pipeline_cuts`).

    path_tables     the seconds of each stage on some paths, with all that is known of them
    counts_of       whether a path counts stages of a rank as often as what is known of them together
    priced_rows     the seconds of stages of a rank that are counted together, under prices of its bytes
    priced_table    the table of a path with the prices that say most at a cut
    weighed_table   the table of a blend with the dual values of its linear program
    best_blend      the blend of paths that says most of a box of cuts
    told_anew       a blend that was found before, with what is known since
    least_implied   what is known of seconds counted in some ways says of those counted otherwise
    blend_of_plans  the blend that says most of mixtures of plans that were found

The first blend is that of a linear program over fractional cuts. Let y[g, o] be the share of option o of group g, and
x[s] the seconds of stage s, one of each term. With all that is known, of terms weighted w and of stages of a rank under
a price,

    minimise T   subject to   T >= path(x)  for each path          w . x[s] >= sum over o of y[g, o] known[s, o]
                              sum over s of a rank of w . x[s] + price * budget >= the same sum of its priced values
                              sum of y[g] = 1                      sum of blocks * y = L
                              sum of blocks * y over some stages at most, or at least, a limit of the box

Paths are generated: those that are critical where stages take the seconds x, and half-way from there to the x of the
shortest pipeline met. Both points may be had, and the second settles sooner. The dual values of the paths are the
weights of the blend, and those of limits prices of a block. A second of a stage costs next to nothing more. Else stages
on no path take any seconds at a corner, and paths that are critical there say nothing. That its terms are those of one
plan of a stage on all of its paths is what mixtures do not know.

What a blend says is the least of linear functions of its counts, one for each choice of plans. So it is concave. What
is known of some counts is below it, and is greatest where something is known already: there nothing new is learned.
Plans that were found are above it. So those counts are searched next of which the plans say most (Kelley, The
cutting-plane method for solving convex programs, 1960). With Y[s] the mixtures of plans of a stage,

    minimise T   subject to   T >= path(x)  for each path      x[s] in Y[s]      bytes of a rank at most its budget

The weights of the blend are the dual values of its paths, and the price of a byte is that of the budget.

Once more is known, a blend is not sought anew. With c the counts of its terms in a stage, what is known says most by

    maximise sum of t[k] * known[k]   subject to   sum of t[k] * w[k] <= c,  t >= 0
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp  # type: ignore[attr-defined]

from autoddl.core.cost_table import Array
from autoddl.core.pipeline_cuts import (
    BlockLimit,
    BoxPart,
    CutProblem,
    Mixture,
    PathBound,
    PricedStages,
    StageSeconds,
)

__all__ = ["Blend", "FoundPlans", "KnownTerms", "PricedRows", "TraceStages", "add_row", "best_blend", "blend_of_plans",
           "counts_of", "least_implied", "linear_program", "path_tables", "priced_rows", "priced_table",
           "solve_program", "told_anew", "weighed_table"]

Blend = tuple[tuple[PathBound, float], ...]
"""Paths with their weights >= 0, of sum 1."""

Told = tuple[tuple[tuple[float, ...], float], ...]
"""(weights of what is known of a stage, how often it counts)."""

ToldOfRanks = tuple[tuple[tuple[object, ...], float], ...]
"""(stages of a rank, weights and price of what is known of them together, how often it counts)."""

TraceStages = Callable[[Sequence[StageSeconds], Sequence[float]], tuple[float, PathBound]]
"""Seconds of the stages, and of transfers -> (seconds of the pipeline, a path that takes as long)."""

NEAR = 1e-3
"""The part by which a pipeline may be above the paths of a linear program that are enough."""

RISES = 1e-4
"""The part by which a pipeline may be above mixtures of plans that were found."""

GENERATED = 50
"""Paths that are generated for a blend, at most."""

NEXT_TO_NOTHING = 1e-5
"""What a second of one stage costs in a linear program over fractional cuts, in seconds of the pipeline."""

TOGETHER = (1, 1, 1, 0, 0, 0)
"""The weights of F + B + W."""

TABLES = 64
"""Paths whose tables are made at once."""

PIVOTS = 4_000
"""Steps that a linear program may take: those with an end need some hundreds, and few that round badly have none."""

WARM = f"max_number_of_iterations: {PIVOTS}, use_dual_simplex: true, use_preprocessing: false"
COLD = f"max_number_of_iterations: {PIVOTS}, use_dual_simplex: false, use_preprocessing: true"
"""What GLOP is told, at first and where it comes to no end."""

LESS = 1 - 1e-9
"""The part of how often something could count that it does, so that no count that is left is below 0."""

SELDOM = 1e-7
"""How often something counts that is next to never: a path with a step in which it does tells next to nothing."""


class FoundPlans(NamedTuple):
    """Plans that were found of a stage, or of each of some equal parts of it, which may have a mixture of them.

        times      the number of these parts
        terms      [plan, term]: seconds, and last by how much the messages before and behind take more than the least
        nbytes     [plan], of a rank, in parts of its budget; none where bytes do not count
    """

    times: float
    terms: Array
    nbytes: Array


class PricedRows(NamedTuple):
    """The seconds of some stages of a rank on a path, where they are counted together under a price of its bytes.

        number    of what is known together, in the problem
        times     how often the path counts it
        less      seconds that the budget's own price takes off
        rows      [stage of these, blocks - 1] seconds
    """

    number: int
    times: float
    less: float
    rows: Array


class _Step(NamedTuple):
    """Terms weighted so take more than the sum of their least.

        weights    of the eight terms
        counted    those with a weight
        more       by cell, the seconds more
    """

    weights: Array
    counted: NDArray[np.intp]
    more: Array


class _Order(NamedTuple):
    """What is known of the cells (a stage, blocks - 1) of which the first of these steps says something, in order."""

    stages: NDArray[np.intp]
    blocks: NDArray[np.intp]
    steps: tuple[_Step, ...]


class KnownTerms:
    """What is known of the terms of the stages of a problem, ready to be applied to many paths.

    `left` are the sizes that it is applied to, [stage, blocks - 1]: all unless others are ruled out.
    """

    def __init__(self, problem: CutProblem, left: NDArray[np.bool_] | None = None) -> None:
        self.problem, self.least = problem, np.nan_to_num(problem.seconds, posinf=0.0)
        self.left = np.ones(problem.seconds.shape[:2], dtype=np.bool_) if left is None else left
        self.stated = [*_stated(problem), *problem.directions]
        self._steps = [self._step(weights, values) for weights, values in _stated(problem)]
        self._orders = dict[tuple[int, ...], list[_Order]]()
        self._told = dict[tuple[int, int, bytes], Told]()

    def _step(self, weights: Sequence[float], values: Array) -> _Step:
        each = np.array((*weights, *(0.0,) * (8 - len(weights))), dtype=float)
        more = np.nan_to_num(values, posinf=0.0) - (each[:6] * self.least).sum(axis=2)
        return _Step(each, np.flatnonzero(each > 0), more)

    @cached_property
    def _more(self) -> list[Array]:
        """[stage, blocks - 1] the seconds that each that is known is more than the least of its terms."""
        return [self._step(weights, values).more for weights, values in self.stated]

    def told_most(self, s: int, counts: Array, blocks: int) -> Told:
        """How often each counts that is known of a stage of so many blocks, so that all say most; most often first."""
        key = s, blocks, counts.tobytes()
        if key not in self._told:
            rows = [(weights, float(more[s, blocks - 1])) for (weights, _), more in zip(
                self.stated, self._more, strict=True) if more[s, blocks - 1] > 0]
            found = zip([weights for weights, _ in rows], _most_often(rows, counts.tolist()), strict=True)
            self._told[key] = tuple(sorted((one for one in found if one[1] > SELDOM), key=lambda one: -one[1]))
        return self._told[key]

    def orders(self, stages: Sequence[int]) -> list[_Order]:
        """For each weighting that is known but for those of `directions`, it first and then the others."""
        key = tuple(stages)
        if key not in self._orders:
            self._orders[key] = [self._order(k, key) for k in range(len(self._steps))]
        return self._orders[key]

    def _order(self, first: int, stages: tuple[int, ...]) -> _Order:
        at = list(stages)
        s, n = np.nonzero((self._steps[first].more[at] > 0) & self.left[at])
        others = (j for j in range(len(self._steps)) if j != first and len(self.stated[j][0]) == 6)
        steps = (self._steps[j] for j in (first, *others))
        cells = ((step, step.more[at][s, n]) for step in steps)
        return _Order(s, n, tuple(
            step._replace(more=np.maximum(more, 0.0)) for step, more in cells if (more > 0).any()))


def path_tables(known: KnownTerms, paths: Sequence[PathBound], bare: bool = False) -> list[Array]:
    """[stage, blocks] seconds of each path; no blocks, and sizes that a stage cannot have, are 0 and never read.

    What is known of weighted terms counts as often as each of them does. It is applied one after the other, each first
    once, behind it those without weights of messages: the greatest sum holds. Where they are `bare`, none is applied.
    """
    found = list[Array]()
    for begin in range(0, len(paths), TABLES):
        some = paths[begin:begin + TABLES]
        counts = np.stack([_counts(path) for path in some])
        if bare:
            found += list(np.pad((counts[:, :, None, :6] * known.least).sum(axis=3), ((0, 0), (0, 0), (1, 0))))
            continue
        found += list(np.pad(_seconds(known, counts, range(counts.shape[1])), ((0, 0), (0, 0), (1, 0))))
    return found


def priced_rows(known: KnownTerms, path: PathBound, table: Array) -> tuple[PricedRows, ...]:
    """What is known of stages together says of a path; `table` is that of the path."""
    counts, found = _counts(path), list[PricedRows]()
    rest = dict[tuple[object, ...], Array]()
    for k, one in enumerate(known.problem.priced):
        at, times = list(one.stages), LESS * _times(one, counts)
        if times <= 0:
            continue
        key = one.stages, one.weights
        if key not in rest:
            rest[key] = _seconds(known, (counts[at] - times * _weights(one))[None], at)[0]
        found.append(PricedRows(k, times, times * one.price * one.budget,
                                np.maximum(table[at, 1:], times * one.values + rest[key])))
    return tuple(found)


def priced_table(problem: CutProblem, priced: Sequence[PricedRows], table: Array, cut: Sequence[int]
                 ) -> tuple[Array, float, Mixture]:
    """([stage, blocks] seconds of a priced path, seconds of every cut, its prices): by those that say most at a cut.

    `table` is that of the path. There are no prices where none says more at the cut. Then the table is the path's.
    """
    found, more, prices = np.array(table), 0.0, list[tuple[int, float]]()
    best = dict[tuple[int, ...], tuple[float, PricedRows]]()
    for one in priced:
        at = problem.priced[one.number].stages
        gain = sum(float(row[cut[s] - 1] - table[s, cut[s]]) for s, row in zip(at, one.rows, strict=True)) - one.less
        if gain > best.get(at, (0.0,))[0]:
            best[at] = gain, one
    for at, (_, one) in sorted(best.items()):
        found[list(at), 1:] = one.rows
        more -= one.less
        prices.append((one.number, one.times))
    return found, more, tuple(prices)


def weighed_table(known: KnownTerms, path: PathBound, table: Array, part: BoxPart
                  ) -> tuple[Array, float, tuple[Mixture, ...], Mixture]:
    """([stage, blocks] seconds of a blend, seconds of every cut, how often what is known counts): by dual values.

    The last are as in `WeighedPath`. What is no more known counts never, and nothing more often than its terms are
    left. `table` has what is known otherwise.
    """
    left, added = LESS * _counts(path), np.zeros(known.least.shape[:2])
    together = _take_together(known.problem, part.together, left, added)
    names = {weights: k for k, (weights, _) in reversed([*enumerate(known.stated)])}
    numbers = list[Mixture]()
    for s, own in enumerate(part.known):
        used = list[tuple[int, float]]()
        for k, often in [(names[name], times) for name, times in own if name in names]:
            weights, values = known.stated[k]
            each = np.array((*weights, *(0.0,) * (8 - len(weights))))
            times = _times_left(left[s], each, often)
            left[s] = np.maximum(left[s] - times * each, 0.0)
            added[s] += times * np.nan_to_num(values[s], posinf=0.0)
            used.append((k, times))
        numbers.append(tuple(used))
    added += (left[:, None, :6] * known.least).sum(axis=2)
    paid = sum(times * known.problem.priced[k].price * known.problem.priced[k].budget for k, times in together)
    return np.maximum(table, np.pad(added, ((0, 0), (1, 0)))), -paid, tuple(numbers), together


def _take_together(problem: CutProblem, told: ToldOfRanks, left: Array, added: Array) -> Mixture:
    """How often what is known of stages of a rank together counts: it is taken off the counts, and its seconds added.
    """
    names, found = {(one.stages, one.weights, one.price): k for k, one in enumerate(problem.priced)}, list[
        tuple[int, float]]()
    for k, often in [(names[name], times) for name, times in told if name in names]:
        one, at = problem.priced[k], list(problem.priced[k].stages)
        times = _times_left(left[at], _weights(one), often)
        left[at] = np.maximum(left[at] - times * _weights(one), 0.0)
        added[at] += times * one.values
        found.append((k, times))
    return tuple(found)


def _times_left(left: Array, weights: Array, times: float) -> float:
    """So often, or as often as the counts that are left hold these weights; 0 where that is next to never."""
    found = min(times, float((left[weights > 0] / weights[weights > 0]).min()))
    return found if found > SELDOM else 0.0


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


def _stated(problem: CutProblem) -> list[tuple[tuple[float, ...], Array]]:
    """All that is known of weighted terms of single stages."""
    return [*problem.known, *([(TOGETHER, problem.whole)] if problem.whole is not None else [])]


def _seconds(known: KnownTerms, left: Array, stages: Sequence[int]) -> Array:
    """[path, stage, blocks - 1] seconds whose terms count so often, [path, stage, term], by what is known."""
    least: Array = (left[:, :, None, :6] * known.least[list(stages)]).sum(axis=3)
    seconds = np.array(least)
    for order in known.orders(stages):
        s, n = order.stages, order.blocks
        seconds[:, s, n] = np.maximum(seconds[:, s, n], least[:, s, n] + _more(order, left[:, s]))
    return seconds


def _more(order: _Order, left: Array) -> Array:
    """[path, cell] seconds that paths take above those of their [path, cell, term], by what is known, in this order."""
    seconds: Array = np.zeros(left.shape[:2])
    for k, step in enumerate(order.steps):
        times = (left[:, :, step.counted] / step.weights[step.counted]).min(axis=2)
        times[:, step.more <= 0] = 0.0
        seconds += times * step.more
        if k + 1 < len(order.steps):
            left = left - times[:, :, None] * step.weights
    return seconds


def best_blend(problem: CutProblem, groups: Sequence[Sequence[int]], options: Sequence[NDArray[np.intp]],
               paths: Sequence[PathBound], trace: TraceStages, limits: Sequence[BlockLimit] = (), most: float = 0.0,
               sent: Sequence[float] | None = None) -> tuple[float, BoxPart, tuple[float, ...]]:
    """(seconds, the blend of paths that says most of the cuts of some groups' options, the fractional cut), as found.

    The seconds are those of the fractional cuts of these options, and no bound of cuts with others. `options` are
    [option, stage of the group] -> blocks; `paths` are those to begin with. The cut has the mean blocks of each stage.
    All is of cuts within `limits`. Where there may be none, the price of each is `most`, and seconds are 0. A blend
    that is clearly above `most` need not be better. `sent` are the least seconds of transfers in these cuts; those of
    all if None.
    """
    program, used = _Fractional(problem, groups, options, limits, problem.transfers if sent is None else sent), [*paths]
    for path in paths:
        program.add(path)
    limited, cut = (most,) * len(limits), tuple[float, ...]()
    told: tuple[tuple[Told, ...], ToldOfRanks] = ((),) * len(problem.seconds), ()
    weights, within, ends, seconds = [1.0], None, inf, 0.0
    for _ in range(GENERATED):
        found = program.solve()
        if found is None:
            break
        seconds, now = found
        weights, limited, told, cut = program.weights(), program.prices(), program.told(), program.cut()
        if 0 < most * (1 + NEAR) <= seconds:
            break
        inner = now if within is None else (now + within) / 2
        traced = [trace(*_split(inner)), trace(*_split(now))]
        if traced[0][0] < ends:
            ends, within = traced[0][0], inner
        new = [path for _, path in traced if path not in used and path.seconds(*_split(now)) > seconds * (1 + NEAR)]
        if not new or ends <= seconds * (1 + NEAR):
            break
        for path in dict.fromkeys(new):
            program.add(path)
            used.append(path)
    blend = tuple((path, weight) for path, weight in zip(used, weights, strict=False) if weight > 0)
    return seconds, BoxPart(blend, limited, *told), cut


def _split(values: Array) -> tuple[list[StageSeconds], list[float]]:
    """(seconds of the stages, of the transfers) of a point of the linear program."""
    stages = (len(values) + 1) // 7
    return [StageSeconds(*row) for row in values[:6 * stages].reshape(stages, 6).tolist()], values[6 * stages:].tolist()


def linear_program() -> Any:
    """An empty linear program of GLOP, which ends after PIVOTS steps.

    It goes on where it was once it has more rows: that is dual simplex, and no preprocessing.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.SetSolverSpecificParametersAsString(WARM)
    return solver


def solve_program(solver: Any) -> bool:
    """Solves a linear program; whether that came to an end. Where it rounds badly, it begins again otherwise."""
    if solver.Solve() == pywraplp.Solver.OPTIMAL:
        return True
    anew = pywraplp.MPSolverParameters()
    anew.SetIntegerParam(anew.INCREMENTALITY, anew.INCREMENTALITY_OFF)
    solver.SetSolverSpecificParametersAsString(COLD)
    found = bool(solver.Solve(anew) == pywraplp.Solver.OPTIMAL)
    solver.SetSolverSpecificParametersAsString(WARM)
    return found


def add_row(solver: Any, pairs: Sequence[tuple[Any, float]], least: float, most: float = inf) -> Any:
    """Adds least <= sum of variable * value <= most; returns it."""
    row, sums = solver.Constraint(least, most), dict[Any, float]()
    for variable, value in pairs:
        sums[variable] = sums.get(variable, 0.0) + value
    for variable, value in sums.items():
        row.SetCoefficient(variable, value)
    return row


class _Fractional:
    """The linear program of `best_blend`."""

    def __init__(self, problem: CutProblem, groups: Sequence[Sequence[int]], options: Sequence[NDArray[np.intp]],
                 limits: Sequence[BlockLimit], sent: Sequence[float]) -> None:
        self.problem, self.solver, self.sent = problem, linear_program(), sent
        self.seconds = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.terms = [[self.solver.NumVar(0.0, self.solver.infinity(), "") for _ in range(8)] for _ in problem.seconds]
        self.shares = [[self.solver.NumVar(0.0, 1.0, "") for _ in own] for own in options]
        self.sizes = {s: (shares, own[:, i]) for group, own, shares in zip(groups, options, self.shares, strict=True)
                      for i, s in enumerate(group)}
        self.paths: list[Any] = []
        self.known = [list[tuple[tuple[float, ...], Any]]() for _ in problem.seconds]
        for shares in self.shares:
            add_row(self.solver, [(share, 1.0) for share in shares], 1.0, 1.0)
        add_row(self.solver, [(share, float(n)) for shares, own in zip(self.shares, options, strict=True)
                   for share, n in zip(shares, own.sum(axis=1), strict=True)], *(float(problem.blocks),) * 2)
        self.limits = [add_row(self.solver, [(share, one.sign * float(n)) for s in one.stages for share, n in zip(
            *self.sizes[s], strict=True)], -self.solver.infinity(), float(one.sign * one.blocks)) for one in limits]
        for s in range(len(problem.seconds)):
            self._add_known(s)
        self.together = [((one.stages, one.weights, one.price), add_row(self.solver, [
            pair for s, weights, values in zip(one.stages, one.weights, one.values, strict=True)
            for pair in (*self._weighted(s, weights), *self._known(s, values))], -one.price * one.budget))
            for one in problem.priced]
        self._prefer_fast_stages()

    def _prefer_fast_stages(self) -> None:
        """Minimises the seconds, and next to nothing of those of stages: no term is more than what is known asks for.

        Else stages off all paths take any seconds at a corner, and the paths that are critical there say nothing.
        """
        goal, often = self.solver.Objective(), (float(self.problem.schedule.microbatches),) * 3 + (1.0,) * 5
        goal.SetCoefficient(self.seconds, 1.0)
        for term, times in ((term, times) for own in self.terms for term, times in zip(own, often, strict=True)):
            goal.SetCoefficient(term, NEXT_TO_NOTHING * times)
        goal.SetMinimization()

    def _add_known(self, s: int) -> None:
        """Adds what is known of a stage, where that of some option is more than its single terms say."""
        problem, sizes = self.problem, self.sizes[s][1] - 1
        least = np.nan_to_num(problem.seconds[s, sizes], posinf=0.0)
        for weights, values in _single_terms(problem, s):
            add_row(self.solver, [*self._weighted(s, weights), *self._known(s, values)], 0.0)
        for weights, known in (*_stated(problem), *problem.directions):
            if (known[s, sizes] > least @ np.array(weights[:6])).any():
                row = add_row(self.solver, [*self._weighted(s, weights), *self._known(s, known[s])], 0.0)
                self.known[s].append((weights, row))

    def _weighted(self, s: int, weights: Sequence[float]) -> list[tuple[Any, float]]:
        return [(term, float(weight)) for term, weight in zip(self.terms[s], weights, strict=False) if weight]

    def _known(self, s: int, values: Array) -> list[tuple[Any, float]]:
        """Less what is known of the stage, by the shares of its sizes."""
        shares, sizes = self.sizes[s]
        return [(share, -float(values[n - 1])) for share, n in zip(shares, sizes, strict=True) if values[n - 1] > 0]

    def add(self, path: PathBound) -> None:
        """Adds a path: the pipeline takes no less."""
        fixed = sum(n * x for n, x in zip(path.transfers, self.sent, strict=True))
        pairs = [(term, -weight) for s, row in enumerate(_counts(path)) for term, weight in self._weighted(s, row)]
        self.paths.append(add_row(self.solver, [(self.seconds, 1.0), *pairs], fixed))

    def solve(self) -> tuple[float, Array] | None:
        """(the least seconds, those of the stages and of the transfers); None where GLOP comes to no end for rounding.
        """
        if not solve_program(self.solver):
            return None
        terms = [[max(0.0, term.solution_value()) for term in own] for own in self.terms]
        sent = [x + before[7] + behind[6] for x, before, behind in zip(
            self.sent, terms[:-1], terms[1:], strict=True)]
        return self.seconds.solution_value(), np.array([x for own in terms for x in own[:6]] + sent)

    def cut(self) -> tuple[float, ...]:
        """The mean blocks of each stage."""
        return tuple(sum(share.solution_value() * float(n) for share, n in zip(*self.sizes[s], strict=True))
                     for s in range(len(self.terms)))

    def prices(self) -> tuple[float, ...]:
        """The seconds that a block costs at each limit."""
        return tuple(max(0.0, -row.dual_value()) for row in self.limits)

    def told(self) -> tuple[tuple[Told, ...], ToldOfRanks]:
        """How often what is known counts, by stage of each, and of stages together; what counts least comes last."""
        return tuple(map(_counting, self.known)), _counting(self.together)

    def weights(self) -> list[float]:
        """The weights of the paths, of sum 1; those of next to no weight have none."""
        return _shares(self.paths)


def _counting(rows: Sequence[tuple[Any, Any]]) -> tuple[tuple[Any, float], ...]:
    """(name of each row, its dual value), the greatest first, without those of next to none."""
    found = [(name, row.dual_value()) for name, row in rows]
    return tuple(sorted((one for one in found if one[1] > SELDOM), key=lambda one: -one[1]))


def _single_terms(problem: CutProblem, s: int) -> list[tuple[tuple[float, ...], Array]]:
    """What is known of each term of a stage by itself."""
    every = np.eye(problem.seconds.shape[2])
    return [(tuple(every[k]), problem.seconds[s, :, k]) for k in range(len(every)) if problem.seconds[s, 0, k] > 0]


def told_anew(known: KnownTerms, path: PathBound, part: BoxPart, cut: Sequence[int]) -> BoxPart:
    """The part of a box whose blend has the counts of `path`, in which what is known counts as says most of one cut."""
    left, added = LESS * _counts(path), np.zeros(known.least.shape[:2])
    _take_together(known.problem, part.together, left, added)
    return part._replace(known=tuple(known.told_most(s, counts, n) for s, (counts, n) in enumerate(
        zip(left, cut, strict=True))))


def least_implied(known: Sequence[tuple[Sequence[float], float]], weights: Sequence[float]) -> float:
    """The most that is known of seconds that count so, by what is known of others: as often as they fit into these."""
    times = _most_often(known, weights)
    return sum(often * seconds for often, (_, seconds) in zip(times, known, strict=True))


def _most_often(known: Sequence[tuple[Sequence[float], float]], weights: Sequence[float]) -> list[float]:
    """How often each of (weights of terms, seconds) counts so that all say most, within how often the terms do."""
    solver = linear_program()
    times = [solver.NumVar(0.0, solver.infinity(), "") for _ in known]
    for k, weight in enumerate(weights):
        add_row(solver, [(one, float(own[k])) for one, (own, _) in zip(times, known, strict=True)
                         if k < len(own) and own[k] > 0], -solver.infinity(), float(weight))
    for one, (_, seconds) in zip(times, known, strict=True):
        solver.Objective().SetCoefficient(one, float(seconds))
    solver.Objective().SetMaximization()
    return [max(0.0, one.solution_value()) for one in times] if solve_program(solver) else [0.0] * len(times)


def blend_of_plans(found: Sequence[Sequence[FoundPlans]], transfers: Sequence[float], trace: TraceStages,
                   groups: Sequence[Sequence[int]] = ()) -> tuple[float, Blend, tuple[float, ...]]:
    """(seconds, the blend of paths that says most of mixtures of plans that were found, price of a budget by group).

    `found` has the plans of each part of each stage. The bytes of a group's stages have a budget together. The seconds
    are no bound: they are above those of every blend. Where no mixture fits, they are infinite.
    """
    program, used = _Mixtures(found, transfers, groups), list[PathBound]()
    seconds, now, weights = 0.0, program.even(), list[float]()
    for _ in range(GENERATED):
        ends, path = trace(*_split(now))
        if path in used or (used and ends <= seconds * (1 + RISES)):
            break
        used.append(path)
        program.add(path)
        made = program.solve()
        if made is None:
            return inf, ((path, 1.0),), (0.0,) * len(groups)
        seconds, now = made
        weights = _shares(program.paths)
    blend = tuple((path, weight) for path, weight in zip(used, weights, strict=False) if weight > 0)
    return seconds, blend, program.prices() if groups else ()


class _Mixtures:
    """The linear program of `blend_of_plans`."""

    def __init__(self, found: Sequence[Sequence[FoundPlans]], transfers: Sequence[float],
                 groups: Sequence[Sequence[int]]) -> None:
        self.solver, self.transfers, self.paths = linear_program(), np.array(transfers), list[Any]()
        self.seconds = self.solver.NumVar(0.0, self.solver.infinity(), "")
        self.found, self.terms = found, [np.concatenate([one.terms for one in own]) for own in found]
        self.shares = [[[self.solver.NumVar(0.0, self.solver.infinity(), "") for _ in one.terms] for one in own]
                       for own in found]
        for one, shares in ((one, shares) for own, every in zip(found, self.shares, strict=True)
                            for one, shares in zip(own, every, strict=True)):
            add_row(self.solver, [(share, 1.0) for share in shares], one.times, one.times)
        self.budgets = [add_row(self.solver, [(share, float(nbytes)) for s in group for one, shares in zip(
            found[s], self.shares[s], strict=True) for share, nbytes in zip(shares, one.nbytes, strict=True)],
            -self.solver.infinity(), 1.0) for group in groups]
        self.solver.Minimize(self.seconds)

    def even(self) -> Array:
        """The seconds of stages that have as much of each plan, and of transfers then."""
        return self._taken([np.concatenate([np.full(len(one.terms), one.times / len(one.terms)) for one in own])
                            for own in self.found])

    def _taken(self, shares: Sequence[Array]) -> Array:
        terms = np.stack([own @ rows for own, rows in zip(shares, self.terms, strict=True)])
        return np.concatenate([terms[:, :6].ravel(), self.transfers + terms[:-1, 7] + terms[1:, 6]])

    def add(self, path: PathBound) -> None:
        """Adds a path: the pipeline takes no less."""
        pairs = [(share, -float(seconds)) for counts, every, rows in zip(
            _counts(path), self.shares, self.terms, strict=True) for share, seconds in zip(
            (share for shares in every for share in shares), rows @ counts, strict=True)]
        fixed = float(self.transfers @ np.array(path.transfers))
        self.paths.append(add_row(self.solver, [(self.seconds, 1.0), *pairs], fixed))

    def solve(self) -> tuple[float, Array] | None:
        """(the least seconds, those of stages and of transfers); None where no mixture fits, or GLOP comes to no end.
        """
        if not solve_program(self.solver):
            return None
        return self.seconds.solution_value(), self._taken(
            [np.array([max(0.0, share.solution_value()) for shares in every for share in shares])
             for every in self.shares])

    def prices(self) -> tuple[float, ...]:
        """The seconds that the whole budget of each group costs."""
        return tuple(max(0.0, -row.dual_value()) for row in self.budgets)


def _shares(paths: Sequence[Any]) -> list[float]:
    """The dual values of paths, as weights of sum 1; those of next to none are 0."""
    found = [max(0.0, row.dual_value()) for row in paths]
    found = [weight if weight > 1e-7 else 0.0 for weight in found]
    return [weight / sum(found) for weight in found] if any(found) else [1.0]
