"""Divides the budget of a rank among the stages that it has.

Stages s of one part have plans x_s that take T_s(x_s) seconds and b_s(x_s) bytes. Wanted is

    min of  sum over s of T_s(x_s)      with   sum over s of b_s(x_s) <= budget

*Front*. A stage is searched under shares of the budget. Of its plans those matter that no other is below in seconds and
bytes. Fronts are merged one after the other, by the sums of every pair: a min-plus product, exact for these plans.

*Price*. Under its share a stage pays some seconds for a byte, the multiplier of its budget row. Where these prices are
equal no other division is better, were the fronts convex (Everett 1963). So a share goes from the stage that pays least
to the one that pays most, until that brings nothing.

Shares are whole twentieths. So stages that are alike are searched under few of them, whatever the cut.
"""

from collections.abc import Sequence
from math import inf

__all__ = ["EVEN", "Point", "least_together", "moved", "shares_of"]

EVEN = 20
"""Shares of a budget."""

Point = tuple[float, float]
"""(seconds, bytes) of a plan of a stage."""


def shares_of(sizes: Sequence[float]) -> tuple[int, ...]:
    """Whole shares in proportion to sizes, at least one each, of the sum `EVEN`: those with the largest rest get more.
    """
    total, free = sum(sizes), EVEN - len(sizes)
    wanted = [free * size / total for size in sizes]
    found = [int(each) for each in wanted]
    order = sorted(range(len(sizes)), key=lambda s: found[s] - wanted[s])
    for s in order[:free - sum(found)]:
        found[s] += 1
    return tuple(each + 1 for each in found)


def moved(shares: Sequence[int], prices: Sequence[float]) -> tuple[int, ...] | None:
    """The shares where one goes from the stage that pays least for a byte to the one that pays most; None if none can.
    """
    order = sorted((s for s in range(len(shares))), key=prices.__getitem__)
    giver = next((s for s in order if shares[s] > 1), None)
    if giver is None or prices[giver] >= prices[order[-1]]:
        return None
    return tuple(each - (s == giver) + (s == order[-1]) for s, each in enumerate(shares))


def least_together(fronts: Sequence[Sequence[Point]], budget: float) -> tuple[int, ...] | None:
    """By stage, the number of its plan: those of the least seconds together that fit; None where none fit."""
    merged: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for front in fronts:
        sums = sorted((t + seconds, b + nbytes, (*chosen, k)) for t, b, chosen in merged
                      for k, (seconds, nbytes) in enumerate(front) if b + nbytes <= budget)
        merged, least = [], inf
        for one in sums:
            if one[1] < least:
                merged.append(one)
                least = one[1]
    return merged[0][2] if merged else None


