"""Divides the budget of a rank among the stages that it has.

Stages s of one part have plans x_s that take T_s(x_s) seconds, and b_s(x_s)[t] bytes at moment t of its ranks. Wanted
is

    min of  sum over s of T_s(x_s)      with   sum over s of b_s(x_s)[t] <= budget   at every t

*Front*. A stage is searched under shares of the budget. Of its plans those matter that no other is below in seconds and
bytes. Fronts are merged one after the other, by the sums of every pair, in a min-plus product. It is exact for these
plans while no more than `KEPT` sums matter.

*Price*. Under its share a stage pays some seconds for a byte, the multiplier of its budget row. Where these prices are
equal no other division is better, were the fronts convex (Everett 1963). So a share goes from the stage that pays least
to the one that pays most, until that brings nothing.

Shares are whole twentieths. So stages that are alike are searched under few of them, whatever the cut.
"""

from collections.abc import Sequence

import numpy as np

from autoddl.core.cost_table import Array

__all__ = ["EVEN", "Point", "least_together", "moved", "shares_of"]

EVEN = 20
"""Shares of a budget."""

KEPT = 200
"""Sums that are kept of merged fronts: the fastest, and that with the least bytes."""

Point = tuple[float, Array]
"""(seconds, bytes at every moment) of a plan of a stage."""


def shares_of(sizes: Sequence[float], every: int = EVEN) -> tuple[int, ...]:
    """Whole shares in proportion to sizes, at least one each, `every` together: those with the largest rest get more.
    """
    total, free = sum(sizes), every - len(sizes)
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
    merged: list[tuple[float, Array, tuple[int, ...]]] = [(0.0, np.zeros(1), ())]
    for front in fronts:
        sums = [(t + seconds, b + nbytes, (*chosen, k)) for t, b, chosen in merged
                for k, (seconds, nbytes) in enumerate(front) if (b + nbytes <= budget).all()]
        merged = _undominated(sorted(sums, key=lambda one: (one[0], float(one[1].max()))))
    return merged[0][2] if merged else None


def _undominated(sums: Sequence[tuple[float, Array, tuple[int, ...]]]) -> list[tuple[float, Array, tuple[int, ...]]]:
    """The first of those that no other before has less bytes than at all moments, and that of the least."""
    found = list[tuple[float, Array, tuple[int, ...]]]()
    rows = np.empty((KEPT, len(sums[0][1]) if sums else 0))
    for one in sums:
        if len(found) < KEPT and not (rows[:len(found)] <= one[1]).all(axis=1).any():
            rows[len(found)] = one[1]
            found.append(one)
    least = min(sums, key=lambda one: float(one[1].max()), default=None)
    return found if least is None or len(found) < KEPT else [*found, least]


