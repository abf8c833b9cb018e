"""The exact solver: elimination without a budget, ranges of thresholds with Lagrangian bounds and labels with one.

    least seconds, no budget   -> within the budget? optimal
    else least bytes           -> above the budget? Infeasible, with the bytes
    else within_budget         -> optimal, or the best plan with a true bound when time or effort is used up

Where a message was too large (mini-buckets) the elimination only bounds, and coordinate descent supplies the plan.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddl.errors import Infeasible
from autoddl.problem import Problem
from autoddl.search.budget import within_budget
from autoddl.search.descent import descend, restarts
from autoddl.search.dual import FINE, dual, least_bytes
from autoddl.search.order import CAP, order
from autoddl.search.reduce import Reduced, reduce
from autoddl.search.space import Above, Limits, Point, Space

__all__ = ["EFFORT", "Outcome", "Statistics", "exact", "feasible", "statistics"]

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
    """What elimination does with a problem: distinct messages, all messages, the most cells in one, exactness."""

    messages: int
    eliminations: int
    largest: int
    exact: bool


def statistics(problem: Problem, cap: int = CAP) -> Statistics:
    """How far equal blocks are shared, without solving."""
    plan = order(reduce(problem).problem, cap)
    largest = max((math.prod(recipe.shape[1:]) for _, recipe in plan.messages()), default=0)
    return Statistics(len(plan.computed), len(plan.steps), largest, plan.exact)


def exact(problem: Problem, limits: Limits, cap: int = CAP) -> Outcome:
    """The optimum, or the best plan found with the best bound proved."""
    reduced = reduce(problem)
    space = Space.of(reduced.problem, order(reduced.problem, cap))
    limits = replace(limits, ceiling=limits.ceiling - reduced.problem.fixed_seconds)
    if limits.price:
        _glance(space, limits)
    free = space.point(0.0, space.thresholds[-1])
    if math.isinf(free.value):
        raise Infeasible(math.inf, _budget(problem), "every choice meets a forbidden combination")
    if not space.program.exact:
        return _bounded(problem, reduced, space, free, limits)
    if space.fits(free):
        return _outcome(reduced, free, free.value, "elimination")
    first = _first(space)
    best = within_budget(space, first, free.value, limits)
    return _outcome(reduced, best.point, best.bound, "elimination, Lagrangian bounds and labels", best.price)


def _glance(space: Space, limits: Limits) -> None:
    """One evaluation at the price that is guessed; Above if nothing below the ceiling can be hoped for."""
    cap = _budget(space.problem) - space.problem.fixed_bytes - space.thresholds[0]
    bound = space.point(limits.price, space.thresholds[-1]).value - limits.price * cap
    if bound >= limits.target(limits.ceiling):
        raise Above(bound + space.problem.fixed_seconds)


def feasible(problem: Problem) -> tuple[int, ...]:
    """Any choice that fits, by elimination for the least bytes; Infeasible if there is none."""
    reduced = reduce(problem)
    space = Space.of(reduced.problem, order(reduced.problem))
    return reduced.restore(_first(space).choice)


def _first(space: Space) -> Point:
    """A choice that fits, or Infeasible with the least bytes."""
    budget = _budget(space.problem)
    needed, point = least_bytes(space, budget)
    if point is None:
        detail = "" if needed > budget else "no plan was found, but it is not proved that there is none"
        raise Infeasible(needed, budget, detail)
    return point


def _bounded(problem: Problem, reduced: Reduced, space: Space, free: Point, limits: Limits) -> Outcome:
    """A bound from mini-buckets, and the best plan that descends from their choices or from other starts."""
    bound, clock = free.value, limits.clock
    starts: list[Sequence[int]] = [free.choice]
    if problem.budget is not None:
        cap = problem.budget - problem.fixed_bytes - space.thresholds[0]
        bound = max(bound, dual(space, space.thresholds[-1], cap, 0.0, math.inf, FINE, clock).bound)
        starts += [point.choice for point in space.known.values()]
    if math.isinf(bound):
        raise Infeasible(least_bytes(space, _budget(problem))[0], _budget(problem))
    found = [descend(reduced.problem, start, clock) for start in dict.fromkeys(map(tuple, starts))]
    other = restarts(reduced.problem, limits.seed, clock)
    plans = [c for c in (*found, *([other] if other else [])) if reduced.problem.feasible(c)]
    choice = min(plans, key=reduced.problem.cost) if plans else _first(space).choice
    return Outcome(reduced.restore(choice), bound + problem.fixed_seconds, "mini-buckets and coordinate descent")


def _outcome(reduced: Reduced, point: Point, bound: float, proof: str, price: float = 0.0) -> Outcome:
    return Outcome(reduced.restore(point.choice), bound + reduced.problem.fixed_seconds, proof, price)


def _budget(problem: Problem) -> float:
    return math.inf if problem.budget is None else problem.budget
