"""Guards torch.export against effects of forward that it leaves out of its graph without a word.

    a backward of its own    autograd.Function on a tensor that needs a gradient becomes one operator (`own_backward`);
                             one that runs modules again is its forward (`rerun_modules`); a hook on a gradient is
                             refused
    a gradient in forward    torch.autograd.grad and Tensor.backward are refused
    a value that no input decides    is computed once, where the graph has to know it (`constant_values`)
    a branch that only raises    is taken the other way and checked in every step (`raising_branches`)
    rand() < 0               is false, as where layers are left out with probability 0
    .data                    reading it is traced as detach; setting it is refused
    .numpy()                 is refused, and so are rows that are packed by their lengths: both leave the graph
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import dirichlet
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from autoddl.capture.patches.autograd_function_patch import Apply, replace_apply
from autoddl.capture.patches.transformers_experts_patch import OWN_BACKWARD
from autoddl.capture.rerun_modules import run_with_gradients, runs_modules
from autoddl.capture.rewrites.constant_values import KnownValues
from autoddl.capture.rewrites.ctc_losses import CtcLosses
from autoddl.capture.rewrites.known_masks import KnownMasks
from autoddl.capture.rewrites.own_backward import HiddenEffect, OwnCall, arguments_of, trace_call
from autoddl.capture.rewrites.raising_branches import asked_number, decided

__all__ = ["guard_export"]

HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
OPERATORS = {dirichlet._Dirichlet: torch._sample_dirichlet}
"""Functions that draw, and the operator that a program has for each: its draw goes by position, with a gradient."""
GRADIENTS = (torch.autograd.grad, Tensor.backward)


class _Watch(TorchFunctionMode):
    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known
        self._losses, self._masks = CtcLosses(), KnownMasks()
        self._uniform: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise HiddenEffect("forward sets the .data of a tensor, which a graph does not show: write x.copy_(y)")
        if (value := self._known.instead(func, args, kwargs or {})) is not NotImplemented:
            return value
        if (value := self._masks.instead(func, args, kwargs or {})) is not NotImplemented:
            return value
        if func == Tensor.__bool__ and (found := decided(args[0])) is not None:
            return found
        if func == Tensor.item and (number := asked_number(args[0])) is not None:
            return number
        if (loss := self._losses.instead(func, args, kwargs or {})) is not None:
            return loss
        if func == torch.rand:
            drawn: Tensor = func(*args, **(kwargs or {}))
            self._uniform += [] if drawn.dim() else [(drawn, drawn._version)]
            return drawn
        if func == Tensor.lt and len(args) == 2 and self._is_never(*args):
            return False
        if func in HOOKS:
            raise HiddenEffect("forward registers a hook on a gradient, which a graph does not show: write what it "
                               "does to the value, as x * s + (x - x * s).detach() for a gradient s times as large")
        if func is Tensor.numpy and isinstance(args[0], FakeTensor):
            raise HiddenEffect("forward takes values out with .numpy(), which a graph does not show: use functions of "
                               "torch, or keep in a buffer what no batch changes")
        if func is torch._VF._pack_padded_sequence:
            raise HiddenEffect("forward packs rows by their lengths, which are values, and a graph has one shape for "
                               "all batches: give the layer the padded rows, and mask what it returns by the lengths")
        if func in GRADIENTS:
            raise HiddenEffect("forward takes gradients itself, which a graph does not show: write them as operators")
        return func(*args, **(kwargs or {}))

    def _is_never(self, x: Any, bound: Any) -> bool:
        """Whether x is one uniform number as it was drawn, of which none is below the bound."""
        return isinstance(bound, int | float) and bound <= 0 and any(
            x is one and x._version == version for one, version in self._uniform)


@contextmanager
def guard_export(known: KnownValues) -> Iterator[list[OwnCall]]:
    """While open, tracing raises HiddenEffect where the exported graph would not be all that forward does.

    The calls of autograd Functions that the trace meets are added to the list. What follows from `known` values is
    computed."""
    calls: list[OwnCall] = []

    def instead(function: type[torch.autograd.Function], apply: Apply, args: tuple[Any, ...], kwargs: dict[str, Any]
                ) -> Any:
        if function in OPERATORS:
            return OPERATORS[function](*args, **kwargs)
        given = (*args, *kwargs.values())
        needs = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
        known = function.__name__ == OWN_BACKWARD
        if known or not needs or get_proxy_mode() is None:  # inside an operator nothing is traced: it has its gradient
            return apply(*args, **kwargs)
        if runs_modules(given) and not issubclass(function, CheckpointFunction):
            return run_with_gradients(function, apply, arguments_of(function, args, kwargs))
        return trace_call(function, apply, args, kwargs, calls)

    with replace_apply(instead), _Watch(known):
        yield calls
