"""Does the jobs of the workers of the outer search: bounds a candidate, or finds its best plan.

A bound is the optimum of seconds + price * (bytes - budget), with the bytes of a row. The optimum of seconds alone
comes with it where it can bound other candidates, which have more microbatches. Earlier jobs never change the result of
a later one.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf, prod

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Solution
from autoddl.planner.budget_search import BudgetSearch
from autoddl.planner.candidates import Candidate, bounds, build_network
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import CostNetwork, Row
from autoddl.pricing.lifetimes import UPDATE, Lifetimes
from autoddl.search import Above, lower_bound, relax, solve

__all__ = ["Answer", "Guess", "Job", "Jobs"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one job.

        solution    a plan of the candidate that fits, or that only bounds
        row         the row of moments under which it was found
        fits        whether its memory line is within the budget
        problem     why there is no solution
        proved      whether it is proved that the candidate has no plan
        bound       seconds that no plan of the candidate within the budget is below
        free        seconds that no plan of the candidate is below, whatever the budget
    """

    solution: Solution | None
    row: Row | None = None
    fits: bool = False
    problem: Infeasible | InputError | None = None
    proved: bool = False
    bound: float = 0.0
    free: float = 0.0


Guess = tuple[Row | None, float]
"""A row of moments at which the budget may bind, None where it may not, and what a byte may be worth there."""

Job = tuple[int, float | None, Guess, float]
"""(candidate, ceiling of its seconds or None for a bound alone, a guess, the gap that will do)."""


class Jobs:
    """Answers the jobs of a worker. Keeps the last candidates, because most come twice: to bound and to solve."""

    CELLS = 6_000_000

    def __init__(self, task: PlanTask, candidates: Sequence[Candidate]) -> None:
        self.task, self.candidates = task, candidates
        self.kept: dict[int, BudgetSearch] = {}
        self.lifetimes: dict[Hashable, Lifetimes] = {}

    def ready(self, i: int) -> BudgetSearch:
        """The search of candidate i."""
        if i not in self.kept:
            options = self.task.options
            network = build_network(self.task, self.candidates[i], self.lifetimes)
            blocks = network.policies.blocks
            plain = network.fixed_at((0,) * len(blocks)) if blocks else None
            self.kept[i] = BudgetSearch(network, self.task.budget, options.solver, options.time_limit, plain,
                                        self.task.late)
            while len(self.kept) > 1 and sum(_cells(one.network) for one in self.kept.values()) > self.CELLS:
                del self.kept[next(iter(self.kept))]
        return self.kept[i]

    def answer(self, job: Job) -> Answer:
        """A bound of a candidate, or its best plan below the job's ceiling of seconds."""
        i, ceiling, (row, price), tolerance = job
        try:
            search = self.ready(i)
        except InputError as error:
            return Answer(None, problem=error, proved=True)
        if row is not None and not search.network.lifetimes.has(row):
            row, price = None, 0.0
        try:
            if ceiling is None:
                return self._bound(i, search, row, price)
            found = search.solve(row, price, ceiling, tolerance)
        except Above as above:
            return Answer(None, bound=above.bound)
        except Infeasible as error:
            return Answer(None, problem=error, proved=error.is_proved)
        except InputError as error:  # of a solver that gave up
            return Answer(None, problem=error)
        return Answer(found.solution, found.row, True)

    def _bound(self, i: int, search: BudgetSearch, row: Row | None, price: float) -> Answer:
        """A bound of a candidate. A large one without others is only solved, because that bounds it better."""
        made = {UPDATE: 1.0} if row is None else row
        if search.plain is not None and not price:
            solution = search.free()
            return self._answer(search, solution, made, free=solution.bound)
        problem, space = search.ready(made) if price else search.ready_for_seconds()
        options = self.task.options
        if space is None and options.solver == "exact":
            return Answer(None, bound=lower_bound(problem, price) if len(self.candidates) > 1 else 0.0)
        if space is None:
            problem, _ = search.ready_for_seconds()
            solution = solve(problem.within(None), options.solver, time_limit=options.time_limit, late=self.task.late)
            return self._answer(search, solution, made, free=solution.bound)
        solution = search.relaxed(problem, price, space) if price else relax(problem, price, space)
        if not price or self._alone(i):
            return self._answer(search, solution, made, free=0.0 if price else solution.bound)
        free = relax(problem, 0.0, space).bound
        return self._answer(search, solution, made, free=free)

    def _answer(self, search: BudgetSearch, solution: Solution, row: Row, free: float) -> Answer:
        """The answer that a solution gives; one whose choice is forbidden only bounds."""
        fits = solution.seconds < inf and solution.nbytes <= search.budget and search.fits(solution.choice)
        return Answer(solution, row, fits, bound=free, free=free)

    def _alone(self, i: int) -> bool:
        """Whether no other candidate can use a bound of any budget."""
        return not any(bounds(self.task, self.candidates[i], other) for other in self.candidates)


def _cells(network: CostNetwork) -> int:
    distinct = {id(seconds): seconds.shape for entry in network.entries for seconds in entry.seconds}
    return sum(prod(shape) for shape in distinct.values())
