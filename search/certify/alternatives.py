"""Finds the seconds of the best whole plan with each option of a variable pinned, under the budget.

    no budget        the min-marginals are the answer
    with a budget    min-marginals of seconds + lam * bytes bound it, for every range of transient bytes; the options
                     with the least bounds are pinned and solved, until no other bound is better by more than the
                     tolerance
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from autoddl.core.errors import Infeasible
from autoddl.core.problem import Array, Factor, Problem, Table
from autoddl.search import solve
from autoddl.search.certify.branch import transient_ranges
from autoddl.search.certify.min_marginals import Beliefs, compute_beliefs
from autoddl.search.elimination_order import plan_exact_elimination
from autoddl.search.relaxations import Space

__all__ = ["Alternative", "alternatives", "bounding_beliefs", "option_bounds", "pin_option"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best whole plan with one option pinned: it takes `seconds`, and at least `bound`.

    The two differ where the search under a budget stopped at its tolerance. Seconds are None where only the bound is
    known, and inf where no plan fits.
    """

    option: int
    seconds: float | None
    bound: float


def bounding_beliefs(problem: Problem, seconds: float) -> tuple[Beliefs, ...]:
    """Beliefs whose least marginal bounds the seconds of a pinned plan; `seconds` are those of the plan at hand."""
    space = Space.of(problem, plan_exact_elimination(problem))
    found = []
    for low, high, lam in transient_ranges(space, seconds):
        cap = math.inf if problem.budget is None else problem.budget - problem.fixed_bytes - space.thresholds[low]
        if cap >= 0:
            known = compute_beliefs(problem, lam, space.thresholds[high])
            found.append(replace(known, offset=known.offset - (lam * cap if lam else 0.0)))
    return tuple(found)


def option_bounds(known: Sequence[Beliefs], v: int) -> Array:
    """A lower bound for every option of v: the least over all ranges."""
    least: Array = np.min([one.marginal(v) for one in known], axis=0)
    return least


def pin_option(problem: Problem, v: int, option: int) -> Problem:
    """The problem in which variable v has one option only."""
    seconds = np.full(problem.sizes[v], math.inf)
    seconds[option] = 0.0
    nothing = np.zeros(problem.sizes[v])
    return replace(problem, tables=(*problem.tables, Table(seconds, nothing, nothing)),
                   factors=(*problem.factors, Factor((v,), len(problem.tables))))


def alternatives(problem: Problem, v: int, known: Sequence[Beliefs], count: int, tolerance: float = 0.0,
                 own: tuple[int, float] | None = None, until: float = math.inf) -> tuple[Alternative, ...]:
    """Every option of v: first those whose seconds are known, the best first, then the others.

    Under a budget the `count` best are solved, and the others at least bounded. The option of a plan at hand may be
    given as `own`, with the seconds of that plan. From the moment `until` of `time.monotonic`, in seconds, none is
    solved any more.
    """
    bounds = option_bounds(known, v)
    found: list[Alternative] = []
    for option in np.argsort(bounds, kind="stable").tolist():
        bound = float(bounds[option])
        exact = sorted(a.seconds for a in found if a.seconds is not None)
        if problem.budget is None or math.isinf(bound):
            found.append(Alternative(option, bound, bound))
        elif own is not None and option == own[0]:
            continue
        elif monotonic() >= until or (len(exact) >= count and bound >= exact[count - 1] * (1 - tolerance)):
            found.append(Alternative(option, None, bound))
        else:
            found.append(_solved(problem, v, option, tolerance, until))
    if own is not None and problem.budget is not None:
        found.append(Alternative(own[0], own[1], min(float(bounds[own[0]]), own[1])))
    return tuple(sorted(found, key=_rank))


def _rank(one: Alternative) -> tuple[bool, float, int]:
    return one.seconds is None, one.bound if one.seconds is None else one.seconds, one.option


def _solved(problem: Problem, v: int, option: int, tolerance: float, until: float) -> Alternative:
    """Solves the problem with the option pinned, until about that moment."""
    limit = None if until == math.inf else until - monotonic()
    try:
        solution = solve(pin_option(problem, v, option), time_limit=limit, tolerance=tolerance)
    except Infeasible:
        return Alternative(option, math.inf, math.inf)
    return Alternative(option, solution.seconds, solution.bound)
