"""Finds the Lagrangian bound under a memory cap, and the least bytes that any choice needs.

    bound = max over lam >= 0 of V(lam) - lam * cap        V is concave, every V(lam) - lam * cap is a lower bound
    next lam = slope between the last choice above the cap and the last one below it (secant on hull points)

The hull is met when no choice lies under the secant. The best choice below the cap is a plan. The difference between it
and the bound is the duality gap, which the labels close.
"""

import heapq
import math
from dataclasses import dataclass
from operator import itemgetter

from autoddl.search.limits import Clock
from autoddl.search.relaxations import HullPoint, Space

__all__ = ["FINE", "Dual", "bracket_of", "find_least_bytes", "solve_dual"]

ROUNDS = 40
FINE = 1e-9
FARTHER = (1.2, 2.0, math.inf)
"""Factors by which a hint is multiplied, or divided, to bracket the multiplier."""


@dataclass(frozen=True, slots=True)
class Dual:
    """A lower bound with the multiplier that proves it, and the best choice met below the cap."""

    lam: float
    bound: float
    best: HullPoint | None


def solve_dual(space: Space, tau: float, cap: float, hint: float, ceiling: float, close: float, clock: Clock) -> Dual:
    """The bound for cells up to threshold `tau` and `cap` retained bytes; the first that reaches `ceiling` will do."""
    heavy, light = bracket_of(space, tau, cap)
    if heavy is None or light is None:
        first = space.point(hint, tau)
        if first.value - hint * cap >= ceiling:
            return Dual(hint, first.value - hint * cap, None)
        heavy, light = _bracket(space, tau, cap, first)
    if heavy is None:
        return Dual(0.0, light.value, light)
    if light.retained > cap:
        return Dual(0.0, math.inf if light.value > cap else space.point(0.0, tau).value, None)
    return _secant(space, tau, cap, heavy, light, close, ceiling, clock)


def bracket_of(space: Space, tau: float, cap: float) -> tuple[HullPoint | None, HullPoint | None]:
    """The known point above the cap with the highest multiplier, and the one below it with the lowest; None without."""
    known = [p for _, p in sorted(((lam, p) for (lam, t), p in space.known.items() if t == tau), key=itemgetter(0))]
    heavy = [p for p in known if p.retained > cap]
    light = [p for p in known if p.retained <= cap]
    return heavy[-1] if heavy else None, light[0] if light else None


def _bracket(space: Space, tau: float, cap: float, first: HullPoint) -> tuple[HullPoint | None, HullPoint]:
    """A choice above the cap, None if the least seconds are below it, and one below it, if the least bytes are."""
    heavy, light = (first, None) if first.retained > cap else (None, first)
    for factor in FARTHER:
        if light is None:
            point = space.point(first.lam * factor if first.lam else math.inf, tau)
        else:
            point = space.point(first.lam / factor, tau)
        if point.retained > cap:
            heavy = point
        else:
            light = point
        if heavy is not None and light is not None:
            return heavy, light
    return (heavy, light) if light is not None else (heavy, point)


def _secant(space: Space, tau: float, cap: float, heavy: HullPoint, light: HullPoint, close: float, ceiling: float,
            clock: Clock) -> Dual:
    """Takes the next lam until no choice lies under the secant by more than `close`; returns the best bound."""
    best = light
    for _ in range(ROUNDS):
        slope = max(0.0, (light.seconds - heavy.seconds) / (heavy.retained - light.retained))
        point = space.point(slope, tau)
        best = min(best, point, key=lambda p: p.seconds if p.retained <= cap else math.inf)
        line = heavy.seconds + slope * heavy.retained
        if point.seconds + slope * point.retained >= line - close * abs(line) or clock.expired:
            break
        if point.value - slope * cap >= ceiling:
            break
        heavy, light = (point, light) if point.retained > cap else (heavy, point)
    bounds = ((p.value - lam * cap, lam) for (lam, t), p in space.known.items() if t == tau and math.isfinite(lam))
    bound, lam = max(bounds)
    return Dual(lam, bound, best)


def find_least_bytes(space: Space, budget: float) -> tuple[float, HullPoint | None]:
    """The least bytes min over tau of (least retained bytes with cells up to tau) + tau, and a choice that takes them.

    Stops at the first choice within the budget. Ranges of thresholds are taken least bound first: the largest threshold
    of a range decides which cells are allowed, the smallest which bytes are charged. A range is split at the threshold
    that its choice really meets. Where the program only bounds, a choice may be forbidden. Then the range is halved,
    and a single threshold gives its bound without a choice.
    """
    taus, fixed = space.thresholds, space.problem.fixed_bytes
    heap = [(-math.inf, 0, len(taus) - 1)]
    while heap:
        bound, low, high = heapq.heappop(heap)
        point = space.point(math.inf, taus[high])
        if math.isinf(point.value):
            continue
        needed = max(bound, fixed + point.value + taus[low])
        if space.fits(point):
            return space.nbytes(point), point
        charged = low == high or (math.isfinite(point.seconds) and point.transient <= taus[low])
        if charged and (not heap or needed <= heap[0][0]):
            return (space.nbytes(point), point) if space.fits(point) else (needed, None)
        if charged:
            heapq.heappush(heap, (needed, low, low))
            continue
        met = math.isfinite(point.seconds) and point.transient <= taus[high]
        middle = taus.index(point.transient) if met else (low + high + 1) // 2
        heapq.heappush(heap, (needed, low, middle - 1))
        heapq.heappush(heap, (needed, middle, high))
    return math.inf, None
