"""Operators of a library and a Function with rules of their own, a model of them, and arguments to try them with."""

from typing import Any

import torch
from own_functions import Shifted
from torch import Tensor, nn

import autoddl


@torch.library.custom_op("ownlib::fused_mlp", mutates_args=())
def fused_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (x @ up).relu() @ down


@fused_mlp.register_fake
def _(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], down.shape[1])


def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, up, down = ctx.saved_tensors
    h = (x @ up).relu()
    inner = (upstream @ down.T) * (h > 0)
    return inner @ up.T, x.flatten(0, 1).T @ inner.flatten(0, 1), h.flatten(0, 1).T @ upstream.flatten(0, 1)


fused_mlp.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

MLP, SHIFTED = "b s ., . f, f e -> b s e | sum", "b d, d -> b d | 0 + 1"
autoddl.rule("ownlib::fused_mlp", MLP, saves=["x", "up", "down"],
             flops=lambda x, up, down: 2 * x[0] * x[1] * (up[0] * up[1] + down[0] * down[1]))
autoddl.rule(Shifted, SHIFTED)


class Ruled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = fused_mlp(self.layer(x), self.up, self.down)
        loss: Tensor = Shifted.apply(h.flatten(0, 1), self.bias).square().mean()  # type: ignore[no-untyped-call]
        return loss


def model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Ruled(), torch.randn(4, 5, 8)


def mlp_call() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, up, down = ((4, 5, 6), (6, 7), (7, 3))
    return (torch.randn(x, generator=generator), torch.randn(up, generator=generator),
            torch.randn(down, generator=generator))


def shifted_call() -> list[Tensor]:
    return [torch.randn(5, 4), torch.randn(4)]


def model_name() -> str:
    return "ruled"
