"""Patches torch 2.13 so that a module that forward moves to where it is already stays as it is in a trace.

    Module._apply    `expert.to(x.device)` in forward changes nothing where model and batch are on one device. Under a
                     trace it would swap the parameters for new ones, which fails as the trace refers to the old ones.
                     A move or a cast that changes a tensor is refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from autoddl.capture.rewrites.own_backward import HiddenEffect

__all__ = ["MADE_FOR", "PATCHED", "modules_stay"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.nn:Module._apply": "self, fn, recurse"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""


@contextmanager
def modules_stay() -> Iterator[None]:
    """While open, applying to a module what changes none of its tensors leaves it alone.

    Raises HiddenEffect where that changes one."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for one in (*self.parameters(recurse), *self.buffers(recurse)):
            if (new := fn(one)) is not one:
                how = f"casts it to {new.dtype}" if new.dtype != one.dtype else (
                    f"moves it to {new.device}" if new.device != one.device else "lays it out anew in memory")
                raise HiddenEffect(f"forward takes a module that it reads and {how}, for good: do that before "
                                   "planning, or convert tensors, as F.linear(x, part.weight.to(x.dtype)), or use "
                                   "torch.autocast")
        return self

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
