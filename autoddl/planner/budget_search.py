"""Finds the fastest plan of a candidate whose memory line fits the budget, and proves a bound for all that fit.

Every plan that fits meets every row (`row_problems`). So the optimum under one row is a bound. Its plan is the answer
if its line fits. Rows are chosen by the plans that they let through:

    1   no row: the free optimum. Its line fits: done
    2   the row of the moment at which the last plan's line is highest
    3   the row of several such moments, with the weights that make the bound highest
    4   the row lets a plan through that is larger than its row says: with less room, by what the line had too much, the
        search finds plans that fit, and with more room again faster ones; the bound stays that of the whole budget
    5   where blocks have policies of recomputation, the levels of a row's plan are tried as fixed ones, and those with
        one block more: without policies a row leaves less open
    6   of small problems every choice is looked at, the fastest first, if the gap is not closed by then

No plan fits if the least bytes of a row are above the budget. Where no plan was found and no row says so, the error
says that instead (`Infeasible.is_proved`).
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf, prod

import numpy as np

from autoddl.core.errors import Infeasible
from autoddl.core.problem import EXACT, Problem, Solution
from autoddl.cost_models import show_bytes
from autoddl.planner.row_problems import RowProblems, dual_row, least_peak, row_key
from autoddl.pricing.build_problem import Row
from autoddl.pricing.lifetimes import UPDATE, Moment
from autoddl.search import Above, Space
from autoddl.search.exhaustive import choice_at, score_every_choice

__all__ = ["BudgetSearch", "Fitted"]

ROUNDS = 5
"""Rows that are tried."""

SHRINKS = 5
"""Plans that are looked at with less room under one row."""

NARROW = 5e-4
"""The part of the budget between rooms that is not searched further."""

DIGITS = 2
"""Digits of the weights by which rows differ; closer ones lead to the same plans."""

FEW = 2_000_000
"""Choices among which the best is looked for one by one."""

LINES = 200
"""Memory lines that are drawn for that."""

FIXED = 4
"""Levels of all blocks that are tried as fixed ones."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A solution whose memory line fits the budget, and the row under which its bound was proved.

    The solution's `nbytes` are those at the peak of the line.
    """

    solution: Solution
    row: Row


@dataclass(frozen=True, eq=False)
class BudgetSearch(RowProblems):
    """The search for the fastest plan of one candidate under a budget."""

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
            while not state.closed and state.rounds < ROUNDS and not self.late():
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
        return dual_row(self.search, self.moments)

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
        while tried < SHRINKS and not search.late() and most - least > NARROW * search.budget:
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
        if self.best is None and self.search.late():
            self._all_again()
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
        search, levels = self.search, sorted(self.levels, reverse=True)
        for _ in range(FIXED):
            if search.late():
                return
            try:
                fixed = BudgetSearch(search.network.fixed_at(levels), search.budget, search.solver, search.time_limit,
                                     late=search.late)
                found = fixed.solve(self.row, self.price, min(self.ceiling, self.seconds), self.tolerance)
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

    def _all_again(self) -> None:
        """The fastest plan that computes every block again, where the time was over before any was found."""
        policies = self.search.network.policies
        if not policies.blocks:
            return
        levels = (len(policies.levels) - 1,) * len(policies.blocks)
        fixed = BudgetSearch(self.search.network.fixed_at(levels), self.search.budget, self.search.solver,
                             self.search.time_limit, late=self.search.late)
        state = _State(fixed, self.ceiling, self.tolerance)
        with suppress(Infeasible, Above):
            state.free()
            if state.best is None:
                state.under(state.next_row(None), self.price)
        if state.best is not None:
            choice = (*levels, *state.best.choice)
            self.best = replace(state.best, choice=choice, nbytes=self.search.peaks.of(choice).nbytes)

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
