"""Patches torch 2.13 so that a trace decides what a call of torch.autograd.Function becomes.

    Function.apply    A Function has a backward of its own, and torch.export writes down its forward alone, without a
                      word. The patched `apply` hands the call to whoever traces.

`Function` is a Python class without a hook for this: `apply` is a class method, and a TorchFunctionMode never sees it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["MADE_FOR", "PATCHED", "Apply", "replace_apply"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.autograd:Function.apply": "*args, **kwargs"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""

Apply = Callable[..., Any]


@contextmanager
def replace_apply(instead: Callable[[type, Apply, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While open, `cls.apply(*args, **kwargs)` of an autograd Function is `instead(cls, its own apply, args, kwargs)`.
    """
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        return instead(cls, original.__get__(None, cls), args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
