"""Runs attention of a split sequence on one rank: keys of all ranks come by, or are here, and results are merged.

Formulas, messages and the halves that ranks trade are those of `operators.ring`. The next keys and values of a ring are
on their way while a block is computed. Sums are float32 at least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from autoddl.operators.kernels.attention_blocks import Gradients, Heads, block_backward, block_forward, sum_dtype
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.halves import Ranks, traded, traded_back
from autoddl.operators.kernels.site import Site

__all__ = ["Blocks", "Turns", "attention_of_halves", "has_all_keys", "ring_attention", "ring_of_blocks"]

Optional = Tensor | None
Pair = tuple[Tensor, Tensor]
Read = tuple[Optional, ...]
KEYS, GRADIENTS = 1, 2
"""Numbers that tell two messages apart which are on their way together."""


def ring_attention(site: Site, q: Tensor, k: Tensor, v: Tensor, mask: Optional, causal: bool, scale: float | None
                   ) -> Tensor:
    """Returns the output of this rank's queries over the keys of all; q, k, v: [batch, heads, sequence here, size]."""
    if is_traced(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    blocks = _Fused(_heads(q, mask, scale), causal)
    return ring_of_blocks(Turns(Ranks.of(site), causal), blocks, q, k, v, (mask,))[0]


def attention_of_halves(site: Site, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """As `ring_attention`, causal, of keys and values that are all here: [batch, fewer heads, sequence, size]."""
    if is_traced(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    ranks = Ranks.of(site)
    found: Tensor = _Halves.apply(_heads(q, None, scale), ranks, traded(ranks, q), k, v)  # type: ignore[no-untyped-call]
    return traded_back(ranks, found)[0]


def has_all_keys(site: Site) -> bool:
    """Whether keys are not split along the sequence."""
    return not site.splits(1, 2)


def _heads(q: Tensor, mask: Optional, scale: float | None) -> Heads:
    return Heads(q.shape[-1] ** -0.5 if scale is None else scale,
                 mask is not None and mask.requires_grad and torch.is_grad_enabled())


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a ring as one of its ranks sees them; `halves`: whether ranks trade these first."""

    ranks: Ranks
    halves: bool

    def source(self, turn: int) -> int:
        """The rank whose keys are here in a turn."""
        return (self.ranks.place - turn) % self.ranks.count

    def shift(self, value: Tensor, number: int) -> Callable[[], Tensor]:
        """Sends `value` to the next rank; call the result for what the one before sent."""
        return self.ranks.site.shifted(value, number)


class Blocks(Protocol):
    """Computes what meets in a turn of a ring; `read` is a mask, or what FlexAttention reads."""

    @property
    def told(self) -> bool:
        """Whether log-sum-exps are an output too."""

    def forward(self, turns: Turns, turn: int, q: Tensor, k: Tensor, v: Tensor, read: Read) -> tuple[slice, Pair]:
        """Rows of the queries, with their output and log-sum-exp over the keys k that are here."""

    def backward(self, turns: Turns, turn: int, upstream: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor,
                 out: Tensor, sums: Tensor, read: Read, of_read: list[Optional]) -> tuple[slice, slice, Gradients]:
        """Rows and columns, with their part of the gradients; those of what was read are added to `of_read`."""


@dataclass(frozen=True, slots=True)
class _Fused:
    """Blocks of torch's attention."""

    heads: Heads
    causal: bool

    @property
    def told(self) -> bool:
        return False

    def forward(self, turns: Turns, turn: int, q: Tensor, k: Tensor, v: Tensor, read: Read) -> tuple[slice, Pair]:
        rows, columns, causal = self._parts(turns, turn, q.shape[-2], k.shape[-2])
        return rows, block_forward(self.heads, q[..., rows, :], k[..., columns, :], v[..., columns, :],
                                   _columns(read[0], turns, turn, k.shape[-2], q), causal)

    def backward(self, turns: Turns, turn: int, upstream: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor,
                 out: Tensor, sums: Tensor, read: Read, of_read: list[Optional]) -> tuple[slice, slice, Gradients]:
        rows, columns, causal = self._parts(turns, turn, q.shape[-2], k.shape[-2])
        found = block_backward(self.heads, upstream[0][..., rows, :], q[..., rows, :], k[..., columns, :],
                               v[..., columns, :], out[..., rows, :], sums[..., rows],
                               _columns(read[0], turns, turn, k.shape[-2], q), causal)
        if of_read[0] is not None and found.mask is not None:
            _add_columns(of_read[0], found.mask, turns.source(turn) * k.shape[-2])
        return rows, columns, found

    def _parts(self, turns: Turns, turn: int, queries: int, keys: int) -> tuple[slice, slice, bool]:
        """The queries and keys that meet in a turn, and whether causally."""
        everything = slice(None)
        if not self.causal or not turn:
            return everything, everything, self.causal
        if turns.source(turn) < turns.ranks.place:
            return everything, slice(0, keys // 2), False
        return slice(queries // 2, None), everything, False


def _columns(mask: Optional, turns: Turns, turn: int, keys: int, like: Tensor) -> Optional:
    """The part of the mask for the keys that are here, as numbers that are added to scores, of four dims."""
    if mask is None:
        return None
    here = mask if mask.shape[-1] == 1 else mask.narrow(-1, turns.source(turn) * keys, keys)
    if here.dtype is torch.bool:
        here = torch.zeros(here.shape, dtype=like.dtype, device=like.device).masked_fill(~here, float("-inf"))
    return here.to(like.dtype).view((1,) * (4 - here.dim()) + here.shape)


def ring_of_blocks(turns: Turns, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, read: Read) -> tuple[Tensor, ...]:
    """The output of this rank's queries over the keys of all, and its log-sum-exp where that is told."""
    found: tuple[Tensor, ...] = _Ring.apply(turns, blocks, q, k, v, *read)  # type: ignore[no-untyped-call]
    return found


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, turns: Turns, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, *read: Optional
                ) -> tuple[Tensor, ...]:
        if turns.halves:
            q, k, v = turns.ranks.trade((q, k, v), there=True)
        out, sums = _forward(turns, blocks, q, k, v, read)
        ctx.save_for_backward(q, k, v, out, sums, *read)
        ctx.turns, ctx.blocks = turns, blocks
        found = (out, sums) if blocks.told else (out,)
        return turns.ranks.trade_back(found) if turns.halves else found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, sums, *read = ctx.saved_tensors
        turns: Turns = ctx.turns
        given = turns.ranks.trade_upstream(upstream) if turns.halves else upstream
        of_read = [torch.zeros_like(x) if x is not None and needed else None
                   for x, needed in zip(read, ctx.needs_input_grad[5:], strict=True)]
        found = _backward(turns, ctx.blocks, given, q, k, v, out, sums, tuple(read), of_read)
        return None, None, *(turns.ranks.trade(found, there=False) if turns.halves else found), *of_read


def _forward(turns: Turns, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor, read: Read) -> Pair:
    """Output and log-sum-exp of the queries over all keys."""
    merged, message, last = None, _joined(k, v), turns.ranks.count - 1
    for turn in range(last + 1):
        arriving = turns.shift(message, KEYS) if turn < last else None
        pair = _apart(message, k, v) if turn else (k, v)
        rows, found = blocks.forward(turns, turn, q, *pair, read)
        merged = _merged(merged, found, rows)
        del pair, found
        message = arriving() if arriving is not None else message
    assert merged is not None, "a ring has at least two ranks"
    return merged[0].to(q.dtype), merged[1]


def _merged(total: Pair | None, found: Pair, rows: slice) -> Pair:
    """Output and log-sum-exp of the keys so far with those of a block, whose queries are `rows`."""
    out, sums = found[0].to(sum_dtype(found[0])), found[1].to(sum_dtype(found[0]))
    if total is None:
        return out, sums
    old_out, old_sums = total[0][..., rows, :], total[1][..., rows]
    new = torch.logaddexp(old_sums, sums)
    old_out.lerp_(out, (sums - new).exp_().nan_to_num_(0.0).unsqueeze(-1))  # both shares add up to 1
    old_sums.copy_(new)
    return total


def _backward(turns: Turns, blocks: Blocks, upstream: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, out: Tensor,
              sums: Tensor, read: Read, of_read: list[Optional]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries here, and of the keys and values here, which come home with a last hop."""
    wide, message, last = sum_dtype(q), _joined(k, v), turns.ranks.count - 1
    of_q, returning = torch.zeros_like(q, dtype=wide), None
    for turn in range(last + 1):
        arriving = turns.shift(message, KEYS) if turn < last else None
        pair = _apart(message, k, v) if turn else (k, v)
        rows, columns, found = blocks.backward(turns, turn, upstream, q, *pair, out, sums, read, of_read)
        of_q[..., rows, :] += found.q
        passed = k.new_zeros(k.numel() + v.numel(), dtype=wide) if returning is None else returning()
        for total, part in zip(_apart(passed, k, v), (found.k, found.v), strict=True):
            total[..., columns, :] += part
        returning = turns.shift(passed, GRADIENTS)
        del pair, found, passed
        message = arriving() if arriving is not None else message
    assert returning is not None, "a ring has at least two ranks"
    of_k, of_v = _apart(returning(), k, v)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype)


class _Halves(torch.autograd.Function):
    """Causal attention of two chunks of queries over all keys, in blocks."""

    @staticmethod
    def forward(ctx: Any, heads: Heads, ranks: Ranks, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, half = q.new_empty(*q.shape[:-1], v.shape[-1]), q.shape[-2] // 2
        sums = q.new_empty(q.shape[:-1], dtype=sum_dtype(q))
        for rows, chunk in _chunks(ranks, half):
            merged = None
            for columns, causal in _met(chunk, half):
                found = block_forward(heads, q[..., rows, :], k[..., columns, :], v[..., columns, :], None, causal)
                merged = _merged(merged, found, slice(None))
            assert merged is not None, "a chunk meets itself"
            out[..., rows, :], sums[..., rows] = merged
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.heads, ctx.ranks = heads, ranks
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        totals, half = [torch.zeros_like(x, dtype=sum_dtype(x)) for x in (q, k, v)], q.shape[-2] // 2
        for rows, chunk in _chunks(ctx.ranks, half):
            for columns, causal in _met(chunk, half):
                found = block_backward(ctx.heads, upstream[0][..., rows, :], q[..., rows, :], k[..., columns, :],
                                       v[..., columns, :], out[..., rows, :], sums[..., rows], None, causal)
                for total, part, where in zip(totals, (found.q, found.k, found.v), (rows, columns, columns),
                                              strict=True):
                    total[..., where, :] += part
        return None, None, *(total.to(q.dtype) for total in totals)


def _chunks(ranks: Ranks, half: int) -> list[tuple[slice, int]]:
    """The rows of each half of the queries, and the chunk of the sequence that it is."""
    return [(slice(n * half, (n + 1) * half), chunk) for n, chunk in enumerate(ranks.chunks(ranks.place))]


def _met(chunk: int, half: int) -> list[tuple[slice, bool]]:
    """The keys that a chunk of queries meets, and whether causally: those before it, and its own."""
    own = slice(chunk * half, (chunk + 1) * half)
    return [(slice(0, own.start), False), (own, True)][not chunk:]


def _add_columns(total: Tensor, part: Tensor, first: int) -> None:
    """Adds the gradient of a part of the mask's columns; all keys share one column."""
    place = total if total.shape[-1] == 1 else total.narrow(-1, first, part.shape[-1])
    place += part.reshape(place.shape)


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([x.reshape(-1) for x in (k, v)])


def _apart(message: Tensor, k: Tensor, v: Tensor) -> Pair:
    """Keys and values of a message, shaped as k and v."""
    first = prod(k.shape)
    return message[:first].view(k.shape), message[first:].view(v.shape)
