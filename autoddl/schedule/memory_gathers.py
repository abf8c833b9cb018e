"""What is held of gathered parameters: `gather` on bytes instead of tensors.

A bucket's buffers are there while it is under way, its members from when they came until their last user; what is
gathered again is held by nobody in between.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoddl.operators.footprints.storages import Value
from autoddl.schedule.buckets import PREFETCH, Bucket, ParameterEdge
from autoddl.schedule.memory_conversions import Flight, Moves

__all__ = ["Gathers"]

Edges = Mapping[str, ParameterEdge]


@dataclass(slots=True)
class _Gather:
    """`flight`: under way; `values`: held for later microbatches; `again`: what came for backward; `notes`: how often
    backward will read each member."""

    bucket: Bucket
    notes: list[int]
    flight: Flight | None = None
    values: list[Value] | None = None
    again: list[Value | None] = field(default_factory=list)


class Gathers:
    """`place`: bucket and position of each parameter that is gathered; `origin`: the same by storage, where what was
    gathered is not kept."""

    def __init__(self, moves: Moves, edges: Edges, stored: Mapping[str, Value], buckets: Sequence[Bucket]
                 ) -> None:
        self._heap, self._moves, self._edges, self._stored = moves.heap, moves, edges, stored
        self._all = [_Gather(bucket, [0] * len(bucket.members)) for bucket in buckets]
        self.place = {fqn: (b, k) for b, one in enumerate(buckets) for k, fqn in enumerate(one.members)}
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        self._next, self._back, self._last = 0, len(self._all), last
        self.origin: dict[int, tuple[int, int]] = {}
        for one in self._all:
            self._forget(one)

    def _forget(self, one: _Gather) -> None:
        """What was gathered for a backward that did not read it goes before the next microbatch."""
        left = [x.storage for x in one.again if x is not None]
        if one.flight is not None:
            sent = [*one.flight.held, one.flight.got]
            left += [x.storage for x in one.flight.done] if one.flight.got < 0 else sent
        for storage in left:
            self._heap.drop(storage)
        one.flight, one.again, one.notes = None, [], [0] * len(one.notes)

    def _start(self, b: int) -> None:
        one = self._all[b]
        edges = [self._edges[fqn] for fqn in one.bucket.members]
        shapes, layouts = [e.tensor.shape for e in edges], [e.conversion.source for e in edges]
        values = [self._stored[fqn] for fqn in one.bucket.members]
        for x in values:
            self._heap.keep(x.storage)
        for i, step in enumerate(one.bucket.steps):
            flight = self._moves.start(step, values, shapes, layouts)
            for x in values:
                self._heap.drop(x.storage)
            if i == len(one.bucket.steps) - 1:
                one.flight = flight
                break
            values, layouts = self._moves.wait(flight, "transient"), [step.after(at) for at in layouts]

    def _wait(self, one: _Gather) -> list[Value]:
        assert one.flight is not None
        found, one.flight = self._moves.wait(one.flight, "gathered parameters"), None
        return found

    def take(self, b: int) -> list[Value]:
        """The members of bucket b, each with one user."""
        while self._next < len(self._all) and self._next <= b + PREFETCH:
            if self._all[self._next].values is None:
                self._start(self._next)
            self._next += 1
        one = self._all[b]
        found = self._wait(one) if one.values is None else one.values
        one.values = None if one.bucket.each or self._last else found
        if one.values is not None:
            for x in found:
                self._heap.keep(x.storage)
        if one.bucket.regather:
            self.origin.update({x.storage: (b, k) for k, x in enumerate(found)})
        return found

    def members(self, b: int) -> tuple[str, ...]:
        return self._all[b].bucket.members

    def note(self, storage: int) -> tuple[int, int]:
        """Backward will read once more what lies in `storage`: a bucket and a position."""
        b, k = self.origin[storage]
        self._all[b].notes[k] += 1
        return b, k

    def read(self, b: int) -> None:
        """Backward reads from bucket b: it must have come."""
        while self._back > max(0, b - PREFETCH):
            self._back -= 1
            if any(self._all[self._back].notes):
                self._start(self._back)
        one = self._all[b]
        if one.flight is not None:
            one.again = [*self._wait(one)]

    def done(self, b: int, k: int) -> None:
        """What `note` wrote has been read, if anything came: no gradient may have asked for it. The last reader frees
        the member."""
        one = self._all[b]
        if not one.again:
            return
        one.notes[k] -= 1
        value = one.again[k]
        if not one.notes[k] and value is not None:
            self._heap.drop(value.storage)
            one.again[k] = None
