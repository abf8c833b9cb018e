"""Finds the fastest plan of a candidate whose memory line fits the budget, and proves a bound for all that fit.

    row w over moments     sum over t of w_t bytes_t(x) <= budget,   w >= 0, sum of w = 1     (`pricing.build_problem`)

Every plan that fits meets every row: the optimum under one row is a bound, and its plan is the answer if its line fits.
Rows are those of the network in which hubs say whether their tensor is kept (`pricing.kept_tensors`); choices here are
of the network without that. Rows are chosen by the plans that they let through:

    1   no row: the free optimum. Its line fits: done
    2   the row of the moment at which the last plan's line is highest
    3   the row of several such moments, with the weights that make the bound highest: the Lagrangian dual
            max over lam >= 0 of  min over x of  seconds(x) + sum over t of lam_t (bytes_t(x) - budget)
        by cutting planes over the choices seen (Kelley 1960); w = lam / sum of lam
    4   the row lets a plan through that is larger than its row says: with less room, by what the line had too much, the
        search finds plans that fit, and with more room again faster ones; the bound stays that of the whole budget
    5   where blocks have policies of recomputation, the levels of a row's plan are tried as fixed ones, and those with
        one block more: without policies a row leaves less open
    6   of small problems every choice is looked at, the fastest first, if the gap is not closed by then

No plan fits if the least bytes of a row are above the budget. Where no plan was found and no row says so, the error
says that instead (`Infeasible.is_proved`).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, prod
from typing import Any

import numpy as np
from ortools.linear_solver.python import model_builder

from autoddl.core.errors import Infeasible
from autoddl.core.problem import EXACT, Problem, Solution
from autoddl.cost_models import show_bytes
from autoddl.planner.peaks import Peaks
from autoddl.pricing.build_problem import CostNetwork, Row
from autoddl.pricing.kept_tensors import KeptTensors, with_kept_tensors
from autoddl.pricing.lifetimes import UPDATE, Moment
from autoddl.search import Above, Space, elimination_space, relax, smallest, solve
from autoddl.search.exhaustive import choice_at, score_every_choice

__all__ = ["BudgetSearch", "Fitted", "best_weights", "least_peak", "plane_of"]

ROUNDS = 5
"""Rows that are tried."""

SHRINKS = 5
"""Plans that are looked at with less room under one row."""

NARROW = 5e-4
"""The part of the budget between rooms that is not searched further."""

DIGITS = 2
"""Digits of the weights by which rows differ; closer ones lead to the same plans."""

PLANES = 12
"""Cutting planes of the dual."""

FEW = 2_000_000
"""Choices among which the best is looked for one by one."""

LINES = 200
"""Memory lines that are drawn for that."""

FIXED = 4
"""Levels of all blocks that are tried as fixed ones."""

SMALLER = 5
"""Rows that are tried for the least peak of any plan."""

BUDGET_PRICE = 10.0
"""What the bytes of a whole budget cost, in steps of the fastest plan: small plans, of which one is not slow."""

CLOSE = 1e-4
"""The gap of the dual that is good enough."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A solution whose memory line fits the budget, and the row under which its bound was proved.

    The solution's `nbytes` are those at the peak of the line.
    """

    solution: Solution
    row: Row


@dataclass(frozen=True, eq=False)
class BudgetSearch:
    """The search for the fastest plan of one candidate under a budget."""

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
        search = self if self.plain is None else BudgetSearch(self.plain, self.budget, self.solver, self.time_limit)
        problem, space = search.ready_for_seconds()
        if space is not None and space.program.exact:
            solution = relax(problem, 0.0, space)
        else:
            solution = solve(problem.within(None), self.solver, time_limit=self.time_limit, tolerance=tolerance,
                             ceiling=ceiling)
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
                      price=price, space=space)
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

    def solve(self, row: Row | None, price: float, ceiling: float, tolerance: float) -> Fitted:
        """The fastest plan that fits; its proven gap is at most `tolerance` where the search reaches that.

        `row` and `price` are a guess of where the budget binds and of the seconds that a byte is worth. Raises Above
        where no plan is below `ceiling` seconds, and Infeasible where none fits or none is found.
        """
        state = _State(self, ceiling, tolerance)
        tried = set[object]()
        try:
            if row is None:
                state.free()
            while not state.closed and state.rounds < ROUNDS:
                row = state.next_row(row)
                if _rounded(row) in tried:
                    break
                tried.add(_rounded(row))
                state.under(row, price)
                price = state.price
        except Above as above:
            if state.best is None:
                raise Above(max(above.bound, state.bound)) from None
            state.bound, state.row = max((state.bound, state.row), (above.bound, row or state.row), key=lambda b: b[0])
        return state.ended()


def row_key(row: Row) -> tuple[tuple[Moment, float], ...]:
    """The row as a sorted tuple."""
    return tuple(sorted(row.items()))


def _rounded(row: Row) -> tuple[tuple[Moment, float], ...]:
    """The row to `DIGITS` digits, as a sorted tuple."""
    return tuple((moment, round(weight, DIGITS)) for moment, weight in row_key(row) if round(weight, DIGITS))


@dataclass(slots=True)
class _State:
    """The state of a search: the plans, bounds and moments found so far."""

    search: BudgetSearch
    """The search that it belongs to."""
    ceiling: float
    """Seconds below which a plan is wanted."""
    tolerance: float
    """The proven gap at which the search may end."""
    best: Solution | None = None
    """The fastest plan that fits."""
    bound: float = -inf
    """Seconds that no plan that fits is below."""
    row: Row = field(default_factory=lambda: {UPDATE: 1.0})
    """The row under which the bound was proved."""
    proof: str = ""
    """How the bound was proved."""
    moments: list[Moment] = field(default_factory=list)
    """Moments at which plans were too large, in the order in which they were found."""
    rounds: int = 0
    """The number of rows tried."""
    price: float = 0.0
    """Seconds that a byte is worth under `row`."""
    needed: float = 0.0
    """Bytes that every plan needs, as far as is known."""
    levels: tuple[int, ...] = ()
    """The levels of all policies in the plan of the last row."""

    @property
    def seconds(self) -> float:
        """Seconds of the best plan, infinite without one."""
        return inf if self.best is None else self.best.seconds

    @property
    def closed(self) -> bool:
        """Whether the best plan is within the tolerance of the bound."""
        return self.bound >= self.seconds * (1 - max(self.tolerance, EXACT))

    def free(self) -> None:
        """Solves without a budget, and takes the optimum, or notes the moment at which it is too large."""
        solution = self.search.free(self.tolerance, self.ceiling)
        if solution.bound >= self.ceiling * (1 - self.tolerance):
            raise Above(solution.bound)
        self._bounded(solution, self.row, solution.bound)
        self._take(solution)

    def _bounded(self, solution: Solution, row: Row, bound: float) -> None:
        if bound > self.bound:
            self.bound, self.row, self.proof = bound, row, solution.proof
            self.price = solution.price

    def _take(self, solution: Solution) -> bool:
        """Keeps the plan if it fits, else the moment of its peak. Returns whether it fits."""
        search = self.search
        if solution.seconds >= self.seconds:
            return search.fits(solution.choice)
        if search.fits(solution.choice):
            self.best = replace(solution, nbytes=search.peaks.of(solution.choice).nbytes)
            return True
        moment = search.moment_of(solution.choice)
        if moment not in self.moments:
            self.moments.append(moment)
        return False

    def next_row(self, guess: Row | None) -> Row:
        """The row to try next: the guess first, then that of the moments found so far."""
        if guess is not None and not self.rounds:
            for moment in guess:
                if moment not in self.moments:
                    self.moments.append(moment)
            return guess
        return _dual_row(self.search, self.moments)

    def under(self, row: Row, price: float) -> None:
        """Solves under a row; where the optimum does not fit, looks for plans with less room."""
        self.rounds += 1
        search = self.search
        problem, space = search.ready(row)
        try:
            solution = search.solved(problem, self.tolerance, min(self.ceiling, self.seconds), price, space)
        except Infeasible as error:
            self._starved(error)
            return
        self._bounded(solution, row, solution.bound)
        if self.best is None and solution.bound >= self.ceiling * (1 - self.tolerance):
            raise Above(solution.bound)
        self.price, self.levels = solution.price, solution.choice[:len(search.network.policies.blocks)]
        if not self._take(solution):
            self._shrink(problem, space, solution)

    def _starved(self, error: Infeasible) -> None:
        """Handles a row that no choice meets: raises Infeasible where that is proved, else notes the bytes needed."""
        if error.is_proved:
            needed = max(error.needed, least_peak(self.search, self.moments)[0] if error.needed < inf else inf)
            weights = self.search.network.weight_bytes
            detail = (f"parameters and optimizer state alone take {show_bytes(weights)} where they are split as far as "
                      "they can be: use more devices, another optimizer or a larger budget")
            raise Infeasible(needed, self.search.budget, detail if weights > self.search.budget else error.detail,
                             self.search.peaks.least_bytes)
        self.needed = max(self.needed, error.needed)

    def _shrink(self, problem: Problem, space: Space | None, solution: Solution) -> None:
        """Looks for plans under the row with less room, by what the last line was above the budget, or half.

        Once a plan fits, rooms between that and the least with which none did are tried, as far as that may halve the
        gap.
        """
        search, most, least, found, near = self.search, self.search.budget, 0.0, False, self.tolerance
        tried = 0
        while tried < SHRINKS and most - least > NARROW * search.budget:
            room = (most + least) / 2
            if not found:
                over = search.peaks.of(solution.choice).nbytes - search.budget
                room = max(min(most, solution.nbytes) - over * (1 + tried / 2) - 1e-6 * search.budget, room)
            try:
                solution = search.solved(problem.within(room), near, min(self.ceiling, self.seconds), self.price,
                                         space and space.within(room))
            except (Infeasible, Above):
                least = room
                continue
            tried += 1
            if not self._take(solution):
                most = room
                continue
            if self.closed:
                return
            least, found, near = room, True, max(self.tolerance, (1 - self.bound / self.seconds) / 2)

    def ended(self) -> Fitted:
        """The best plan with its bound, after the last means to find one. Raises Infeasible where there is none."""
        if not self.closed and self.levels:
            self._fixed_levels()
        if not self.closed:
            self._every_choice()
        if self.best is None:
            self._smallest()
        if self.best is None:
            raise Infeasible(self.needed, self.search.budget, "", self.search.peaks.least_bytes)
        bound = min(max(self.bound, 0.0), self.best.seconds)
        return Fitted(replace(self.best, bound=bound, proof=self.proof or self.best.proof, price=self.price), self.row)

    def _fixed_levels(self) -> None:
        """The best plans whose levels are those of the last row's plan, and those with more blocks computed again.

        Backward comes to the first blocks last: there, what the others kept is gone by then. So these are computed
        again first.
        """
        network, levels = self.search.network, sorted(self.levels, reverse=True)
        for _ in range(FIXED):
            fixed = network.fixed_at(levels)
            try:
                found = BudgetSearch(fixed, self.search.budget, self.search.solver, self.search.time_limit).solve(
                    self.row, self.price, min(self.ceiling, self.seconds), self.tolerance)
            except (Infeasible, Above) as error:
                if isinstance(error, Above) or 0 not in levels:
                    return
            else:
                if found.solution.seconds >= self.seconds:
                    return
                choice = (*levels, *found.solution.choice)
                self.best = replace(found.solution, choice=choice, nbytes=self.search.peaks.of(choice).nbytes)
                if self.closed:
                    return
            if 0 not in levels:
                return
            levels[levels.index(0)] = max(1, *levels)

    def _smallest(self) -> None:
        """Takes the plan with the least peak that the rows lead to, and a faster one under the row that led to it."""
        if self.search.solver == "exact" and self.search.ready(self.row)[1] is None:
            return
        needed, row = least_peak(self.search, self.moments)
        self.needed = max(self.needed, needed)
        choice = self.search.peaks.least
        if choice is None or not self.search.fits(choice):
            return
        seconds = self.search.network.seconds(choice)
        self.best = Solution(choice, seconds, self.search.peaks.of(choice).nbytes, min(self.bound, seconds), self.proof,
                             self.search.solver)
        with suppress(Above):
            self.under(row, self.price)

    def _every_choice(self) -> None:
        """Takes the fastest choice of a small problem whose line fits, which then is the optimum."""
        search, row = self.search, self.row
        if prod(search.network.sizes) > FEW:
            return
        seconds, nbytes = score_every_choice(search.network.problem(None, row))
        seconds = np.where(nbytes <= search.budget, seconds, inf)
        order, known, drawn = np.argsort(seconds, kind="stable"), {row_key(row)}, 0
        for place in order.tolist():
            if seconds[place] == inf:
                continue
            if seconds[place] >= min(self.seconds, self.ceiling):
                break
            if drawn >= LINES:
                self.bound = max(self.bound, float(seconds[place]))
                return
            choice, drawn = choice_at(search.network.problem(None, row), place), drawn + 1
            if search.fits(choice):
                self.best = Solution(choice, float(seconds[place]), search.peaks.of(choice).nbytes, self.bound,
                                     "every choice", search.solver)
                break
            moment = search.moment_of(choice)
            if ((moment, 1.0),) not in known:
                known.add(((moment, 1.0),))
                other = score_every_choice(search.network.problem(None, {moment: 1.0}))[1]
                seconds = np.where(other <= search.budget, seconds, inf)
        if self.best is None:
            if self.ceiling < inf:
                raise Above(max(self.bound, self.ceiling))
            self.needed = max(self.needed, float(np.nextafter(search.budget, inf)))
            least_peak(search, self.moments)
            return
        self.bound, self.proof = self.best.seconds, "every choice"


def _dual_row(search: BudgetSearch, moments: Sequence[Moment]) -> Row:
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


def least_peak(search: BudgetSearch, moments: Sequence[Moment]) -> tuple[float, Row]:
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
        planes.append(choice)
        moment = search.moment_of(choice)
        known += [moment] * (moment not in known)
        weights = _master([(0.0, *(search.row_bytes(x, m) / search.budget for m in known)) for x in planes],
                          len(known), 1.0)
        row = {m: float(w) for m, w in zip(known, weights[1] / weights[1].sum(), strict=True) if w > 0}
    return best


def plane_of(search: BudgetSearch, choice: Sequence[int], moments: Sequence[Moment]) -> tuple[float, ...]:
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

    `total` is the sum of lam, where it is given.
    """
    model: Any = model_builder.Model()  # type: ignore[no-untyped-call]
    unit = max(plane[0] for plane in planes) or 1.0
    z = model.new_num_var(-1e6, 1e6, "z")
    lam = [model.new_num_var(0.0, 1e3, f"lam{t}") for t in range(count)]
    for seconds, *over in planes:
        model.add(z <= seconds / unit + sum(x * o for x, o in zip(lam, over, strict=True)))
    if total is not None:
        model.add(sum(lam) == total)
    model.maximize(z)
    solver = model_builder.Solver("GLOP")
    solver.solve(model)
    return float(solver.value(z)) * unit, np.array([max(0.0, float(solver.value(x))) for x in lam]) * unit


def _lagrangian(search: BudgetSearch, moments: Sequence[Moment], lam: np.ndarray
                ) -> tuple[float, tuple[int, ...] | None]:
    """min over x of seconds(x) + sum of lam_t (bytes_t(x) / budget - 1), and where it is attained."""
    total = float(lam.sum())
    if not total:
        return -inf, None
    row = {moment: float(x) / total for moment, x in zip(moments, lam, strict=True) if x > 0}
    problem, space = search.ready(row)
    found = search.relaxed(problem, total / search.budget, space)
    return found.bound, found.choice if found.seconds < inf else None
