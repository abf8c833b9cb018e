"""Linears as a chain, and the words that one of them sends at least.

For Y(M,N) = X(M,K) W(K,N) on p = p1 p2 p3 ranks, p1 splitting M, p2 N and p3 K, with all of them stored in p pieces,

    words = 2 (x + w + y)      x = (1-1/p2) MK/(p1 p3)   w = (1-1/p1) KN/(p2 p3)   y = (1-1/p3) MN/(p1 p2)

forward and backward. `bound` is twice what one product takes at least (Al Daas et al. 2022): a yardstick for the three
products of a step, not a proven bound of them.
"""

from math import sqrt

import torch
from torch import Tensor, nn

__all__ = ["Linears", "Size", "bound", "classifier", "grids", "transformer", "words"]

Size = tuple[int, int, int]
"""M, N, K of a linear."""


class Linears(nn.Module):
    """The input is a parameter, so that it is stored in pieces and has a gradient. A layer whose result is three times
    as wide as the next one's input is qkv."""

    def __init__(self, rows: int, widths: tuple[tuple[int, int], ...], nonlinear: tuple[bool, ...]) -> None:
        super().__init__()
        self.x, self.nonlinear = nn.Parameter(torch.empty(rows, widths[0][0])), nonlinear
        self.sizes = tuple((rows, after, before) for before, after in widths)
        self.layers = nn.ModuleList(nn.Linear(before, after, bias=False) for before, after in widths)

    def forward(self, scale: Tensor) -> Tensor:
        y: Tensor = self.x
        for layer, nonlinear, (_, _, before) in zip(self.layers, self.nonlinear, self.sizes, strict=True):
            if y.shape[-1] == 3 * before:
                y = y.view(y.shape[0], -1, 3).sum(-1)
            y = layer(y)
            y = y.relu() if nonlinear else y
        return y.sum() * scale


def transformer(h: int, rows: int) -> Linears:
    with torch.device("meta"):
        return Linears(rows, ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h)), (True, False, True, True))


def classifier(rows: int) -> Linears:
    with torch.device("meta"):
        return Linears(rows, ((25088, 4096), (4096, 4096), (4096, 1000)), (True, True, True))


def grids(p: int) -> list[Size]:
    return [(a, b, p // a // b) for a in range(1, p + 1) if p % a == 0 for b in range(1, p // a + 1) if p // a % b == 0]


def words(size: Size, grid: Size) -> float:
    (m, n, k), (a, b, c) = size, grid
    return 2 * ((1 - 1 / b) * m * k / (a * c) + (1 - 1 / a) * k * n / (b * c) + (1 - 1 / c) * m * n / (a * b))


def bound(size: Size, p: int) -> float:
    m, n, k = sorted(size, reverse=True)
    if p <= m / n:
        least = (m * n + m * k) / p + n * k
    elif p <= m * n / k**2:
        least = 2 * sqrt(m * n * k**2 / p) + m * n / p
    else:
        least = 3 * (m * n * k / p) ** (2 / 3)
    return 2 * (least - (m * n + m * k + n * k) / p)
