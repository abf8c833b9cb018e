"""One table of a cost network: what every combination of the options of one to three variables costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoddl.errors import InputError

__all__ = ["MAX_NDIM", "Array", "Classes", "Table"]

Array = NDArray[np.float64]
Classes = NDArray[np.intp]

MAX_NDIM = 3


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Table:
    """Seconds, retained bytes and transient bytes of every combination of the options of one to three variables.

    Options that cost the same in a table are one *class* of it: `core` holds the three arrays over classes, and
    `classes[axis][option]` is the class. Without classes every option is its own.
    """

    core: tuple[Array, Array, Array]
    classes: tuple[Classes, ...]

    def __init__(self, seconds: Array, retained: Array, transient: Array,
                 classes: Sequence[Classes] | None = None) -> None:
        core = _frozen(seconds), _frozen(retained), _frozen(transient)
        given = [np.arange(n) for n in core[0].shape] if classes is None else classes
        object.__setattr__(self, "core", core)
        object.__setattr__(self, "classes", tuple(_positions(c) for c in given))
        self._check()

    def _check(self) -> None:
        seconds, retained, transient = self.core
        if not seconds.shape == retained.shape == transient.shape:
            shapes = f"{seconds.shape}, {retained.shape}, {transient.shape}"
            raise InputError(f"a table's seconds, retained and transient have one shape, not {shapes}")
        if not 1 <= seconds.ndim <= MAX_NDIM or 0 in (*seconds.shape, *self.shape):
            raise InputError(f"a table has 1 to {MAX_NDIM} axes, none empty, not the shape {seconds.shape}")
        if len(self.classes) != seconds.ndim or any(
                c.min() < 0 or c.max() >= n for c, n in zip(self.classes, seconds.shape, strict=True)):
            raise InputError(f"classes are rows of the arrays, one list for each of their {seconds.ndim} axes")
        if not seconds.min() > -math.inf:  # nor where the least is nan
            raise InputError("seconds are numbers, or inf where a combination is forbidden; found nan or -inf")
        for name, nbytes in (("retained", retained), ("transient", transient)):
            if not (nbytes.min() >= 0 and nbytes.max() < math.inf):
                raise InputError(f"{name} bytes are finite and not negative; forbid a combination by seconds = inf")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(c) for c in self.classes)

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
        if all(np.array_equal(c, np.arange(n)) for c, n in zip(self.classes, self.core[0].shape, strict=True)):
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
