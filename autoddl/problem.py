"""A cost network: pick one option x_i for every variable i; every factor f charges the cell of its table.

    seconds(x)   = fixed_seconds + sum over f of f.seconds[x]        infinite where a combination is forbidden
    retained(x)  = sum over f of f.retained[x]                       bytes that are held at the same time: they add
    transient(x) = max over f of f.transient[x]                      bytes held for a moment: only the worst counts
    nbytes(x)    = fixed_bytes + retained(x) + transient(x)          must be <= budget, where there is a budget

A solver minimises seconds(x) subject to nbytes(x) <= budget; these functions are what every solver is tested against.
Factors of repeated blocks name the same table, so repetition is there to be seen in the numbers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autoddl.errors import InputError
from autoddl.table import MAX_NDIM, Array, Classes, Table

__all__ = ["Array", "Classes", "Factor", "Problem", "Solution", "Table"]

EXACT = 1e-9
"""A solution this close to its bound, relatively, is optimal: the rest is the rounding of sums."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One table laid over variables: axis j of the table is the option of `variables[j]`."""

    variables: tuple[int, ...]
    table: int


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Variables with their numbers of options, tables, and the factors that lay tables over variables."""

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
        known: set[tuple[int, ...]] = set()
        for factor in self.factors:
            scope = factor.variables
            if min(scope, default=-1) < 0 or max(scope) >= len(self.sizes) or len(set(scope)) != len(scope):
                raise InputError(f"{factor} names a variable twice, or one outside 0..{len(self.sizes) - 1}")
            kind = (factor.table, *[self.sizes[v] for v in scope])
            if kind not in known:
                self._check(factor)
                known.add(kind)

    def _check(self, factor: Factor) -> None:
        if not 0 <= factor.table < len(self.tables):
            raise InputError(f"{factor} names a table outside 0..{len(self.tables) - 1}")
        expected = tuple(self.sizes[v] for v in factor.variables)
        if self.tables[factor.table].shape != expected:
            raise InputError(f"{factor} needs a table of shape {expected}, not {self.tables[factor.table].shape}")

    def cells(self, choice: Sequence[int]) -> Iterator[tuple[Table, tuple[int, ...]]]:
        """Every factor's table, and the cell of it that `choice` picks."""
        if len(choice) != len(self.sizes):
            raise InputError(f"a choice names one option per variable: {len(self.sizes)}, not {len(choice)}")
        for factor in self.factors:
            yield self.tables[factor.table], tuple([choice[v] for v in factor.variables])

    def totals(self, choice: Sequence[int]) -> tuple[float, float, float]:
        """(seconds, retained, transient), summed without rounding on the way."""
        if len(choice) != len(self.sizes):
            raise InputError(f"a choice names one option per variable: {len(self.sizes)}, not {len(choice)}")
        known: dict[tuple[int, ...], tuple[float, float, float]] = {}
        found = []
        for factor in self.factors:
            key = (factor.table, *[choice[v] for v in factor.variables])
            if key not in known:
                known[key] = self.tables[key[0]].at(key[1:])
            found.append(known[key])
        seconds, retained, transient = zip(*found, strict=True) if found else ((), (), ())
        return self.fixed_seconds + math.fsum(seconds), math.fsum(retained), max(transient, default=0.0)

    def cost(self, choice: Sequence[int]) -> float:
        """seconds(x)"""
        return self.totals(choice)[0]

    def retained(self, choice: Sequence[int]) -> float:
        """retained(x)"""
        return self.totals(choice)[1]

    def transient(self, choice: Sequence[int]) -> float:
        """transient(x)"""
        return self.totals(choice)[2]

    def nbytes(self, choice: Sequence[int]) -> float:
        """nbytes(x)"""
        _, retained, transient = self.totals(choice)
        return self.fixed_bytes + retained + transient

    def feasible(self, choice: Sequence[int]) -> bool:
        """No forbidden combination, and within the budget."""
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
        """Read what `save` wrote."""
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
    """A choice, what it costs, and a proven lower bound on what any choice costs. `price`: about how many seconds one
    more byte of budget would save."""

    choice: tuple[int, ...]
    seconds: float
    nbytes: float
    bound: float
    proof: str
    solver: str
    price: float = 0.0

    @property
    def optimal(self) -> bool:
        return self.seconds <= self.bound + EXACT * abs(self.bound)

    @property
    def gap(self) -> float:
        """The part of the seconds that a better choice might still save."""
        return 0.0 if self.optimal else (self.seconds - self.bound) / abs(self.seconds)

    def __str__(self) -> str:
        verdict = "optimal" if self.optimal else f"at most {self.gap:.3%} above the optimum"
        return f"{self.seconds:.6g} s, {self.nbytes / 1e9:.4g} GB, {verdict} ({self.solver}: {self.proof})"


def _padded(rows: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """Short tuples as rows of three, filled up with -1."""
    return np.array([row + (-1,) * (MAX_NDIM - len(row)) for row in rows], dtype=np.int64).reshape(-1, MAX_NDIM)
