"""Keeps sets of labels: (seconds, retained bytes) of partial choices that no other choice dominates.

    combine(A, B) = { a + b : slack(a) + slack(b) <= room }       slack: how far above the least seconds + lam * bytes,
                                                                  one for each of several lam
    pareto(A)     = { a : no b in A has at most a's bytes and at most a's seconds }

Each label remembers the option that made it and which label of every part it came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoddl.core.problem import Array
from autoddl.search.limits import Clock

__all__ = ["Labels", "combine", "no_labels", "pareto", "single", "thin", "union"]

NOISE = 1e-13
"""Seconds that differ by less than this, relatively, differ by the order of additions only."""

OVERHEAD = 100
"""Label pairs that cost as much time as starting does."""

LARGEST = 1 << 22
"""Label pairs that are computed together."""

NEAR = 0.005
"""A fraction of the bytes between the lightest and the heaviest label. Labels are kept most densely within this
distance of the share that is sought."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels in columns, one per row: `option` of the eliminated variable, `back` the label of every part.

    `slack` has a column for each multiplier.
    """

    seconds: Array
    retained: Array
    slack: Array
    option: NDArray[np.int64]
    back: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> "Labels":
        return Labels(self.seconds[rows], self.retained[rows], self.slack[rows], self.option[rows], self.back[rows])


def single(seconds: float, retained: float, slack: Array, option: int) -> Labels:
    """A set of one label without parts."""
    t, m, k = (np.array([x]) for x in (seconds, retained, option))
    return Labels(t, m, slack[None], k, np.zeros((1, 0), np.int64))


def no_labels(parts: int, lams: int) -> Labels:
    """The empty set, of labels with so many parts and multipliers."""
    return Labels(np.zeros(0), np.zeros(0), np.zeros((0, lams)), np.zeros(0, np.int64), np.zeros((0, parts), np.int64))


def combine(start: Labels, parts: Sequence[Labels], room: Array, scale: float, clock: Clock) -> Labels:
    """The undominated sums of one label from each set, as far as their slack is within the room."""
    result = start
    for part in parts:
        rows = max(1, LARGEST // max(1, len(part)))
        chunks = [np.arange(i, min(i + rows, len(result))) for i in range(0, len(result), rows)]
        sums = []
        for chunk in chunks:
            clock.spend(len(chunk) * len(part) + OVERHEAD)
            sums.append(pareto(_sums(result[chunk], part, room), scale))
        result = union(sums, scale) if sums else _sums(result, part, room)
    return result


def _sums(left: Labels, right: Labels, room: Array) -> Labels:
    """The sums of one label from each set within the room; `back` gets the right one."""
    i, j = np.nonzero(left.slack[:, None, 0] + right.slack[None, :, 0] <= room[0])
    slack = left.slack[i] + right.slack[j]
    within = (slack[:, 1:] <= room[1:]).all(axis=1)
    i, j = i[within], j[within]
    return Labels(
        left.seconds[i] + right.seconds[j],
        left.retained[i] + right.retained[j],
        slack[within],
        left.option[i],
        np.concatenate([left.back[i], j[:, None]], axis=1),
    )


def union(sets: Sequence[Labels], scale: float) -> Labels:
    """The undominated labels of several sets with equally many parts."""
    if len(sets) == 1:
        return sets[0]
    columns = ("seconds", "retained", "slack", "option", "back")
    return pareto(Labels(*(np.concatenate([getattr(s, c) for s in sets]) for c in columns)), scale)


def pareto(labels: Labels, scale: float) -> Labels:
    """The undominated labels, by rising bytes; the first of equal ones stays."""
    if len(labels) < 2:
        return labels
    rows = labels[np.lexsort((labels.seconds, labels.retained))]
    best = np.concatenate([[np.inf], np.minimum.accumulate(rows.seconds)[:-1]])
    return rows[rows.seconds < best - NOISE * scale]


def thin(labels: Labels, ahead: Array, keep: int, share: float) -> Labels:
    """At most about `keep` labels: in each range of bytes, the one whose choices have the least bound.

    `ahead` is how far the bound of every multiplier is below the best one. Ranges are finer the nearer they are to
    `share` of the way from the least bytes to the most.
    """
    if len(labels) <= keep:
        return labels
    low, high = labels.retained[0], labels.retained[-1]
    ends = np.arcsinh(np.array([-share, 1 - share]) / NEAR)
    place = np.arcsinh(((labels.retained - low) / (high - low) - share) / NEAR)
    bucket = np.minimum(((place - ends[0]) / (ends[1] - ends[0]) * keep).astype(np.int64), keep - 1)
    order = np.lexsort(((labels.slack - ahead).max(axis=1), bucket))
    first = np.concatenate([[True], np.diff(bucket[order]) > 0])
    return labels[np.sort(order[first])]
