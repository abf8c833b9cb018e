"""A recommender with large tables (DLRM), planned for a cluster. Run: python examples/recommender.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Recommender(nn.Module):
    """Numbers through an MLP, categories through tables, their inner products, and an MLP that says how likely a click
    is. Tables are large and read in few rows: splitting their rows saves memory, and costs messages."""

    pairs: Tensor

    def __init__(self, tables: int, rows: int, width: int, hidden: int, numbers: int, batch: int) -> None:
        super().__init__()
        self.rows, self.sizes = rows, (batch, numbers, tables)
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(numbers, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        self.register_buffer("pairs", torch.triu_indices(tables + 1, tables + 1, offset=1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor, clicks: Tensor) -> Tensor:
        x = self.bottom(numbers)
        found = torch.stack([x, *(table(categories[:, k]) for k, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(found, found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, products], dim=1)).squeeze(1), clicks)

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        batch, numbers, tables = self.sizes
        return (torch.randn(batch, numbers, device="cpu"), torch.randint(0, self.rows, (batch, tables), device="cpu"),
                torch.randint(0, 2, (batch,), device="cpu").float())


def recommender(tables: int = 4, rows: int = 1000, width: int = 16, hidden: int = 64, numbers: int = 13,
                batch: int = 32) -> Recommender:
    return Recommender(tables, rows, width, hidden, numbers, batch)


def recommender_large(batch: int = 65536) -> Recommender:
    """26 tables of a million rows, 3.3 billion parameters; on the meta device."""
    with torch.device("meta"):
        return recommender(tables=26, rows=10**6, width=128, hidden=1024, batch=batch)


if __name__ == "__main__":
    print(autoddl.plan(recommender(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
