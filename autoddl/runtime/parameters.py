"""Replaces each parameter in the user's own module by the piece that this rank stores.

If the plan splits any parameter, all become DTensors of their stored layouts, under their own names, with ties kept. So
optimizers, `clip_grad_norm_` and distributed checkpoints work as they are. If every parameter is stored whole (one
rank, data parallel), they stay plain tensors. Either way the program reads a *leaf*: the local tensor, which shares the
parameter's memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from autoddl.core import graph as graphs
from autoddl.core.graph import Graph, Kind
from autoddl.core.layout import B, Layout, Split, extents
from autoddl.core.plan import Plan
from autoddl.runtime.collectives.process_groups import Groups

__all__ = ["StoredParameter", "placements", "shard_parameters"]


@dataclass(slots=True, eq=False)
class StoredParameter:
    """One parameter on this rank: the module's `parameter`, and the `leaf` that the program reads."""

    tensor: graphs.Tensor
    layout: Layout
    parameter: nn.Parameter
    leaf: Tensor

    def as_used(self, value: Tensor) -> Tensor:
        """A piece of the parameter in the dtype in which the program reads it; `value` itself if that is its dtype."""
        return value.to(getattr(torch, self.tensor.dtype))

    def summed(self, gradient: Tensor) -> Tensor:
        """A gradient that backward yields, in the dtype in which gradients are summed."""
        return gradient.to(getattr(torch, self.tensor.gradient.dtype))

    def deposit(self, gradient: Tensor) -> None:
        """Adds this rank's piece of the gradient to .grad of the parameter, in the parameter's dtype and strides.

        Fused optimizers go through memory in one order, so equal strides are what PyTorch promises of gradients.
        """
        parameter, gradient = self.parameter, gradient.to(self.parameter.dtype)
        if gradient.stride() != self.leaf.stride():
            gradient = torch.empty_like(self.leaf, requires_grad=False).copy_(gradient)
        sharded = isinstance(parameter, DTensor)
        if parameter.grad is None:
            parameter.grad = _like(parameter, gradient) if sharded else gradient
        else:
            (parameter.grad._local_tensor if isinstance(parameter.grad, DTensor) else parameter.grad).add_(gradient)


def _like(parameter: Any, local: Tensor) -> DTensor:
    """`local` as a DTensor with the layout of `parameter`, without the checks of from_local, which cost 30 us each."""
    return DTensor(local, parameter._spec, requires_grad=False)


def placements(layout: Layout) -> tuple[Placement, ...]:
    """The placements of torch's DTensor for a stored layout."""
    return tuple(Shard(state.dim) if isinstance(state, Split) else Replicate() for state in layout)


def _slots(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every module and name under which a parameter is registered, ties included."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def shard_parameters(model: nn.Module, graph: Graph, plan: Plan, groups: Groups, device: torch.device,
                     here: Mapping[str, StoredParameter] = MappingProxyType({})) -> dict[str, StoredParameter]:
    """Replaces the parameters of `model` by the pieces that `plan` stores on this rank; returns them by name.

    Of those that another program stores `here` already, on this rank and in the same pieces, the leaf alone is new.
    """
    stored = plan.index().stored
    whole = plan.mesh.size == 1 or all(state == B for one in stored.values() for state in one.layout)
    mesh = None if whole else groups.device_mesh(device.type)
    by_id: dict[int, nn.Parameter] = {}
    found: dict[str, StoredParameter] = {}
    for tensor in graph.tensors:
        if tensor.kind is Kind.PARAMETER:
            old = model.get_parameter(tensor.fqn)
            layout = stored[tensor.fqn].layout if tensor.fqn in stored else Layout.broadcast(plan.mesh)
            if tensor.fqn in here:
                leaf = here[tensor.fqn].leaf.detach().requires_grad_(tensor.trained)
                found[tensor.fqn] = StoredParameter(tensor, layout, here[tensor.fqn].parameter, leaf)
                continue
            new, local = _piece(old, layout, groups, device, mesh, getattr(torch, tensor.stored.dtype))
            by_id[id(old)] = new
            found[tensor.fqn] = StoredParameter(tensor, layout, new, local)
    for module, name, old in list(_slots(model)):
        module._parameters[name] = by_id.get(id(old), old)
    return found


def _piece(old: nn.Parameter, layout: Layout, groups: Groups, device: torch.device, mesh: DeviceMesh | None,
           dtype: torch.dtype) -> tuple[nn.Parameter, Tensor]:
    """The new parameter, stored in `dtype`, and its leaf; without values where the old one has none."""
    if mesh is None:
        if old.is_meta:
            old = nn.Parameter(torch.empty(old.shape, dtype=dtype, device=device), old.requires_grad)
        old.data = old.data.to(device, dtype).contiguous()
        return old, old.detach().requires_grad_(old.requires_grad) if groups.mesh.size > 1 else old
    local = old.detach()
    for dim, (offset, size) in enumerate(extents(tuple(old.shape), layout, groups.mesh, groups.coordinate)):
        local = local.narrow(dim, offset, size)
    local = (torch.empty(local.shape, dtype=dtype, device=device) if local.is_meta
             else local.to(device, dtype).clone(memory_format=torch.contiguous_format))
    stride = tuple(prod(old.shape[dim + 1:]) for dim in range(old.dim()))
    spread = DTensor.from_local(local, mesh, placements(layout), run_check=False, shape=old.shape, stride=stride)
    new = nn.Parameter(spread, old.requires_grad)
    assert isinstance(new, DTensor), type(new)
    return new, new._local_tensor.detach().requires_grad_(old.requires_grad)
