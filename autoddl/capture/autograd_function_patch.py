"""Patches torch 2.13 so that a trace notices calls of torch.autograd.Function.

    Function.apply    A Function has a backward of its own, and torch.export writes down its forward alone, without a
                      word. The patched `apply` calls a check first.

`Function` is a Python class without a hook for this: `apply` is a class method, and a TorchFunctionMode never sees it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["MADE_FOR", "PATCHED", "check_functions"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.autograd:Function.apply": "*args, **kwargs"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""


@contextmanager
def check_functions(check: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """While open, `check(cls, args)` is called before every `cls.apply(*args)` of an autograd Function."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        check(cls, args)
        return original.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
