"""What a call of an operator holds and moves, forward and backward.

It holds the storages that it made and that are there. It moves what its operators read and write.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoddl.operators.trials.cases import Case, fill, listed

__all__ = ["Moved", "measured", "moved"]


class Counted(TorchDispatchMode):
    """Bytes of the storages that operators made and that are there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held, self.now, self.peak = dict[int, Any](), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in (x for x in tree_leaves(found) if isinstance(x, Tensor)):
            self.count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return found

    def count(self, storage: torch.UntypedStorage, own: bool = True) -> None:
        key, nbytes = storage._cdata, storage.nbytes() * own
        if key not in self.held:
            self.now += nbytes

            def gone(_: object) -> None:
                self.now -= nbytes
                del self.held[key]

            self.held[key] = weakref.ref(storage, gone)


class Taken(torch.autograd.Function):
    """Hands the input on, and its gradient to `box`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, box: list[Tensor]) -> Tensor:
        ctx.box = box
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.box.append(grads[0])
        return None, None


class Given(torch.autograd.Function):
    """A number whose gradient makes one of the shape of x that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ones(ctx.shape, dtype=ctx.dtype)


def measured(one: Case, needs: tuple[int, ...]) -> tuple[int, int, int]:
    """(peak of forward, kept between, peak of backward) beside the inputs."""
    values, box, mode = [x.clone() for x in one.values], list[Tensor](), Counted()
    for x in values:
        mode.count(x.untyped_storage(), own=False)
    inputs = [Taken.apply(x.requires_grad_(), box) if k in needs else x  # type: ignore[no-untyped-call]
              for k, x in enumerate(values)]
    with mode:
        made = one.fn(*fill(one.args, inputs), **fill(one.kwargs, inputs))
        forward, end = mode.peak, Given.apply(listed(made)[0])  # type: ignore[no-untyped-call]
        del made, inputs
        mode.peak = kept = mode.now
        end.backward(torch.ones(()))
    return forward, kept, mode.peak


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write, but those of some names; a view moves none."""

    def __init__(self, without: tuple[str, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes, self.without = 0, ("aten._unsafe_view", *without)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not str(func).startswith(self.without):
            self.nbytes += sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))
        return out


def moved(function: Callable[..., Tensor], *inputs: Tensor, without: tuple[str, ...] = ()) -> tuple[float, float]:
    """Bytes that a function moves for a value of its first input, forward and backward."""
    with Moved(without) as forth:
        out = function(*inputs)
    gradient = torch.ones_like(out)
    with Moved(without) as back:
        torch.autograd.grad(out, [x for x in inputs if x.requires_grad], gradient)
    return forth.nbytes / inputs[0].numel(), back.nbytes / inputs[0].numel()
