"""Trades halves of a split sequence, so that every rank has as much of causal attention (`operators.ring`).

Of 2c chunks rank i has chunks 2i and 2i+1, and computes with chunks i and 2c-1-i. The trade back is that of gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoddl.operators.kernels.site import Site
from autoddl.operators.ring import half_goes_to

__all__ = ["Ranks", "traded", "traded_back"]

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that split a sequence, of which this one is `place`."""

    site: Site
    place: int
    count: int

    @classmethod
    def of(cls, site: Site) -> "Ranks":
        members = site.mesh.members(site.option.inner, site.coordinate)
        return cls(site, members.index(site.coordinate), len(members))

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks with which a rank computes."""
        return rank, 2 * self.count - 1 - rank

    def firsts(self, rank: int, length: int, halves: bool) -> tuple[int, ...]:
        """Where the parts of the sequence begin with which a rank of `length` computes: its own, or two `halves`."""
        return tuple(chunk * (length // 2) for chunk in self.chunks(rank)) if halves else (rank * length,)

    def trade(self, tensors: Tensors, there: bool) -> Tensors:
        """Tensors [.., sequence, size] whose halves go to the ranks that compute with them, or back from `there`."""
        goes, comes = self._halves() if there else self._halves()[::-1]
        sent, received = ([sum(rank == at for _, rank in halves) for at in range(self.count)]
                          for halves in (goes, comes))
        rows = self.site.exchanged(_packed(tensors, [half for half, _ in goes]), tuple(sent), tuple(received),
                                   outward=True)
        return _unpacked(rows, tensors, [half for half, _ in comes])

    def trade_back(self, values: Tensors) -> Tensors:
        """An output [.., sequence, size], and log-sum-exps [.., sequence] if given, back from where they were made."""
        return self._one_by_one(values, there=False)

    def trade_upstream(self, upstream: Tensors) -> Tensors:
        """The gradients of what `trade_back` gives."""
        return self._one_by_one(upstream, there=True)

    def _one_by_one(self, values: Tensors, there: bool) -> Tensors:
        out, *sums = values
        return (*self.trade((out,), there), *(self.trade((x.unsqueeze(-1),), there)[0].squeeze(-1) for x in sums))

    def _halves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(half, rank) by rank: where this rank's halves go, then whence those come that it computes with."""
        own = [(half, half_goes_to(2 * self.place + half, self.count)) for half in (0, 1)]
        head = [(half, chunk // 2) for half, chunk in enumerate(self.chunks(self.place))]
        return sorted(own, key=lambda half: half[1]), sorted(head, key=lambda half: half[1])


def traded(ranks: Ranks, q: Tensor) -> Tensor:
    """The halves of queries [.., sequence, size] with which this rank computes; backward trades the gradient back."""
    found: Tensor = _Traded.apply(ranks, q)  # type: ignore[no-untyped-call]
    return found


def traded_back(ranks: Ranks, out: Tensor, sums: Tensor | None = None) -> Tensors:
    """The output, and log-sum-exps [.., sequence] if given, of the queries that were here before."""
    found: Tensors = _TradedBack.apply(ranks, out, *([] if sums is None else [sums]))  # type: ignore[no-untyped-call]
    return found


class _TradedBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, *values: Tensor) -> Tensors:
        ctx.ranks = ranks
        return ranks.trade_back(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, *ctx.ranks.trade_upstream(upstream)


class _Traded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, q: Tensor) -> Tensor:
        ctx.ranks = ranks
        return ranks.trade((q,), there=True)[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, *ctx.ranks.trade(upstream, there=False)


def _packed(tensors: Tensors, halves: list[int]) -> Tensor:
    """A row for each of `halves`, with that half of every tensor."""
    rows = tensors[0].new_empty(2, sum(x.numel() for x in tensors) // 2)
    for place, half in _places(rows, tensors, halves):
        place.copy_(half)
    return rows


def _unpacked(rows: Tensor, like: Tensors, halves: list[int]) -> Tensors:
    """Tensors like those given, whose `halves` are in the rows."""
    found = tuple(torch.empty_like(x) for x in like)
    for place, half in _places(rows, found, halves):
        half.copy_(place)
    return found


def _places(rows: Tensor, tensors: Tensors, halves: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a place in a row, and the half of a tensor that belongs there."""
    for row, half in zip(rows, halves, strict=True):
        for x, part in zip(tensors, row.split([x.numel() // 2 for x in tensors]), strict=True):
            place = x.chunk(2, -2)[half]
            yield part.view(place.shape), place
