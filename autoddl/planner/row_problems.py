"""Poses the problem of a row of bytes of one candidate, and finds the rows whose bounds are highest.

    row w over moments     sum over t of w_t bytes_t(x) <= budget,   w >= 0, sum of w = 1     (`pricing.build_problem`)

Every plan that fits meets every row. Rows are those of the network in which hubs say whether their tensor is kept
(`pricing.kept_tensors`); choices here are of the network without that. Of several moments the weights that make the
bound highest are those of the Lagrangian dual, by cutting planes over the choices seen (Kelley 1960):

    max over lam >= 0 of  min over x of  seconds(x) + sum over t of lam_t (bytes_t(x) - budget),   w = lam / sum of lam
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
from ortools.linear_solver.python import model_builder

from autoddl.core.problem import Problem, Solution
from autoddl.planner.peaks import Peaks
from autoddl.pricing.build_problem import CostNetwork, Row
from autoddl.pricing.kept_tensors import KeptTensors, with_kept_tensors
from autoddl.pricing.lifetimes import UPDATE, Moment
from autoddl.search import Space, elimination_space, relax, smallest, solve
from autoddl.search.limits import Late, never

__all__ = ["RowProblems", "best_weights", "dual_row", "least_peak", "plane_of", "row_key"]

PLANES = 12
"""Cutting planes of the dual."""

SMALLER = 5
"""Rows that are tried for the least peak of any plan."""

BUDGET_PRICE = 10.0
"""What the bytes of a whole budget cost, in steps of the fastest plan: small plans, of which one is not slow."""

CLOSE = 1e-4
"""The gap of the dual that is good enough."""


@dataclass(frozen=True, eq=False)
class RowProblems:
    """The problems of one candidate under a budget: without bytes, and of every row of bytes."""

    network: CostNetwork
    """All choices of the candidate, priced."""
    budget: float
    """Bytes that a rank may use."""
    solver: str = "exact"
    """Name of the solver of every problem on the way."""
    time_limit: float | None = None
    """Seconds that solving one problem may take; None: no limit."""
    plain: CostNetwork | None = None
    """The network without policies of recomputation: without a budget nothing is faster computed again."""
    late: Late = never
    """Tells whether the time is over of all that this is a part of."""
    peaks: Peaks = field(init=False)
    """The memory lines drawn so far."""
    _made: dict[tuple[tuple[Moment, float], ...] | None, tuple[Problem, Space | None]] = field(default_factory=dict)
    """The problem of the last row, or that of seconds alone, and what the exact solver prepared of it."""
    _rows: dict[tuple[tuple[int, ...], Moment], float] = field(default_factory=dict)
    """Bytes by choice and moment, as the rows count them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peaks", Peaks(self.network))

    @cached_property
    def kept(self) -> KeptTensors:
        """The network for rows, whose hubs say whether their tensor is kept."""
        return with_kept_tensors(self.network)

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the memory line of an allowed choice is within the budget."""
        return self.budget == inf or self.peaks.of(choice).nbytes <= self.budget

    def free(self, tolerance: float = 0.0, ceiling: float = inf) -> Solution:
        """The optimum without a budget, or a bound on it and a choice that may be forbidden."""
        search = self if self.plain is None else RowProblems(self.plain, self.budget, self.solver, self.time_limit,
                                                             late=self.late)
        problem, space = search.ready_for_seconds()
        if space is not None and space.program.exact:
            solution = relax(problem, 0.0, space)
        else:
            solution = solve(problem.within(None), self.solver, time_limit=self.time_limit, tolerance=tolerance,
                             ceiling=ceiling, is_large=space is None, late=self.late)
        return replace(solution, choice=(0,) * len(self.network.policies.blocks) * (search is not self)
                       + solution.choice)

    def ready(self, row: Row) -> tuple[Problem, Space | None]:
        """The problem of a row, over the choices of `kept`, and what the exact solver prepares of it.

        The second is None where the problem is large.
        """
        return self._prepared(row_key(row), lambda: self.kept.network.problem(self.budget, row))

    def ready_for_seconds(self) -> tuple[Problem, Space | None]:
        """The problem whose bytes do not count, over the choices of `network`, and the same of it."""
        return self._prepared(None, lambda: self.network.problem(self.budget))

    def _prepared(self, key: tuple[tuple[Moment, float], ...] | None, make: Callable[[], Problem]
                  ) -> tuple[Problem, Space | None]:
        if key not in self._made:
            self._made.clear()
            problem = make()
            self._made[key] = problem, elimination_space(problem) if self.solver == "exact" else None
        return self._made[key]

    def solved(self, problem: Problem, tolerance: float, ceiling: float, price: float, space: Space | None) -> Solution:
        """The solution of a row's problem, with a choice of `network`. Raises Infeasible, and Above the ceiling."""
        found = solve(problem, self.solver, time_limit=self.time_limit, tolerance=tolerance, ceiling=ceiling,
                      price=price, space=space, is_large=space is None, late=self.late)
        return replace(found, choice=self.kept.plain(found.choice))

    def relaxed(self, problem: Problem, price: float, space: Space | None) -> Solution:
        """The optimum of a row's problem at a price of bytes, with a choice of `network`."""
        found = relax(problem, price, space)
        return replace(found, choice=self.kept.plain(found.choice))

    def row_bytes(self, choice: Sequence[int], moment: Moment) -> float:
        """The bytes at one moment under a choice of `network`, as the rows count them."""
        at = tuple(choice), moment
        if at not in self._rows:
            self._rows[at] = self.kept.row_bytes(choice, {moment: 1.0})
        return self._rows[at]

    def moment_of(self, choice: Sequence[int]) -> Moment:
        """The moment of the peak's op whose row has the most bytes under `choice`."""
        return self.peaks.moment_of(choice, self.row_bytes)


