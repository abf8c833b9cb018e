"""Problem -> Certificate: the messages of an elimination, written down with what each of them replaces.

    no budget, or one that does not bind    one piece with lam = 0: its bound is the optimum
    a budget that binds                     for a range of transients the best multiplier, V(lam) - lam * cap; the range
                                            with the least bound is split where its choice meets the transients
    too large for elimination               what factors give to their variables, at the best multiplier found

What is left between the bound and a plan is the duality gap: it is never more than what the pieces leave open.
"""

import heapq
import math

from autoddl.certificate import Certificate, Message, Piece
from autoddl.problem import Array, Problem
from autoddl.reparametrised import Reparametrised
from autoddl.search import is_large
from autoddl.search.dual import FINE, dual
from autoddl.search.eliminate import messages
from autoddl.search.large import given
from autoddl.search.order import answering
from autoddl.search.program import Program
from autoddl.search.space import Clock, Space, floor_of, priced

__all__ = ["messages_of", "prove", "ranges"]

Range = tuple[int, int, float]
"""The first and the last threshold of transient bytes, and the multiplier that bounds what lies between."""

PIECES = 12
CLOSE = 1e-9
NEAR = 5e-4
"""A large problem's proof is sought until it is this near."""


def messages_of(program: Program) -> tuple[Message, ...]:
    """The messages of `program`, each with the factors that it replaces; those of one recipe name one table."""
    return tuple(Message(step.sources, step.scope, program.slots[step.outputs[0]] - program.base)
                 for step in program.steps)


def prove(problem: Problem, seconds: float) -> Certificate:
    """A certificate whose bound is as near to `seconds`, the cost of the plan at hand, as multipliers bring it."""
    if is_large(problem):
        return Certificate((_reparametrised(problem, seconds),))
    space = Space.of(problem, answering(problem))
    program, written = space.program, messages_of(space.program)

    def piece(low: float, high: float, lam: float) -> Piece:
        values = messages(program, [priced(table, lam, high) for table in problem.tables])
        return Piece(low, high, lam, written, tuple(values[program.base:]))

    taus = space.thresholds
    return Certificate(tuple(piece(taus[low], taus[high], lam) for low, high, lam in ranges(space, seconds)))


def _reparametrised(problem: Problem, seconds: float) -> Reparametrised:
    """One piece for all transients; factors that give the same name one table."""
    lam, made = given(problem, seconds, NEAR)
    tables, number = list[Array](), dict[int, int]()
    for gift in (gift for both in made.values() for gift in both):
        if id(gift) not in number:
            number[id(gift)] = len(tables)
            tables.append(gift)
    every = tuple((i, tuple([number[id(gift)] for gift in both])) for i, both in made.items())
    return Reparametrised(floor_of(problem), math.inf, lam, every, tuple(tables))


def ranges(space: Space, seconds: float) -> list[Range]:
    """Ranges that cover all transients: the one with the least bound is split, as long as that helps."""
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
    """(bound, multiplier) of a range. Where no choice fits, least - cap > 0 bytes too many cost lam * (least - cap)."""
    budget, tau = space.problem.budget, space.thresholds[high]
    assert budget is not None
    cap = budget - space.problem.fixed_bytes - space.thresholds[low]
    least = space.point(math.inf, tau).value if cap >= 0 else math.inf
    if least > cap:
        return math.inf, 0.0 if math.isinf(least) else 2.0 * max(enough, 0.0) / (least - cap)
    found = dual(space, tau, cap, hint, math.inf, FINE, Clock.start(None, math.inf))
    return found.bound, found.lam
