"""Branches and bounds for certificates under a budget: splits by transient bytes, then by options.

    range     its bound is V(lam) - lam * cap at the best multiplier; the range with the least bound is split at the
              transient bytes of its choice
    branch    one option of a variable that the choices above and below the cap decide differently, and all its others

The branch with the least bound is divided until it reaches the plan or no effort is left.
"""

import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from autoddl.core.problem import Problem
from autoddl.search.certify.certificate import Allowed, restrict_options
from autoddl.search.elimination_order import plan_exact_elimination
from autoddl.search.lagrangian import FINE, bracket_of, solve_dual
from autoddl.search.limits import Clock
from autoddl.search.relaxations import HullPoint, Space

__all__ = ["Branch", "branch_until_close", "transient_ranges"]

Range = tuple[int, int, float]
"""The first and the last threshold of transient bytes, and the multiplier that gives the bound between them."""

PIECES = 12
CLOSE = 1e-9
DIFFERENT = 40
"""Variables among which the one to branch on is chosen."""
BRANCHES, MOST = 1e7, 24
"""Cells of messages of all branches together, at most, and number of branches, at most."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A range of transient bytes for some options of some variables, with its best multiplier."""

    space: Space
    low: int
    high: int
    lam: float
    allowed: Allowed

    @property
    def bound(self) -> float:
        """A lower bound on the seconds of its choices, without the fixed ones."""
        cap = _cap(self.space, self.low)
        return math.inf if cap < 0 else self.space.point(self.lam, self.tau).value - (self.lam * cap if self.lam else 0)

    @property
    def tau(self) -> float:
        """The greatest transient bytes of its cells."""
        return self.space.thresholds[self.high]


def branch_until_close(problem: Problem, roots: list[Branch], seconds: float) -> list[Branch]:
    """Branches that cover `roots`: the branch with the least bound is divided, as long as effort is left.

    Without a budget there is no gap, and the roots are returned.
    """
    if problem.budget is None:
        return roots
    enough, count, closed = (seconds - problem.fixed_seconds) * (1 - CLOSE), itertools.count(), list[Branch]()
    heap = [(root.bound, next(count), root) for root in roots]
    heapq.heapify(heap)
    work = sum(math.prod(recipe.shape) for _, recipe in roots[0].space.program.messages())
    effort = len(roots) + min(MOST, BRANCHES / max(1, work))
    while heap and heap[0][0] < enough and len(heap) + len(closed) < effort:
        _, _, branch = heapq.heappop(heap)
        halves = _halves(problem, branch, enough)
        if not halves:
            closed.append(branch)
            break
        for half in halves:
            heapq.heappush(heap, (half.bound, next(count), half))
    return [*closed, *(branch for _, _, branch in heap)]


def _halves(problem: Problem, branch: Branch, enough: float) -> list[Branch]:
    """Two halves of a branch: transient bytes below those of its choice, and from them on.

    If that does not divide it: one option of one variable, and all its others. Empty where choices do not differ.
    """
    space, low, high = branch.space, branch.low, branch.high
    met = space.point(branch.lam, branch.tau).transient
    if met > space.thresholds[low] and met in space.thresholds:
        middle = space.thresholds.index(met)
        return [_branch(space, *part, branch, branch.allowed, enough) for part in ((low, middle - 1), (middle, high))]
    heavy, light = bracket_of(space, branch.tau, _cap(space, low))
    v = None if heavy is None or light is None else _telling(space, heavy, light)
    if v is None or heavy is None:
        return []
    allowed, chosen = dict(branch.allowed), int(heavy.choice[v])
    others = tuple([k for k in allowed.get(v, range(problem.sizes[v])) if k != chosen])
    found = []
    for some in ((chosen,), others):
        within = tuple((allowed | {v: some}).items())
        less = restrict_options(problem, within)
        found.append(_branch(Space.of(less, plan_exact_elimination(less)), low, high, branch, within, enough))
    return found


def _branch(space: Space, low: int, high: int, above: Branch, allowed: Allowed, enough: float) -> Branch:
    return Branch(space, low, high, _bounded(space, low, high, above.lam, enough)[1], allowed)


def _telling(space: Space, heavy: HullPoint, light: HullPoint) -> int | None:
    """The variable on which the two choices differ and whose option alone changes most bytes, None without one."""
    found = []
    for v in np.flatnonzero(heavy.choice != light.choice)[:DIFFERENT].tolist():
        other = heavy.choice.copy()
        other[v] = light.choice[v]
        found.append((abs(space.problem.totals(other)[1] - heavy.retained), -v))
    return -max(found)[1] if found else None


def transient_ranges(space: Space, seconds: float) -> list[Range]:
    """Ranges that cover all transient bytes: the one with the least bound is split, as long as that helps."""
    top, enough = len(space.thresholds) - 1, seconds - space.problem.fixed_seconds
    if space.problem.budget is None or space.point(0.0, space.thresholds[top]).value >= enough - CLOSE * seconds:
        return [(0, top, 0.0)]
    heap, closed = [(*_bounded(space, 0, top, 0.0, enough), 0, top)], list[Range]()
    while len(heap) < PIECES and heap[0][0] < enough * (1 - CLOSE):
        _, lam, low, high = heapq.heappop(heap)
        met = space.thresholds.index(space.point(lam, space.thresholds[high]).transient)
        if met <= low:
            closed.append((low, high, lam))
            break
        for first, last in ((low, met - 1), (met, high)):
            heapq.heappush(heap, (*_bounded(space, first, last, lam, enough), first, last))
    return sorted(closed + [(low, high, lam) for _, lam, low, high in heap])


def _bounded(space: Space, low: int, high: int, hint: float, enough: float) -> tuple[float, float]:
    """The (bound, multiplier) of a range. Where no choice fits, least - cap bytes too many cost lam * (least - cap)."""
    tau, cap = space.thresholds[high], _cap(space, low)
    least = space.point(math.inf, tau).value if cap >= 0 else math.inf
    if least > cap:
        return math.inf, 0.0 if math.isinf(least) else 2.0 * max(enough, 0.0) / (least - cap)
    found = solve_dual(space, tau, cap, hint, math.inf, FINE, Clock.start(None, math.inf))
    return found.bound, found.lam


def _cap(space: Space, low: int) -> float:
    budget = space.problem.budget
    return math.inf if budget is None else budget - space.problem.fixed_bytes - space.thresholds[low]
