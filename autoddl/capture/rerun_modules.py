"""Traces a Function that runs modules again in its backward, as reversible layers do, as its forward with gradients.

    forward     runs modules that are its arguments, and keeps next to nothing
    backward    computes anew what was not kept, and runs the modules again with a graph

The gradients of such a Function are those of its forward, but for rounding. That is tried before forward is traced: a
copy with random weights runs both ways with the same draws. Values that have gradients are random too. What
backward computes again is left to the plan, as with torch.utils.checkpoint. A Function whose gradients are others is
refused.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from autoddl.capture.patches.torch_reruns_patch import gradients_stay, modules_untraced
from autoddl.capture.rewrites.own_backward import HiddenEffect, has_setup

__all__ = ["run_with_gradients", "runs_modules"]

Function = type[torch.autograd.Function]

CLOSE = 1e-3
"""How far a gradient may differ in float32, relative to its largest value: what is computed anew is rounded anew."""
TINY = 1e-6
"""The part of the largest value of all gradients below which one is rounding alone."""
MOST = 1e8
"""Elements of weights and of arguments with which both ways are tried."""


def runs_modules(args: tuple[Any, ...]) -> bool:
    """Whether there are modules among the arguments of a Function, alone or in lists and dicts."""
    return bool(_modules(args))


def run_with_gradients(function: Function, apply: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What the forward of a Function returns, traced with the graph that autograd needs.

    Raises HiddenEffect where its backward is not the gradient of its forward, or nobody knows.
    """
    _check_alike(function, apply, args)
    with _attributes_stay(args), gradients_stay():
        return _forward(function, args)


def _modules(args: tuple[Any, ...]) -> list[nn.Module]:
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, nn.Module)]


def _forward(function: Function, args: tuple[Any, ...]) -> Any:
    """The forward of a Function by itself; what it keeps for backward is dropped."""
    if has_setup(function):
        return function.forward(*args)
    names = ("save_for_backward", "mark_non_differentiable", "mark_dirty", "set_materialize_grads")
    ctx = SimpleNamespace(**{name: lambda *_: None for name in names}, needs_input_grad=(True,) * len(args))
    return function.forward(ctx, *args)


@contextmanager
def _attributes_stay(args: tuple[Any, ...]) -> Iterator[None]:
    """Undoes what is written into attributes of modules, such as states of generators that backward would read."""
    parts = [part for module in _modules(args) for part in module.modules()]
    before = [(part, dict(vars(part))) for part in parts]
    try:
        yield
    finally:
        for part, values in before:
            vars(part).clear()
            vars(part).update(values)


def _check_alike(function: Function, apply: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises HiddenEffect where gradients on random values are not those of forward."""
    said = f"{function.__name__} has a backward of its own, which runs modules again, and "
    tensors = _tensors(args)
    if sum(x.numel() for x in tensors) > MOST:
        raise HiddenEffect(f"{said}is too large to try whether its gradients are those of its forward: write its "
                           "layers without it; a plan chooses what backward computes again (--recompute)")
    try:
        alike = _alike(function, apply, args)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise HiddenEffect(f"{said}cannot be tried with random values ({reason}): write its layers without it; a "
                           "plan chooses what backward computes again (--recompute)") from error
    if not alike:
        raise HiddenEffect(f"{said}its gradients are not those of its forward: write what it does to them as a "
                           "Function of tensors alone")


def _alike(function: Function, apply: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether gradients of both ways are the same on random values; nothing of that is traced."""
    with ExitStack() as stack:
        for one in (disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), _disable_current_modes(),
                    modules_untraced(), torch.random.fork_rng(devices=[]), torch.enable_grad()):
            stack.enter_context(one)
        own = _gradients(apply, args)
        stack.enter_context(gradients_stay())
        plain = _gradients(lambda *given: _forward(function, given), args)
        most = [float(x.abs().max()) if x.numel() else 0.0 for x in plain]
        if not all(map(math.isfinite, most)):
            raise ValueError("its gradients are not finite there")
        least = TINY * max(most, default=0.0)
        return len(own) == len(plain) and all(torch.allclose(x, y, rtol=0.0, atol=CLOSE * max(one, least))
                                              for x, y, one in zip(own, plain, most, strict=True))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among the arguments, and those of the modules in them, each once."""
    held = [x for module in _modules(args) for part in module.modules()
            for x in (*part._parameters.values(), *part._buffers.values(), *vars(part).values())]
    found = [x for x in (*pytree.tree_leaves(args), *held) if isinstance(x, Tensor)]
    return list({id(x): x for x in found}.values())


def _gradients(run: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """Gradients of all that requires one, of a copy of the arguments with random values, the same at every call."""
    torch.manual_seed(0)
    args = pytree.tree_map_only(nn.Module, lambda one: getattr(one, "get_base", lambda: one)(), args)  # of a proxy
    tensors = _tensors(args)
    memo: dict[int, Any] = {id(x): _drawn(x) for x in tensors}
    found = run(*copy.deepcopy(args, memo))
    roots = [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(1)
    torch.autograd.backward(roots, [torch.randn_like(x) for x in roots])
    leaves = [memo[id(x)] for x in tensors if x.requires_grad]
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def _drawn(like: Tensor) -> Tensor:
    """A tensor of values: small random numbers where it has a gradient, else ones, and zeros for whole numbers."""
    if not like.is_floating_point():
        return torch.full(like.shape, like.dtype is torch.bool, dtype=like.dtype)
    made = 0.1 * torch.randn(like.shape, dtype=like.dtype) if like.requires_grad else torch.ones(
        like.shape, dtype=like.dtype)
    return nn.Parameter(made) if isinstance(like, nn.Parameter) else made.requires_grad_(like.requires_grad)
