"""Solves exactly: by elimination without a budget, and by ranges of thresholds, Lagrangian bounds and labels with one.

    least seconds, no budget   -> within the budget? optimal
    else least bytes           -> above the budget? Infeasible, with the bytes
    else solve_within_budget   -> optimal, or the best plan with a true bound when time or effort is used up

Where a message was too large (mini-buckets) the elimination only bounds, and coordinate descent supplies the plan.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from autoddl.core.errors import Infeasible
from autoddl.core.problem import Problem
from autoddl.search.budget import solve_within_budget
from autoddl.search.coordinate_descent import descend, descend_from_starts
from autoddl.search.elimination_order import CAP, plan_folded_elimination
from autoddl.search.lagrangian import FINE, find_least_bytes, solve_dual
from autoddl.search.limits import Above, Limits
from autoddl.search.presolve import presolve_folded
from autoddl.search.relaxations import HullPoint, Space

__all__ = ["EFFORT", "Outcome", "Statistics", "build_space", "find_feasible", "solve_exactly", "solve_relaxation",
           "statistics"]

EFFORT = 2e7
"""Label pairs without a time limit: a second or two, the same plan on every machine."""

DEARER = (1.0, 1.2, 2.0)
"""Multiples of a guessed price at which a choice that fits is looked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A choice of the original problem, a lower bound on its seconds, and how that is proved."""

    choice: tuple[int, ...]
    bound: float
    proof: str
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sizes of an elimination: distinct messages, variables, the most cells in a message, and whether it is exact."""

    messages: int
    eliminations: int
    largest: int
    exact: bool


def statistics(problem: Problem, cap: int = CAP) -> Statistics:
    """The sizes of a problem's elimination, without solving: they show how far equal blocks are shared."""
    plan = build_space(problem, cap).program
    largest = max((math.prod(recipe.shape[1:]) for _, recipe in plan.messages()), default=0)
    return Statistics(len(plan.computed), plan.count, largest, plan.exact)


def solve_exactly(problem: Problem, limits: Limits, cap: int = CAP, space: Space | None = None) -> Outcome:
    """The optimum, or the best plan found with the best bound proved.

    `space` is that of the problem, if it was built already. Raises Infeasible where no plan fits, and Above where the
    bound reaches the ceiling.
    """
    space = build_space(problem, cap) if space is None else space
    limits = replace(limits, ceiling=limits.ceiling - problem.fixed_seconds)
    point = space.point(limits.price, space.thresholds[-1])
    bound = _lagrangian(space, point)
    if limits.price and bound >= limits.target(limits.ceiling):
        raise Above(bound + problem.fixed_seconds)
    if math.isinf(point.value):
        raise Infeasible(math.inf, _budget(problem), "every choice meets a forbidden combination")
    if not space.program.exact:
        return _bounded(problem, space, point, bound, limits)
    if not limits.price and space.fits(point):
        return _outcome(space, point, point.value, "elimination")
    best = solve_within_budget(space, _first(space, limits.price), bound, limits)
    return _outcome(space, best.point, best.bound, "elimination, Lagrangian bounds and labels", best.price)


def solve_relaxation(problem: Problem, price: float = 0.0, space: Space | None = None) -> Outcome:
    """The least seconds + price * bytes without the budget: a choice, which may not fit, and a bound within it."""
    space = build_space(problem) if space is None else space
    point = space.point(price, space.thresholds[-1])
    if math.isinf(point.value):
        raise Infeasible(math.inf, _budget(problem), "every choice meets a forbidden combination")
    proof = "elimination at one price" if price else "elimination"
    return _outcome(space, point, _lagrangian(space, point), proof, price)


def _lagrangian(space: Space, point: HullPoint) -> float:
    """The bound V(lam) - lam * cap."""
    if not point.lam:
        return point.value
    return point.value - point.lam * (_budget(space.problem) - space.problem.fixed_bytes - space.thresholds[0])


def build_space(problem: Problem, cap: int = CAP) -> Space:
    """The space of the problem, folded and reduced."""
    short, reduced = presolve_folded(problem)
    program = plan_folded_elimination(short, reduced.problem, cap)
    kept = np.array([k for options in reduced.kept for k in options], dtype=np.intp)
    start = np.cumsum([0, *map(len, reduced.kept)])[:-1]
    offset, back = start[short.of], np.argsort(short.variable)
    return Space.of(reduced.problem, program, problem, lambda found: kept[offset + found][back])


def find_feasible(problem: Problem) -> tuple[int, ...]:
    """Any choice that fits, by elimination for the least bytes; Infeasible if there is none."""
    return tuple(_first(build_space(problem)).choice.tolist())


def _first(space: Space, price: float = 0.0) -> HullPoint:
    """A choice that fits, or Infeasible with the least bytes. Near a price that is guessed there is a good one."""
    budget = _budget(space.problem)
    for factor in DEARER if price else ():
        near = space.point(price * factor, space.thresholds[-1])
        if space.fits(near):
            return near
    needed, point = find_least_bytes(space, budget)
    if point is None:
        raise Infeasible(needed, budget)
    return point


def _bounded(problem: Problem, space: Space, free: HullPoint, bound: float, limits: Limits) -> Outcome:
    """A bound from mini-buckets, `bound` or better, and the best plan that descends from their choices or from other
    starts."""
    clock = limits.clock
    starts = [free.choice]
    if problem.budget is not None:
        cap = problem.budget - problem.fixed_bytes - space.thresholds[0]
        bound = max(bound, solve_dual(space, space.thresholds[-1], cap, 0.0, math.inf, FINE, clock).bound)
        starts += [point.choice for point in space.known.values()]
    if math.isinf(bound):
        raise Infeasible(find_least_bytes(space, _budget(problem))[0], _budget(problem))
    found = [descend(problem, start, clock) for start in dict.fromkeys(tuple(start.tolist()) for start in starts)]
    other = descend_from_starts(problem, limits.seed, clock)
    plans = [c for c in (*found, *([other] if other else [])) if problem.is_feasible(c)]
    choice = min(plans, key=problem.cost) if plans else tuple(_first(space).choice.tolist())
    return Outcome(choice, bound + problem.fixed_seconds, "mini-buckets and coordinate descent")


def _outcome(space: Space, point: HullPoint, bound: float, proof: str, price: float = 0.0) -> Outcome:
    return Outcome(tuple(point.choice.tolist()), bound + space.problem.fixed_seconds, proof, price)


def _budget(problem: Problem) -> float:
    return math.inf if problem.budget is None else problem.budget
