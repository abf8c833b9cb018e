"""Represents the choices of a variable: one as layouts (`Choice`), thousands as columns of numbers (`Choices`).

A mesh of four axes gives an op thousands of choices, of which a plan takes one. The sequence `Choices` makes a `Choice`
when it is asked for one. Pricing all of them reads the columns instead.
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
    """The layouts at the inputs and outputs of one variable, an op or a parameter."""

    inputs: tuple[Layout, ...]
    """Layouts in which the inputs are read; none for a parameter."""
    outputs: tuple[Layout, ...]
    """Layouts in which the outputs are written; for a parameter the stored one."""
    gradients: tuple[Layout, ...]
    """By input, the layout in which backward yields its gradient."""
    wanted: tuple[Layout, ...]
    """By output, the layout in which backward needs its gradient."""
    inner: tuple[int, ...] = ()
    """Positions of the mesh axes over which the op's own kernel reduces."""
    depths: Depths = ()
    """For a parameter, what is split on each axis (`core.state_layouts`)."""
    sparse: bool = False
    """For a parameter, whether the sum of its gradients is sparse (`core.sparse`)."""

    @property
    def regather(self) -> bool:
        """Whether the weight of a parameter is split on some axis, and so gathered again for backward."""
        return 2 in self.depths

    def __str__(self) -> str:
        reads, writes = (", ".join(map(str, layouts)) for layouts in (self.inputs, self.outputs))
        sparse = ", sparse gradients" if self.sparse else ""
        inside = ", with messages inside" if self.inner else ""
        return f"{reads} -> {writes}{inside}" if reads else \
            f"stored {writes} ({show_depths(self.outputs[0], self.depths)}{sparse})"


@dataclass(frozen=True, eq=False)
class Choices(Sequence[Choice]):
    """Choices as columns: for every input and output one array with the code of each choice's layout.

    The columns are those of `Choice`; `core.layout_codes` defines the codes.
    """

    axes: int
    """The number of axes of the mesh."""
    inputs: tuple[Codes, ...]
    """By input, the layouts in which it is read."""
    outputs: tuple[Codes, ...]
    """By output, the layouts in which it is written."""
    gradients: tuple[Codes, ...]
    """By input, the layouts in which backward yields its gradient."""
    wanted: tuple[Codes, ...]
    """By output, the layouts in which backward needs its gradient."""
    inner: Codes
    """Bit a says that the op's own kernel reduces over mesh axis a."""
    depths: Codes
    """Digit a in base 3 says what is split on mesh axis a; the digit behind them, whether gradients add up sparse."""
    unkept: int = 0
    """So many choices, the last, are those of a hub whose tensor no reader keeps as it is (`kept_tensors`)."""

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def kept(self) -> Bools:
        """Whether readers may keep the tensor as it is, by choice."""
        return np.arange(len(self)) < len(self) - self.unkept

    @property
    def sparse(self) -> Bools:
        """Whether gradients add up sparse, by choice; an op's choices have other numbers there."""
        found: Bools = self.depths // 3**self.axes > 0
        return found

    def twice(self) -> "Choices":
        """The choices, then again as those of a tensor that no reader keeps as it is."""
        inputs, outputs, gradients, wanted = (
            tuple(np.concatenate([column, column]) for column in columns)
            for columns in (self.inputs, self.outputs, self.gradients, self.wanted))
        return Choices(self.axes, inputs, outputs, gradients, wanted, np.concatenate([self.inner] * 2),
                       np.concatenate([self.depths] * 2), len(self))

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
        return Choice(inputs, outputs, gradients, wanted, tuple(a for a in range(self.axes) if inner >> a & 1), depths,
                      self.depths.item(k) // 3**self.axes > 0)

    def only(self, allowed: Bools) -> "Choices":
        """The choices at which `allowed` is true, in order."""
        inputs, outputs, gradients, wanted = (
            tuple(column[allowed] for column in columns)
            for columns in (self.inputs, self.outputs, self.gradients, self.wanted))
        return Choices(self.axes, inputs, outputs, gradients, wanted, self.inner[allowed], self.depths[allowed],
                       int((allowed & ~self.kept).sum()))


def numbered(choices: Sequence[Choice]) -> Choices:
    """The choices as columns; `choices` itself if it has them already."""
    if isinstance(choices, Choices):
        return choices
    inputs, outputs, gradients, wanted = (
        tuple(np.array([encode_layout(layout) for layout in column]) for column in zip(*rows, strict=True))
        for rows in ([c.inputs for c in choices], [c.outputs for c in choices], [c.gradients for c in choices],
                     [c.wanted for c in choices]))
    inner = np.array([sum(1 << a for a in c.inner) for c in choices])
    return Choices(len(choices[0].outputs[0]), inputs, outputs, gradients, wanted, inner,
                   np.array([sum(depth * 3**a for a, depth in enumerate((*c.depths, int(c.sparse)))) for c in choices]))
