"""Published models as modules: embeddings, layers, and the head.

    layer       x + attention(norm(x)), then x + mlp(norm(x))                        Vaswani et al. 2017, pre-norm
    attention   fused: scaled_dot_product_attention; else two products around a softmax and its dropout, and perhaps a
                division and a mask as operators of their own; keys and values of a group are copied for each query then
    latent      keys and values, and perhaps queries, from a narrow row that is normalised    DeepSeek-V2, 2024
    mlp         up, activation, down; gated: activation(gate) * up; experts: each token through `top` of `experts`,
                and perhaps through an MLP that all tokens share
    head        norm, logits, mean loss of the next token, or in an encoder of the token itself

Shapes are those of one microbatch: x is (batch, length, width). All experts get the same number of tokens, as the
routers of benchmarks are forced to do. With `batch` microbatches of as many ranks, tokens of one rank go to the experts
of another.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Decoder", "Shape"]

LIMIT = 7.0
"""Greatest value of a clamped gate (config.json of GPT-OSS: swiglu_limit)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and kinds that decide the kernels of a model."""

    width: int
    """Width of the stream x."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int
    """Attention heads of keys and values."""
    hidden: int
    """Width between up and down, of one expert where there are any."""
    vocab: int
    """Tokens of the vocabulary, padded."""
    batch: int
    """Sequences that the model computes at once."""
    length: int
    """Tokens of a sequence."""
    gated: bool = False
    """Whether the MLP multiplies by an activated gate; norms are then RMSNorm, and attention rotates."""
    fused: bool = True
    """Whether attention is one kernel."""
    dropout: bool = False
    """Whether there is dropout."""
    masks_apart: bool = False
    """Whether scores are divided and masked by operators of their own, where attention is not fused."""
    bias: bool = True
    """Whether linear layers of columns have biases."""
    experts: int = 0
    """Experts of a mixture; 0 for a dense MLP."""
    top_k: int = 0
    """Experts that a token goes to."""
    expert_bias: bool = False
    """Whether both products of an expert have biases."""
    clamped: bool = False
    """Whether experts clamp the gate and what it multiplies."""
    qk_norm: bool = False
    """Whether every head of queries and keys is normalised before it is turned."""
    activation: str = "gelu"
    """`gelu`, or `relu` for a squared relu, where nothing is gated."""
    row_dtype: str = ""
    """Dtype of the rows of experts, of their probabilities and of the rotation of latent attention; empty for that of
    the stream."""
    head_dim: int = 0
    """Width of a head; 0 for width / heads. Of latent attention, the part of queries and keys that is not turned."""
    q_rank: int = 0
    """Width of the row that queries of latent attention are made from; 0 for the stream."""
    kv_rank: int = 0
    """Width of the row that keys and values are made from; 0 where attention is not latent."""
    rope_dim: int = 0
    """Width of the part of queries that is turned, and of the keys' part that all heads share."""
    v_dim: int = 0
    """Width of the values of a head of latent attention."""
    shared: int = 0
    """Width between up and down of an MLP that every token passes besides its experts; 0 for none."""
    low_norms: bool = False
    """Whether norms compute in the dtype of the stream under autocast too, without casts."""
    written_out: bool = False
    """Whether RMSNorm and the rotation are rows of operators on float32 copies."""
    causal: bool = True
    """Whether a query sees only the keys before it; else all of them."""
    dtype: str = "bfloat16"
    """Dtype of activations and parameters."""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def key_width(self) -> int:
        """Width of a head of queries and keys, with the part of latent attention that is turned."""
        return self.head_width + self.rope_dim


def _mask(shape: Shape) -> nn.Buffer | None:
    """The mask of attention where it is an operator's."""
    return nn.Buffer(torch.empty(1, 1, shape.length, shape.length)) if shape.masks_apart else None


