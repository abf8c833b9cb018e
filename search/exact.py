"""The exact solver: elimination without a budget, ranges of thresholds with Lagrangian bounds and labels with one.

    least seconds, no budget   -> within the budget? optimal
    else least bytes           -> above the budget? Infeasible, with the bytes
    else within_budget         -> optimal, or the best plan with a true bound when time or effort is used up

Where a message was too large (mini-buckets) the elimination only bounds, and coordinate descent supplies the plan.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from autoddl.errors import Infeasible
from autoddl.problem import Problem
from autoddl.search.budget import within_budget
from autoddl.search.descent import descend, restarts
from autoddl.search.dual import FINE, dual, least_bytes
from autoddl.search.order import CAP, order_of
from autoddl.search.reduce import folded
from autoddl.search.space import Above, Limits, Point, Space

__all__ = ["EFFORT", "Outcome", "Statistics", "exact", "feasible", "space_of", "statistics"]

EFFORT = 3e7
"""Label pairs without a time limit: a second or two, the same plan on every machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A choice of the original problem, a lower bound on its seconds, and how that is proved."""

    choice: tuple[int, ...]
    bound: float
    proof: str
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Statistics:
    """What elimination does with a problem: distinct messages, variables, the most cells in a message, exactness."""

    messages: int
    eliminations: int
    largest: int
    exact: bool


def statistics(problem: Problem, cap: int = CAP) -> Statistics:
    """How far equal blocks are shared, without solving."""
    plan = space_of(problem, cap).program
    largest = max((math.prod(recipe.shape[1:]) for _, recipe in plan.messages()), default=0)
    return Statistics(len(plan.computed), plan.count, largest, plan.exact)


def exact(problem: Problem, limits: Limits, cap: int = CAP) -> Outcome:
    """The optimum, or the best plan found with the best bound proved."""
    space = space_of(problem, cap)
    limits = replace(limits, ceiling=limits.ceiling - problem.fixed_seconds)
    if limits.price:
        _glance(space, limits)
    free = space.point(0.0, space.thresholds[-1])
    if math.isinf(free.value):
        raise Infeasible(math.inf, _budget(problem), "every choice meets a forbidden combination")
    if not space.program.exact:
        return _bounded(problem, space, free, limits)
    if space.fits(free):
        return _outcome(space, free, free.value, "elimination")
    first = _first(space)
    best = within_budget(space, first, free.value, limits)
    return _outcome(space, best.point, best.bound, "elimination, Lagrangian bounds and labels", best.price)


def space_of(problem: Problem, cap: int = CAP) -> Space:
    """The problem folded and reduced; unfolded where a message is too large."""
    short, reduced = folded(problem)
    program = order_of(short, reduced.problem, cap)
    kept = np.array([k for options in reduced.kept for k in options], dtype=np.intp)
    start = np.cumsum([0, *map(len, reduced.kept)])[:-1]
    offset, back = start[short.of], np.argsort(short.variable)
    return Space.of(reduced.problem, program, problem, lambda found: kept[offset + found][back])


def _glance(space: Space, limits: Limits) -> None:
    """One evaluation at the price that is guessed; Above if nothing below the ceiling can be hoped for."""
    cap = _budget(space.problem) - space.problem.fixed_bytes - space.thresholds[0]
    bound = space.point(limits.price, space.thresholds[-1]).value - limits.price * cap
    if bound >= limits.target(limits.ceiling):
        raise Above(bound + space.problem.fixed_seconds)


def feasible(problem: Problem) -> tuple[int, ...]:
    """Any choice that fits, by elimination for the least bytes; Infeasible if there is none."""
    return tuple(_first(space_of(problem)).choice.tolist())


def _first(space: Space) -> Point:
    """A choice that fits, or Infeasible with the least bytes."""
    budget = _budget(space.problem)
    needed, point = least_bytes(space, budget)
    if point is None:
        detail = "" if needed > budget else "no plan was found, but it is not proved that there is none"
        raise Infeasible(needed, budget, detail)
    return point


def _bounded(problem: Problem, space: Space, free: Point, limits: Limits) -> Outcome:
    """A bound from mini-buckets, and the best plan that descends from their choices or from other starts."""
    bound, clock = free.value, limits.clock
    starts = [free.choice]
    if problem.budget is not None:
        cap = problem.budget - problem.fixed_bytes - space.thresholds[0]
        bound = max(bound, dual(space, space.thresholds[-1], cap, 0.0, math.inf, FINE, clock).bound)
        starts += [point.choice for point in space.known.values()]
    if math.isinf(bound):
        raise Infeasible(least_bytes(space, _budget(problem))[0], _budget(problem))
    found = [descend(problem, start, clock) for start in dict.fromkeys(tuple(start.tolist()) for start in starts)]
    other = restarts(problem, limits.seed, clock)
    plans = [c for c in (*found, *([other] if other else [])) if problem.feasible(c)]
    choice = min(plans, key=problem.cost) if plans else tuple(_first(space).choice.tolist())
    return Outcome(choice, bound + problem.fixed_seconds, "mini-buckets and coordinate descent")


def _outcome(space: Space, point: Point, bound: float, proof: str, price: float = 0.0) -> Outcome:
    return Outcome(tuple(point.choice.tolist()), bound + space.problem.fixed_seconds, proof, price)


def _budget(problem: Problem) -> float:
    return math.inf if problem.budget is None else problem.budget
