"""Runs min-sum elimination: a program's messages for given tables, and the choice behind their minimum.

S(scope) = min over k of C_k(scope)      C_k: the sum of the recipe's tables at option k of the eliminated variable
value    = sum of the messages with an empty scope
choice   = from the tops down, argmin over k of C_k(cell), computed again instead of stored; lowest k wins. The
           choice behind a message depends on its cell alone, so equal blocks with equal cells are walked once.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autoddl.core.problem import Array, Classes
from autoddl.search.class_tables import ClassTable, JointClasses, class_table, join_classes
from autoddl.search.elimination_program import EliminationProgram, Ids, MessageRecipe, RecipePart

__all__ = ["Node", "argmin", "class_messages", "count_cells", "least_value", "messages", "option_costs", "read_choice"]

Node = tuple[int, tuple[int, ...], int]
"""The slot of a message, a cell of it, and a mark."""

BLOCK = 1 << 15
"""Cells that are worked on together: a few hundred kilobytes, which caches hold."""


def messages(program: EliminationProgram, tables: Sequence[Array]) -> list[Array]:
    """The table S of every slot over all options: the given tables, then every distinct message."""
    return [*tables, *(m.dense() for m in class_messages(program, [class_table(t) for t in tables])[len(tables):])]


def class_messages(program: EliminationProgram, tables: Sequence[ClassTable]) -> list[ClassTable]:
    """The table S of every slot, by classes."""
    values = list(tables)
    for _, recipe in program.messages():
        values.append(_message(recipe, values))
    return values


def least_value(program: EliminationProgram, values: Sequence[ClassTable]) -> float:
    """The sum of the messages with an empty scope."""
    return math.fsum(values[top.slot].core.item() for top in program.tops)


def argmin(program: EliminationProgram, values: Sequence[ClassTable]) -> Ids:
    """The choice, by position."""
    def take(node: Node) -> tuple[int, list[Node]]:
        slot, cell, _ = node
        k = int(option_costs(program.recipe_of(slot), values, cell).argmin())
        return k, [(part, there, 0) for part, there in program.parts(slot, cell, k)]

    return read_choice(program, [(top.slot, (), 0) for top in program.tops], take)


def read_choice(program: EliminationProgram, starts: Sequence[Node], take: Callable[[Node], tuple[int, list[Node]]]
                ) -> Ids:
    """The choice, by position, read from the tops down.

    A node is a message, a cell of it and a mark. For a node, `take` returns the option of
    its variable, and the nodes of the messages among its parts. Equal nodes are walked once.
    """
    choice, known = np.zeros(program.count, dtype=np.intp), dict[Node, Ids]()
    opened: dict[Node, tuple[int, list[Node]]] = {}
    for top, start in zip(program.tops, starts, strict=True):
        stack = [start]
        while stack:
            node = stack[-1]
            k, parts = opened[node] if node in opened else opened.setdefault(node, take(node))
            missing = [part for part in parts if part not in known]
            if missing:
                stack += missing
                continue
            known[node] = np.concatenate([np.array([k], dtype=np.intp), *(known[part] for part in parts)])
            stack.pop()
        choice[top.ids] = known[start]
    return choice


def option_costs(recipe: MessageRecipe, values: Sequence[ClassTable], cell: Sequence[int]) -> Array:
    """The sum C_k(cell) for every option k of the eliminated variable."""
    total = np.zeros(recipe.shape[0])
    for part in recipe.parts:
        total += values[part.slot].column([cell[a - 1] if a else slice(None) for a in part.axes])
    return total


def count_cells(program: EliminationProgram, tables: Sequence[Sequence[Classes]]) -> int:
    """The cells that `class_messages` looks at, from the classes of the tables' options alone."""
    known, cells = list(tables), 0
    for _, recipe in program.messages():
        joints = [_joint(recipe, known, u) for u in range(len(recipe.shape))]
        cells += math.prod(len(joint.first) for joint in joints)
        known.append([joint.of for joint in joints[1:]])
    return cells


