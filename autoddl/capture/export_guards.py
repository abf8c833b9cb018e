"""Guards torch.export against effects of forward that it leaves out of its graph without a word.

    a backward of its own    autograd.Function on a tensor that needs a gradient; a hook on a gradient       refused
    a gradient in forward    torch.autograd.grad, Tensor.backward                                            refused
    .data                    reading it is traced as detach; setting it is refused
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoddl.capture.autograd_function_patch import check_functions

__all__ = ["HiddenEffect", "guard_export"]

HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
GRADIENTS = (torch.autograd.grad, Tensor.backward)


class HiddenEffect(Exception):
    """Names an effect of forward that the exported graph would not show, and the way out."""


class _Watch(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise HiddenEffect("forward sets the .data of a tensor, which a graph does not show: write x.copy_(y)")
        if func in HOOKS:
            raise HiddenEffect("forward registers a hook on a gradient, which a graph does not show: write what it "
                               "does to the value, as x * s + (x - x * s).detach() for a gradient s times as large")
        if func in GRADIENTS:
            raise HiddenEffect("forward takes gradients itself, which a graph does not show: write them as operators")
        return func(*args, **(kwargs or {}))


@contextmanager
def guard_export() -> Iterator[None]:
    """While open, tracing raises HiddenEffect where the exported graph would not be all that forward does."""
    with check_functions(_refuse_own_backward), _Watch():
        yield


def _refuse_own_backward(function: type, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        raise HiddenEffect(f"{function.__name__} has a backward of its own, which a graph does not show: write it as "
                           "operators, checkpoints with use_reentrant=False")
