"""Patches torch 2.13 so that a module that forward moves to where it is already stays as it is in a trace.

    Module._apply    `expert.to(x.device)` in forward changes nothing where model and batch are on one device. Under a
                     trace it would swap the parameters for new ones, which fails as the trace refers to the old ones.
                     A move or a cast that changes a tensor goes on to torch, and is refused there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["MADE_FOR", "PATCHED", "modules_stay"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.nn:Module._apply": "self, fn, recurse"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""


@contextmanager
def modules_stay() -> Iterator[None]:
    """While open, applying to a module what changes none of its tensors leaves it alone."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        tensors = (*self.parameters(recurse), *self.buffers(recurse))
        if all(fn(one) is one for one in tensors):
            return self
        return original(self, fn, recurse)  # type: ignore[no-untyped-call]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
