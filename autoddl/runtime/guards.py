"""Refuses optimizers of torch whose update is not made for parameters in pieces, before their first step.

Most optimizers of torch.optim update DTensors as they would whole tensors. These do not:

    Rprop                     writes by a mask, which DTensor does not do in place
    Adafactor                 means over rows and columns, in place
    LBFGS                     joins all gradients to one vector
    SGD, Adagrad with fused   fused kernels that know no DTensor

An optimizer that is none of torch.optim is let through. If it reads a number of a DTensor, as `p.grad.norm().item()`,
it gets that of this rank's piece: `p.grad.norm().full_tensor()` is that of the whole.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoddl.core.errors import InputError

__all__ = ["guard_optimizers"]

WHOLE = (torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS)
UNFUSED = (torch.optim.SGD, torch.optim.Adagrad)


def guard_optimizers(owner: object, parameters: Iterable[Tensor]) -> None:
    """While `owner` lives, an optimizer that cannot update one of its `parameters` raises InputError as it steps."""
    mine = {id(p) for p in parameters if isinstance(p, DTensor)}
    if not mine:
        return
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in seen:
            for group in optimizer.param_groups:
                if any(id(p) in mine for p in group["params"]):
                    _check(optimizer, bool(group.get("fused")))
            seen.add(optimizer)

    weakref.finalize(owner, register_optimizer_step_pre_hook(check).remove)


def _check(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Raises InputError where the optimizer does not update DTensors."""
    name = type(optimizer).__name__
    if isinstance(optimizer, WHOLE):
        raise InputError(f"torch.optim.{name} needs whole parameters, and the plan stores some in pieces: take another "
                         "optimizer, or pin every parameter, as --pin '*.weight: AXIS=B'")
    if fused and isinstance(optimizer, UNFUSED):
        raise InputError(f"torch.optim.{name} with fused=True does not know parameters in pieces, which the plan has: "
                         "leave fused=True out")
