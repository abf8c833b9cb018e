"""One table of a cost network: the cost of every combination of the options of one to three variables.

A table holds three numbers per combination: seconds, retained bytes and transient bytes (`problem`). Many options cost
the same in a table, so the numbers are kept per *class* of options:

    number(k1, k2, ...) = cells[classes[0][k1], classes[1][k2], ...]

Large tables compute their cells when they are asked for, some rows at a time (`Cells`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoddl.core.errors import InputError

__all__ = ["MAX_NDIM", "Array", "Cells", "Classes", "Rows", "Table", "row_blocks"]

Array = NDArray[np.float64]
Classes = NDArray[np.intp]
Rows = slice | Classes

BLOCK = 1 << 15
"""Cells that are computed at a time, so that they stay in the processor's cache."""

MAX_NDIM = 3
"""Variables that one table may be over."""


def row_blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Slices of rows that cover an array of `shape`, each of about BLOCK cells."""
    step = max(1, BLOCK * shape[0] // math.prod(shape))
    return (slice(begin, begin + step) for begin in range(0, shape[0], step))


@dataclass(frozen=True, eq=False)
class Cells:
    """An array over classes that is computed when it is asked for.

    `make` computes some rows, the classes along the first axis. The whole array, once asked for, is kept. `least` is a
    lower bound on its numbers, if one is known beforehand.
    """

    shape: tuple[int, ...]
    make: Callable[[Rows], Array]
    least: float | None = None

    @classmethod
    def of(cls, values: Array) -> "Cells":
        """Cells that are computed already: a read-only copy of `values`."""
        whole = _frozen(values)
        found = cls(whole.shape, whole.__getitem__)
        found.__dict__["whole"] = whole
        return found

    @cached_property
    def whole(self) -> Array:
        """The whole array, read-only."""
        found = np.empty(self.shape)
        for rows in row_blocks(self.shape):
            found[rows] = self.make(rows)
        found.flags.writeable = False
        return found

    def rows(self, which: Rows) -> Array:
        """The rows of some classes of the first axis."""
        whole: Array | None = self.__dict__.get("whole")
        return self.make(which) if whole is None else whole[which]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Table:
    """Seconds, retained bytes and transient bytes of every combination of the options of one to three variables.

    Options with equal costs are one *class*: `cells` are the three arrays over classes, `classes[axis][option]` is the
    class of an option. Without `classes` every option is a class of its own. Seconds may be inf, which forbids a
    combination. Raises InputError where shapes or numbers are wrong.
    """

    cells: tuple[Cells, Cells, Cells]
    classes: tuple[Classes, ...]

    def __init__(self, seconds: Array, retained: Array, transient: Array,
                 classes: Sequence[Classes] | None = None) -> None:
        self._set(Cells.of(seconds), Cells.of(retained), Cells.of(transient), classes)
        self._check_numbers()

    @classmethod
    def over(cls, seconds: Cells, retained: Cells, transient: Cells, classes: Sequence[Classes]) -> "Table":
        """A table whose cells are computed when they are asked for; its numbers are not checked."""
        table = object.__new__(cls)
        table._set(seconds, retained, transient, classes)
        return table

    def _set(self, seconds: Cells, retained: Cells, transient: Cells, classes: Sequence[Classes] | None) -> None:
        given = [np.arange(n) for n in seconds.shape] if classes is None else classes
        object.__setattr__(self, "cells", (seconds, retained, transient))
        object.__setattr__(self, "classes", tuple(_positions(c) for c in given))
        self._check_shapes()

    def _check_shapes(self) -> None:
        seconds, retained, transient = (cells.shape for cells in self.cells)
        if not seconds == retained == transient:
            shapes = f"{seconds}, {retained}, {transient}"
            raise InputError(f"a table's seconds, retained and transient have one shape, not {shapes}")
        if not 1 <= len(seconds) <= MAX_NDIM or 0 in (*seconds, *self.shape):
            raise InputError(f"a table has 1 to {MAX_NDIM} axes, none empty, not the shape {seconds}")
        if len(self.classes) != len(seconds) or any(
                c.min() < 0 or c.max() >= n for c, n in zip(self.classes, seconds, strict=True)):
            raise InputError(f"classes are rows of the arrays, one list for each of their {len(seconds)} axes")

    def _check_numbers(self) -> None:
        seconds, retained, transient = self.core
        if not seconds.min() > -math.inf:  # nor where the least is nan
            raise InputError("seconds are numbers, or inf where a combination is forbidden; found nan or -inf")
        for name, nbytes in (("retained", retained), ("transient", transient)):
            if not (nbytes.min() >= 0 and nbytes.max() < math.inf):
                raise InputError(f"{name} bytes are finite and not negative; forbid a combination by seconds = inf")

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of options along each axis."""
        return tuple(len(c) for c in self.classes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of classes along each axis."""
        return self.cells[0].shape

    @property
    def core(self) -> tuple[Array, Array, Array]:
        """(seconds, retained, transient) over all classes."""
        seconds, retained, transient = self.cells
        return seconds.whole, retained.whole, transient.whole

    @property
    def least_transient(self) -> float:
        """The least transient bytes of any allowed combination, or a known lower bound on them."""
        seconds, _, transient = self.cells
        if transient.least is not None:
            return transient.least
        return float(np.where(np.isfinite(seconds.whole), transient.whole, math.inf).min())

    def part(self, used: Sequence[Classes]) -> tuple[Array, Array, Array]:
        """(seconds, retained, transient) over some classes along each axis."""
        index = np.ix_(np.arange(len(used[0])), *used[1:])
        seconds, retained, transient = (cells.rows(used[0])[index] for cells in self.cells)
        return seconds, retained, transient

    def pick(self, classes: Sequence[Classes]) -> tuple[Array, Array, Array]:
        """(seconds, retained, transient) of single cells; `classes[axis][i]` is the class of cell i."""
        rows, row = np.unique(classes[0], return_inverse=True)
        seconds, retained, transient = (cells.rows(rows)[(row, *classes[1:])] for cells in self.cells)
        return seconds, retained, transient

    def at(self, cell: Sequence[int]) -> tuple[float, float, float]:
        """(seconds, retained, transient) of one combination of options, one per axis."""
        where = tuple([c.item(k) for c, k in zip(self.classes, cell, strict=True)])
        seconds, retained, transient = self.core
        return seconds.item(where), retained.item(where), transient.item(where)

    @property
    def seconds(self) -> Array:
        """Seconds over options, computed at each call."""
        return self._over_options(0)

    @property
    def retained(self) -> Array:
        """Retained bytes over options, computed at each call."""
        return self._over_options(1)

    @property
    def transient(self) -> Array:
        """Transient bytes over options, computed at each call."""
        return self._over_options(2)

    def _over_options(self, which: int) -> Array:
        if all(np.array_equal(c, np.arange(n)) for c, n in zip(self.classes, self.lengths, strict=True)):
            return self.core[which]
        found: Array = self.core[which][np.ix_(*self.classes)]
        found.flags.writeable = False
        return found


def _frozen(values: Array) -> Array:
    """A read-only float64 copy of `values`; an array that is read-only already is kept, and may stay shared."""
    array = np.asarray(values, dtype=np.float64)
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


def _positions(classes: Classes) -> Classes:
    """`classes` as a read-only array of indices."""
    array = np.ascontiguousarray(classes, dtype=np.intp)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array
