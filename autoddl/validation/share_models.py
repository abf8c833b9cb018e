"""The two models of the published communication shares, as Megatron-LM builds them: `gpt2-medium` and `t5-large`.

    layer     x + attention(norm(x)), where there is an encoder x + attention(norm(x), encoded), then x + mlp(norm(x))
    heads     two products around a softmax and its dropout; queries, keys and values are one product. The mask belongs
              to the kernel of the softmax (fused scale, mask and softmax), so none is written here
    sizes     24 layers (T5: 24 of the encoder and 24 of the decoder), width 1024, 16 heads, 4096 between up and down
    tokens    GPT-2: 50257 in length 1024; T5: 30522 of BERT and 100 more in lengths 512 and 128, the lengths of
              Megatron-LM's example (pretrain_t5.sh); both padded to a multiple of 128
    weights   float16; logits and loss in float32

355 and 737 million parameters, on the meta device. A batch is what all ranks together train on in a step.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "gpt2_medium", "t5_large"]

WIDTH, HEADS, HIDDEN, LAYERS, DROPOUT = 1024, 16, 4096, 24, 0.1


class TransformerAttention(nn.Module):
    """Attention of x to itself, or with `cross` to what an encoder made."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH if cross else 3 * WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH) if cross else None
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        if self.kv is None or encoded is None:
            q, k, v = self.q(x).chunk(3, -1)
        else:
            q, (k, v) = self.q(x), self.kv(encoded).chunk(2, -1)
        q, k, v = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in (q, k, v))
        y = F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), DROPOUT, self.training) @ v
        done: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return done


class TransformerLayer(nn.Module):
    """One layer, of a decoder with `cross` to what an encoder made."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 + cross))
        self.attention = TransformerAttention(False)
        self.cross = TransformerAttention(True) if cross else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = x + F.dropout(self.attention(self.norms[0](x)), DROPOUT, self.training)
        if self.cross is not None:
            x = x + F.dropout(self.cross(self.norms[2](x), encoded), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), DROPOUT, self.training)


class TransformerStack(nn.Module):
    """Layers between the embeddings of tokens and the norm at the end."""

    def __init__(self, length: int, cross: bool) -> None:
        super().__init__()
        self.positions = nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList(TransformerLayer(cross) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, encoded: Tensor | None = None) -> Tensor:
        x = F.dropout(x + self.positions(torch.arange(x.shape[1], device=x.device)), DROPOUT, self.training)
        for layer in self.layers:
            x = layer(x, encoded)
        done: Tensor = self.norm(x)
        return done


class LanguageModel(nn.Module):
    """Loss of the next token; with an encoder, of what follows from the text that it reads."""

    def __init__(self, vocab: int, length: int, read: int = 0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, WIDTH)
        self.encoder = TransformerStack(read, False) if read else None
        self.decoder = TransformerStack(length, bool(read))

    def forward(self, ids: Tensor, labels: Tensor, text: Tensor | None = None) -> Tensor:
        encoded = self.encoder(self.tokens(text)) if self.encoder is not None else None
        x = self.decoder(self.tokens(ids), encoded)
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1).float(), labels.flatten())


ModelAndInputs = tuple[nn.Module, tuple[Tensor, ...]]


def _build(vocab: int, batch: int, length: int, read: int = 0) -> ModelAndInputs:
    with torch.device("meta"):
        model = LanguageModel(vocab, length, read).to(torch.float16)
        ids, text = (torch.zeros(batch, size, dtype=torch.int64) for size in (length, read))
    return model, (ids, ids, text) if read else (ids, ids)


def gpt2_medium(batch: int = 16) -> ModelAndInputs:
    """Returns GPT-2 Medium and a batch of sequences of 1024 tokens, on the meta device."""
    return _build(50304, batch, 1024)


def t5_large(batch: int = 16) -> ModelAndInputs:
    """Returns T5-Large and a batch of sequences of 512 tokens that are read and 128 that follow, on the meta device."""
    return _build(30720, batch, 128, 512)


MODELS: Mapping[str, Callable[[int], ModelAndInputs]] = MappingProxyType({
    "gpt2-medium": gpt2_medium, "t5-large": t5_large})
"""Name on the command line -> builder of the model and a batch."""
