"""Factories for the tests of the shell: small, and one that cannot be captured."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.dropout(self.down(F.gelu(self.up(self.norm(x))))))


class Tiny(nn.Module):
    def __init__(self, layers: int, width: int, batch: int, dropout: float) -> None:
        super().__init__()
        self.batch = batch
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), labels.flatten())

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 64, (self.batch, 6), generator=torch.Generator().manual_seed(0))
        return ids, ids.roll(-1, 1)


def tiny(layers: int = 2, width: int = 16, batch: int = 8, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return Tiny(layers, width, batch, dropout)


def on_meta(layers: int = 1) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        model = Tiny(layers, 16, 8, 0.0)
        return model, (torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 6, dtype=torch.int64))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:  # depends on the data
            y = -y
        return y.mean()


def branching() -> tuple[nn.Module, Tensor]:
    return Branching(), torch.zeros(2, 4)


def without_sample() -> nn.Module:
    return Branching()


def failing() -> nn.Module:
    raise RuntimeError("no weights here")


def not_a_module() -> int:
    return 3


class OneOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, unused: Tensor) -> Tensor:
        return self.weight.sum()


def one_op() -> tuple[nn.Module, Tensor]:
    return OneOp(), torch.zeros(4)
