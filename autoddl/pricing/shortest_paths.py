"""Finds the shortest paths between all nodes of a graph, and the first move of each.

Ties go to the path with fewer moves, then to the one whose first move has the lowest number.

    least[i, j]   = min over moves i -> k of  seconds(i -> k) + least[k, j]      swept over rows till nothing changes
    tight[m, j]   seconds(m) + least[k, j] is as little as least[i, j]           a row of bits per move m: i -> k
    reach_r[i]    = reach_{r-1}[i] or any of (tight[m] and reach_{r-1}[k])       the nodes j that are r moves away

A pair that is new in round r takes the first move that reaches it. Words of 64 bits make a round cheap; a move that is
longer than the way around it is dropped. A search asks for nothing but the seconds of most pairs, so first moves are
computed on demand.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

__all__ = ["Nearest", "first_moves", "nearest"]

LESS = 1 - 1e-12
"""What is nearer by less than this is as near."""

SPARE = 1e-11
"""A move that is longer than the way around it by more than this part of the longest path is on no shortest one."""

FEW = 0.1
"""Of all pairs, what is followed one by one."""

BLOCK = 4096
"""Words that are unpacked at a time."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
Moves = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Moves by the node that they leave, then by number: `begin[i]` is the first of node i."""

    moves: Ints
    here: Ints
    there: Ints
    seconds: Floats
    begin: Ints

    @classmethod
    def of(cls, moves: Ints, here: Ints, there: Ints, seconds: Floats, count: int) -> "_Edges":
        return cls(moves, here, there, seconds, np.searchsorted(here, np.arange(count + 1)))

    def useful(self, far: Floats) -> "_Edges":
        """The moves that are no longer than the way around them; `far` is no less than the shortest paths."""
        longest = far.max(initial=0.0, where=np.isfinite(far))
        keep = self.seconds <= far[self.here, self.there] + SPARE * longest
        return _Edges.of(self.moves[keep], self.here[keep], self.there[keep], self.seconds[keep], len(far))

    def rows(self) -> list[tuple[int, Ints, Floats]]:
        """Per node with moves: itself, where they lead, and their seconds as a column."""
        ends = self.begin.tolist()
        return [(i, self.there[a:b], self.seconds[a:b, None])
                for i, (a, b) in enumerate(pairwise(ends)) if a < b]


@dataclass(frozen=True, slots=True, eq=False)
class _Into:
    """Moves by the node that they lead to: `begin[k]` is the first to node k."""

    here: Ints
    seconds: Floats
    begin: Ints

    @classmethod
    def of(cls, edges: _Edges, which: Bools) -> "_Into":
        order = np.argsort(edges.there[which], kind="stable")
        there = edges.there[which][order]
        return cls(edges.here[which][order], edges.seconds[which][order],
                   np.searchsorted(there, np.arange(len(edges.begin))))


@dataclass(frozen=True, slots=True, eq=False)
class Nearest:
    """The length `far[i, j]` of the shortest paths, infinite where there is none, and the moves on them."""

    far: Floats
    edges: _Edges


def nearest(count: int, moves: Ints, here: Ints, there: Ints, seconds: Floats) -> Nearest:
    """The shortest paths between `count` nodes.

    Move e has the number `moves[e]`, leads from node `here[e]` to `there[e]` and takes `seconds[e]`; numbers rise.
    """
    order = np.argsort(here, kind="stable")
    order = order[np.isfinite(seconds[order])]
    edges = _Edges.of(moves[order], here[order], there[order], seconds[order], count)
    return Nearest(*_least(edges, count))


def first_moves(paths: Nearest) -> Moves:
    """The number of the first move from i to j, -1 where there is none."""
    return _first(paths.edges, _tight(paths.edges, paths.far))


def _least(edges: _Edges, count: int) -> tuple[Floats, _Edges]:
    """The least seconds up to rounding, and the moves that are of use.

    Rows are swept in order, each from the present state of the others. When little changes any more, the changed pairs
    are followed one by one.
    """
    far = np.full((count, count), np.inf)
    np.minimum.at(far, (edges.here, edges.there), edges.seconds)
    np.fill_diagonal(far, 0.0)
    changed = np.zeros(far.shape, dtype=bool)
    while True:
        _sweep(far, changed, edges.rows())
        edges = edges.useful(far)
        if np.count_nonzero(changed) <= FEW * far.size:
            break
    into = _Into.of(edges, edges.here < edges.there)
    while changed.any():
        _spread(far, into, changed)
        into = _Into.of(edges, edges.here >= 0)
    return far, edges.useful(far)


def _sweep(far: Floats, changed: Bools, rows: list[tuple[int, Ints, Floats]]) -> None:
    """Tries one more move from every node, row by row, and marks the pairs that got nearer."""
    for i, there, seconds in rows:
        through = far.take(there, axis=0)
        through += seconds
        least, row = through.min(axis=0), far[i]
        np.less(least, row * LESS, out=changed[i])
        np.minimum(row, least, out=row)


def _spread(far: Floats, into: _Into, changed: Bools) -> None:
    """Tries, for every pair (k, j) that `changed`, the moves from all i to k, and marks the pairs that got nearer."""
    flat, pairs = far.reshape(-1), np.flatnonzero(changed)
    there, column = np.divmod(pairs, len(far))
    number = into.begin[there + 1] - into.begin[there]
    edge = np.arange(number.sum()) + np.repeat(into.begin[there] - np.cumsum(number) + number, number)
    through = into.seconds[edge] + np.repeat(flat[pairs], number)
    target = into.here[edge] * len(far) + np.repeat(column, number)
    nearer = through < flat[target] * LESS
    np.minimum.at(flat, target[nearer], through[nearer])
    changed[:] = False
    changed.reshape(-1)[target[nearer]] = True


def _tight(edges: _Edges, far: Floats) -> Words:
    """By move, as bits, the nodes to which it begins a shortest path."""
    words = -(-len(far) // 64)
    found = np.zeros((len(edges.moves), words * 8), dtype=np.uint8)
    for i, there, seconds in edges.rows():
        through = far.take(there, axis=0)
        through += seconds
        tight = np.packbits(through <= far[i] / LESS, axis=1, bitorder="little")
        found[edges.begin[i]:edges.begin[i + 1], :tight.shape[1]] = tight
    return found.view(np.uint64)


def _first(edges: _Edges, tight: Words) -> Moves:
    """The first moves, by rounds of one more move.

    Pairs that are new in a round take the first move that leads to a node from which the target was reached before.
    """
    count = len(edges.begin) - 1
    onward = np.full((count, count), -1, dtype=np.int16)
    whole = np.zeros((count, tight.shape[1] * 64), dtype=np.uint8)
    np.fill_diagonal(whole, 1)
    left = ~np.packbits(whole, axis=1, bitorder="little").view(np.uint64)
    number = np.diff(edges.begin)
    slots = [edges.begin[:-1][rows] + d for d in range(int(number.max(initial=0))) for rows in [number > d]]
    while True:
        taken = tight & ~left[edges.there]
        for slot in slots:
            rows = edges.here[slot]
            taken[slot] &= left[rows]
            left[rows] ^= taken[slot]
        if not taken.any():
            return onward
        _settle(onward, edges, taken)


def _settle(onward: Moves, edges: _Edges, taken: Words) -> None:
    """Writes the first moves of the pairs that are `taken`: by move, the targets as bits."""
    count, words = len(onward), taken.shape[1]
    first, bits = onward.reshape(-1), taken.reshape(-1)
    every = np.flatnonzero(bits != 0)
    for begin in range(0, len(every), BLOCK):
        which = every[begin:begin + BLOCK]
        move, column = np.divmod(which, words)
        column *= 64
        bit = np.flatnonzero(np.unpackbits(bits[which].view(np.uint8), bitorder="little").view(np.bool_))
        word = bit >> 6
        bit &= 63
        first[(edges.here[move] * count + column).take(word) + bit] = edges.moves[move].astype(np.int16).take(word)
