"""What a variable may choose: one choice in words, and thousands of them as columns of numbers.

A mesh of four axes gives an op thousands of choices, of which a plan takes one: `Choices` is the sequence of them that
makes a `Choice` when it is asked for one, and what prices them all reads its columns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
import numpy.typing as npt

from autoddl.core.layout import Layout
from autoddl.core.layout_codes import Codes, decode_layout, encode_layout
from autoddl.core.state_layouts import Depths, show_depths

__all__ = ["Choice", "Choices", "numbered"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Choice:
    """Layouts at the ports of a variable: read, written, of the gradients that its backward yields (per input) and
    needs (per output). `inner`: axes over which the op's own kernel reduces. `depths`, of a parameter: what is split on
    each axis (`core.state_layouts`)."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    wanted: tuple[Layout, ...]
    inner: tuple[int, ...] = ()
    depths: Depths = ()

    @property
    def regather(self) -> bool:
        """Whether the weight of a parameter is split on some axis, and so gathered again for backward."""
        return 2 in self.depths

    def __str__(self) -> str:
        reads, writes = (", ".join(map(str, layouts)) for layouts in (self.inputs, self.outputs))
        return f"{reads} -> {writes}" if reads else f"stored {writes} ({show_depths(self.outputs[0], self.depths)})"


@dataclass(frozen=True, eq=False)
class Choices(Sequence[Choice]):
    """Choices on a mesh of so many axes: per port a column with the number of every choice's layout (`numbers`). Bit a
    of `inner` says that the kernel reduces over axis a; digit a of `depths`, in base 3, what is split there."""

    axes: int
    inputs: tuple[Codes, ...]
    outputs: tuple[Codes, ...]
    gradients: tuple[Codes, ...]
    wanted: tuple[Codes, ...]
    inner: Codes
    depths: Codes

    def __len__(self) -> int:
        return len(self.inner)

    @overload
    def __getitem__(self, k: int) -> Choice: ...

    @overload
    def __getitem__(self, k: slice) -> tuple[Choice, ...]: ...

    def __getitem__(self, k: int | slice) -> Choice | tuple[Choice, ...]:
        return self._every[k] if isinstance(k, slice) else self._at(range(len(self))[k])

    def __iter__(self) -> Iterator[Choice]:
        return iter(self._every)

    @cached_property
    def _every(self) -> tuple[Choice, ...]:
        return tuple(map(self._at, range(len(self))))

    def _at(self, k: int) -> Choice:
        inputs, outputs, gradients, wanted = (
            tuple([decode_layout(column.item(k), self.axes) for column in columns])
            for columns in (self.inputs, self.outputs, self.gradients, self.wanted))
        inner = self.inner.item(k)
        depths = () if inputs else tuple(self.depths.item(k) // 3**a % 3 for a in range(self.axes))
        return Choice(inputs, outputs, gradients, wanted, tuple(a for a in range(self.axes) if inner >> a & 1), depths)

    def only(self, allowed: Bools) -> "Choices":
        """Those that are allowed."""
        inputs, outputs, gradients, wanted = (
            tuple(column[allowed] for column in columns)
            for columns in (self.inputs, self.outputs, self.gradients, self.wanted))
        return Choices(self.axes, inputs, outputs, gradients, wanted, self.inner[allowed], self.depths[allowed])


def numbered(choices: Sequence[Choice]) -> Choices:
    """Their columns."""
    if isinstance(choices, Choices):
        return choices
    inputs, outputs, gradients, wanted = (
        tuple(np.array([encode_layout(layout) for layout in column]) for column in zip(*rows, strict=True))
        for rows in ([c.inputs for c in choices], [c.outputs for c in choices], [c.gradients for c in choices],
                     [c.wanted for c in choices]))
    inner = np.array([sum(1 << a for a in c.inner) for c in choices])
    return Choices(len(choices[0].outputs[0]), inputs, outputs, gradients, wanted, inner,
                   np.array([sum(depth * 3**a for a, depth in enumerate(c.depths)) for c in choices]))
