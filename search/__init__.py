"""Solvers of cost networks: numbers in, numbers out.

    solve(problem, solver) -> Solution        minimise problem.cost(x) subject to problem.is_feasible(x)

`exact` proves its plan optimal, or says how far it may be from that; `exhaustive` looks at every choice;
`coordinate-descent`, `greedy` and `cp-sat` are there to be compared with. Whatever a solver says is
scored again by the problem.

Reading order: `exhaustive` (the definition), `relaxations`, `elimination*` (no budget), `repeated_blocks` (a stack of
equal blocks costs the logarithm of its depth), `budget`, `lagrangian`, `labels` (one sum of bytes within a budget),
`exact` (which of these, when), `large` with `tree_reweighted` (problems too large for elimination), `certify` (proofs).
Knows neither models nor clusters: may import `core` alone.
"""

import math
from collections.abc import Callable

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import EXACT, Problem, Solution
from autoddl.search.coordinate_descent import choose_greedily, descend, descend_from_starts
from autoddl.search.cp_sat import solve_with_cp_sat
from autoddl.search.exact import (
    EFFORT,
    Outcome,
    Statistics,
    build_space,
    find_feasible,
    solve_exactly,
    solve_relaxation,
    statistics,
)
from autoddl.search.exhaustive import search_exhaustively
from autoddl.search.lagrangian import find_least_bytes
from autoddl.search.large import is_large, lower_bound, solve_by_messages
from autoddl.search.limits import Above, Clock, Limits, Progress
from autoddl.search.relaxations import Space

__all__ = [
    "SOLVERS",
    "Above",
    "Space",
    "Statistics",
    "build_space",
    "is_large",
    "lower_bound",
    "relax",
    "smallest",
    "solve",
    "statistics",
]


def solve(
    problem: Problem,
    solver: str = "exact",
    *,
    time_limit: float | None = None,
    tolerance: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
    ceiling: float = math.inf,
    price: float = 0.0,
    space: Space | None = None,
) -> Solution:
    """The least seconds within the budget, with a proven bound.

    `time_limit` is in seconds and soft: a plan and a bound come first. Without one the exact solver stops after a fixed
    effort, so its plan does not depend on the machine. It stops early once the gap is at most `tolerance`.
    `progress(seconds, bound)` is told each time either may have moved. A plan above `ceiling` seconds is of no use: the
    exact solver stops once its bound, within the tolerance, reaches that, and raises Above if it has no plan then.
    `price` is a guess of the solution's own, which is where the exact solver tries first; `space` is what
    `space_of(problem)` made for it.
    """
    if solver not in SOLVERS:
        raise InputError(f"there is no solver {solver!r}; there are {', '.join(SOLVERS)}")
    tell = progress or (lambda seconds, bound: None)
    limits = Limits(tolerance, ceiling, Clock.start(time_limit, EFFORT), tell, seed, price)
    if solver == "exact" and (space is not None or not is_large(problem)):
        return _scored(problem, solve_exactly(problem, limits, space=space), solver)
    return _scored(problem, SOLVERS[solver](problem, limits), solver)


def relax(problem: Problem, price: float = 0.0, space: Space | None = None) -> Solution:
    """The least seconds + price * bytes, the budget apart: a choice that may not fit, and a bound of those that do."""
    outcome = solve_relaxation(problem, price, space)
    return Solution(outcome.choice, problem.cost(outcome.choice), problem.nbytes(outcome.choice), outcome.bound,
                    outcome.proof, "exact", price)


def smallest(problem: Problem) -> tuple[float, tuple[int, ...] | None]:
    """(bytes that no choice is below, the choice that takes them), whatever the budget.

    The choice is None where elimination only bounds. Raises Infeasible where every choice is forbidden.
    """
    needed, point = find_least_bytes(build_space(problem.within(None)), math.inf)
    if math.isinf(needed):
        raise Infeasible(math.inf, math.inf, "every choice meets a forbidden combination")
    return needed, None if point is None else tuple(point.choice.tolist())


def _scored(problem: Problem, outcome: Outcome, solver: str) -> Solution:
    """The solution by the problem's own account; a solver that disagrees with it has a bug."""
    seconds, retained, transient = problem.totals(outcome.choice)
    nbytes = problem.fixed_bytes + retained + transient
    if seconds == math.inf or (problem.budget is not None and nbytes > problem.budget):
        raise AssertionError(f"{solver} returned a plan that is forbidden or takes {nbytes} of {problem.budget} bytes")
    if outcome.bound > seconds + EXACT * abs(seconds):
        raise AssertionError(f"{solver} claims the bound {outcome.bound} above the cost {seconds} of its own plan")
    return Solution(outcome.choice, seconds, nbytes, min(outcome.bound, seconds), outcome.proof, solver, outcome.price)


def _exhaustive(problem: Problem, limits: Limits) -> Outcome:
    choice = search_exhaustively(problem)
    return Outcome(choice, problem.cost(choice), "every choice")


def _descent(problem: Problem, limits: Limits) -> Outcome:
    choice = descend_from_starts(problem, limits.seed, limits.clock)
    if choice is None:
        choice = descend(problem, find_feasible(problem), limits.clock)
    return Outcome(choice, _least(problem), "sum of the tables' minima")


def _greedy(problem: Problem, limits: Limits) -> Outcome:
    choice = choose_greedily(problem)
    choice = choice if problem.is_feasible(choice) else find_feasible(problem)
    return Outcome(choice, _least(problem), "sum of the tables' minima")


def _satisfied(problem: Problem, limits: Limits) -> Outcome:
    """What CP-SAT proves not to fit is told with the least bytes."""
    try:
        found = solve_with_cp_sat(problem, limits.clock, limits.seed)
    except Infeasible:
        find_feasible(problem)
        raise
    return Outcome(found.choice, found.bound, found.proof)


def _least(problem: Problem) -> float:
    """The sum of the tables' minima."""
    minima = [table.core[0].min() for table in problem.tables]
    return problem.fixed_seconds + math.fsum(minima[factor.table] for factor in problem.factors)


SOLVERS: dict[str, Callable[[Problem, Limits], Outcome]] = {
    "exact": solve_by_messages,
    "exhaustive": _exhaustive,
    "coordinate-descent": _descent,
    "greedy": _greedy,
    "cp-sat": _satisfied,
}
