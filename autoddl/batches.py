"""From the global batch that a user gives to the pieces that this rank reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl import graph as graphs
from autoddl.errors import CaptureError, MismatchError
from autoddl.groups import Groups
from autoddl.layout import Layout, extents
from autoddl.sample import as_sample, named

__all__ = ["Batches", "LocalBatch"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """This rank's pieces of one global batch, by the name of the input."""

    tensors: Mapping[str, Tensor]


class Batches:
    """Checks global batches against the plan's sample, and cuts them."""

    def __init__(self, forward: Callable[..., Any], inputs: tuple[graphs.Tensor, ...], layouts: Mapping[str, Layout],
                 groups: Groups, device: torch.device) -> None:
        self._forward, self._inputs, self._device = forward, inputs, device
        whole = Layout.broadcast(groups.mesh)
        pieces = {t: extents(t.shape, layouts.get(t.fqn, whole), groups.mesh, groups.coordinate) for t in inputs}
        self._cuts = {t.fqn: [(dim, offset, size) for dim, (offset, size) in enumerate(piece) if size != t.shape[dim]]
                      for t, piece in pieces.items()}

    def local(self, batch: object) -> LocalBatch:
        """This rank's pieces of the global `batch`: what the model is called with, as the plan's sample was given."""
        if isinstance(batch, LocalBatch):
            return batch
        try:
            found = named(self._forward, as_sample(batch))
        except CaptureError as error:
            raise MismatchError(f"{error}; give the batch in the form of the plan's sample") from None
        return LocalBatch({t.fqn: self._cut(t, found.get(t.fqn)) for t in self._inputs})

    def _cut(self, tensor: graphs.Tensor, value: object) -> Tensor:
        if not isinstance(value, Tensor):
            raise MismatchError(f"input {tensor.fqn} is missing from the batch; the plan was made for one of shape "
                                f"{list(tensor.shape)}: give it, or plan for a sample without it")
        dtype = str(value.dtype).removeprefix("torch.")
        if tuple(value.shape) != tensor.shape or dtype != tensor.dtype:
            raise MismatchError(f"input {tensor.fqn} is {dtype}{list(value.shape)}, the plan was made for "
                                f"{tensor.dtype}{list(tensor.shape)}: give the global batch in this shape on every "
                                "rank (drop or pad a smaller one), or make a plan with a sample of the other shape")
        for dim, offset, size in self._cuts[tensor.fqn]:
            value = value.narrow(dim, offset, size)
        return value.to(self._device)
