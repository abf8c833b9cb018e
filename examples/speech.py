"""Speech to text: an encoder of spectra and a decoder. Run: python examples/speech.py [cluster.yaml]"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl

CLUSTER = "examples/clusters/laptop.yaml"


class Attention(nn.Module):
    """Attention of `x` to `source`, causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in (self.q(x), self.k(source), self.v(source)))
        found: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2)
                               .flatten(2))
        return found


class Layer(nn.Module):
    """Attention to itself, in the decoder also to the encoder, and a feed-forward; norms come first."""

    def __init__(self, width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.norm, self.own = nn.LayerNorm(width), Attention(width, heads, decoder)
        self.cross = Attention(width, heads, False) if decoder else None
        self.cross_norm = nn.LayerNorm(width) if decoder else None
        self.feed_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        x = x + self.own(y, y)
        if self.cross is not None and self.cross_norm is not None and source is not None:
            x = x + self.cross(self.cross_norm(x), source)
        return torch.add(x, self.down(F.gelu(self.up(self.feed_norm(x)))))


class Speech(nn.Module):
    """Two convolutions over time, an encoder and a decoder with tied token embeddings, as Whisper has them."""

    def __init__(self, layers: int, width: int, heads: int, bands: int, frames: int, context: int, vocab: int,
                 batch: int) -> None:
        super().__init__()
        self.spectra, self.text, self.vocab = (batch, bands, frames), (batch, context), vocab
        self.narrow = nn.Conv1d(bands, width, 3, padding=1)
        self.halve = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.times, self.places = nn.Embedding(frames // 2, width), nn.Embedding(context, width)
        self.tokens = nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, True) for _ in range(layers))
        self.heard, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, spectra: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        x = F.gelu(self.halve(F.gelu(self.narrow(spectra)))).transpose(1, 2) + self.times.weight
        for layer in self.encoder:
            x = layer(x)
        x, y = self.heard(x), self.tokens(ids) + self.places.weight
        for layer in self.decoder:
            y = layer(y, x)
        logits = F.linear(self.norm(y), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    def example_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.randint(0, self.vocab, self.text, device="cpu")
        lengths = torch.randint(1, self.text[1] + 1, (self.text[0], 1), device="cpu")
        labels = ids.roll(-1, 1).masked_fill(torch.arange(self.text[1], device="cpu") >= lengths, -100)
        return torch.randn(self.spectra, device="cpu"), ids, labels


def speech(layers: int = 2, width: int = 64, heads: int = 4, bands: int = 20, frames: int = 64, context: int = 16,
           vocab: int = 128, batch: int = 8) -> Speech:
    return Speech(layers, width, heads, bands, frames, context, vocab, batch)


def whisper_large(batch: int = 64) -> Speech:
    """1.5 billion parameters, 30 seconds of sound a row; on the meta device."""
    with torch.device("meta"):
        return speech(layers=32, width=1280, heads=20, bands=128, frames=3000, context=448, vocab=51866, batch=batch)


if __name__ == "__main__":
    print(autoddl.plan(speech(), sys.argv[1] if len(sys.argv) > 1 else CLUSTER))
