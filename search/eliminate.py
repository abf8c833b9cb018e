"""Min-sum elimination in numbers: a program's messages for given tables, and the choice behind their minimum.

S(scope) = min over k of C_k(scope)      C_k: the sum of the recipe's tables at option k of the eliminated variable
value    = sum of the messages with an empty scope
choice   = walking back, argmin over k of C_k(choice of the scope), computed again instead of stored; lowest k wins
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoddl.problem import Array
from autoddl.search.program import Part, Program, Recipe

__all__ = ["argmin", "column", "messages", "value"]

BLOCK = 1 << 15
"""Cells that are worked on together: a few hundred kilobytes, which caches hold."""


def messages(program: Program, tables: Sequence[Array]) -> list[Array]:
    """S for every slot: the given tables, then every distinct message."""
    values = list(tables)
    for _, recipe in program.messages():
        values.append(_message(recipe, values))
    return values


def value(program: Program, values: Sequence[Array]) -> float:
    """The sum of the messages with an empty scope."""
    return math.fsum(values[program.slots[root]].item() for root in program.roots)


def argmin(program: Program, values: Sequence[Array]) -> tuple[int, ...]:
    """The choice: one column per variable, and one only for variables alike in recipe and surroundings."""
    choice = [0] * len(program.steps)
    memo: dict[tuple[int, tuple[int, ...]], int] = {}
    for step in reversed(program.steps):
        cell = tuple([choice[u] for u in step.scope])
        key = (step.recipe, cell)
        if key not in memo:
            memo[key] = int(column(program.recipes[step.recipe], values, cell).argmin())
        choice[step.variable] = memo[key]
    return tuple(choice)


def column(recipe: Recipe, values: Sequence[Array], cell: Sequence[int]) -> Array:
    """C_k(cell) for every option k of the eliminated variable."""
    total = np.zeros(recipe.shape[0])
    for part in recipe.parts:
        total += values[part.slot][tuple([cell[a - 1] if a else slice(None) for a in part.axes])]
    return total


def _message(recipe: Recipe, values: Sequence[Array]) -> Array:
    """S(scope), over blocks of options of the eliminated variable."""
    if not recipe.parts:
        return np.zeros(())
    groups = _merged(recipe, values)
    if len(groups) == 1:
        result: Array = groups[0].min(axis=0)
        return result
    alive = np.ones(recipe.shape[0], dtype=bool)
    for group in groups:
        alive &= np.isfinite(group.min(axis=tuple(range(1, group.ndim))))
    if not alive.all():
        groups = [group[alive] for group in groups]
    out = np.full(recipe.shape[1:], math.inf)
    step = max(1, BLOCK // out.size)
    buffer = np.empty((step, *out.shape))
    for start in range(0, int(alive.sum()), step):
        blocks = [group[start : start + step] for group in groups]
        work = buffer[: len(blocks[0])]
        np.add(blocks[0], blocks[1], out=work)
        for block in blocks[2:]:
            work += block
        np.minimum(out, work[0] if len(work) == 1 else work.min(axis=0), out=out)
    return out


def _merged(recipe: Recipe, values: Sequence[Array]) -> list[Array]:
    """The recipe's tables with axes in local order, added where one's variables are among another's, ready to add."""
    groups: dict[tuple[int, ...], Array] = {}
    for part in sorted(recipe.parts, key=lambda p: -len(p.axes)):
        axes, table = _aligned(part, values[part.slot])
        home = min((g for g in groups if set(axes) <= set(g)), key=lambda g: groups[g].size, default=None)
        if home is None:
            groups[axes] = table
        else:
            groups[home] = groups[home] + _spread(table, axes, home)
    everything = tuple(range(len(recipe.shape)))
    return [_spread(table, axes, everything) for axes, table in groups.items()]


def _aligned(part: Part, table: Array) -> tuple[tuple[int, ...], Array]:
    """A part's local variables in rising order, and its table with axes in that order."""
    order = sorted(range(len(part.axes)), key=lambda i: part.axes[i])
    return tuple(part.axes[i] for i in order), np.ascontiguousarray(table.transpose(order))


def _spread(table: Array, axes: tuple[int, ...], wider: tuple[int, ...]) -> Array:
    """A view with an axis of length one for every variable that the table does not know."""
    sizes = itertools.chain(table.shape)
    return table.reshape([next(sizes) if a in axes else 1 for a in wider])
