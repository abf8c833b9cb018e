"""Runs ring attention on one rank: keys and values of all ranks come by, and what they yield is merged.

Formulas, messages and the halves that a causal ring trades are those of `operators.ring`. The next keys and values are
on their way while a block is computed. Sums are float32 at least.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from autoddl.operators.kernels.attention_blocks import Heads, block_backward, block_forward
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.site import Site

__all__ = ["ring_attention"]

Optional = Tensor | None
Pair = tuple[Tensor, Tensor]
KEYS, GRADIENTS = 1, 2
"""Numbers that tell two messages apart which are on their way together."""


def ring_attention(site: Site, q: Tensor, k: Tensor, v: Tensor, mask: Optional, causal: bool, scale: float | None
                   ) -> Tensor:
    """Returns the output of this rank's queries over the keys of all; q, k, v: [batch, heads, sequence here, size]."""
    if is_traced(q):
        return q.new_empty(*q.shape[:-1], v.shape[-1])
    heads = Heads(q.shape[-1] ** -0.5 if scale is None else scale,
                  mask is not None and mask.requires_grad and torch.is_grad_enabled())
    found: Tensor = _Ring.apply(q, k, v, mask, _Turns.of(site, causal), heads)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class _Turns:
    """The ring as rank `place` of `ranks` sees it."""

    site: Site
    causal: bool
    place: int
    ranks: int

    @classmethod
    def of(cls, site: Site, causal: bool) -> "_Turns":
        members = site.mesh.members(site.option.inner, site.coordinate)
        return cls(site, causal, members.index(site.coordinate), len(members))

    def source(self, turn: int) -> int:
        """The rank whose keys are here in a turn."""
        return (self.place - turn) % self.ranks

    def parts(self, turn: int, queries: int, keys: int) -> tuple[slice, slice, bool]:
        """The queries and keys that meet in a turn, and whether causally."""
        everything = slice(None)
        if not self.causal or not turn:
            return everything, everything, self.causal
        if self.source(turn) < self.place:
            return everything, slice(0, keys // 2), False
        return slice(queries // 2, None), everything, False

    def shift(self, value: Tensor, number: int) -> Callable[[], Tensor]:
        """Sends `value` to the next rank; call the result for what the one before sent."""
        return self.site.shifted(value, number)

    def columns(self, mask: Optional, turn: int, keys: int, like: Tensor) -> Optional:
        """The part of the mask for the keys that are here, as numbers that are added to scores, of four dims."""
        if mask is None:
            return None
        here = mask if mask.shape[-1] == 1 else mask.narrow(-1, self.source(turn) * keys, keys)
        if here.dtype is torch.bool:
            here = torch.zeros(here.shape, dtype=like.dtype, device=like.device).masked_fill(~here, float("-inf"))
        return here.to(like.dtype).view((1,) * (4 - here.dim()) + here.shape)

    def trade(self, tensors: tuple[Tensor, ...], there: bool) -> tuple[Tensor, ...]:
        """Tensors [.., sequence, size] whose halves go to the ranks that have head and tail, or back from `there`."""
        if not self.causal:
            return tensors
        goes, comes = self._halves() if there else self._halves()[::-1]
        sent, received = ([sum(rank == at for _, rank in halves) for at in range(self.ranks)]
                          for halves in (goes, comes))
        rows = self.site.exchanged(_packed(tensors, [half for half, _ in goes]), tuple(sent), tuple(received),
                                   outward=True)
        return _unpacked(rows, tensors, [half for half, _ in comes])

    def _halves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(half, rank) by rank: where this rank's halves go, then whence those come that it computes with."""
        def owner(chunk: int) -> int:
            return min(chunk, 2 * self.ranks - 1 - chunk)

        own = [(0, owner(2 * self.place)), (1, owner(2 * self.place + 1))]
        head = [(0, self.place // 2), (1, (2 * self.ranks - 1 - self.place) // 2)]
        return sorted(own, key=lambda half: half[1]), sorted(head, key=lambda half: half[1])


def _packed(tensors: tuple[Tensor, ...], halves: list[int]) -> Tensor:
    """A row for each of `halves`, with that half of every tensor."""
    rows = tensors[0].new_empty(2, sum(x.numel() for x in tensors) // 2)
    for place, half in _places(rows, tensors, halves):
        place.copy_(half)
    return rows


def _unpacked(rows: Tensor, like: tuple[Tensor, ...], halves: list[int]) -> tuple[Tensor, ...]:
    """Tensors like those given, whose `halves` are in the rows."""
    found = tuple(torch.empty_like(x) for x in like)
    for place, half in _places(rows, found, halves):
        half.copy_(place)
    return found


def _places(rows: Tensor, tensors: tuple[Tensor, ...], halves: list[int]) -> Iterator[Pair]:
    """Pairs of a place in a row, and the half of a tensor that belongs there."""
    for row, half in zip(rows, halves, strict=True):
        for x, part in zip(tensors, row.split([x.numel() // 2 for x in tensors]), strict=True):
            place = x.chunk(2, -2)[half]
            yield part.view(place.shape), place


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Optional, turns: _Turns, heads: Heads) -> Tensor:
        q, k, v = turns.trade((q, k, v), there=True)
        out, sums = _forward(turns, heads, q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, out, sums)
        ctx.turns, ctx.heads = turns, heads
        (found,) = turns.trade((out,), there=False)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        q, k, v, mask, out, sums = ctx.saved_tensors
        turns: _Turns = ctx.turns
        (given,) = turns.trade(upstream, there=True)
        of_q, of_k, of_v, of_mask = _backward(turns, ctx.heads, given, q, k, v, mask, out, sums)
        return *turns.trade((of_q, of_k, of_v), there=False), of_mask, None, None


def _forward(turns: _Turns, heads: Heads, q: Tensor, k: Tensor, v: Tensor, mask: Optional) -> Pair:
    """Output and log-sum-exp of the queries over all keys."""
    keys, merged, message = k.shape[-2], None, _joined(k, v)
    for turn in range(turns.ranks):
        arriving = turns.shift(message, KEYS) if turn < turns.ranks - 1 else None
        pair = _apart(message, k, v) if turn else (k, v)
        rows, columns, causal = turns.parts(turn, q.shape[-2], keys)
        key, value = (x[..., columns, :] for x in pair)
        found = block_forward(heads, q[..., rows, :], key, value, turns.columns(mask, turn, keys, q), causal)
        merged = _merged(merged, found, rows)
        del pair, key, value, found
        message = arriving() if arriving is not None else message
    assert merged is not None, "a ring has at least two ranks"
    return merged[0].to(q.dtype), merged[1]


def _merged(total: Pair | None, found: Pair, rows: slice) -> Pair:
    """Output and log-sum-exp of the keys so far with those of a block, whose queries are `rows`."""
    out, sums = found[0].to(_sum_dtype(found[0])), found[1].to(_sum_dtype(found[0]))
    if total is None:
        return out, sums
    old_out, old_sums = total[0][..., rows, :], total[1][..., rows]
    new = torch.logaddexp(old_sums, sums)
    old_out.lerp_(out, (sums - new).exp_().nan_to_num_(0.0).unsqueeze(-1))  # both shares add up to 1
    old_sums.copy_(new)
    return total


def _backward(turns: _Turns, heads: Heads, upstream: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Optional,
              out: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Optional]:
    """The gradients of the queries here, and of the keys and values here, which come home with a last hop."""
    keys, wide, message = k.shape[-2], _sum_dtype(q), _joined(k, v)
    of_q, returning = torch.zeros_like(q, dtype=wide), None
    of_mask = torch.zeros_like(mask) if heads.of_mask and mask is not None else None
    for turn in range(turns.ranks):
        arriving = turns.shift(message, KEYS) if turn < turns.ranks - 1 else None
        pair = _apart(message, k, v) if turn else (k, v)
        rows, columns, causal = turns.parts(turn, q.shape[-2], keys)
        key, value = (x[..., columns, :] for x in pair)
        found = block_backward(heads, upstream[..., rows, :], q[..., rows, :], key, value, out[..., rows, :],
                               sums[..., rows], turns.columns(mask, turn, keys, q), causal)
        of_q[..., rows, :] += found.q
        if of_mask is not None and found.mask is not None:
            _add_columns(of_mask, found.mask, turns.source(turn) * keys)
        passed = k.new_zeros(k.numel() + v.numel(), dtype=wide) if returning is None else returning()
        for total, part in zip(_apart(passed, k, v), (found.k, found.v), strict=True):
            total[..., columns, :] += part
        returning = turns.shift(passed, GRADIENTS)
        del pair, key, value, found, passed
        message = arriving() if arriving is not None else message
    assert returning is not None, "a ring has at least two ranks"
    of_k, of_v = _apart(returning(), k, v)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_mask


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


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