def _attended(shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Queries that attend to keys, in one kernel or written out: (batch, length, heads times width of values)."""
    each = q.shape[1] // k.shape[1]
    if shape.fused:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=each > 1)
    else:
        k, v = (part.repeat_interleave(each, 1) if each > 1 else part for part in (k, v))
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores / shape.key_width ** 0.5 * mask
        y = F.dropout(F.softmax(scores, dim=-1), 0.1, shape.dropout) @ v
    return y.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)


class Attention(nn.Module):
    """Queries, keys and values of a group in one product; keys and values may have fewer heads. A rotation of queries
    and keys by their position, which is one kernel, is a multiplication."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * shape.head_width, bias=shape.bias)
        self.o = nn.Linear(shape.heads * shape.head_width, shape.width, bias=False)
        self.turn = nn.Buffer(torch.empty(shape.length, shape.head_width)) if shape.gated else None
        self.mask = _mask(shape)
        self.norms = nn.ModuleList(_row_norm(shape, shape.head_width) for _ in range(2 * shape.qk_norm))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        shape, each = self.shape, self.shape.heads // self.shape.kv_heads
        parts = self.qkv(x).view(batch, length, shape.kv_heads, each + 2, shape.head_width).split((each, 1, 1), 3)
        q, k, v = (part.reshape(batch, length, -1, shape.head_width) for part in parts)
        if shape.qk_norm:
            q, k = (norm(part) for norm, part in zip(self.norms, (q, k), strict=True))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.turn is not None:
            q, k = (_turned(part, self.turn, shape.written_out) for part in (q, k))
        done: Tensor = self.o(_attended(shape, q, k, v, self.mask))
        return done


class LatentAttention(nn.Module):
    """Queries, keys and values from narrow rows; every head has the same turned part of the keys beside its own.

    Where kernels turn queries in their place (Megatron-Core, fused_mla_yarn_rope_apply.py), their rotation is one
    multiplication. Written out, both parts are cut and joined. A key's parts are joined either way.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, heads, rope = shape, shape.heads, shape.rope_dim
        self.q_a = nn.Linear(shape.width, shape.q_rank, bias=False) if shape.q_rank else None
        self.q_norm = _row_norm(shape, shape.q_rank) if shape.q_rank else None
        self.q_b = nn.Linear(shape.q_rank or shape.width, heads * shape.key_width, bias=False)
        self.kv_a = nn.Linear(shape.width, shape.kv_rank + rope, bias=False)
        self.kv_norm = _row_norm(shape, shape.kv_rank)
        self.kv_b = nn.Linear(shape.kv_rank, heads * (shape.head_width + shape.v_dim), bias=False)
        self.o = nn.Linear(heads * shape.v_dim, shape.width, bias=False)
        self.turn = nn.Buffer(torch.empty(shape.length, rope))
        self.turn_heads = None if shape.written_out else nn.Buffer(torch.empty(shape.length, shape.key_width))
        self.mask = _mask(shape)

    def forward(self, x: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        narrow, shared = self.kv_a(x).split((shape.kv_rank, shape.rope_dim), -1)
        made = self.kv_b(self.kv_norm(narrow)).view(batch, length, shape.heads, -1).transpose(1, 2)
        own, v = made.split((shape.head_width, shape.v_dim), -1)
        shared = _turned(shared.unsqueeze(1), self._low(self.turn), shape.written_out)
        k = torch.cat((own, shared.expand(batch, shape.heads, length, shape.rope_dim)), -1)
        done: Tensor = self.o(_attended(shape, self._queries(x), k, v, self.mask))
        return done

    def _queries(self, x: Tensor) -> Tensor:
        """(batch, heads, length, width of keys)."""
        rows = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        q: Tensor = self.q_b(rows).view(*x.shape[:2], self.shape.heads, -1).transpose(1, 2)
        if self.turn_heads is not None:
            return q * self._low(self.turn_heads)
        own, last = q.split((self.shape.head_width, self.shape.rope_dim), -1)
        return torch.cat((own, _turned(last, self._low(self.turn), self.shape.written_out)), -1)

    def _low(self, turn: Tensor) -> Tensor:
        """A rotation in the dtype of products, so that both parts of a head have it."""
        return turn.to(getattr(torch, self.shape.row_dtype)) if self.shape.row_dtype else turn


class Dense(nn.Module):
    """One expert for all tokens. Gate and up are one product with their columns interleaved, so that a shard of the
    columns has part of both."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, (1 + shape.gated) * shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.shape.gated:
            gate, up = y.view(*x.shape[:2], -1, 2).unbind(3)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y) if self.shape.activation == "gelu" else torch.relu(y) * y
        done: Tensor = self.down(y)
        return done


