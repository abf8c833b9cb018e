"""What forward may do that torch.export leaves out of its graph without a word.

    a backward of its own    autograd.Function on what needs a gradient, a hook on a gradient       refused
    a gradient within        torch.autograd.grad                                                    refused
    .data                    what detach gives; where it is set                                     refused
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["Unseen", "nothing_unseen"]

HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
GRADIENTS = (torch.autograd.grad, Tensor.backward)


class Unseen(Exception):
    """What the graph would not show, and the way out."""


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise Unseen("forward sets the .data of a tensor, which a graph does not show: write x.copy_(y)")
        if func in HOOKS:
            raise Unseen("forward registers a hook on a gradient, which a graph does not show: write what it does to "
                         "the value, as x * s + (x - x * s).detach() for a gradient s times as large")
        if func in GRADIENTS:
            raise Unseen("forward takes gradients itself, which a graph does not show: write them as operators")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_unseen() -> Iterator[None]:
    """While open, tracing raises Unseen where the graph would not be all of what forward does."""
    plain = vars(torch.autograd.Function)["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise Unseen(f"{cls.__name__} has a backward of its own, which a graph does not show: write it as "
                         "operators, checkpoints with use_reentrant=False")
        return plain.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        with _Watch():
            yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]
