"""Groups choices into classes by what they have at one port: an output that an op writes, or an input that it reads.

Thousands of choices have few distinct layouts at one port. So costs are computed once per class, and every choice names
its class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from autoddl.core.cost_table import Array, Cells, Classes, Rows
from autoddl.core.layout import Mesh
from autoddl.core.layout_codes import decode_states, distinct_rows, local_shapes
from autoddl.pricing.choices import Choice, Choices, numbered
from autoddl.pricing.routes import Routes

__all__ = ["Pieces", "Port", "Ports", "pieces_of"]

Column = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Port:
    """The distinct values that choices have at a port, and the class of every choice.

    A value has a column for each of its parts: the layout, that of the gradient, the depths. Layouts are numbers.
    """

    columns: tuple[Column, ...]
    classes: Classes


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """The distinct shards that choices give an op.

    `shapes` has, for each class, the local shapes of the op's tensors; `first` has the first choice of the class.
    """

    shapes: tuple[tuple[Shape, ...], ...]
    first: Classes
    classes: Classes


class Ports:
    """Caches the ports of choices: variables that are alike share their choices, and so their ports."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, str, int], tuple[Sequence[Choice], Port]] = {}
        self.back: dict[int, tuple[Routes, Array]] = {}
        self.found: dict[tuple[int, int, int], tuple[Port, Routes, Classes]] = {}
        self.equal: dict[tuple[int, bytes], Classes] = {}
        self.same: dict[tuple[object, ...], Cells] = {}

    def writes(self, choices: Sequence[Choice], port: int) -> Port:
        """The port at which the choices write output `port`: its layout, that of the gradient they need, the depths."""
        return self._port(choices, "write", port, lambda c: (c.outputs[port], c.wanted[port], c.depths))

    def reads(self, choices: Sequence[Choice], slot: int) -> Port:
        """The port at which the choices read input `slot`: its layout, and that of the gradient they yield."""
        return self._port(choices, "read", slot, lambda c: (c.inputs[slot], c.gradients[slot]))

    def _port(self, choices: Sequence[Choice], way: str, k: int, columns: Callable[[Choices], tuple[Column, ...]]
              ) -> Port:
        """The distinct values that the choices have in `columns`."""
        at = (id(choices), way, k)
        if at not in self.known:
            parts = columns(numbered(choices))
            first, classes = distinct_rows(parts)
            self.known[at] = choices, Port(tuple(part[first] for part in parts), classes)
        return self.known[at][1]

    def positions(self, port: Port, k: int, table: Routes) -> Classes:
        """Positions in the routes of the k-th layout of every value. Equal results are one array."""
        at = (id(port), k, id(table))
        if at not in self.found:
            found = table.place[port.columns[k]]
            assert found.min() >= 0, "a layout that no conversion reaches"
            self.found[at] = port, table, self.equal.setdefault((id(table), found.tobytes()), found)
        return self.found[at][2]

    def cells(self, key: tuple[object, ...], shape: tuple[int, int], make: Callable[[Rows], Array],
              least: float | None = None) -> Cells:
        """The cells that `make` makes, one object per key: equal tables share them."""
        return self.same.setdefault(key, Cells(shape, make, least))

    def turned(self, table: Routes) -> Array:
        """The seconds of the way back, as [target, source]: those of the routes, transposed."""
        if id(table) not in self.back:
            self.back[id(table)] = table, np.ascontiguousarray(table.seconds.T)
        return self.back[id(table)][1]


def pieces_of(choices: Sequence[Choice], shapes: Sequence[Shape], mesh: Mesh) -> Pieces:
    """The shards on rank 0 of an op whose tensors have `shapes`, inputs before outputs, by class of choices.

    Where the kernel reduces by itself, choices of one class agree in the layout of the first input and in the axes too.
    """
    given = numbered(choices)
    sizes = np.concatenate([local_shapes(shape, decode_states(column, given.axes), mesh) for shape, column in
                            zip(shapes, (*given.inputs, *given.outputs), strict=True)], axis=1)
    reduced = given.inputs[0] * (given.inner > 0) if given.inputs else given.inner
    first, classes = distinct_rows([*sizes.T, given.inner, reduced])
    ends = np.cumsum([len(shape) for shape in shapes])[:-1]
    rows = zip(*(map(tuple, part.tolist()) for part in np.split(sizes[first], ends, axis=1)), strict=True)
    return Pieces(tuple(rows), first, classes)
