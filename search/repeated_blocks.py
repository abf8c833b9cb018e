"""Finds repeated blocks of a problem by structure, and makes the short problem in which three of them stand for all.

Variables get *positions* in their order. But a variable without an earlier neighbour comes right before its first
neighbour, so that parameters are next to the ops that use them. A *run* is K successive blocks of `period`
positions such that

    factors(j) = { f : f touches block j and no later one }, for j >= 1, equal factors(1) moved by (j - 1) periods
    no factor joins blocks that are not neighbours; only block 0 meets what is before the run, only K - 1 what is after

*Shared* variables, with many neighbours all over the problem, are outside of runs and may meet every block. One whose
many neighbours are a block's, like the policy of what is computed again, comes right behind the first of them. That is
mostly the output of the block before.

The short problem keeps blocks 0, 1 and K - 1. Its factors(1) stand for those of blocks 1 .. K - 2: elimination raises
them to that power.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoddl.core.problem import MAX_NDIM, Factor, FactorArrays, Problem, Table

__all__ = ["Fold", "FoldedProblem", "fold_blocks"]

Rows = NDArray[np.intp]

LEAST = 5
"""Blocks that a run has at least; with fewer there is nothing to save."""

SHARED = (16, 6)
"""A variable with more neighbours is shared, if these are far apart: fewer ones where nothing repeats otherwise."""

SPREAD = 3
"""Positions a neighbour beyond which they are. Those of a policy are most variables of one block."""

MOST = 0.75
"""Part of the neighbours that are close to each other where they are not far apart; others may be shared ones."""

PERIODS = 4
"""Distances between equal variables that are tried as periods, the most frequent first."""

PHASES = 3
"""Places in a period at which cutting a run is tried, those that the fewest options cross."""


@dataclass(frozen=True, slots=True)
class Fold:
    """A run in the short problem.

    `blocks` are the variables of blocks 0, 1 and K - 1, `factors` the numbers of the factors of block 1. Block 1 stands
    for `times` = K - 2 blocks, each `period` positions behind the one before.
    """

    blocks: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    factors: frozenset[int]
    times: int
    period: int


@dataclass(frozen=True, slots=True, eq=False)
class FoldedProblem:
    """The short problem with its runs.

    Each short variable has its `position` in the whole problem. At every position, `variable` is the whole problem's
    variable, and `of` the short variable that stands for it.
    """

    problem: Problem
    folds: tuple[Fold, ...]
    position: Rows
    variable: Rows
    of: Rows


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """A problem in arrays, while its runs are cut.

        sizes       options of each variable
        scopes      variables of each factor, filled up with -1
        tables      table of each factor
        position    position of each variable
        marks       for each factor, the run to whose block 1 it belongs, or -1
        blocks      for each run, the variables of its three blocks
        times       for each run, the blocks for which block 1 stands
        periods     for each run, positions of a block
    """

    sizes: Rows
    scopes: Rows
    tables: Rows
    position: Rows
    marks: Rows
    blocks: tuple[Rows, ...] = ()
    times: tuple[int, ...] = ()
    periods: tuple[int, ...] = ()


def fold_blocks(problem: Problem, tables: tuple[Table, ...], numbers: Rows) -> FoldedProblem:
    """The short problem; the whole one, reordered, if it repeats nothing.

    `tables` are the distinct tables, `numbers` the one of them that each table of the problem is.
    """
    order = _order(problem.arrays, len(problem.sizes))
    rank = np.append(np.argsort(order), -1)
    state = _State(np.array(problem.sizes, dtype=np.intp)[order], rank[problem.arrays.scopes],
                   numbers[problem.arrays.tables], np.arange(len(order)), np.full(len(problem.factors), -1))
    of = np.arange(len(order))
    while (found := next(filter(None, (_best(state, _shared(state, least)) for least in SHARED)), None)) is not None:
        state, moved = _cut(state, *found)
        of = moved[of]
    names = tuple(problem.names[order[p]] for p in state.position.tolist())
    factors = tuple(Factor(tuple(v for v in row if v >= 0), t)
                    for row, t in zip(state.scopes.tolist(), state.tables.tolist(), strict=True))
    short = replace(problem, names=names, sizes=tuple(state.sizes.tolist()), tables=tables, factors=factors)
    folds = tuple(_fold(state, i) for i in range(len(state.times)))
    return FoldedProblem(short, folds, state.position, order, of)


def _fold(state: _State, i: int) -> Fold:
    first, second, last = (tuple(block) for block in state.blocks[i].tolist())
    return Fold((first, second, last), frozenset(np.flatnonzero(state.marks == i).tolist()), state.times[i],
                state.periods[i])


def _order(laid: FactorArrays, count: int) -> Rows:
    """The variables by position."""
    many = _many(laid.scopes, count, SHARED[0])
    scopes = np.where(many[laid.scopes], -1, laid.scopes)
    least = np.full(count + 1, count)
    after = np.full(count + 1, count)
    low = np.where(scopes >= 0, scopes, count).min(axis=1, initial=count)
    for axis in range(MAX_NDIM):
        np.minimum.at(least, scopes[:, axis], low)
        for other in range(MAX_NDIM):
            later = (scopes[:, other] > scopes[:, axis]) & (scopes[:, axis] >= 0)
            np.minimum.at(after, scopes[later, axis], scopes[later, other])
    own = np.arange(count)
    source = (least[:count] >= own) & (after[:count] < count)
    place = np.argsort(np.argsort(np.where(source, 2 * after[:count] - 1, 2 * own), kind="stable")).astype(float)
    for v, first in _of_blocks(laid.scopes, many, place).items():
        place[v] = first + 0.5
    return np.argsort(place, kind="stable")


def _many(scopes: Rows, count: int, least: int) -> NDArray[np.bool_]:
    """Whether each variable has more neighbours than `least`, with one more entry for 'none'."""
    joined = (scopes >= 0).sum(axis=1) > 1
    degree = np.bincount(scopes[joined].ravel() + 1, minlength=count + 1)[1:]
    return np.append(degree > least, False)


def _of_blocks(scopes: Rows, many: NDArray[np.bool_], place: NDArray[Any]) -> dict[int, float]:
    """The variables whose many neighbours are a block's, each with the first place of these; none if they are few.

    There is one for every block at least. A single such variable is known to all blocks, which are small.
    """
    found = dict[int, float]()
    for v in np.flatnonzero(many).tolist():
        near = np.unique(scopes[(scopes == v).any(axis=1)])
        together = _together(place[near[(near >= 0) & ~many[near]]])
        if len(together):
            found[v] = float(together.min())
    return found if len(found) >= LEAST else {}


def _together(places: NDArray[Any]) -> NDArray[Any]:
    """The places close to the middle one, if most are: those of a block, not of many; else none."""
    if not len(places):
        return places
    close: NDArray[Any] = places[np.abs(places - np.sort(places)[len(places) // 2]) <= SPREAD * len(places) / 2]
    return close if len(close) >= MOST * len(places) else close[:0]


def _mixed(*columns: Rows) -> NDArray[np.uint64]:
    """A hash of rows of integers."""
    total = np.full(len(columns[0]), 0x9E3779B97F4A7C15, dtype=np.uint64)
    for column in columns:
        total = (total ^ (column.astype(np.int64).astype(np.uint64) + np.uint64(0x2545F4914F6CDD1D))) \
            * np.uint64(0xBF58476D1CE4E5B9)
        total ^= total >> np.uint64(29)
    return total


def _shared(state: _State, least: int) -> NDArray[np.bool_]:
    """Whether each variable has more neighbours than `least`, far apart, with one more entry for 'none'."""
    many = _many(state.scopes, len(state.sizes), least)
    many[list(_of_blocks(state.scopes, many, state.position))] = False
    return many


def _signatures(state: _State, shared: NDArray[np.bool_]) -> NDArray[np.uint64]:
    """A hash of each variable: equal where sizes and factors are equal.

    In a factor, other variables are named by their distance, shared ones by their number. A shared variable is like no
    other.
    """
    scopes, count = state.scopes, len(state.sizes)
    total = np.zeros(count + 1, dtype=np.uint64)
    for axis in range(MAX_NDIM):
        columns = [state.tables, np.full(len(scopes), axis)]
        for other in range(MAX_NDIM):
            there, distance = scopes[:, other], scopes[:, other] - scopes[:, axis]
            named = np.where(shared[there], 2 * there + 1, 2 * distance)
            columns.append(np.where(there < 0, 1 << 40, named))
        np.add.at(total, scopes[:, axis], _mixed(*columns))
    found = _mixed(total[:count].view(np.int64), state.sizes)
    numbers = np.arange(count)
    alone = shared[:count] | (np.diff(state.position, prepend=-1) != 1) | np.isin(numbers, np.concatenate(
        [np.zeros(0, np.intp), *(blocks.ravel() for blocks in state.blocks)]))
    return np.where(alone, _mixed(numbers, numbers), found)


def _best(state: _State, shared: NDArray[np.bool_]) -> tuple[int, int, int, NDArray[np.bool_]] | None:
    """The (start, period, blocks) of the run that saves most, and `shared` again; None without runs."""
    signature = _signatures(state, shared)
    found = []
    for period in _periods(signature):
        for start, blocks in _stretches(signature, period):
            run = _phased(state, shared, start, period, blocks)
            if run is not None:
                found.append(((run[2] - 3) * period, -period, run))
    return (*max(found)[2], shared) if found else None


def _periods(signature: NDArray[np.uint64]) -> list[int]:
    """The most frequent distances between equal variables, and twice those: a factor may reach beyond one of them."""
    order = np.argsort(signature, kind="stable")
    near = signature[order][1:] == signature[order][:-1]
    distances = np.diff(order)[near]
    if not len(distances):
        return []
    values, counts = np.unique(distances, return_counts=True)
    best = np.lexsort((values, -counts * values))[:PERIODS]
    return list(dict.fromkeys(n * int(v) for n in (1, 2) for v in values[best] if n * v < len(signature)))


def _stretches(signature: NDArray[np.uint64], period: int) -> Iterator[tuple[int, int]]:
    """The (start, variables) of each stretch in which every variable is like the one a period later."""
    like = np.concatenate([[False], signature[:-period] == signature[period:], [False]])
    edges = np.flatnonzero(np.diff(like.astype(np.int8)))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if end - start >= (LEAST - 1) * period:
            yield start, end - start + period


def _phased(state: _State, shared: NDArray[np.bool_], start: int, period: int, length: int
            ) -> tuple[int, int, int] | None:
    """The run in a stretch, cut where the fewest options cross, or None."""
    middle = start + period * (length // period // 2)
    weight = np.zeros(2 * period + 1)
    within = [(column >= middle) & (column < middle + period) for column in state.scopes.T]
    inside = state.scopes[np.logical_or.reduce(within)]
    plain = (inside >= 0) & ~shared[inside]
    high = np.where(plain, inside, -1).max(axis=1)
    reach = np.arange(middle, middle + period)
    for column, counts in zip(inside.T, plain.T, strict=True):
        here = counts & (column >= middle) & (column < middle + period)
        np.maximum.at(reach, column[here] - middle, high[here])
    if (reach - np.arange(middle, middle + period) > period).any():
        return None
    for u, v in enumerate(reach.tolist(), middle):
        weight[u - middle + 1:v - middle + 1] += np.log(state.sizes[u])
    crossing = weight[:period] + weight[period:2 * period]
    for phase in np.argsort(crossing, kind="stable")[:PHASES].tolist():
        first = start + (phase + middle - start) % period
        for skip, less in ((0, 0), (1, 0), (0, 1), (1, 1)):
            blocks = (start + length - first) // period - skip - less
            if blocks >= LEAST and _repeats(state, shared, first + skip * period, period, blocks):
                return first + skip * period, period, blocks
    return None


def _placed(state: _State, shared: NDArray[np.bool_], start: int, period: int, blocks: int
            ) -> tuple[Rows, Rows, NDArray[np.bool_], NDArray[np.bool_]]:
    """For each factor: its first and last block, whether it meets variables before the run, and variables after it.

    A factor outside has first block `blocks` and last block -1. Scopes have few columns, so each is taken whole.
    """
    end, count = start + period * blocks, len(state.scopes)
    first, last = np.full(count, blocks), np.full(count, -1)
    before, after = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    for column in state.scopes.T:
        plain = (column >= 0) & ~shared[column]
        early, late = plain & (column < start), plain & (column >= end)
        inside, block = plain & ~early & ~late, (column - start) // period
        np.minimum(first, block, out=first, where=inside)
        np.maximum(last, block, out=last, where=inside)
        before |= early
        after |= late
    return first, last, before, after


def _repeats(state: _State, shared: NDArray[np.bool_], start: int, period: int, blocks: int) -> bool:
    """Whether this is a run, by exact comparison without hashes."""
    if shared[start:start + period * blocks].any():
        return False
    sizes = state.sizes[start:start + period * blocks].reshape(blocks, period)
    first, last, before, after = _placed(state, shared, start, period, blocks)
    touches = last >= 0
    if (sizes != sizes[0]).any() or (touches & ((last - first > 1) | (before & (last > 0))
                                                | (after & (first < blocks - 1)))).any():
        return False
    rows = np.flatnonzero((last >= 1) & ~after)
    scopes, block = state.scopes[rows], last[rows]
    outside = shared[scopes] | (scopes < 0)  # named by numbers that no variable of a block gets
    moved = np.where(outside, scopes + 2 * len(state.sizes), scopes - (block * period)[:, None])
    counts = np.bincount(block, minlength=blocks)[1:]
    if not counts[0] or (counts != counts[0]).any():
        return False
    columns = (*moved.T[::-1], state.tables[rows])

    def alike(order: Rows) -> bool:
        each = [column[order].reshape(blocks - 1, -1) for column in columns]
        return all((of == of[0]).all() for of in each)

    return alike(np.argsort(block, kind="stable")) or alike(np.lexsort((*columns, block)))  # mostly as they come


def _cut(state: _State, start: int, period: int, blocks: int, shared: NDArray[np.bool_]) -> tuple[_State, Rows]:
    """The state without blocks 2 .. K - 2, and the new variable that stands for each old one."""
    first, last, _, _ = _placed(state, shared, start, period, blocks)
    count, dropped = len(state.sizes), (blocks - 3) * period
    old = np.arange(count)
    gone = (old >= start + 2 * period) & (old < start + (blocks - 1) * period)
    moved = np.where(gone, start + period + (old - start) % period,
                     np.where(old >= start + 2 * period, old - dropped, old))
    stays = (last < 2) | (first == blocks - 1)
    across = (first == 0) & (last == 1)
    shift = np.append(moved, -1)
    scopes = shift[state.scopes[stays]]
    joins = state.scopes[across]
    inside = (joins >= start) & (joins < start + 2 * period)
    scopes = np.concatenate([scopes, np.where(inside, joins + period, shift[joins])])
    marks = np.concatenate([np.where(last[stays] == 1, len(state.times), state.marks[stays]),
                            np.full(len(joins), -1)])
    new = start + np.arange(3 * period).reshape(3, period)
    return replace(state, sizes=state.sizes[~gone], scopes=scopes, marks=marks, position=state.position[~gone],
                   tables=np.concatenate([state.tables[stays], state.tables[across]]),
                   blocks=(*(shift[b] for b in state.blocks), new), times=(*state.times, blocks - 2),
                   periods=(*state.periods, period)), moved