class Experts(nn.Module):
    """(batch, length, width) -> (experts, tokens of each, width) -> products -> back; a router besides.

    Tokens of an expert are in the order of the batch, so that ranks which share no experts keep the rows they have.
    In mixed precision programs send rows in the dtype of products, and weight them in it (transformers, AutoModel).
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.up = nn.Parameter(torch.empty(shape.experts, shape.width, 2 * shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))
        self.biases = nn.ParameterList(torch.empty(shape.experts, 1, n) for n in (2 * shape.hidden, shape.width)
                                       if shape.expert_bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        count, top = self.shape.experts, self.shape.top_k
        weight = torch.softmax(self.router(x), -1)
        if self.shape.row_dtype:
            weight, x = (one.to(getattr(torch, self.shape.row_dtype)) for one in (weight, x))
        copies = x.unsqueeze(2).expand(batch, length, top, width).reshape(batch, length * top // count, count, width)
        sent = copies.permute(2, 0, 1, 3).clone().reshape(count, -1, width)
        gate, up = self._biased(sent @ self.up.to(sent.dtype), 0).view(count, sent.shape[1], -1, 2).unbind(3)
        if self.shape.clamped:
            gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        done = self._biased((F.silu(gate) * up) @ self.down.to(sent.dtype), 1).view(count, batch, -1, width)
        back = done.permute(1, 2, 0, 3).clone().reshape(batch, length, top, width)
        mixed: Tensor = (back * weight[..., :top].unsqueeze(-1)).sum(2, dtype=x.dtype)
        return mixed

    def _biased(self, y: Tensor, k: int) -> Tensor:
        """What product k wrote, with its bias where it has one."""
        return y + self.biases[k].to(y.dtype) if self.shape.expert_bias else y


class LowNorm(nn.LayerNorm):
    """A norm that reads and writes the stream's dtype, where autocast would cast to float32 and back."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class NormInRows(nn.RMSNorm):
    """A norm as operators: to float32, square, mean, root, product, back, weight: 36 bytes an element in forward."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return wide.to(x.dtype) * self.weight


def _turned(x: Tensor, turn: Tensor, written_out: bool) -> Tensor:
    """Queries or keys times the rotation of their positions: one kernel, or to float32, a product and back."""
    return (x.float() * turn).to(x.dtype) if written_out else x * turn


def _row_norm(shape: Shape, width: int) -> nn.RMSNorm:
    """A norm without means of rows of a width."""
    return (NormInRows if shape.written_out else nn.RMSNorm)(width)


def _norm(shape: Shape) -> nn.Module:
    """The norm of a model."""
    if shape.gated:
        return _row_norm(shape, shape.width)
    return (LowNorm if shape.low_norms else nn.LayerNorm)(shape.width)


class Block(nn.Module):
    """One layer of a model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = _norm(shape), _norm(shape)
        self.attention = LatentAttention(shape) if shape.kv_rank else Attention(shape)
        self.mlp = Experts(shape) if shape.experts else Dense(shape)
        self.shared = Dense(replace(shape, hidden=shape.shared, bias=False)) if shape.shared else None
        self.dropout = shape.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.first(x)), 0.1, self.dropout)
        y = self.second(x)
        done = self.mlp(y) if self.shared is None else self.mlp(y) + self.shared(y)
        return x + F.dropout(done, 0.1, self.dropout)


class Decoder(nn.Module):
    """A whole model: token embeddings, perhaps positions, layers, norm, and the mean loss of the next token."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.positions = None if shape.gated else nn.Parameter(torch.empty(shape.length, shape.width))
        self.layers = nn.ModuleList(Block(shape) for _ in range(layers))
        self.norm, self.head = _norm(shape), nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
