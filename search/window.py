"""Closes the gap under a memory cap: looks at every choice whose seconds + lam * bytes is near the least.

    need(cell)   = the largest slack that is left for a cell of a message in any choice within the window
    labels(cell) = pareto of the union over k of combine(parts' labels at option k), within need(cell)

A choice within the cap that takes fewer than T seconds is near the least at every multiplier lam at once:

    seconds + lam * bytes < T + lam * cap        so its slack above V(lam) is within T + lam * cap - V(lam)

One multiplier rules out what is slow for its bytes. A higher one rules out what is too heavy to get within the cap in
time, a lower one what is needlessly light. So the best choice within the cap among the labels is optimal if it takes no
more than T. Otherwise T is a lower bound, as long as no label was thinned out. Cells are met from the roots down, and
labels are made upward, only for these cells, once for all equal blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.core.problem import Array
from autoddl.search.class_tables import ClassTable
from autoddl.search.elimination import Node, least_value, option_costs, read_choice
from autoddl.search.elimination_program import EliminationProgram, Ids, MessageRecipe
from autoddl.search.labels import Labels, combine, no_labels, single, thin, union
from autoddl.search.limits import Clock
from autoddl.search.relaxations import Space, price_classes

__all__ = ["Priced", "WindowResult", "priced", "search_window"]

Cell = tuple[int, ...]
Needs = list[dict[Cell, Array]]


@dataclass(frozen=True, slots=True, eq=False)
class Priced:
    """The messages of several multipliers, the first of which gave the bound.

        values    by multiplier, its messages
        bounds    by multiplier, V(lam) - lam * cap
        scales    by multiplier, the size of a total, for judging rounding
    """

    values: tuple[list[ClassTable], ...]
    bounds: Array
    scales: Array


def priced(space: Space, lams: Sequence[float], tau: float, cap: float) -> Priced:
    """The messages of several multipliers for cells up to threshold `tau` and `cap` retained bytes."""
    values = tuple([space.messages(lam, tau) for lam in reversed(lams)][::-1])
    least = np.array([least_value(space.program, each) for each in values])
    return Priced(values, least - np.array(lams) * cap, np.abs(least))


@dataclass(frozen=True, slots=True)
class WindowResult:
    """The best choice within the cap, if any, and whether every choice of the window was looked at.

    `share` says where the cap is between the lightest label (0) and the heaviest (1).
    """

    choice: Ids | None
    complete: bool
    share: float


@dataclass(frozen=True, slots=True)
class _Pass:
    """The tables and messages of some multipliers, and the limits of a window.

        program     the elimination
        values      by multiplier, its messages
        ahead       by multiplier, how far its bound is below the best one: what its slack may be more
        seconds     tables of seconds alone
        retained    tables of retained bytes alone
        scale       size of a total, for judging rounding
        keep        labels that a cell keeps at most
        share       where between the lightest and the heaviest label they are kept most densely
        clock       the effort that may be used
    """

    program: EliminationProgram
    values: tuple[list[ClassTable], ...]
    ahead: Array
    seconds: list[ClassTable]
    retained: list[ClassTable]
    scale: float
    keep: int
    share: float
    clock: Clock


def search_window(
    space: Space, found: Priced, tau: float, cap: float, window: float, keep: int, share: float, clock: Clock
) -> WindowResult:
    """The best choice within `cap` retained bytes of those that take at most `window` more than the first bound.

    Cells keep at most `keep` labels, most densely near `share` of their bytes. Raises Exhausted if the clock expires.
    """
    program, tables, ahead = space.program, space.problem.tables, found.bounds[0] - found.bounds
    seconds = [price_classes(t, 0.0, tau) for t in tables]
    retained = [ClassTable(t.core[1], t.classes) for t in tables]
    run = _Pass(program, found.values, ahead, seconds, retained, float(found.scales[0]), keep, share, clock)
    rooms = window + ahead + 1e-12 * found.scales
    needs = _needs(run, rooms)
    store, complete = _labels(run, needs)
    roots = [store[top.slot - program.base][()] for top in program.tops]
    whole = combine(single(0.0, 0.0, np.zeros(len(rooms)), 0), roots, rooms, run.scale, clock)
    there = _share(whole.retained, cap, share)
    whole = whole[whole.retained <= cap]
    if not len(whole):
        return WindowResult(None, complete, there)
    return WindowResult(_trace(program, store, whole.back[int(whole.seconds.argmin())].tolist()), complete, there)


def _share(retained: Array, cap: float, otherwise: float) -> float:
    """The place of the cap between the least (0) and the most bytes (1)."""
    if not len(retained):
        return otherwise
    low, high = retained[0], retained[-1]
    return min(1.0, max(0.0, float((cap - low) / (high - low)))) if high > low else otherwise


def _needs(run: _Pass, rooms: Array) -> Needs:
    """The slack need(cell) of every message at every multiplier, from the roots down."""
    program = run.program
    needs: Needs = [{} for _ in program.computed]
    for top in program.tops:
        needs[top.slot - program.base][()] = rooms
    for slot, recipe in reversed(program.messages()):
        for cell, room in needs[slot - program.base].items():
            run.clock.spend(recipe.shape[0])
            for k, slack in _options(run, recipe, cell, room):
                for target, index in _parts(program, recipe, cell, k):
                    known = needs[target]
                    known[index] = np.maximum(known[index], room - slack) if index in known else room - slack
    return needs


def _labels(run: _Pass, needs: Needs) -> tuple[list[dict[Cell, Labels]], bool]:
    """The labels of every cell needed, upward, and whether none had to be thinned."""
    store: list[dict[Cell, Labels]] = [{} for _ in needs]
    complete = True
    for slot, recipe in run.program.messages():
        here = slot - run.program.base
        for cell, room in needs[here].items():
            full = _cell(run, recipe, cell, room, store)
            store[here][cell] = thin(full, run.ahead, run.keep, run.share)
            complete &= len(full) <= run.keep
    return store, complete


def _cell(run: _Pass, recipe: MessageRecipe, cell: Cell, room: Array, store: Sequence[dict[Cell, Labels]]) -> Labels:
    """The labels of one cell."""
    sets = []
    for k, slack in _options(run, recipe, cell, room):
        seconds = retained = 0.0
        for part in recipe.parts:
            if part.slot < run.program.base:
                index = _index(part.axes, cell, k)
                seconds += run.seconds[part.slot].at(index)
                retained += run.retained[part.slot].at(index)
        parts = [store[target][index] for target, index in _parts(run.program, recipe, cell, k)]
        sets.append(combine(single(seconds, retained, slack, k), parts, room, run.scale, run.clock))
    return union(sets, run.scale) if sets else no_labels(len(_parts(run.program, recipe, cell, 0)), len(room))


def _options(run: _Pass, recipe: MessageRecipe, cell: Cell, room: Array) -> list[tuple[int, Array]]:
    """The options of the eliminated variable that are within the room at every multiplier, each with its slacks."""
    costs = np.stack([option_costs(recipe, values, cell) for values in run.values], axis=1)
    slack = costs - costs.min(axis=0)
    return [(k, slack[k]) for k in np.flatnonzero((slack <= room).all(axis=1)).tolist()]


def _parts(program: EliminationProgram, recipe: MessageRecipe, cell: Cell, k: int) -> list[tuple[int, Cell]]:
    """The messages among a recipe's parts, and the cell of each."""
    return [(p.slot - program.base, _index(p.axes, cell, k)) for p in recipe.parts if p.slot >= program.base]


def _index(axes: tuple[int, ...], cell: Cell, k: int) -> Cell:
    return tuple([cell[a - 1] if a else k for a in axes])


def _trace(program: EliminationProgram, store: Sequence[dict[Cell, Labels]], rows: Sequence[int]) -> Ids:
    """The choice, by position, behind one label of every top: a node's mark is the label taken."""
    def take(node: Node) -> tuple[int, list[Node]]:
        slot, cell, row = node
        labels = store[slot - program.base][cell]
        k = int(labels.option[row])
        parts = program.parts(slot, cell, k)
        return k, [(part, there, mark) for (part, there), mark in zip(parts, labels.back[row].tolist(), strict=True)]

    return read_choice(program, [(top.slot, (), row) for top, row in zip(program.tops, rows, strict=True)], take)
