"""Finds the optimum within a byte budget: best first over ranges of the transient threshold.

    seconds(x) s.t. fixed + retained(x) + transient(x) <= budget
      = min over tau of  min seconds(x) s.t. retained(x) <= budget - fixed - tau, cells with transient <= tau only
    range low..high   relaxed: cells up to `high` are allowed, only `low` is charged

A node is a range. It is refined by its Lagrangian bound, then by wider and wider windows of labels. Few labels a cell
find good plans soon, and many labels prove; the cheaper window goes first. A choice that meets the relaxed cap but not
the budget uses a threshold above `low`. The range is split there, so that its bytes are charged fully. The least bound
of all open nodes bounds the problem. Once it is within the tolerance, a little more effort goes into a better plan:
often the next window has it.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.search.lagrangian import FINE, Dual, solve_dual
from autoddl.search.limits import Clock, Exhausted, Limits
from autoddl.search.relaxations import HullPoint, Space
from autoddl.search.window import Priced, WindowResult, priced, search_window

__all__ = ["BestPlan", "solve_within_budget"]

FIRST_WINDOW = 2e-5
GROWTH = 3.0
COARSE = 1e-3
SHARE = 1 / 3
"""Fraction of the remaining effort that one window may take."""
RISE = 8.0
"""Times the label pairs of a window that one with the next number of labels is expected to take."""
POLISH = 2e6
"""Label pairs that one more window may take, after the gap is within the tolerance."""
NEARLY = 0.1
"""Within this fraction of the tolerance, the plan is good enough without that window."""
BESIDE = (1.0, 1.1, 0.9, 1.4, 0.7)
"""Multiples of the multiplier at which messages rule out labels too, from the second window of a range on."""
KEEP = (64, 512, 4096, 1 << 15)
"""Labels kept per cell: few, to find a good plan at once, and as many as a proof needs."""


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Windows with one number of labels: the next, None beyond the gap or the effort, and the last two's pairs."""

    keep: int
    window: float | None
    spent: tuple[float, float] = (0.0, 0.0)

    @property
    def guess(self) -> float:
        """The expected label pairs of the next window: they grow as before, after the first one as the window does."""
        before, last = self.spent
        return last**2 / before if before else GROWTH * last

    def beyond(self, window: float) -> "_Ladder":
        """The ladder whose next window is wider than one that was looked at completely."""
        return self if self.window is None else replace(self, window=max(self.window, window * GROWTH))


@dataclass(frozen=True, slots=True)
class BestPlan:
    """The best plan so far, the bound so far, and the multiplier of the range solved last."""

    point: HullPoint
    bound: float
    price: float


@dataclass(frozen=True, slots=True)
class _Node:
    """A range of thresholds.

        bound      least seconds of its choices
        low        position of the threshold that is charged
        high       position of the threshold up to which cells are allowed
        lam        the multiplier
        probed     whether its bound was computed
        dual       its Lagrangian bound, once there
        ladders    its windows, once there
        share      where the cap is between the lightest and the heaviest label
    """

    bound: float
    low: int
    high: int
    lam: float = 0.0
    probed: bool = True
    dual: Dual | None = None
    ladders: tuple[_Ladder, ...] = ()
    share: float = 0.5


def solve_within_budget(space: Space, first: HullPoint, bound: float, limits: Limits) -> BestPlan:
    """The best plan that fits, starting from one that does, and the least bound over all thresholds."""
    count = itertools.count()
    heap = [(bound, 0, _Node(bound, 0, len(space.thresholds) - 1, limits.price))]
    best, price = first, limits.price
    spent: list[float] = []
    while heap and heap[0][0] < limits.target(best.seconds):
        _, _, node = heapq.heappop(heap)
        try:
            children, found = _refine(space, node, best, limits)
            price = max([child.lam for child in children], default=price)
        except Exhausted:
            children, found = [], []
            spent.append(node.bound)
        best = min([best, *filter(space.fits, found)], key=lambda p: p.seconds)
        for child in children:
            heapq.heappush(heap, (child.bound, next(count), child))
        limits.tell(best.seconds, min([best.seconds, *spent, *(b for b, _, _ in heap)]))
    best = _polished(space, heap, count, best, limits)
    return BestPlan(best, min([best.seconds, *spent, *(b for b, _, _ in heap)]), price)


def _polished(space: Space, heap: list[tuple[float, int, _Node]], count: Iterator[int], best: HullPoint, limits: Limits
              ) -> HullPoint:
    """The best plan after one more window of the node with the least bound, which it replaces in the heap."""
    near = replace(limits, tolerance=limits.tolerance * NEARLY)
    if not heap or heap[0][0] >= near.target(best.seconds) or heap[0][2].dual is None or limits.clock.expired:
        return best
    try:
        children, found = _widen(space, heap[0][2], best, limits.clock.of(POLISH))
    except Exhausted:
        return best
    heapq.heappop(heap)
    for child in children:
        heapq.heappush(heap, (child.bound, next(count), child))
    return min([best, *filter(space.fits, found)], key=lambda p: p.seconds)


