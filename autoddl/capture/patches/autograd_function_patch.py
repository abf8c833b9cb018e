"""Patches torch 2.13 so that a trace decides what a call of torch.autograd.Function becomes.

    Function.apply    A Function has a backward of its own, and torch.export writes down its forward alone, without a
                      word. The patched `apply` hands the call to whoever traces.

`Function` is a Python class without a hook for this: `apply` is a class method, and a TorchFunctionMode never sees it.
Its code is replaced and not the method, as `swish = Swish.apply` may have bound the method before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch

__all__ = ["MADE_FOR", "PATCHED", "Apply", "replace_apply"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.autograd:Function.apply": "*args, **kwargs"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""

Apply = Callable[..., Any]

_METHOD: FunctionType = vars(torch.autograd.Function)["apply"].__func__
_OWN = FunctionType(_METHOD.__code__, _METHOD.__globals__, "apply", _METHOD.__defaults__, _METHOD.__closure__)
_HANDLER = "_autoddl_handles_apply"
"""The name, among those of torch's file, by which the replaced code finds who handles a call."""


def _with_closure() -> Any:
    __class__ = torch.autograd.Function  # the code that is replaced has it in its closure, for super()

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        __class__  # noqa: B018
        return _autoddl_handles_apply(cls, args, kwargs)  # type: ignore[name-defined]  # noqa: F821

    return apply


@contextmanager
def replace_apply(instead: Callable[[type, Apply, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """While open, `cls.apply(*args, **kwargs)` of an autograd Function is `instead(cls, its own apply, args, kwargs)`.
    """
    names, code = _METHOD.__globals__, _METHOD.__code__
    before = names.get(_HANDLER)
    names[_HANDLER] = lambda cls, args, kwargs: instead(cls, MethodType(_OWN, cls), args, kwargs)
    _METHOD.__code__ = _with_closure().__code__
    try:
        yield
    finally:
        _METHOD.__code__, names[_HANDLER] = code, before
        if before is None:
            del names[_HANDLER]