def row_key(row: Row) -> tuple[tuple[Moment, float], ...]:
    """The row as a sorted tuple."""
    return tuple(sorted(row.items()))


def dual_row(search: RowProblems, moments: Sequence[Moment]) -> Row:
    """The row of the moments with about the highest bound: its weights are the multipliers of the dual."""
    if len(moments) == 1:
        return {moments[0]: 1.0}
    even = {moment: 1 / len(moments) for moment in moments}
    if search.ready(even)[1] is None:
        return even
    planes = [plane_of(search, choice, moments) for choice in search.peaks.drawn]
    best, lam = -inf, np.zeros(len(moments))
    for _ in range(PLANES):
        most, tried = _master(planes, len(moments))
        value, choice = _lagrangian(search, moments, tried)
        if value > best:
            best, lam = value, tried
        if most - best <= CLOSE * abs(most) or choice is None:
            break
        planes.append(plane_of(search, choice, moments))
    total = float(lam.sum())
    return {m: float(v) / total for m, v in zip(moments, lam, strict=True) if v > 0} if total else {moments[-1]: 1.0}


def least_peak(search: RowProblems, moments: Sequence[Moment]) -> tuple[float, Row]:
    """(bytes that no plan's peak is below, the row that proves it), by rows that lead to ever smaller plans.

    min over x of max over t of bytes_t(x) >= max over w of min over x of sum w_t bytes_t(x): cutting planes again.
    """
    known, row = list(moments) or [UPDATE], {(list(moments) or [UPDATE])[-1]: 1.0}
    best, planes = (0.0, row), list[tuple[int, ...]]()
    for _ in range(SMALLER):
        problem, space = search.ready(row)
        needed, choice = smallest(problem)
        best = max(best, (needed, row), key=lambda one: one[0])
        if choice is not None:
            choice = search.kept.plain(choice)
            price = BUDGET_PRICE * min(map(search.network.seconds, (choice, *search.peaks.drawn))) / search.budget
            other = search.relaxed(problem, price, space)
            choices = (choice, other.choice) if other.seconds < inf else (choice,)
            choice = min(choices, key=lambda x: search.peaks.of(x).nbytes)
        if choice is None or choice in planes or search.peaks.of(choice).nbytes <= best[0] * (1 + CLOSE):
            break
        if search.late() and search.peaks.least_bytes <= search.budget:
            break  # some plan fits
        planes.append(choice)
        moment = search.moment_of(choice)
        known += [moment] * (moment not in known)
        weights = best_weights([(0.0, *(search.row_bytes(x, m) / search.budget for m in known)) for x in planes],
                               len(known), 1.0)
        row = {m: float(w) for m, w in zip(known, weights, strict=True) if w > 0}
    return best


def plane_of(search: RowProblems, choice: Sequence[int], moments: Sequence[Moment]) -> tuple[float, ...]:
    """(seconds, bytes over budget - 1 at each moment) of a choice."""
    over = [search.row_bytes(choice, moment) / search.budget - 1 for moment in moments]
    return search.network.seconds(choice), *over


def best_weights(planes: Sequence[tuple[float, ...]], count: int, total: float) -> np.ndarray:
    """The weights of moments, of sum 1, with the highest bound over planes where a whole budget costs `total` seconds.
    """
    unit = max(plane[0] for plane in planes) or 1.0
    lam = _master(planes, count, total / unit)[1]
    return np.array(lam / lam.sum() if lam.sum() else np.full(count, 1 / count))


def _master(planes: Sequence[tuple[float, ...]], count: int, total: float | None = None) -> tuple[float, np.ndarray]:
    """max z subject to z <= seconds + sum of lam_t over_t for every plane, lam >= 0: (z, lam in seconds).

    `total` is the sum of lam, where it is given. GLOP's primal simplex can end without a solution where planes are
    nearly parallel; its dual simplex is asked then. Without one of either z is infinite, and lam 0.
    """
    model: Any = model_builder.Model()  # type: ignore[no-untyped-call]
    unit = max(plane[0] for plane in planes) or 1.0
    z = model.new_num_var(-inf, inf, "z")
    lam = [model.new_num_var(0.0, max(1e3, total or 0.0), f"lam{t}") for t in range(count)]
    for seconds, *over in planes:
        model.add(z <= seconds / unit + sum(x * o for x, o in zip(lam, over, strict=True)))
    if total is not None:
        model.add(sum(lam) == total)
    model.maximize(z)
    for way in ("use_dual_simplex: false", "use_dual_simplex: true"):
        solver = model_builder.Solver("GLOP")
        solver.set_solver_specific_parameters(way)
        if solver.solve(model) == model_builder.SolveStatus.OPTIMAL:
            return float(solver.value(z)) * unit, np.array([max(0.0, float(solver.value(x))) for x in lam]) * unit
    return inf, np.zeros(count)


def _lagrangian(search: RowProblems, moments: Sequence[Moment], lam: np.ndarray
                ) -> tuple[float, tuple[int, ...] | None]:
    """min over x of seconds(x) + sum of lam_t (bytes_t(x) / budget - 1), and where it is attained."""
    total = float(lam.sum())
    if not total:
        return -inf, None
    row = {moment: float(x) / total for moment, x in zip(moments, lam, strict=True) if x > 0}
    problem, space = search.ready(row)
    found = search.relaxed(problem, total / search.budget, space)
    return found.bound, found.choice if found.seconds < inf else None
