"""Computes the gradients of weights apart from those of activations, where a schedule splits backward into B and W.

    forward   an op that waits (`core.split_backward`) runs on detached tensors, and keeps its own graph of autograd
    B         the gradients of its activations go on. Those of its weights wait: a product has not computed them yet;
              any other op has, since it computes all at once
    W         the gradients of weights are made, the last op first, and go on to the parameters as in any backward

So the outer graph has two parts that do not touch: through B nothing comes to a parameter. What an op keeps for its
weights stays until W. Blocks that are computed again are so in B, once. What products read of them stays until W too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoddl.runtime.recompute import Segment

__all__ = ["WaitingGradients"]


class _Waiting:
    """An op of the running microbatch whose gradients of weights are to come.

        results, given    where its results with a gradient are made on its own graph, and these gradients, once known
        weights           its weights on its own graph
        made              the gradients of its weights, where B made them
        heads             the weights on the graph that W runs through
        is_due            whether B came to the op
    """

    def __init__(self, is_product: bool) -> None:
        self.is_product, self.is_due = is_product, False
        self.results: list[GradientEdge] = []
        self.given: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.made: Sequence[Tensor | None] | None = None
        self.heads: Sequence[Tensor] = ()

    def gradients(self) -> Sequence[Tensor | None]:
        """The gradients of the weights; what was kept for them is freed."""
        found = self.made
        if found is None:
            found = torch.autograd.grad(self.results, self.weights, self.given, allow_unused=True)
        self.results, self.given, self.weights, self.made = [], [], [], None
        return found


class _Head(torch.autograd.Function):
    """Passes on the weights of an op; backward brings their gradients."""

    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.waiting = waiting
        return tuple(x.view_as(x) for x in weights)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        return None, *ctx.waiting.gradients()


class _Op(torch.autograd.Function):
    """Runs an op on a graph of its own; backward gives the gradients of its activations, and leaves the others."""

    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, call: Callable[..., Any], token: Tensor, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.waiting, ctx.activations = waiting, [k for k, x in enumerate(tensors) if x.requires_grad]
        with torch.enable_grad():
            own = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
            results = call(own)
        several = isinstance(results, tuple | list)
        made = list(results) if several else [results]
        ctx.own, ctx.count = [own[k] for k in ctx.activations], len(tensors)
        ctx.results = [get_gradient_edge(x) if isinstance(x, Tensor) and x.requires_grad else None for x in made]
        flat = [x.detach() if isinstance(x, Tensor) else x for x in made]
        ctx.mark_non_differentiable(*(x for x, y in zip(flat, ctx.results, strict=True)
                                      if isinstance(x, Tensor) and y is None))
        return tuple(flat) if several else flat[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        waiting: _Waiting = ctx.waiting
        pairs = [(x, g) for x, g in zip(ctx.results, gradients, strict=True) if g is not None and x is not None]
        results, given = [x for x, _ in pairs], [g for _, g in pairs]
        found: list[Tensor | None] = [None] * ctx.count
        wanted = ctx.own if waiting.is_product or not ctx.own else [*ctx.own, *waiting.weights]
        if pairs and ctx.own:
            made = torch.autograd.grad(results, wanted, given, retain_graph=waiting.is_product, allow_unused=True)
            for k, gradient in zip(ctx.activations, made, strict=False):
                found[k] = gradient
            waiting.made = None if waiting.is_product else made[len(ctx.own):]
        if waiting.made is None:
            waiting.results, waiting.given = results, given
        waiting.is_due = bool(pairs)
        ctx.own = ctx.results = None
        return None, None, None, *found


class WaitingGradients:
    """The gradients of weights of one microbatch that wait for W."""

    def __init__(self) -> None:
        self._ops: list[_Waiting] = []

    def clear(self) -> None:
        """Forgets the last microbatch."""
        for one in self._ops:
            one.heads = ()
        self._ops.clear()

    def call(self, function: Callable[..., Any], late: Sequence[int], is_product: bool, segment: Segment | None = None
             ) -> Callable[..., Any]:
        """`function`, of an op that waits; `late` are the places of its weights among all its flat arguments.

        Where its `segment` runs again the op saves what it saved, and waits no second time.
        """
        def run(*args: Any, **kwargs: Any) -> Any:
            flat, form = tree_flatten((args, kwargs))
            weights = [k for k in late if flat[k].requires_grad]
            if not torch.is_grad_enabled() or not weights or (segment is not None and segment.is_again):
                return function(*args, **kwargs)
            waiting = _Waiting(is_product)
            waiting.heads = _Head.apply(waiting, *(flat[k] for k in weights))  # type: ignore[no-untyped-call]
            waiting.weights = [flat[k].detach().requires_grad_() for k in weights]
            others = [k for k, x in enumerate(flat) if isinstance(x, Tensor) and k not in weights]

            def own(tensors: list[Tensor]) -> Any:
                mine = dict(zip([*weights, *others], [*waiting.weights, *tensors], strict=True))
                args, kwargs = tree_unflatten([mine.get(k, x) for k, x in enumerate(flat)], form)
                return function(*args, **kwargs)

            self._ops.append(waiting)
            token = torch.empty(0, requires_grad=True)
            return _Op.apply(waiting, own, token, *(flat[k] for k in others))  # type: ignore[no-untyped-call]
        return run

    def backward(self) -> None:
        """Computes the gradients of weights, and brings them to the parameters."""
        heads = [one.heads[0] for one in self._ops if one.is_due]
        self.clear()
        if heads:
            torch.autograd.backward(heads, [x.new_zeros(()).expand_as(x) for x in heads])