def _refine(space: Space, node: _Node, best: HullPoint, limits: Limits) -> tuple[list[_Node], list[HullPoint]]:
    """One step on one node: a first bound, its dual, or its next window. Returns its children and the choices found."""
    clock, enough = limits.clock, min(best.seconds, limits.ceiling)
    if node.dual is not None:
        return _widen(space, node, best, clock)
    tau, cap = space.thresholds[node.high], _cap(space, node)
    if (node.low, node.high) != (0, len(space.thresholds) - 1):
        clock.spend(0)
    if not node.probed:
        point = space.point(node.lam, tau)
        return [replace(node, bound=max(node.bound, point.value - node.lam * cap), probed=True)], [point]
    new = solve_dual(space, tau, cap, node.lam, enough, COARSE, clock)
    if new.best is not None and (node.low == node.high or space.fits(new.best)):
        new = solve_dual(space, tau, cap, node.lam, enough, FINE, clock)
    if math.isinf(new.bound):
        return [], []
    node = replace(node, bound=max(node.bound, new.bound), lam=new.lam)
    if new.best is None:
        return ([node] if new.bound >= enough else _halves(node)), []
    node = replace(node, dual=new, ladders=tuple(_Ladder(keep, FIRST_WINDOW * abs(new.bound)) for keep in KEEP))
    return _after(space, node, new.best), list(space.known.values())


def _widen(space: Space, node: _Node, best: HullPoint, clock: Clock) -> tuple[list[_Node], list[HullPoint]]:
    """Computes the labels of the next window; with all of them kept, the bound rises by the window."""
    assert node.dual is not None
    open_ = [ladder for ladder in node.ladders if ladder.window is not None]
    if not open_:
        raise Exhausted
    ladder = min(open_, key=lambda ladder: (_guess(ladder, node), ladder.keep))
    assert ladder.window is not None
    tau, cap = space.thresholds[node.high], _cap(space, node)
    room = max(0.0, best.seconds - node.dual.bound)
    window = min(ladder.window, room)
    granted = clock.part(SHARE)
    try:
        found = search_window(space, _priced(space, node), tau, cap, window, ladder.keep, node.share, granted)
    except Exhausted:
        found = WindowResult(None, False, node.share)
        window = room
    clock.pairs -= granted.spent
    further = _Ladder(ladder.keep, window * GROWTH if found.complete or window < room else None,
                      (ladder.spent[1], max(ladder.spent[1], granted.spent)))
    ladders = [further if it is ladder else it for it in node.ladders]
    if found.complete:  # what was looked at needs no more labels
        ladders = [it.beyond(window) for it in ladders]
    wider = replace(node, ladders=tuple(ladders), share=found.share)
    if found.complete:
        wider = replace(wider, bound=max(node.bound, node.dual.bound + window))
    if found.choice is None:
        return [wider], []
    point = space.measured(node.lam, node.bound, found.choice)
    if found.complete and point.seconds <= wider.bound:
        wider = replace(wider, bound=point.seconds)
    return _after(space, wider, point), [point]


def _guess(ladder: _Ladder, node: _Node) -> float:
    """The expected label pairs of a ladder's next window; of its first, more than those of fewer labels took."""
    fewer = [it.spent[1] for it in node.ladders if it.keep < ladder.keep]
    return ladder.guess if ladder.spent[1] else RISE * max(fewer, default=0.0)


def _priced(space: Space, node: _Node) -> Priced:
    """The messages of the node's multiplier; from the second window on, those of some beside it too."""
    factors = BESIDE if any(it.spent[1] for it in node.ladders) and node.lam else BESIDE[:1]
    return priced(space, [node.lam * factor for factor in factors], space.thresholds[node.high], _cap(space, node))


def _after(space: Space, node: _Node, point: HullPoint) -> list[_Node]:
    """The node again, closed if its choice attains the bound; split where its choice uses more than it is charged."""
    if space.fits(point):
        return [] if point.seconds <= node.bound else [node]
    if space.thresholds[node.low] < point.transient:
        return list(_split(node, space.thresholds.index(point.transient)))
    raise Exhausted  # above the budget by the rounding of one sum


def _halves(node: _Node) -> list[_Node]:
    """Two nodes where a dual found no choice at all; a single threshold is given up, with its bound."""
    if node.low == node.high:
        raise Exhausted
    return list(_split(node, (node.low + node.high + 1) // 2))


def _split(node: _Node, middle: int) -> Iterator[_Node]:
    yield _Node(node.bound, node.low, middle - 1, node.lam, False)
    yield _Node(node.bound, middle, node.high, node.lam, False)


def _cap(space: Space, node: _Node) -> float:
    """The bytes that the range leaves for retained ones."""
    budget = space.problem.budget
    assert budget is not None
    return budget - space.problem.fixed_bytes - space.thresholds[node.low]
