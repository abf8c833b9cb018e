"""One table of a cost network: what every combination of the options of one to three variables costs."""

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
"""Cells that are made at a time, so that they stay near."""

MAX_NDIM = 3


def row_blocks(shape: Sequence[int]) -> Iterator[slice]:
    """Rows of an array of `shape`, some at a time."""
    step = max(1, BLOCK * shape[0] // math.prod(shape))
    return (slice(begin, begin + step) for begin in range(0, shape[0], step))


@dataclass(frozen=True, eq=False)
class Cells:
    """Numbers over classes that are made when they are asked for: some rows, or the whole, which stays then. None is
    below `least`, if that is known before."""

    shape: tuple[int, ...]
    make: Callable[[Rows], Array]
    least: float | None = None

    @classmethod
    def of(cls, values: Array) -> "Cells":
        """What is there already."""
        whole = _frozen(values)
        found = cls(whole.shape, whole.__getitem__)
        found.__dict__["whole"] = whole
        return found

    @cached_property
    def whole(self) -> Array:
        found = np.empty(self.shape)
        for rows in row_blocks(self.shape):
            found[rows] = self.make(rows)
        found.flags.writeable = False
        return found

    def rows(self, which: Rows) -> Array:
        """Of some classes along the first axis."""
        whole: Array | None = self.__dict__.get("whole")
        return self.make(which) if whole is None else whole[which]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Table:
    """Seconds, retained bytes and transient bytes of every combination of the options of one to three variables.

    Options that cost the same in a table are one *class* of it: `cells` are the three numbers over classes, and
    `classes[axis][option]` is the class. Without classes every option is its own.
    """

    cells: tuple[Cells, Cells, Cells]
    classes: tuple[Classes, ...]

    def __init__(self, seconds: Array, retained: Array, transient: Array,
                 classes: Sequence[Classes] | None = None) -> None:
        self._set(Cells.of(seconds), Cells.of(retained), Cells.of(transient), classes)
        self._check_numbers()

    @classmethod
    def over(cls, seconds: Cells, retained: Cells, transient: Cells, classes: Sequence[Classes]) -> "Table":
        """A table whose numbers are made when they are asked for: large ones are never asked for all."""
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
        """Options along every axis."""
        return tuple(len(c) for c in self.classes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Classes along every axis."""
        return self.cells[0].shape

    @property
    def core(self) -> tuple[Array, Array, Array]:
        """The three numbers of all classes."""
        seconds, retained, transient = self.cells
        return seconds.whole, retained.whole, transient.whole

    @property
    def momentary(self) -> float:
        """Transient bytes that no allowed combination can do without."""
        seconds, _, transient = self.cells
        if transient.least is not None:
            return transient.least
        return float(np.where(np.isfinite(seconds.whole), transient.whole, math.inf).min())

    def part(self, used: Sequence[Classes]) -> tuple[Array, Array, Array]:
        """The three numbers of some classes along every axis."""
        index = np.ix_(np.arange(len(used[0])), *used[1:])
        seconds, retained, transient = (cells.rows(used[0])[index] for cells in self.cells)
        return seconds, retained, transient

    def picked(self, classes: Sequence[Classes]) -> tuple[Array, Array, Array]:
        """The three numbers of single cells, whose classes along every axis are given."""
        rows, row = np.unique(classes[0], return_inverse=True)
        seconds, retained, transient = (cells.rows(rows)[(row, *classes[1:])] for cells in self.cells)
        return seconds, retained, transient

    def at(self, cell: Sequence[int]) -> tuple[float, float, float]:
        """(seconds, retained, transient) of one combination of options."""
        where = tuple([c.item(k) for c, k in zip(self.classes, cell, strict=True)])
        seconds, retained, transient = self.core
        return seconds.item(where), retained.item(where), transient.item(where)

    @property
    def seconds(self) -> Array:
        """Over options. Made when asked for, as are the next two."""
        return self._over_options(0)

    @property
    def retained(self) -> Array:
        return self._over_options(1)

    @property
    def transient(self) -> Array:
        return self._over_options(2)

    def _over_options(self, which: int) -> Array:
        if all(np.array_equal(c, np.arange(n)) for c, n in zip(self.classes, self.lengths, strict=True)):
            return self.core[which]
        wide: Array = self.core[which][np.ix_(*self.classes)]
        wide.flags.writeable = False
        return wide


def _frozen(values: Array) -> Array:
    """A read-only float64 array of our own; one that is read-only already is kept, so sharing survives."""
    array = np.asarray(values, dtype=np.float64)
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


def _positions(classes: Classes) -> Classes:
    """Read-only indices."""
    array = np.ascontiguousarray(classes, dtype=np.intp)
    if array.flags.writeable:
        array = array.copy()
        array.flags.writeable = False
    return array
