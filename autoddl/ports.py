"""What a choice shows at one place: the layouts that an op writes at an output, or reads at an input.

Thousands of choices show few distinct values, so costs are computed per value and a choice names its value's class.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.layout import Layout, Mesh, local_shape
from autoddl.routes import Routes
from autoddl.space import Choice
from autoddl.table import Array, Cells, Classes, Rows

__all__ = ["Port", "Ports"]


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Port:
    """The distinct values of something that choices have, and which of them each choice has."""

    values: tuple[tuple[Any, ...], ...]
    classes: Classes


def _port(columns: Sequence[Sequence[Any]]) -> Port:
    """Of rows with these columns. Most rows hold the same objects as others: only those that differ are compared."""
    keys = list(zip(*(map(id, column) for column in columns), strict=True))
    found: dict[tuple[Any, ...], int] = {}
    number = {key: found.setdefault(row, len(found))
              for key, row in dict(zip(keys, zip(*columns, strict=True), strict=True)).items()}
    return Port(tuple(found), np.array([number[key] for key in keys], dtype=np.intp))


class Ports:
    """Ports of the choices at hand, each found once: variables that are alike share their choices."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[tuple[Choice, ...], Port]] = {}
        self.back: dict[int, tuple[Routes, Array]] = {}
        self.found: dict[tuple[int, int, int], tuple[Port, Routes, Classes]] = {}
        self.equal: dict[tuple[int, bytes], Classes] = {}
        self.same: dict[tuple[object, ...], Cells] = {}
        self.local: dict[tuple[Shape, Mesh], tuple[dict[Shape, Shape], dict[Layout, Shape]]] = {}

    def __call__(self, choices: tuple[Choice, ...], key: Hashable, columns: Callable[[], Sequence[Sequence[Any]]]
                 ) -> Port:
        """What the choices have in `columns`, one for each part of a value."""
        at = (id(choices), key)
        if at not in self.known:
            self.known[at] = choices, _port(columns())
        return self.known[at][1]

    def positions(self, port: Port, k: int, table: Routes) -> Classes:
        """Where the routes have the k-th layout of every value. Those that are equal are one array."""
        at = (id(port), k, id(table))
        if at not in self.found:
            row = [value[k] for value in port.values]
            where = {key: table.index[layout] for key, layout in dict(zip(map(id, row), row, strict=True)).items()}
            found = np.array([where[key] for key in map(id, row)], dtype=np.intp)
            self.found[at] = port, table, self.equal.setdefault((id(table), found.tobytes()), found)
        return self.found[at][2]

    def cells(self, key: tuple[object, ...], shape: tuple[int, int], make: Callable[[Rows], Array],
              least: float | None = None) -> Cells:
        """The cells that `make` makes, one object per key: tables that say the same share them."""
        return self.same.setdefault(key, Cells(shape, make, least))

    def turned(self, table: Routes) -> Array:
        """`seconds[j, i]`: the way back."""
        if id(table) not in self.back:
            self.back[id(table)] = table, np.ascontiguousarray(table.seconds.T)
        return self.back[id(table)][1]

    def writes(self, choices: tuple[Choice, ...], port: int) -> Port:
        return self(choices, ("write", port), lambda: (
            [c.outputs[port] for c in choices], [c.wanted[port] for c in choices], [c.regather for c in choices]))

    def reads(self, choices: tuple[Choice, ...], slot: int) -> Port:
        return self(choices, ("read", slot), lambda: (
            [c.inputs[slot] for c in choices], [c.gradients[slot] for c in choices]))

    def shapes(self, choices: tuple[Choice, ...], shapes: tuple[Shape, ...], mesh: Mesh) -> Port:
        """Local shapes of tensors of `shapes`, inputs then outputs, and where the kernel reduces by itself (`inner`)
        the first layout too and over which axes."""

        def columns() -> list[list[Any]]:
            inner = [c.inner for c in choices]
            rows = zip(*[(*c.inputs, *c.outputs) for c in choices], strict=True)
            local = [self.pieces(shape, row, mesh) for shape, row in zip(shapes, rows, strict=True)]
            return [*local, [c.inputs[0] if c.inner else None for c in choices], inner]

        return self(choices, ("shapes", shapes), columns)

    def pieces(self, shape: Shape, row: Sequence[Layout], mesh: Mesh) -> list[Shape]:
        """Rank 0's piece of a tensor in each layout; what is equal is one object."""
        same, known = self.local.setdefault((shape, mesh), ({}, {}))
        distinct = dict(zip(map(id, row), row, strict=True))
        for layout in distinct.values():
            if layout not in known:
                piece = local_shape(shape, layout, mesh)
                known[layout] = same.setdefault(piece, piece)
        made = {key: known[layout] for key, layout in distinct.items()}
        return [made[key] for key in map(id, row)]
