"""Stores tables by classes: options that cost the same everywhere in a table are one row of it.

    table(k1, k2, ...) = core[classes[0][k1], classes[1][k2], ...]

An operator's options are products of the layouts that it reads, writes and owns. So each neighbour sees few classes of
them. Work on `core` is a small part of the work on all options, and gives the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.core.problem import Array, Classes

__all__ = ["ClassTable", "JointClasses", "class_table", "join_classes"]


@dataclass(frozen=True, slots=True, eq=False)
class ClassTable:
    """A table over options, stored by classes of options."""

    core: Array
    classes: tuple[Classes, ...]

    def at(self, cell: Sequence[int]) -> float:
        """The value of one cell."""
        return self.core.item(tuple([c.item(k) for c, k in zip(self.classes, cell, strict=True)]))

    def column(self, index: Sequence[int | slice]) -> Array:
        """The table with some axes fixed at an option, the others over all options."""
        rows = [c if isinstance(k, slice) else c[[k]] for c, k in zip(self.classes, index, strict=True)]
        free = [len(c) for c, k in zip(self.classes, index, strict=True) if isinstance(k, slice)]
        return self.core[np.ix_(*rows)].reshape(free)

    def dense(self) -> Array:
        """The table over all options."""
        return self.core[np.ix_(*self.classes)] if self.classes else self.core


def class_table(table: Array) -> ClassTable:
    """A table in which every option is its own class."""
    return ClassTable(table, tuple(np.arange(n) for n in table.shape))


@dataclass(frozen=True, slots=True, eq=False)
class JointClasses:
    """The classes of a variable that several tables tell apart: first option of each, and the class of each option."""

    first: Classes
    of: Classes


def join_classes(parts: Sequence[Classes], count: int) -> JointClasses:
    """The joint classes: options share a class if they do in every part. Numbers go by the first option's classes."""
    code, span = np.zeros(count, dtype=np.intp), 1
    for classes in parts:
        width = int(classes.max()) + 1
        if span * width >= 1 << 62:
            code = np.unique(code, return_inverse=True)[1]
            span = count
        code, span = code * width + classes, span * width
    _, first, of = np.unique(code, return_index=True, return_inverse=True)
    return JointClasses(first, of)
