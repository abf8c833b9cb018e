"""Fewer options and shared tables, with the optimum unchanged.

    dead        option k of variable v: in some table over v every cell of row k is forbidden
    duplicate   k next to j: the same seconds in every cell of every table over v, and nowhere fewer bytes than j
    alone       a variable with one option left is sliced out of every table that has another variable

Tables with equal content become one table. What is done to a variable depends on its tables alone, so equal blocks
stay equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoddl.problem import Factor, Problem, Table

__all__ = ["Reduced", "reduce"]

Kept = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    """A smaller problem; `kept[v][k]` is the original option behind its option k of variable v."""

    problem: Problem
    kept: tuple[Kept, ...]

    def restore(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The original problem's choice."""
        return tuple(kept[k] for kept, k in zip(self.kept, choice, strict=True))


def reduce(problem: Problem) -> Reduced:
    """Drop dead and duplicate options, slice out variables that stand alone, share equal tables."""
    pool = _Pool()
    laid = [pool.intern(table) for table in problem.tables]
    factors = [Factor(f.variables, laid[f.table]) for f in problem.factors]
    kept = _kept(problem, factors, pool.tables)
    sliced: dict[tuple[int, tuple[Kept, ...]], int] = {}
    result = []
    final = _Pool()
    for factor in factors:
        key = (factor.table, tuple(kept[v] for v in factor.variables))
        if key not in sliced:
            sliced[key] = final.intern(_slice(pool.tables[factor.table], key[1]))
        result.append(Factor(_live(factor.variables, kept), sliced[key]))
    small = Problem(
        problem.names,
        tuple(len(k) for k in kept),
        tuple(final.tables),
        tuple(result),
        problem.budget,
        problem.fixed_seconds,
        problem.fixed_bytes,
    )
    return Reduced(small, tuple(kept))


@dataclass(slots=True)
class _Pool:
    """Tables by content."""

    tables: list[Table] = field(default_factory=list)
    index: dict[tuple[tuple[int, ...], bytes, bytes, bytes], int] = field(default_factory=dict)

    def intern(self, table: Table) -> int:
        key = (table.shape, table.seconds.tobytes(), table.retained.tobytes(), table.transient.tobytes())
        if key not in self.index:
            self.index[key] = len(self.tables)
            self.tables.append(table)
        return self.index[key]


def _kept(problem: Problem, factors: Sequence[Factor], tables: Sequence[Table]) -> list[Kept]:
    """The options of every variable that stay; variables with the same tables share the work."""
    views: list[set[tuple[int, int]]] = [set() for _ in problem.sizes]
    for factor in factors:
        for axis, v in enumerate(factor.variables):
            views[v].add((factor.table, axis))
    memo: dict[tuple[int, tuple[tuple[int, int], ...]], Kept] = {}
    result = []
    for size, view in zip(problem.sizes, views, strict=True):
        key = (size, tuple(sorted(view)))
        if key not in memo:
            memo[key] = _distinct(size, [(tables[t], axis) for t, axis in key[1]])
        result.append(memo[key])
    return result


def _distinct(size: int, views: Sequence[tuple[Table, int]]) -> Kept:
    """The options that are neither dead nor duplicate; one stays even where all are dead."""

    def rows(pick: Callable[[Table], NDArray[np.float64]]) -> NDArray[np.float64]:
        columns = [np.moveaxis(pick(table), axis, 0).reshape(size, -1) for table, axis in views]
        return np.ascontiguousarray(np.concatenate([np.zeros((size, 0)), *columns], axis=1))

    dead = np.zeros(size, dtype=bool)
    for table, axis in views:
        dead |= np.isinf(np.moveaxis(table.seconds, axis, 0).reshape(size, -1)).all(axis=1)
    seconds = rows(lambda t: t.seconds)
    nbytes = np.concatenate([rows(lambda t: t.retained), rows(lambda t: t.transient)], axis=1)
    groups: dict[bytes, list[int]] = {}
    for k in np.flatnonzero(~dead).tolist():
        group = groups.setdefault(seconds[k].tobytes(), [])
        if any((nbytes[j] <= nbytes[k]).all() for j in group):
            continue
        group[:] = [j for j in group if not (nbytes[k] <= nbytes[j]).all()] + [k]
    return tuple(sorted(k for group in groups.values() for k in group)) or (0,)


def _live(variables: tuple[int, ...], kept: Sequence[Kept]) -> tuple[int, ...]:
    """The variables that still have a choice; the last one where none has."""
    return tuple(v for v in variables if len(kept[v]) > 1) or variables[-1:]


def _slice(table: Table, kept: tuple[Kept, ...]) -> Table:
    """The part of a table that the kept options can reach, without axes of length one."""
    shape = tuple(len(k) for k in kept if len(k) > 1) or (1,)
    index = np.ix_(*kept)
    return Table(*(a[index].reshape(shape) for a in (table.seconds, table.retained, table.transient)))
