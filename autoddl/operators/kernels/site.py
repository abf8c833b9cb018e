"""The place where an operator runs: one rank, one option. Kernels use it to make local calls of global ones.

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

__all__ = ["Exchange", "Kernel", "Shift", "Site", "TorchCall"]

Reduce = Callable[["torch.Tensor", str, tuple[int, ...]], "torch.Tensor"]
Exchange = Callable[["torch.Tensor", tuple[int, ...], tuple[int, ...], tuple[int, ...], int], "torch.Tensor"]
Shift = Callable[["torch.Tensor", tuple[int, ...], int], Callable[[], "torch.Tensor"]]


@dataclass(frozen=True, slots=True)
class Site:
    """One op of the graph on one rank of the mesh, under one option."""

    op: Op
    """The op as captured."""
    inputs: tuple[Tensor, ...]
    """The input tensors, with global shapes."""
    outputs: tuple[Tensor, ...]
    """The output tensors, with global shapes."""
    option: Option
    """The layouts that the plan chose for the op."""
    mesh: Mesh
    """The mesh that the layouts are of."""
    coordinate: tuple[int, ...]
    """The place of this rank in the mesh, one index per axis."""
    reduce: Reduce
    """`reduce(tensor, 'sum' | 'max', axes)`: an all-reduce over mesh axes."""
    seed: "torch.Tensor | None" = None
    """The seed of this step's dropout; None is 0."""
    exchange: Exchange | None = None
    """`exchange(rows, sent, received, axes, nbytes)`: an all-to-all of so many rows to and from each member of a group,
    noted as one of `nbytes`; None where nothing is exchanged."""
    shift: Shift | None = None
    """`shift(tensor, axes, number)`: sends to the next member of a group, under a number; call the result to wait for
    what the member before sent. None where nothing goes round."""
    swap: Exchange | None = None
    """As `exchange`, of values by messages to those members alone that get any; None where there are none."""

    def extents(self, tensor: Tensor, layout: Layout) -> tuple[Extent, ...]:
        return extents(tensor.shape, layout, self.mesh, self.coordinate)

    def input_extents(self, k: int) -> tuple[Extent, ...]:
        """Returns (offset, size) along every dim of this rank's shard of input k."""
        return self.extents(self.inputs[k], self.option.inputs[k])

    def output_extents(self, k: int = 0) -> tuple[Extent, ...]:
        return self.extents(self.outputs[k], self.option.outputs[k])

    def input_shape(self, k: int) -> tuple[int, ...]:
        return tuple(size for _, size in self.input_extents(k))

    def output_shape(self, k: int = 0) -> tuple[int, ...]:
        return tuple(size for _, size in self.output_extents(k))

    def share(self, k: int) -> float:
        """Returns the fraction of the elements of input k that are here, which is the weight of a local mean."""
        return prod(self.input_shape(k)) / prod(self.inputs[k].shape)

    def exchanged(self, rows: "torch.Tensor", sent: tuple[int, ...], received: tuple[int, ...], outward: bool
                  ) -> "torch.Tensor":
        """Returns the rows that the members of the group of `option.inner` send to this rank.

        Its bytes are noted on the side of the tokens, which has as many rows whatever the router decides."""
        assert self.exchange is not None, "a kernel exchanges rows where none are exchanged"
        home = sum(sent if outward else received)
        nbytes = home * prod(rows.shape[1:]) * rows.element_size()
        return self.exchange(rows.contiguous(), sent, received, self.option.inner, nbytes)

    def swapped(self, values: "torch.Tensor", sent: tuple[int, ...], received: tuple[int, ...]) -> "torch.Tensor":
        """Returns the values that the members of the group of `option.inner` send, most of which send none."""
        assert self.swap is not None, "a kernel swaps values where none are swapped"
        return self.swap(values, sent, received, self.option.inner, values.nbytes)

    def shifted(self, value: "torch.Tensor", number: int) -> "Callable[[], torch.Tensor]":
        """Sends `value` round the group of `option.inner` by one; call the result for what came."""
        assert self.shift is not None, "a kernel sends round a ring where there is none"
        return self.shift(value.contiguous(), self.option.inner, number)

    def splits(self, k: int, dim: int) -> tuple[int, ...]:
        """Returns the mesh axes that split dim `dim` of input k."""
        return tuple(a for a, part in enumerate(self.option.inputs[k]) if part == Split(dim))


TorchCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Kernel = Callable[[Site, Callable[..., Any], tuple[Any, ...], dict[str, Any]], TorchCall]
