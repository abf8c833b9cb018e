"""Clips gradients by their norm over all ranks, each element counted once.

    norm = sqrt( sum over ranks of  sum of squares of the elements that the rank counts )

Of ranks that hold the same piece, the first counts it: the one at coordinate 0 of every axis that does not split the
parameter. Squares are summed in float64, and by one all-reduce of one number, so all ranks get the same bits.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoddl.core.layout import B
from autoddl.runtime.parameters import StoredParameter
from autoddl.runtime.process_groups import Groups, peer_error

__all__ = ["clip_gradients"]


def _local(gradient: Tensor) -> Tensor:
    """This rank's piece of a gradient."""
    found: Tensor = getattr(gradient, "_local_tensor", gradient)
    return found


def _counts(one: StoredParameter, groups: Groups) -> bool:
    """Whether this rank counts its piece."""
    return all(state != B or at == 0 for state, at in zip(one.layout, groups.coordinate, strict=True))


@torch.no_grad()
def clip_gradients(counted: Iterable[tuple[StoredParameter, Groups]], parameters: Sequence[nn.Parameter],
                   max_norm: float) -> Tensor:
    """Scales the gradients of `parameters` to a norm of at most `max_norm`; returns the norm before, in float64.

    `counted` are the pieces on which the norm is taken, each with the mesh that it is a piece on. The scale is that of
    torch's `clip_grad_norm_`: max_norm / (norm + 1e-6), at most 1. Raises MachineError where a peer is gone.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    squares = [_local(one.parameter.grad).double().square().sum() for one, groups in counted
               if one.parameter.grad is not None and _counts(one, groups)]
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            raise peer_error("adding up the norm of the gradients", error) from error
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
