"""A cost network: one option x_i is picked for every variable i, and every factor f charges the cell of its table.

    seconds(x)   = fixed_seconds + sum over f of f.seconds[x]        infinite where a combination is forbidden
    retained(x)  = sum over f of f.retained[x]                       bytes that are live at the same time: they add
    transient(x) = max over f of f.transient[x]                      bytes that are live briefly: the most counts
    nbytes(x)    = fixed_bytes + retained(x) + transient(x)          must be <= budget, where there is a budget

A solver minimises seconds(x) subject to nbytes(x) <= budget. Every solver is tested against the functions here. Factors
of repeated blocks name the same table, so a solver can see the repetition in the numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import MAX_NDIM, Array, Classes, Table
from autoddl.core.errors import InputError

__all__ = ["MAX_NDIM", "Array", "Classes", "Factor", "FactorArrays", "Problem", "Solution", "Table"]

EXACT = 1e-9
"""A solution whose relative distance to its bound is at most this is optimal: sums round."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One table over some variables: the options of `variables[j]` are axis j of table number `table`."""

    variables: tuple[int, ...]
    table: int


@dataclass(frozen=True, slots=True, eq=False)
class FactorArrays:
    """The factors of a problem as arrays.

    Factor i is table `tables[i]` over the variables `scopes[i]`: a row of three, filled up with -1. For every table
    that some factor uses, `groups` has (table, rows of `scopes`).
    """

    scopes: NDArray[np.intp]
    tables: NDArray[np.intp]
    groups: tuple[tuple[int, NDArray[np.intp]], ...]

    @classmethod
    def of(cls, factors: Sequence[Factor]) -> "FactorArrays":
        """The arrays of `factors`."""
        scopes = np.array([f.variables + (-1,) * (MAX_NDIM - len(f.variables)) for f in factors], dtype=np.intp)
        tables = np.array([f.table for f in factors], dtype=np.intp)
        scopes, rows = scopes.reshape(-1, MAX_NDIM), np.argsort(tables, kind="stable")
        ends = np.flatnonzero(np.diff(tables[rows], append=-1)) + 1
        parts = [rows[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if len(rows) else []
        return cls(scopes, tables, tuple((int(tables[part[0]]), scopes[part]) for part in parts))


@dataclass(frozen=True, eq=False)
class Problem:
    """A cost network. Raises InputError where its parts do not fit each other.

        names            of the variables
        sizes            options of each variable
        tables           the distinct tables
        factors          which table is over which variables
        budget           bytes that a choice may take; None for any number
        fixed_seconds    seconds that every choice costs
        fixed_bytes      bytes that every choice takes
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    tables: tuple[Table, ...]
    factors: tuple[Factor, ...]
    budget: float | None = None
    fixed_seconds: float = 0.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise InputError(f"every variable has one name and one size: {len(self.names)} and {len(self.sizes)}")
        if any(size < 1 for size in self.sizes):
            raise InputError(f"variable {self.names[[s < 1 for s in self.sizes].index(True)]!r} has no options")
        self._check()

    def _check(self) -> None:
        """Raise InputError unless every factor has a table of the right shape over distinct variables."""
        if any(len(f.variables) > MAX_NDIM for f in self.factors):
            raise InputError(f"a factor is over at most {MAX_NDIM} variables")
        scopes, count = self.arrays.scopes, len(self.sizes)
        twice = np.zeros(len(scopes), dtype=bool)
        for a, b in ((0, 1), (0, 2), (1, 2)):
            twice |= (scopes[:, a] == scopes[:, b]) & (scopes[:, a] >= 0)
        shorter = np.array([len(f.variables) for f in self.factors], dtype=np.intp) != (scopes >= 0).sum(axis=1)
        wrong = np.flatnonzero(twice | shorter | (scopes >= count).any(axis=1))
        if len(wrong):
            raise InputError(f"{self.factors[wrong[0]]} names a variable twice, or one outside 0..{count - 1}")
        sizes = np.array([*self.sizes, 0], dtype=np.intp)
        for table, rows in self.arrays.groups:
            if not 0 <= table < len(self.tables):
                raise InputError(f"a factor names table {table}: a table outside 0..{len(self.tables) - 1}")
            shape = self.tables[table].shape
            given = sizes[rows]
            expected = np.array(shape + (0,) * (MAX_NDIM - len(shape)))
            wrong = np.flatnonzero((given != expected).any(axis=1))
            if len(wrong):
                row = given[wrong[0]]
                scope, needed = rows[wrong[0]][row > 0].tolist(), tuple(row[row > 0].tolist())
                raise InputError(f"table {table} is over variables {scope}: that needs a table of shape {needed}, "
                                 f"not {shape}")

    @cached_property
    def arrays(self) -> FactorArrays:
        """The factors as arrays."""
        return FactorArrays.of(self.factors)

    def within(self, budget: float | None) -> "Problem":
        """This problem under another budget; nothing is checked or computed again."""
        made = replace(self, factors=(), budget=budget)
        made.__dict__.update(factors=self.factors, arrays=self.arrays)
        return made

    def cells(self, choice: Sequence[int]) -> Iterator[tuple[Table, tuple[int, ...]]]:
        """(table, the cell of it that `choice` picks) of every factor."""
        if len(choice) != len(self.sizes):
            raise InputError(f"a choice names one option per variable: {len(self.sizes)}, not {len(choice)}")
        for factor in self.factors:
            yield self.tables[factor.table], tuple([choice[v] for v in factor.variables])

    def totals(self, choice: Sequence[int] | NDArray[np.intp]) -> tuple[float, float, float]:
        """(seconds(x), retained(x), transient(x)) of the choice x; InputError unless it has an option per variable."""
        if len(choice) != len(self.sizes):
            raise InputError(f"a choice names one option per variable: {len(self.sizes)}, not {len(choice)}")
        options, found = np.asarray(choice, dtype=np.intp), []
        for number, scopes in self.arrays.groups:
            table = self.tables[number]
            cells = [c[options[scopes[:, axis]]] for axis, c in enumerate(table.classes)]
            found.append(np.stack(table.pick(cells)))
        seconds, retained, transient = np.concatenate(found, axis=1) if found else np.zeros((3, 0))
        return (self.fixed_seconds + float(seconds.sum()), float(retained.sum()),
                float(transient.max(initial=0.0)))

    def cost(self, choice: Sequence[int]) -> float:
        """seconds(x) of the choice x."""
        return self.totals(choice)[0]

    def retained(self, choice: Sequence[int]) -> float:
        """retained(x) of the choice x, in bytes."""
        return self.totals(choice)[1]

    def transient(self, choice: Sequence[int]) -> float:
        """transient(x) of the choice x, in bytes."""
        return self.totals(choice)[2]

    def nbytes(self, choice: Sequence[int]) -> float:
        """nbytes(x) of the choice x."""
        _, retained, transient = self.totals(choice)
        return self.fixed_bytes + retained + transient

    def is_feasible(self, choice: Sequence[int]) -> bool:
        """Whether the choice meets no forbidden combination and is within the budget."""
        seconds, retained, transient = self.totals(choice)
        fits = self.budget is None or self.fixed_bytes + retained + transient <= self.budget
        return seconds < math.inf and fits

    def save(self, path: str | Path) -> None:
        """Write the problem as one npz file."""
        seconds, retained, transient = (
            np.concatenate([np.zeros(0)] + [getattr(t, name).ravel() for t in self.tables])
            for name in ("seconds", "retained", "transient")
        )
        budget = math.nan if self.budget is None else self.budget
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                names=np.array(self.names, dtype=np.str_),
                sizes=np.array(self.sizes, dtype=np.int64),
                shapes=_padded([t.shape for t in self.tables]),
                scopes=_padded([f.variables for f in self.factors]),
                laid=np.array([f.table for f in self.factors], dtype=np.int64),
                scalars=np.array([budget, self.fixed_seconds, self.fixed_bytes]),
                seconds=seconds,
                retained=retained,
                transient=transient,
            )

    @classmethod
    def load(cls, path: str | Path) -> "Problem":
        """The problem that `save` wrote to `path`."""
        with np.load(path, allow_pickle=False) as data:
            shapes = [tuple(int(n) for n in row if n >= 0) for row in data["shapes"]]
            ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]
            parts = [np.split(data[name], ends) for name in ("seconds", "retained", "transient")]
            tables = tuple(Table(*(p.reshape(s) for p in three)) for s, *three in zip(shapes, *parts, strict=False))
            scopes = [tuple(int(v) for v in row if v >= 0) for row in data["scopes"]]
            factors = tuple(Factor(scope, int(t)) for scope, t in zip(scopes, data["laid"], strict=True))
            budget, fixed_seconds, fixed_bytes = (float(x) for x in data["scalars"])
            names, sizes = tuple(str(n) for n in data["names"]), tuple(int(n) for n in data["sizes"])
        return cls(names, sizes, tables, factors, None if math.isnan(budget) else budget, fixed_seconds, fixed_bytes)


@dataclass(frozen=True, slots=True)
class Solution:
    """A choice, its cost, and a proven lower bound on the cost of every choice.

        choice     the option of each variable
        seconds    of the choice
        nbytes     of the choice
        bound      seconds that no choice within the budget is below
        proof      how the bound was proved
        solver     name of the solver
        price      seconds that one more byte of budget would save, about
    """

    choice: tuple[int, ...]
    seconds: float
    nbytes: float
    bound: float
    proof: str
    solver: str
    price: float = 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the choice reaches its bound, but for rounding."""
        return self.seconds <= self.bound + EXACT * abs(self.bound)

    @property
    def gap(self) -> float:
        """The fraction of the seconds that a better choice could save at most."""
        return 0.0 if self.is_optimal else (self.seconds - self.bound) / abs(self.seconds)

    def __str__(self) -> str:
        verdict = "optimal" if self.is_optimal else f"at most {self.gap:.3%} above the optimum"
        return f"{self.seconds:.6g} s, {self.nbytes / 1e9:.4g} GB, {verdict} ({self.solver}: {self.proof})"


def _padded(rows: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Tuples of up to three numbers as rows of three, filled up with -1."""
    return np.array([row + (-1,) * (MAX_NDIM - len(row)) for row in rows], dtype=np.int64).reshape(-1, MAX_NDIM)
