"""Small models that call FlexAttention as libraries do: `name(kind, layers, ..) -> (module, sample)`."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

VOCAB, WIDTH, HEADS, KEYS, LENGTH = 60, 32, 4, 2, 48
END = 0
"""The token behind a document."""


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def window(width: int) -> Any:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < width
    return near


def documents(tokens: Tensor, end: int = END) -> Any:
    """Which keys are of the query's document, as torchtitan has it: a token `end` is the last of its document."""
    is_last = tokens == end
    numbers = torch.cumsum(is_last.int(), dim=1) - is_last.int()

    def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return numbers[b, q] == numbers[b, k]
    return same


def compiled(function: Any) -> Any:
    """torch.compile of a function; the compiler's own imports warn of what is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(function)


class Attention(nn.Module):
    """Grouped heads; `compiled` as torchtitan holds it, `sinks` as GPT-OSS scales by the log-sum-exp."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS * KEYS, bias=False) for _ in range(2))
        self.call: Any = compiled(flex_attention) if kind == "compiled" else flex_attention
        if kind == "biased":
            self.slopes, self.distances = nn.Parameter(torch.rand(HEADS)), nn.Parameter(torch.randn(2 * LENGTH - 1))
        if kind == "sinks":
            self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.kind == "sinks":
            y, aux = self.call(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
            y = y * torch.sigmoid(aux.lse - self.sinks[:, None]).unsqueeze(-1)
        else:
            y = self.call(q, k, v, score_mod=self.bias() if self.kind == "biased" else None, block_mask=mask,
                          enable_gqa=True)
        found: Tensor = self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return found

    def bias(self) -> Any:
        slopes, distances = self.slopes, self.distances

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            near = torch.where((q - k).abs() < 7, s, 10 * torch.tanh(s / 10))
            return near - slopes[h] * (q - k) + distances[q - k + LENGTH - 1]
        return score


class Model(nn.Module):
    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(layers))
        self.attentions = nn.ModuleList(Attention(kind) for _ in range(layers))
        if kind == "outside":
            self.mask = create_block_mask(and_masks(causal, window(9)), None, None, LENGTH, LENGTH, "cpu", 16)

    def forward(self, tokens: Tensor, labels: Tensor, mask: Any = None) -> Tensor:
        batch, length = tokens.shape
        if mask is not None:
            pass
        elif self.kind == "outside":
            mask = self.mask
        elif self.kind == "biased":
            mask = None
        else:
            both = and_masks(causal, documents(tokens))
            make = compiled(create_block_mask) if self.kind == "compiled" else create_block_mask
            mask = make(both, batch, None, length, length, device=tokens.device, BLOCK_SIZE=16)
        x = self.tokens(tokens)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x), mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def library(given: str = "", **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A Llama of transformers, which calls FlexAttention; `given` masks of padding, or positions of packed rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {"attn_implementation": "flex_attention", **more}
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1,
                         num_attention_heads=HEADS, num_key_value_heads=KEYS, max_position_embeddings=16, **settings)
    tokens, ends = torch.randint(1, VOCAB, (3, 16)), torch.tensor([[16], [9], [12]])
    others = {"padding": {"attention_mask": (torch.arange(16) < ends).long()},
              "positions": {"position_ids": torch.where(torch.arange(16) < ends, 0, -ends) + torch.arange(16)}}
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens, "use_cache": False,
                                      **others.get(given, {})}


def model(kind: str = "documents", layers: int = 1, batch: int = 3) -> tuple[nn.Module, tuple[Any, ...]]:
    """A language model of packed documents (`documents`, `compiled`, `sinks`), also with the batch's mask (`given`).

    Or one of a window whose mask is made once (`outside`), or with biases that are learnt (`biased`)."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCAB // 6, (batch, LENGTH))
    given: tuple[Any, ...] = (tokens, torch.randint(0, VOCAB, (batch, LENGTH)))
    if kind == "given":
        both = and_masks(causal, documents(tokens))
        given = (*given, create_block_mask(both, batch, None, LENGTH, LENGTH, "cpu", 16))
    return Model(kind, layers), given
