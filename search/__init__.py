"""Solves cost networks: numbers in, numbers out.

    solve(problem, solver) -> Solution        minimise problem.cost(x) subject to problem.is_feasible(x)

The solver `exact` proves its plan optimal, or says how far it may be from that. The solver `exhaustive` looks at every
choice; `coordinate-descent`, `greedy` and `cp-sat` are there for comparison. The problem scores every solution again.

Reading order:

    exhaustive           the definition of the optimum
    presolve             options that no optimum needs are dropped
    elimination_order    without a budget: which variable is eliminated when, as an `elimination_program`, whose numbers
                         are `elimination` on `class_tables`
    repeated_blocks      a stack of equal blocks costs the logarithm of its depth, with `block_powers`, `block_factors`
    relaxations          elimination of seconds + lam * bytes
    lagrangian, budget   one sum of bytes within a budget: bounds, then `window` with `labels`; the bound of a memory
                         budget over all moments is proved by several of these, in `autoddl/planner/budget_search.py`
    exact                chooses among these
    large                problems too large for elimination: bounds by messages (`tree_reweighted`)
    coordinate_descent, cp_sat   other solvers
    pipeline_cuts        the best cut of a chain of blocks into stages of a pipeline, with `cut_planes`, `cut_boxes`
    limits               when a search stops
    certify              proofs of bounds, checked by code that does not import the solver

Others use the names that this file exports, `pipeline_cuts`, and `certify`. This room may import `core` alone: it knows
neither models nor clusters.
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
from autoddl.search.large import elimination_space, lower_bound, rough_space, solve_by_messages
from autoddl.search.limits import Above, Clock, Late, Limits, Progress, never
from autoddl.search.relaxations import Space

__all__ = [
    "SOLVERS",
    "Above",
    "Space",
    "Statistics",
    "build_space",
    "elimination_space",
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
    is_large: bool = False,
    late: Late = never,
) -> Solution:
    """The choice with the least seconds within the budget, and a proven bound.

        solver        one of SOLVERS
        time_limit    seconds, soft: a plan and a bound come first; without one, the exact solver stops after a fixed
                      effort, so that its plan does not depend on the machine
        tolerance     the relative gap at which the exact solver stops early
        seed          seed of random starts
        progress      called with (seconds, bound) each time either may have moved
        ceiling       seconds; the exact solver stops once its bound, within the tolerance, reaches them
        price         a guess of the solution's price of a byte, which the exact solver tries first
        space         the result of `elimination_space(problem)`, if there is one
        is_large      whether it is known that there is none
        late          tells whether the time is over of all that this is a part of: then it ends as by its own limit

    Raises InputError for an unknown solver, or a problem too large for it. Raises Infeasible where no plan fits, and
    Above where the ceiling is reached without a plan.
    """
    if solver not in SOLVERS:
        raise InputError(f"there is no solver {solver!r}; there are {', '.join(SOLVERS)}")
    tell = progress or (lambda seconds, bound: None)
    limits = Limits(tolerance, ceiling, Clock.start(time_limit, EFFORT, late), tell, seed, price)
    space = elimination_space(problem) if space is None and not is_large and solver == "exact" else space
    if solver == "exact" and space is not None:
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
    needed, point = find_least_bytes(rough_space(problem.within(None)), math.inf)
    if math.isinf(needed):
        raise Infeasible(math.inf, math.inf, "every choice meets a forbidden combination")
    return needed, None if point is None else tuple(point.choice.tolist())


def _scored(problem: Problem, outcome: Outcome, solver: str) -> Solution:
    """The solution, scored by the problem itself; a solver that disagrees with it has a bug."""
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


def _solve_with_cp_sat(problem: Problem, limits: Limits) -> Outcome:
    """Solves with CP-SAT; where it proves that nothing fits, the error names the least bytes."""
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
    "cp-sat": _solve_with_cp_sat,
}
