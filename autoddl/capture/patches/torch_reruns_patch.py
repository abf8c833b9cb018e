"""Patches torch 2.13 for a Function that runs modules, which is tried inside of a trace and then traced with gradients.

    no_grad.__enter__    does nothing, and so does `__exit__`: gradients stay enabled or disabled as they are
    Module.__getattr__   those of torch, and not those by which a trace notes every weight that is read; `__call__` too
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["MADE_FOR", "PATCHED", "gradients_stay", "modules_untraced"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.autograd.grad_mode:no_grad.__enter__": "self",
           "torch.autograd.grad_mode:no_grad.__exit__": "self, exc_type, exc_value, traceback",
           "torch.nn:Module.__getattr__": "self, name", "torch.nn:Module.__call__": "self, *args, **kwargs"}
"""The patched functions with the names of their parameters; a test compares both with the installed torch."""

_UNTRACED = nn.Module.__getattr__, nn.Module.__call__


@contextmanager
def gradients_stay() -> Iterator[None]:
    """While open, `torch.no_grad()` disables no gradients."""
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__

    def nothing(self: torch.no_grad, *ended: Any) -> None:
        return None

    torch.no_grad.__enter__ = torch.no_grad.__exit__ = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.no_grad.__enter__, torch.no_grad.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def modules_untraced() -> Iterator[None]:
    """While open, modules run as outside of a trace."""
    traced = nn.Module.__getattr__, nn.Module.__call__
    nn.Module.__getattr__, nn.Module.__call__ = _UNTRACED  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__getattr__, nn.Module.__call__ = traced  # type: ignore[method-assign]
