"""Small seeded models whose parts are joined by more than one tensor in a row: `branching(name) -> (module, sample)`.

    thrice       every block has the same weights
    frozen       embedding and half of the blocks do not learn; the others have an adapter beside each weight
    auxiliary    each block adds to the loss
    chosen       numbers of the best classes, whole numbers, are read again later; so is a mask
    dense        each block reads what all before it have made
    twins        two inputs go through the same blocks, and the rows of a microbatch are told apart by their products
    swapped      what blocks hand on is a transposed view, and a row that is repeated
    gated        gates are numbers that several blocks share; between them is nothing that learns
    derived      every block adds a row that is made of a parameter alone
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.sample import Sample

WIDTH, LENGTH, WORDS = 16, 8, 12

Way = Callable[["Branching", Tensor], tuple[Tensor, Tensor]]
"""(model, words) -> (what the head reads, what is added to the loss)."""


class Block(nn.Module):
    """A norm, a product, a nonlinearity, and what was there before."""

    def __init__(self, width: int = WIDTH, drops: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up: nn.Module = nn.Linear(width, 2 * width)
        self.down: nn.Module = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(drops)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return x + y


class Branching(nn.Module):
    """Words, blocks and a head, which `way` joins."""

    def __init__(self, way: Way, layers: int, drops: float) -> None:
        super().__init__()
        self.way, self.words = way, nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(drops=drops) for _ in range(layers))
        self.head, self.narrow = nn.Linear(WIDTH, WORDS), nn.Linear(WIDTH, WORDS)
        self.gates = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + k / 4)) for k in range(2))
        self.joins = nn.ModuleList(nn.Linear((k + 2) * WIDTH, WIDTH) for k in range(layers))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, more = self.way(self, ids)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten()) + more


def _thrice(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = of.words(ids)
    for _ in of.blocks:
        x = of.blocks[0](x) + of.joins[0](torch.cat([x, x], -1))
    return x, x.new_zeros(())


def _auxiliary(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x, more = of.words(ids), torch.zeros((), dtype=of.head.weight.dtype)
    for block in of.blocks:
        x = block(x)
        more = more + 0.01 * x.square().mean()
    return x, more


def _chosen(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = of.blocks[0](of.words(ids))
    best, keep = of.narrow(x).argmax(-1), x > 0
    for block in of.blocks[1:]:
        x = block(x)
    return torch.where(keep, x, 0.5 * x) + of.words(best), x.new_zeros(())


def _dense(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    every = [of.words(ids)]
    for block, join in zip(of.blocks, of.joins, strict=True):
        every.append(block(every[-1]))
        every[-1] = join(torch.cat(every, -1))
    return every[-1], every[-1].new_zeros(())


def _twins(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x, y = of.words(ids), of.words(ids.flip(1))
    for block in of.blocks:
        x, y = block(x), block(y)
    products = F.normalize(x.mean(1), dim=-1) @ F.normalize(y.mean(1), dim=-1).t()
    return x, F.cross_entropy(4 * products, torch.arange(ids.shape[0]))


def _swapped(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = of.words(ids).transpose(0, 1)
    row = x.mean(0, keepdim=True).expand(LENGTH, -1, -1)
    for block in of.blocks:
        x = (block(x).transpose(0, 1) + 0.1 * row.transpose(0, 1)).transpose(0, 1)
    return x.transpose(0, 1), x.new_zeros(())


def _gated(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x = of.words(ids)
    for k, block in enumerate(of.blocks):
        x = x + of.gates[k % 2] * torch.tanh(block(x))
        x = x - x.softmax(-1).mean(1, keepdim=True)
    return x, x.new_zeros(())


def _derived(of: Branching, ids: Tensor) -> tuple[Tensor, Tensor]:
    x, row = of.words(ids), torch.cos(of.narrow.weight.mean(0))
    for block in of.blocks:
        x = block(x + row) * row
    return x, x.new_zeros(())


WAYS: dict[str, Way] = {"thrice": _thrice, "auxiliary": _auxiliary, "chosen": _chosen, "dense": _dense, "twins": _twins,
                        "swapped": _swapped, "gated": _gated, "frozen": _auxiliary, "derived": _derived}


class Adapted(nn.Module):
    """A linear layer that does not learn, and a product of low rank that does."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        assert isinstance(linear, nn.Linear)
        self.linear = linear.requires_grad_(False)
        self.a, self.b = (nn.Parameter(0.1 * torch.randn(*size)) for size in ((2, linear.in_features),
                                                                              (linear.out_features, 2)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found + F.linear(F.linear(x, self.a), self.b)


def branching(name: str, layers: int = 4, B: int = 4, dtype: torch.dtype = torch.float32, dropout: float = 0.0
              ) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    model = Branching(WAYS[name], layers, dropout)
    if name == "frozen":
        model.words.requires_grad_(False)
        for block in model.blocks[:layers // 2]:
            block.requires_grad_(False)
        for block in model.blocks[layers // 2:]:
            assert isinstance(block, Block)
            block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model.to(dtype), Sample(tuple(torch.randint(0, WORDS, (B, LENGTH)) for _ in range(2)))
