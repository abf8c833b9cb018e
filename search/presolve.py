"""Drops options and shares tables, with the optimum unchanged.

    class       in each table: options with equal rows of seconds and bytes; work is done once per class
    dead        option k of variable v: in some table over v every cell of row k is forbidden
    dominated   k next to j: the same seconds as j in every cell of every table that v shares with others, at least its
                seconds in those of v alone, and nowhere fewer bytes
    alone       a variable with one option left is sliced out of every table that has another variable

Tables with equal content become one table. The options of a variable depend on its tables alone, so equal blocks stay
equal.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoddl.core.problem import Array, Classes, Factor, Problem, Table
from autoddl.search.repeated_blocks import FoldedProblem, fold_blocks

__all__ = ["Reduced", "keep_options", "presolve", "presolve_folded"]

Kept = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem; `kept[v][k]` is the original option behind its option k of variable v."""

    problem: Problem
    kept: tuple[Kept, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The choice of the original problem."""
        return tuple(kept[k] for kept, k in zip(self.kept, choice, strict=True))


def presolve(problem: Problem) -> Reduced:
    """The problem without dead and dominated options and lone variables, and with equal tables shared."""
    pool = _Pool()
    laid = [pool.intern(table) for table in problem.tables]
    factors = tuple(Factor(f.variables, laid[f.table]) for f in problem.factors)
    shared = Problem(problem.names, problem.sizes, tuple(pool.tables), factors, problem.budget, problem.fixed_seconds,
                     problem.fixed_bytes)
    return keep_options(shared, _kept(shared))


def presolve_folded(problem: Problem) -> tuple[FoldedProblem, Reduced]:
    """The short problem of a problem, and the short problem reduced."""
    pool = _Pool()
    numbers = np.array([pool.intern(table) for table in problem.tables], dtype=np.intp)
    short = fold_blocks(problem, tuple(pool.tables), numbers)
    kept = _kept(short.problem)
    for fold in short.folds:  # what stands for equal blocks keeps equal options
        for alike in zip(*fold.blocks, strict=True):
            whole = tuple(sorted({k for v in alike for k in kept[v]}))
            for v in alike:
                kept[v] = whole
    return short, keep_options(short.problem, kept)


def keep_options(problem: Problem, kept: Sequence[Kept]) -> Reduced:
    """The problem with the kept options only. Its tables must be distinct."""
    sliced: dict[tuple[int, tuple[Kept, ...]], int] = {}
    result, final = [], _Pool()
    for factor in problem.factors:
        key = (factor.table, tuple(kept[v] for v in factor.variables))
        if key not in sliced:
            sliced[key] = final.intern(_slice(problem.tables[factor.table], key[1]))
        result.append(Factor(_live(factor.variables, kept), sliced[key]))
    small = Problem(problem.names, tuple(len(k) for k in kept), tuple(final.tables), tuple(result), problem.budget,
                    problem.fixed_seconds, problem.fixed_bytes)
    return Reduced(small, tuple(kept))


@dataclass(slots=True)
class _Pool:
    """Distinct tables, found by content."""

    tables: list[Table] = field(default_factory=list)
    index: dict[tuple[object, ...], int] = field(default_factory=dict)

    def intern(self, table: Table) -> int:
        """The number of a table with this content."""
        merged = _merged(table)
        key = (merged.core[0].shape, *(a.tobytes() for a in (*merged.core, *merged.classes)))
        if key not in self.index:
            self.index[key] = len(self.tables)
            self.tables.append(merged)
        return self.index[key]


def _merged(table: Table) -> Table:
    """The table with one class for all options with equal rows; classes are numbered by their first option."""
    core, classes = table.core, list(table.classes)
    told = [i for i, one in enumerate(core) if one.any()]
    for axis in range(core[0].ndim):
        used = list(dict.fromkeys(classes[axis].tolist()))
        rows, known = _row_names([core[i] for i in told], axis) or [b""] * core[0].shape[axis], dict[bytes, int]()
        new = {c: known.setdefault(rows[c], len(known)) for c in used}
        first = {n: c for c, n in reversed(new.items())}
        if len(first) < len(rows) or list(first) != list(range(len(first)))[::-1] or used != sorted(used):
            core = (core[0].take([first[n] for n in range(len(first))], axis),
                    core[1].take([first[n] for n in range(len(first))], axis),
                    core[2].take([first[n] for n in range(len(first))], axis))
            classes[axis] = np.array([new[c] for c in classes[axis].tolist()], dtype=np.intp)
    return table if core[0] is table.core[0] else Table(*core, classes)


def _row_names(arrays: Sequence[Array], axis: int) -> list[bytes]:
    """By class along an axis, the bytes of its numbers in all arrays, which are equal for equal rows."""
    rows = [np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1) for one in arrays]
    whole = np.ascontiguousarray(np.concatenate(rows, axis=1)) if rows else np.zeros((0, 1))
    found: list[bytes] = whole.view(f"V{whole.shape[1] * whole.itemsize}").ravel().tolist()
    return found


def _kept(problem: Problem) -> list[Kept]:
    """The options of every variable that stay; variables with the same tables share the work."""
    views: list[Counter[tuple[int, int]]] = [Counter() for _ in problem.sizes]
    for factor in problem.factors:
        for axis, v in enumerate(factor.variables):
            views[v][factor.table, axis] += 1
    memo: dict[tuple[int, tuple[tuple[tuple[int, int], int], ...]], Kept] = {}
    result = []
    for size, view in zip(problem.sizes, views, strict=True):
        key = (size, tuple(sorted(view.items())))
        if key not in memo:
            memo[key] = _distinct(size, [(problem.tables[t], axis, times) for (t, axis), times in key[1]])
        result.append(memo[key])
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """Seconds and bytes of the options of a variable in one table, a row per class."""

    seconds: Array
    nbytes: Array
    classes: Classes
    alone: bool

    @classmethod
    def of(cls, table: Table, axis: int) -> "_View":
        rows = [np.moveaxis(a, axis, 0).reshape(a.shape[axis], -1) for a in table.core]
        return cls(rows[0], np.concatenate(rows[1:], axis=1), table.classes[axis], table.core[0].ndim == 1)


def _distinct(size: int, tables: Sequence[tuple[Table, int, int]]) -> Kept:
    """The options that are neither dead nor dominated; one stays even where all are dead.

    `tables` are (table, axis of the variable, how many factors have it there).
    """
    views = [_View.of(table, axis) for table, axis, _ in tables]
    dead = np.zeros(size, dtype=bool)
    own = np.zeros(size)
    codes: list[Classes] = []
    for view, (_, _, times) in zip(views, tables, strict=True):
        never = np.asarray(np.isinf(view.seconds).all(axis=1))
        dead |= never[view.classes]
        if view.alone:
            own += times * view.seconds[view.classes, 0]
        else:
            known: dict[bytes, int] = {}
            codes.append(np.array([known.setdefault(row, len(known)) for row in _row_names([view.seconds], 0)]
                                  )[view.classes])
    groups: dict[tuple[int, ...], list[int]] = {}
    alike = np.stack(codes, axis=1).tolist() if codes else [()] * size
    for k in np.flatnonzero(~dead).tolist():
        group = groups.setdefault(tuple(alike[k]), [])
        if any(_covers(views, own, j, k) for j in group):
            continue
        group[:] = [j for j in group if not _covers(views, own, k, j)] + [k]
    return tuple(sorted(k for group in groups.values() for k in group)) or (0,)


def _covers(views: Sequence[_View], own: Array, j: int, k: int) -> bool:
    """Whether j costs no more than k, if both have the same seconds in every table shared with other variables."""
    if own[j] > own[k]:
        return False
    return all((v.nbytes[v.classes[j]] <= v.nbytes[v.classes[k]]).all() for v in views)


def _live(variables: tuple[int, ...], kept: Sequence[Kept]) -> tuple[int, ...]:
    """The variables that still have a choice; the last one where none has."""
    return tuple(v for v in variables if len(kept[v]) > 1) or variables[-1:]


def _slice(table: Table, kept: tuple[Kept, ...]) -> Table:
    """The part of a table that the kept options can reach, without axes of length one."""
    used: list[NDArray[np.intp]] = []
    classes: list[Classes] = []
    for axis, options in zip(table.classes, kept, strict=True):
        picked = axis[list(options)]
        found = np.zeros(int(axis.max()) + 1, dtype=bool)
        found[picked] = True
        used.append(np.flatnonzero(found))
        if len(options) > 1:
            classes.append((np.cumsum(found) - 1)[picked])
    shape = tuple(len(rows) for rows, options in zip(used, kept, strict=True) if len(options) > 1) or (1,)
    seconds, retained, transient = (values.reshape(shape) for values in table.part(used))
    return Table(seconds, retained, transient, classes or [np.zeros(1, dtype=np.intp)])
