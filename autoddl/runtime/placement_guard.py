"""Keeps a planned module where it is: `.to`, `.double` and the like would give its parameters other memory.

The program reads the memory of the pieces itself, and an optimizer updates that of the parameters. They are the same
until `nn.Module._apply` makes new tensors, which it does for DTensors even where nothing changes. So a call that
changes nothing does nothing, and any other raises InputError.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.core.errors import InputError

__all__ = ["guard_placement"]


def guard_placement(module: nn.Module, device: torch.device) -> None:
    """From now on, `module` refuses to be moved from `device`, or to other dtypes."""
    dtypes = {p.dtype for p in module.parameters()}

    def stay(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dtypes:
            before = torch.empty(0, dtype=dtype, device=device)
            after = function(before)
            if (after.device.type, after.dtype) != (device.type, dtype) or (
                    before.device.index is not None and after.device.index != before.device.index):
                raise InputError(f"the module runs a plan on {device} in {dtype}, and this would make it "
                                 f"{after.dtype} on {after.device}: give parallelize the device, and plan with a "
                                 "precision")
        return module

    kept: Any = module
    kept._apply = stay
