"""A model of operators without a rule: one of a library, a Function, one of torch, and one that mixes the batch."""

from typing import Any

import torch
from torch import Tensor, nn


@torch.library.custom_op("unruled::gated", mutates_args=())
def gated(x: Tensor, scale: Tensor) -> Tensor:
    return x.sigmoid() * x * scale


@gated.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x, scale = ctx.saved_tensors
    s = x.sigmoid()
    return upstream * scale * (s + x * s * (1 - s)), (upstream * x * s).flatten(0, -2).sum(0)


gated.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


class Softened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y: Tensor = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        found: Tensor = y * (upstream - (upstream * y).sum(-1, keepdim=True))
        return found


class Unruled(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed
        self.first, self.last, self.scale = nn.Linear(16, 24), nn.Linear(24, 16), nn.Parameter(torch.randn(24))

    def forward(self, x: Tensor) -> Tensor:
        h = gated(self.first(x), self.scale)
        h = h + Softened.apply(h)  # type: ignore[no-untyped-call]
        y = torch.nanmean(self.last(h), -1)
        if self.mixed:
            y = y + torch.renorm(y, 2.0, 1, 0.5)
        loss: Tensor = y.square().mean()
        return loss

    def example_inputs(self) -> Tensor:
        return torch.randn(16, 10, 16, generator=torch.Generator().manual_seed(0))


def unruled(mixed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Unruled(mixed)
