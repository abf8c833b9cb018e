"""Adds up the largest values of the ranks' gradients, and keeps the rest for the next step (`core.sparse`).

Every exchange is one primitive: each rank gives every other a tensor and gets one from it (`Swap`). A step is

    select     S: a = e + g above the rank's threshold, in order of the index
    split      entries of S to the owners of their regions, behind a count for each
    reduce     the owner adds up what came, in the order of the ranks, and keeps what is above the common threshold
    balance    all tell how many they keep; each gives what makes all parts equal
    gather     all get all parts, in order of the index

Every rank puts the same entries in place, so all have the same bits. In every RENEWED-th step the thresholds and the
bounds of regions are computed:

    of the rank    the magnitude of the k-th largest of a
    of all         that of the k-th largest sum: 4 rounds count by byte how many magnitudes begin so; as whole
                   numbers, the bits of magnitudes are in their order
    regions        bound j is the mean over ranks of the index of entry j m / P of the m in S

In the warm-up of the rule a rank gives each other its region of the residual, adds up what came, and gives all its sum.

Between these steps the threshold of a rank may let 4/5 k or fewer through, or 5/4 k or more. Then the rank takes its k
largest: of S, if these are among them. While residuals grow, S does too, so the whole of a is seldom looked through.
The common threshold follows by 2 % a step where the sums are so few or so many. At most k sums are sent, and at most
k (P-1)/P - 2 (P-1) entries of S, the largest; the others stay in the residual. That is what keeps a rank within
`word_limit`. A value that is not finite is sent, so that it is seen, and is not kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from autoddl.core.sparse import BINS, RENEWED, ROUNDS, SparseRule, entries, word_limit

__all__ = ["SparseSent", "SparseSum", "Swap"]

Swap = Callable[[Sequence[Tensor], Sequence[int]], list[Tensor]]
"""(by rank, the flat int32 tensor for it; by rank, the words that come from it) -> by rank, what came."""

FOLLOW = 1.02
"""The factor by which the common threshold follows the number of sums above it."""


@dataclass(frozen=True, slots=True)
class SparseSent:
    """The words of 4 bytes that a rank sent in one sparse sum, and how many it may unless thresholds were renewed.

    A `whole` one is a step of the warm-up.
    """

    axes: str
    words: int
    limit: float
    renewed: bool
    whole: bool = False

    @property
    def fits(self) -> bool:
        """Whether the step sent no more than it may."""
        return self.renewed or self.words <= self.limit


class _Entries(NamedTuple):
    """Values and their indices, rising."""

    values: Tensor
    places: Tensor

    def cut(self, start: int, end: int) -> "_Entries":
        return _Entries(self.values[start:end], self.places[start:end])

    def only(self, where: Tensor) -> "_Entries":
        return _Entries(self.values[where], self.places[where])

    def words(self) -> Tensor:
        """The entries as they are sent: all values, then all indices, as int32."""
        return torch.cat([self.values.view(torch.int32), self.places.to(torch.int32)])

    def largest(self, count: int) -> "_Entries":
        """The `count` entries of the largest magnitudes, in order of the index."""
        if len(self.places) <= count:
            return self
        return self.only(self.values.abs().topk(count).indices.sort().values)


def _read(words: Tensor) -> _Entries:
    """The entries that `_Entries.words` wrote."""
    half = len(words) // 2
    return _Entries(words[:half].view(torch.float32), words[half:].long())


@dataclass(slots=True, eq=False)
class SparseSum:
    """The sums of one bucket of gradients on one rank.

        rule        which part of the elements is sent, and when
        ranks       number of ranks
        rank        this one
        residual    [elements] float32: e, what was not sent yet
        velocity    [elements] float32: v; without momentum none
        own         the threshold of S
        common      the threshold of G, the same on all ranks
        bounds      first index of each region but the first
        steps       steps so far
        renewed     steps after which thresholds are computed again
    """

    rule: SparseRule
    ranks: int
    rank: int
    residual: Tensor
    velocity: Tensor = field(init=False)
    own: float = 0.0
    common: float = 0.0
    bounds: list[int] = field(default_factory=list)
    steps: int = 0
    renewed: int = RENEWED

    def __post_init__(self) -> None:
        self.velocity = torch.zeros_like(self.residual) if self.rule.momentum else self.residual.new_empty(0)

    @property
    def kept(self) -> int:
        """k of the step that ran last; before all, that of the first."""
        return self._entries(max(0, self.steps - 1 - self.rule.warmup))

    def _entries(self, since: int) -> int:
        """k of a step that is so many behind the warm-up."""
        return entries(self.rule.share_at(since), self.residual.numel(), self.ranks)

    def _renews(self, since: int) -> bool:
        """Whether such a step computes thresholds: every `renewed`-th, the first of each stair, and where none are."""
        return since % self.renewed == 0 or not self.bounds or self._entries(since) != self._entries(since - 1)

    def to(self, device: torch.device) -> None:
        """Moves what is kept to a device."""
        self.residual, self.velocity = self.residual.to(device), self.velocity.to(device)

    def parts(self, shapes: Sequence[torch.Size]) -> list[tuple[Tensor, Tensor]]:
        """By gradient of these shapes, views of its residual and its velocity, which is empty without momentum."""
        sizes = [shape.numel() for shape in shapes]
        residuals = [part.view(shape) for part, shape in zip(self.residual.split(sizes), shapes, strict=True)]
        if not self.rule.momentum:
            return [(part, self.velocity) for part in residuals]
        velocities = [part.view(shape) for part, shape in zip(self.velocity.split(sizes), shapes, strict=True)]
        return list(zip(residuals, velocities, strict=True))

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor], swap: Swap, axes: str = "") -> tuple[Tensor, SparseSent]:
        """The sparse sum of the gradients of all ranks, flat and new, and what it took.

        All ranks call it with gradients of the same shapes, which together have as many elements as the residual.
        """
        wire, since = _Wire(swap, self.ranks, self.rank), self.steps - self.rule.warmup
        self.steps += 1
        self._take(gradients)
        if since < 0:
            return self._whole(wire), SparseSent(axes, wire.words, wire.words, renewed=False, whole=True)
        renews = self._renews(since)
        total = self._sparse(wire, renews)
        return total, SparseSent(axes, wire.words, word_limit(self.kept, self.ranks), renews)

    def _take(self, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients to the residual, or with momentum the velocities."""
        into = self.residual
        if self.rule.momentum:
            into = self.velocity.mul_(self.rule.momentum)
        for part, gradient in zip(into.split([g.numel() for g in gradients]), gradients, strict=True):
            part.add_(gradient.reshape(-1))
        if self.rule.momentum:
            self.residual.add_(self.velocity)

    def _whole(self, wire: "_Wire") -> Tensor:
        """The sum of all residuals, which become 0: every rank adds up a region, in the order of the ranks."""
        sizes = [self.residual.numel() * (j + 1) // self.ranks - self.residual.numel() * j // self.ranks
                 for j in range(self.ranks)]
        came = wire.swap([part.view(torch.int32) for part in self.residual.split(sizes)],
                         [sizes[self.rank]] * self.ranks)
        own = torch.zeros(sizes[self.rank], device=self.residual.device)
        for words in came:
            own.add_(words.view(torch.float32))
        self.residual.zero_()
        self.velocity.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return torch.cat(wire.swap([own.view(torch.int32)] * self.ranks, sizes)).view(torch.float32)

    def _sparse(self, wire: "_Wire", renews: bool) -> Tensor:
        """The sum of the largest, which are no longer in the residual."""
        chosen = self._select(renews)
        if renews:
            self.bounds = self._regions(chosen, wire)
        elif self.ranks > 1:
            chosen = self._capped(chosen)
        reduced = self._reduce(chosen, wire)
        if renews:
            self.common = self._threshold(reduced, wire)
        found = self._gather(reduced, wire, renews)
        total = torch.zeros_like(self.residual)
        total[found.places] = found.values
        sent = chosen.places[_among(chosen.places, found.places)]
        self.residual[sent] = 0.0
        if self.rule.momentum:
            self.velocity[sent] = 0.0
        return total

    def _select(self, renews: bool) -> _Entries:
        """S, by the rank's threshold; the k largest where it is renewed, or has come to fit badly."""
        a, k = self.residual, self.kept
        size = a.abs()
        if not renews:
            index = _above(size, self.own).nonzero().squeeze(1)
            if 0.8 * k < len(index) < 1.25 * k:
                return _Entries(a[index], index)
            if len(index) > k and self.own > 0:
                found = _Entries(a[index], index).largest(k)
                self.own = float(found.values.abs().min())
                return found
        index = size.topk(k).indices.sort().values
        self.own = float(size[index].min())
        return _Entries(a[index], index).only(_above(size[index], 0.0))

    def _regions(self, chosen: _Entries, wire: "_Wire") -> list[int]:
        """The bounds of regions on which all ranks agree: means of their quantiles."""
        n, m = self.residual.numel(), len(chosen.places)
        at = [m * j // self.ranks for j in range(1, self.ranks)]
        mine = chosen.places[at] if m else self._numbers([n * j // self.ranks for j in range(1, self.ranks)])
        every = torch.stack(wire.tell(mine.to(torch.int32)))
        return [int(bound) for bound in every.double().mean(0).round().tolist()]

    def _capped(self, chosen: _Entries) -> _Entries:
        """S without the smallest of those entries that leave the rank, where these are too many."""
        start, end = self._region(self.rank)
        leaves = (chosen.places < start) | (chosen.places >= end)
        most = max(0, self.kept * (self.ranks - 1) // self.ranks - 2 * (self.ranks - 1))
        where = leaves.nonzero().squeeze(1)
        if len(where) <= most:
            return chosen
        few = where[chosen.values[where].abs().topk(most).indices]
        keeps = ~leaves
        keeps[few] = True
        return chosen.only(keeps)

    def _numbers(self, numbers: Sequence[int]) -> Tensor:
        """Whole numbers as they are sent."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.residual.device)

    def _region(self, rank: int) -> tuple[int, int]:
        every = [0, *self.bounds, self.residual.numel()]
        return every[rank], every[rank + 1]

    def _reduce(self, chosen: _Entries, wire: "_Wire") -> _Entries:
        """The sums of the rank's region, of all ranks' entries there."""
        ends = torch.searchsorted(chosen.places, self._numbers(self.bounds).long()).tolist()
        ends = [0, *ends, len(chosen.places)]
        parts = [chosen.cut(a, b) for a, b in pairwise(ends)]
        came = wire.give([part.words() for part in parts])
        start, end = self._region(self.rank)
        sums, there = (self.residual.new_zeros(end - start, dtype=dtype) for dtype in (torch.float32, torch.bool))
        for words in came:
            one = _read(words)
            sums.index_add_(0, one.places - start, one.values)
            there[one.places - start] = True
        index = there.nonzero().squeeze(1)
        return _Entries(sums[index], index + start)

    def _threshold(self, reduced: _Entries, wire: "_Wire") -> float:
        """The magnitude of the k-th largest of all sums; 0 where they are fewer."""
        bits, prefix, left = reduced.values.abs().view(torch.int32), 0, self.kept
        for shift in range(8 * ROUNDS - 8, -8, -8):
            same = bits >> (shift + 8) == prefix
            counts = torch.bincount(bits[same] >> shift & 255, minlength=BINS).to(torch.int32)
            above = torch.stack(wire.tell(counts)).long().sum(0).flip(0).cumsum(0)
            if int(above[-1]) < left:
                return 0.0
            byte = 255 - int((above < left).sum())
            left -= int(above[254 - byte]) if byte < 255 else 0
            prefix = prefix << 8 | byte
        return float(torch.tensor(prefix, dtype=torch.int32).view(torch.float32))

    def _gather(self, reduced: _Entries, wire: "_Wire", renewed: bool) -> _Entries:
        """G, from the sums of all regions that are above the common threshold."""
        kept = reduced.only(_above(reduced.values.abs(), self.common))
        if renewed:
            kept = self._without_ties(kept, wire)
        counts = torch.cat(wire.tell(self._numbers([len(kept.places)]))).tolist()
        if not renewed:
            total = sum(counts)
            self.common *= FOLLOW if total > 1.25 * self.kept else 1 / FOLLOW if total < 0.8 * self.kept else 1.0
            if total > self.kept:
                counts = [self.kept * count // total for count in counts]
                kept = kept.largest(counts[self.rank])
        return self._spread(kept, counts, wire)

    def _without_ties(self, kept: _Entries, wire: "_Wire") -> _Entries:
        """At most k sums: of those that are as large as the threshold, the first."""
        equal = kept.values.abs() == self.common
        mine = self._numbers([len(equal) - int(equal.sum()), int(equal.sum())])
        every = torch.stack(wire.tell(mine)).long()
        room = self.kept - int(every[:, 0].sum()) - int(every[:self.rank, 1].sum())
        return kept.only(~equal | (equal.cumsum(0) <= room))

    def _spread(self, kept: _Entries, counts: Sequence[int], wire: "_Wire") -> _Entries:
        """All ranks' sums on every rank: equal parts first, then all parts."""
        total, before = sum(counts), sum(counts[:self.rank])
        ends = [total * j // self.ranks for j in range(self.ranks + 1)]

        def shared(first: int, last: int, j: int) -> int:
            return max(0, min(last, ends[j + 1]) - max(first, ends[j]))

        cuts = [min(max(end - before, 0), counts[self.rank]) for end in ends]
        parts = [kept.cut(a, b) for a, b in pairwise(cuts)]
        firsts = [sum(counts[:r]) for r in range(self.ranks)]
        came = wire.swap([part.words() for part in parts],
                         [2 * shared(first, first + count, self.rank) for first, count in zip(firsts, counts,
                                                                                            strict=True)])
        part = _joined(came)
        every = wire.swap([part.words()] * self.ranks, [2 * (b - a) for a, b in pairwise(ends)])
        return _joined(every)


def _joined(many: Sequence[Tensor]) -> _Entries:
    read = [_read(words) for words in many]
    return _Entries(torch.cat([one.values for one in read]), torch.cat([one.places for one in read]))


def _above(size: Tensor, threshold: float) -> Tensor:
    """Which magnitudes are no smaller than a threshold and not 0, or are no numbers."""
    below = size < threshold if threshold > 0 else size == 0
    return below.logical_not_()


def _among(places: Tensor, others: Tensor) -> Tensor:
    """Which places are among others; both rise."""
    if not len(others):
        return torch.zeros_like(places, dtype=torch.bool)
    at = torch.searchsorted(others, places).clamp_(max=len(others) - 1)
    return others[at] == places


@dataclass(slots=True)
class _Wire:
    """Swaps among the ranks, which count the words that this rank sends to others."""

    one: Swap
    ranks: int
    rank: int
    words: int = 0

    def swap(self, given: Sequence[Tensor], expected: Sequence[int]) -> list[Tensor]:
        """Gives every rank its tensor; `expected` are the words that come from each."""
        self.words += sum(len(x) for r, x in enumerate(given) if r != self.rank)
        return self.one(given, expected)

    def give(self, given: Sequence[Tensor]) -> list[Tensor]:
        """A swap of tensors whose sizes the receivers do not know: they get these first."""
        sizes = self.swap([x.new_tensor([len(x)]) for x in given], [1] * self.ranks)
        return self.swap(given, torch.cat(sizes).tolist())

    def tell(self, value: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which are equally long."""
        return self.swap([value] * self.ranks, [len(value)] * self.ranks)
