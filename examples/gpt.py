"""A small GPT, planned for a cluster. Run: python examples/gpt.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.attention_norm(x)
        q, k, v = (part(y).view(batch, length, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.dropout(self.o(y.transpose(1, 2).reshape(batch, length, width)))
        return torch.add(x, self.dropout(self.down(F.gelu(self.up(self.norm(x))))))


class GPT(nn.Module):
    """A decoder with tied token embeddings; forward returns the mean loss of the next token."""

    def __init__(self, layers: int, width: int, heads: int, context: int, batch: int, vocab: int,
                 dropout: float) -> None:
        super().__init__()
        self.shape, self.vocab = (batch, context), vocab
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def example_inputs(self) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, self.vocab, self.shape, device="cpu")
        return ids, ids.roll(-1, 1)


def gpt(layers: int = 4, width: int = 256, heads: int = 8, context: int = 128, batch: int = 8, vocab: int = 256,
        dropout: float = 0.0) -> GPT:
    return GPT(layers, width, heads, context, batch, vocab, dropout)


def gpt2_small(batch: int = 8) -> GPT:
    """GPT-2, 124 million parameters; on the meta device, as a plan needs no weights."""
    with torch.device("meta"):
        return gpt(layers=12, width=768, heads=12, context=1024, batch=batch, vocab=50257)


if __name__ == "__main__":
    print(autoddl.plan(gpt(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