def _message(recipe: MessageRecipe, values: Sequence[ClassTable]) -> ClassTable:
    """The message S(scope), over classes of the scope's options and of the eliminated variable's."""
    if not recipe.parts:
        return ClassTable(np.zeros(()), ())
    own = [p for p in recipe.parts if p.axes == (0,)]
    classes = {part.slot: values[part.slot].classes for part in recipe.parts}
    joints = [_joint(recipe, classes, u) for u in range(len(recipe.shape))]
    groups = _merged(recipe, values, joints)
    if own:
        single = np.full(len(joints[0].first), math.inf)
        total = np.zeros(recipe.shape[0])
        for part in own:
            total += values[part.slot].column([slice(None)])
        np.minimum.at(single, joints[0].of, total)
        if not groups:
            return ClassTable(np.asarray(single.min()), ())
        groups[0] = groups[0] + single.reshape([-1] + [1] * (groups[0].ndim - 1))
    return ClassTable(_minimum(groups, tuple(len(j.first) for j in joints[1:])), tuple(j.of for j in joints[1:]))


def _joint(recipe: MessageRecipe, classes: Mapping[int, Sequence[Classes]] | Sequence[Sequence[Classes]], u: int
           ) -> JointClasses:
    """The classes of local variable u that the recipe's tables, whose options have `classes`, tell apart.

    Tables over the eliminated variable alone do not count.
    """
    views = [classes[p.slot][p.axes.index(u)] for p in recipe.parts if u in p.axes and (u or len(p.axes) > 1)]
    return join_classes(views, recipe.shape[u])


def _minimum(groups: list[Array], shape: tuple[int, ...]) -> Array:
    """The minimum over the first axis of the sum of tables that are ready to add."""
    if len(groups) == 1:
        result: Array = np.asarray(groups[0].min(axis=0))
        return np.ascontiguousarray(np.broadcast_to(result, shape))
    alive = np.ones(max(len(group) for group in groups), dtype=bool)
    for group in groups:
        alive &= np.isfinite(group.min(axis=tuple(range(1, group.ndim))))
    if not alive.all():
        groups = [group[alive] for group in groups]
    out = np.full(shape, math.inf)
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


def _merged(recipe: MessageRecipe, values: Sequence[ClassTable], joints: Sequence[JointClasses]) -> list[Array]:
    """The recipe's tables, with axes in local order, ready to add; those of the eliminated variable alone are left out.

    A table whose variables are among those of another is added to it.
    """
    groups: dict[tuple[int, ...], Array] = {}
    for part in sorted((p for p in recipe.parts if p.axes != (0,)), key=lambda p: -len(p.axes)):
        axes, table = _aligned(part, values[part.slot], joints)
        home = min((g for g in groups if set(axes) <= set(g)), key=lambda g: groups[g].size, default=None)
        if home is None:
            groups[axes] = table
        else:
            groups[home] = groups[home] + _spread(table, axes, home)
    everything = tuple(range(len(recipe.shape)))
    return [_spread(table, axes, everything) for axes, table in groups.items()]


def _aligned(part: RecipePart, table: ClassTable, joints: Sequence[JointClasses]) -> tuple[tuple[int, ...], Array]:
    """A part's local variables in rising order, and its table over their classes with axes in that order."""
    order = sorted(range(len(part.axes)), key=lambda i: part.axes[i])
    core = table.core[np.ix_(*[c[joints[u].first] for c, u in zip(table.classes, part.axes, strict=True)])]
    return tuple(part.axes[i] for i in order), np.ascontiguousarray(core.transpose(order))


def _spread(table: Array, axes: tuple[int, ...], wider: tuple[int, ...]) -> Array:
    """A view of the table, with an axis of length one for every variable that it does not know."""
    sizes = itertools.chain(table.shape)
    return table.reshape([next(sizes) if a in axes else 1 for a in wider])
