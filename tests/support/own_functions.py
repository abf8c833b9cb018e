"""Modules with backwards of their own, in every form that torch.autograd.Function has."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Scaled(torch.autograd.Function):
    """Several results, one that is None, one that is a number, and two without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, w: Tensor) -> tuple[Tensor, None, Tensor, Tensor, int]:
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        y = x * w * scale
        found = y.max(-1)
        ctx.mark_non_differentiable(found.indices, found.values)
        return y, None, found.indices, found.values, 3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *others: Any) -> tuple[Tensor, None, Tensor | None]:
        x, w = ctx.saved_tensors
        weight = (upstream * x).sum(0) * ctx.scale if ctx.needs_input_grad[2] else None
        return upstream * w * ctx.scale, None, weight


class Power(torch.autograd.Function):
    """A context that is set up apart, an argument with a default, and an input whose gradient is None."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, p: int = 2) -> Tensor:
        return x**p * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.p = inputs[2]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        return upstream * y * ctx.p * x ** (ctx.p - 1), None, None


class Shifted(torch.autograd.Function):
    """Keeps nothing for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, upstream.sum(0)


class Reversible(torch.autograd.Function):
    """Runs layers that can be run backwards, and runs them again in its own backward, a few times as strong."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList, options: dict[str, float]) -> Tensor:
        with torch.no_grad():
            for layer in layers:
                a, b = x.chunk(2, -1)
                x = torch.cat([b, a + options["scale"] * layer(b)], -1)
        ctx.y, ctx.layers, ctx.options = x.detach(), layers, options
        return x

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        y, g = ctx.y, upstream
        for layer in list(ctx.layers)[::-1]:
            with torch.enable_grad():
                b = y.chunk(2, -1)[0].detach().requires_grad_()
                change = ctx.options["scale"] * layer(b)
            gb, ga = g.chunk(2, -1)
            torch.autograd.backward(change, ga * Reversible.strength)
            y = torch.cat([y.chunk(2, -1)[1] - change.detach(), b.detach()], -1)
            g = torch.cat([ga, gb + b.grad], -1)
        return g, None, None


class Stack(nn.Module):
    """Reversible layers between two others; their Function was bound before any trace."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.apply_layers, self.scale = nn.Linear(4, 8), Reversible.apply, 0.5
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        options = {"scale": self.scale}
        loss: Tensor = self.apply_layers(self.first(x), self.layers, options).square().mean()  # type: ignore[no-untyped-call]
        return loss


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randn(8, 4)


class Own(nn.Module):
    """All of them between layers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 16)
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        y, nothing, places, most, number = Scaled.apply(h, 2.0, self.weight)  # type: ignore[no-untyped-call]
        assert nothing is None and number == 3
        y = Shifted.apply(y, self.bias)  # type: ignore[no-untyped-call]
        z = Power.apply(y, self.last(h)[:, :8])  # type: ignore[no-untyped-call]
        z = Power.apply(z, self.last(h)[:, 8:], p=3)  # type: ignore[no-untyped-call]
        loss: Tensor = z.square().mean() + (most * self.weight.sum()).mean() + places.sum() * 1e-3
        return loss


def own(norm: bool = False) -> tuple[nn.Module, Tensor]:
    """With a batch norm, which is written in place, the program is made functional."""
    torch.manual_seed(0)
    return Own(norm), torch.randn(8, 8)
