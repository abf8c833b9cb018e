"""What the workers of the outer search do: bound a candidate, or find its best plan.

A bound is the optimum of seconds + price * (bytes - budget); where other candidates with more microbatches can use it,
that of seconds alone comes with it. Nothing that a job asked before changes what a later one finds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Problem, Solution
from autoddl.planner.candidates import Built, Candidate, bounds, build_problem
from autoddl.planner.task import PlanTask
from autoddl.search import Above, Space, build_space, is_large, lower_bound, relax, solve

__all__ = ["Answer", "Job", "Jobs"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one candidate: a solution that fits or only bounds, a bound, or why there is neither, and whether
    that is `proved` to be no plan; `free` is a bound of any budget."""

    solution: Solution | None
    fits: bool = False
    problem: Infeasible | InputError | None = None
    proved: bool = False
    bound: float = 0.0
    free: float = 0.0


Job = tuple[int, float | None, float, float]
"""(candidate, ceiling of its seconds or None for a bound alone, a guess of the price of a byte, the gap that will do).
"""


class Jobs:
    """The jobs of a worker. The last problems are kept: most candidates are asked for twice."""

    CELLS = 20_000_000

    def __init__(self, task: PlanTask, candidates: Sequence[Candidate]) -> None:
        self.task, self.candidates = task, candidates
        self.kept: dict[int, tuple[Built, Space | None]] = {}

    def ready(self, i: int) -> tuple[Built, Space | None]:
        """The problem, and for the exact solver what it makes of it first, unless the problem is large: then nothing
        is kept."""
        if i not in self.kept:
            made = build_problem(self.task, self.candidates[i])
            if self.task.options.solver == "exact" and is_large(made[2]):
                return made, None
            self.kept[i] = made, build_space(made[2]) if self.task.options.solver == "exact" else None
            while len(self.kept) > 1 and sum(_cells(made[2]) for made, _ in self.kept.values()) > self.CELLS:
                del self.kept[next(iter(self.kept))]
        return self.kept[i]

    def answer(self, job: Job) -> Answer:
        """A bound of candidate i, or its best plan; what costs more than the ceiling is not wanted."""
        i, ceiling, price, tolerance = job
        try:
            (_, _, problem), space = self.ready(i)
        except InputError as error:
            return Answer(None, problem=error, proved=True)
        try:
            return self._bound(i, problem, space, price) if ceiling is None \
                else self._plan(problem, space, ceiling, price, tolerance)
        except Above as above:
            return Answer(None, bound=above.bound)
        except Infeasible as error:
            return Answer(None, problem=error, proved=error.needed > error.budget)
        except InputError as error:  # of a solver that gave up
            return Answer(None, problem=error)

    def _bound(self, i: int, problem: Problem, space: Space | None, price: float) -> Answer:
        if space is None and self.task.options.solver == "exact":
            return Answer(None, bound=lower_bound(problem, price))
        if space is None:
            solution = solve(problem.within(None), self.task.options.solver, time_limit=self.task.options.time_limit)
            return Answer(solution, self._fits(solution), free=solution.bound)
        solution = relax(problem, price, space)
        if not price or self._alone(i):
            return Answer(solution, self._fits(solution), free=0.0 if price else solution.bound)
        free = relax(problem, 0.0, space).bound
        return Answer(solution, self._fits(solution), bound=free, free=free)

    def _fits(self, solution: Solution) -> bool:
        """What an elimination that only bounds reads back may be forbidden."""
        return solution.seconds < inf and solution.nbytes <= self.task.budget

    def _alone(self, i: int) -> bool:
        """Whether no other candidate can use a bound of any budget."""
        return not any(bounds(self.task, self.candidates[i], other) for other in self.candidates)

    def _plan(self, problem: Problem, space: Space | None, ceiling: float, price: float, tolerance: float) -> Answer:
        task = self.task
        if space is not None:
            space.forget(price)
        return Answer(solve(problem, task.options.solver, time_limit=task.options.time_limit, tolerance=tolerance,
                             ceiling=ceiling, price=price, space=space), True)


def _cells(problem: Problem) -> int:
    return sum(prod(table.lengths) for table in problem.tables)
