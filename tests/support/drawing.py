"""Modules that draw random numbers, of every kind: the gradient of `weight` is what was drawn, bit by bit.

    made(name) -> (module, sample)        loss = sum(weight * drawn), weight of the shape of what is drawn
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

__all__ = ["DRAWS", "Dropped", "Scaled", "dropped", "made"]

ROWS, WIDTH = 8, 12


def dropped_path(x: Tensor) -> Tensor:
    """Stochastic depth as timm has it."""
    mask = x.new_empty((x.shape[0], 1)).bernoulli_(0.7)
    return x * mask.div_(0.7)


def dropped_path_of_rand(x: Tensor) -> Tensor:
    """Stochastic depth as transformers has it."""
    mask = (0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device)).floor_()
    return x.div(0.7) * mask


def uniform(x: Tensor) -> Tensor:
    return torch.rand_like(x) + torch.rand(x.shape[1], dtype=x.dtype) + torch.empty_like(x).uniform_(-2, 1)


def normal(x: Tensor) -> Tensor:
    drawn = torch.randn_like(x) + torch.randn(x.shape[1], dtype=x.dtype) + torch.zeros_like(x).normal_(1, 2)
    return drawn + torch.normal(x, 2.0) + torch.normal(x, x.abs()) + torch.normal(0.0, 2.0, x.shape)


def whole(x: Tensor) -> Tensor:
    drawn = torch.randint(9, x.shape) + torch.randint(-5, 5, x.shape[1:])
    return drawn + torch.randint_like(drawn, 7) + torch.zeros_like(x).random_(6) + torch.zeros_like(x).random_(2, 4)


def kept(x: Tensor) -> Tensor:
    return torch.bernoulli(x.sigmoid()) + 2 * torch.empty_like(x).bernoulli_(x.sigmoid()) + torch.bernoulli(x, p=0.25)


def leaky(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True) + F.rrelu_(x * 2, 0.5, 0.75, training=True)


def gumbel(x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, 1.0, hard=True) + F.gumbel_softmax(x, 0.5)


def chosen(x: Tensor) -> Tensor:
    p = x.softmax(-1)
    drawn = torch.multinomial(p, 6), torch.multinomial(p, 6, replacement=True)
    return torch.cat(drawn, 1) + torch.multinomial(p, 1) + torch.multinomial(p[0], 12)


def others(x: Tensor) -> Tensor:
    y = x[torch.randperm(x.shape[0])]
    y = y + torch.empty_like(x).exponential_(3.0) + torch.empty_like(x).cauchy_(1.0, 0.5)
    return y + torch.empty_like(x).log_normal_() + torch.empty_like(x).geometric_(0.3)


def counted(x: Tensor) -> Tensor:
    drawn = torch.poisson(x.exp()) + torch.binomial(torch.full_like(x, 5.0), x.sigmoid())
    tries: Tensor = distributions.NegativeBinomial(torch.full_like(x, 3.0), logits=x).sample()
    return drawn + tries


def shaped(x: Tensor) -> Tensor:
    """Laws of torch.distributions that are made of gamma numbers."""
    positive = x.exp()
    drawn = distributions.Gamma(positive, positive + 1).rsample() + distributions.Beta(positive, positive).rsample()
    return drawn + distributions.StudentT(positive + 1, x).rsample()


def turned(x: Tensor) -> Tensor:
    """Angles, which torch tries until each is accepted."""
    angles: Tensor = distributions.VonMises(x, x.exp()).sample()
    return angles


def recurrent(x: Tensor) -> Tensor:
    """Layers that pass positive numbers on, so that what is dropped between them shows."""
    steps, state = torch.stack([x, 2 * x]), torch.zeros(3, *x.shape, dtype=x.dtype)
    weights = [torch.eye(WIDTH, dtype=x.dtype), torch.zeros(WIDTH, WIDTH, dtype=x.dtype)]
    out, last = torch.rnn_relu(steps, state, weights * 3, False, 3, 0.5, True, False, False)
    return out[0] + out[1] + last[0] + last[1] + last[2]


DRAWS: Mapping[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (dropped_path, dropped_path_of_rand, uniform, normal, whole, kept, leaky, gumbel, chosen,
                            others, counted, shaped, turned, recurrent)}


class Scaled(nn.Module):
    """The sum of what a function draws for x (n, m), each scaled by a weight of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, nn.Parameter(torch.ones(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * DRAWS[self.name](x)).sum()


def made(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    return Scaled(name), (torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).sin(),)


class Residual(nn.Module):
    """x + f(x), where f is left out of some samples, and sees noise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.slope = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.slope(self.up(self.norm(x))))
        if self.training:
            y = dropped_path_of_rand(dropped_path(y))
        return x + y


class Dropped(nn.Module):
    """Three blocks with stochastic depth."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.blocks, self.noise = nn.Sequential(*(Residual(WIDTH) for _ in range(3))), noise

    def forward(self, x: Tensor) -> Tensor:
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        loss: Tensor = self.blocks(x).square().mean()
        return loss

    def example_inputs(self) -> Tensor:
        return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).sin()


def dropped(noise: float = 0.5) -> nn.Module:
    """Loads with `FILE.py:dropped`."""
    torch.manual_seed(0)
    return Dropped(noise)
