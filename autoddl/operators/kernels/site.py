"""Where an operator runs: one rank, one option. What kernels need to make local calls of global ones.

    fn, args, kwargs = KERNELS[op.target](site, target, args, kwargs)

A kernel sees the call as captured, its tensors opaque, and gives back the call for this rank's pieces.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from autoddl.core.graph import Op, Tensor
from autoddl.core.layout import Extent, Layout, Mesh, Split, extents
from autoddl.operators.rules.table import Option

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Kernel", "Site"]

Reduce = Callable[["torch.Tensor", str, tuple[int, ...]], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Site:
    """`inputs` and `outputs` have global shapes. `reduce(tensor, 'sum' | 'max', axes)` is an all-reduce over mesh axes;
    `seed` holds the step's seed of dropout (none: 0)."""

    op: Op
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    option: Option
    mesh: Mesh
    coordinate: tuple[int, ...]
    reduce: Reduce
    seed: "torch.Tensor | None" = None

    def extents(self, tensor: Tensor, layout: Layout) -> tuple[Extent, ...]:
        return extents(tensor.shape, layout, self.mesh, self.coordinate)

    def input_extents(self, k: int) -> tuple[Extent, ...]:
        """(offset, size) along every dim of this rank's piece of input k."""
        return self.extents(self.inputs[k], self.option.inputs[k])

    def output_extents(self, k: int = 0) -> tuple[Extent, ...]:
        return self.extents(self.outputs[k], self.option.outputs[k])

    def input_shape(self, k: int) -> tuple[int, ...]:
        return tuple(size for _, size in self.input_extents(k))

    def output_shape(self, k: int = 0) -> tuple[int, ...]:
        return tuple(size for _, size in self.output_extents(k))

    def share(self, k: int) -> float:
        """Elements of input k here, as a part of all: what a local mean counts in the whole one."""
        return prod(self.input_shape(k)) / prod(self.inputs[k].shape)

    def splits(self, k: int, dim: int) -> tuple[int, ...]:
        """Mesh axes that split dim `dim` of input k."""
        return tuple(a for a, part in enumerate(self.option.inputs[k]) if part == Split(dim))


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Kernel = Callable[[Site, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Call]
