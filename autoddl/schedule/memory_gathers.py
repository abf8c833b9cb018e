"""Counts the bytes of gathered parameters: the parameter protocol on counted storages.

The buffers of a bucket are there while it is in flight. Its members are there from their arrival to their last user.
Regathered members are freed between forward and backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoddl.core.conversion import Step
from autoddl.operators.footprints.storages import Value
from autoddl.schedule.buckets import Bucket, ParameterEdge
from autoddl.schedule.memory_conversions import ConversionMemory, PendingStep
from autoddl.schedule.parameter_protocol import GatherProtocol

__all__ = ["CountedGathers"]

Edges = Mapping[str, ParameterEdge]


@dataclass(slots=True)
class _Gather:
    """The gathered values of a bucket.

        flight     the collective in flight
        values     values that stay for later microbatches
        again      members that were gathered again for backward
        weights    values in the layout W, where the bucket takes some steps once; they stay until the end of the step
    """

    bucket: Bucket
    flight: PendingStep | None = None
    values: list[Value] | None = None
    again: list[Value | None] = field(default_factory=list)
    weights: list[Value] | None = None


class CountedGathers:
    """Gathers the buckets of a microbatch on the heap of `moves`.

    `place` is the bucket and position of each gathered parameter by name; `origin` is that by storage, for parameters
    that will be gathered again.
    """

    def __init__(self, moves: ConversionMemory, edges: Edges, stored: Mapping[str, Value], buckets: Sequence[Bucket]
                 ) -> None:
        self._heap, self._moves, self._edges, self._stored = moves.heap, moves, edges, stored
        self._all = [_Gather(bucket) for bucket in buckets]
        self._protocol = GatherProtocol(buckets)
        self.place = {fqn: (b, k) for b, one in enumerate(buckets) for k, fqn in enumerate(one.members)}
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        """Called before a microbatch, the `last` of the step or not."""
        self._protocol.begin(last)
        self.origin: dict[int, tuple[int, int]] = {}
        for b, one in enumerate(self._all):
            if not self._protocol.is_ahead(b):
                self._forget(one)

    def ahead(self) -> None:
        """Called before the first microbatch of a stage: starts what is gathered once a step."""
        for b in self._protocol.ahead():
            self._start(b)

    def _forget(self, one: _Gather) -> None:
        """Frees members that were gathered for backward and not read there."""
        left = [x.storage for x in one.again if x is not None]
        if one.flight is not None:
            buffers = [*one.flight.sent, one.flight.got]
            left += [x.storage for x in one.flight.done] if one.flight.got < 0 else buffers
        for storage in left:
            self._heap.drop(storage)
        one.flight, one.again = None, []

    def _start(self, b: int) -> None:
        one = self._all[b]
        edges = [self._edges[fqn] for fqn in one.bucket.members]
        if one.bucket.once and one.weights is None:
            flight = self._run(one.bucket, one.bucket.once, self._casts(one.bucket, edges), edges)
            one.weights = self._moves.wait(flight, "gathered parameters")
        if one.weights is None:
            values = self._casts(one.bucket, edges)
        else:
            values = [x._replace(storage=self._heap.keep(x.storage)) for x in one.weights]
        one.flight = self._run(one.bucket, one.bucket.steps, values, edges)

    def _casts(self, bucket: Bucket, edges: Sequence[ParameterEdge]) -> list[Value]:
        """The stored pieces of a bucket in the dtype of use, each with one user more."""
        values = [self._stored[fqn] for fqn in bucket.members]
        for x in values:
            self._heap.keep(x.storage)
        return [self._moves.cast(x, e.tensor.itemsize, "transient") for x, e in zip(values, edges, strict=True)]

    def _run(self, bucket: Bucket, steps: Sequence[Step], values: list[Value], edges: Sequence[ParameterEdge]
             ) -> PendingStep:
        """Runs steps on values, which lose a user; returns the last, which is in flight."""
        shapes, layouts = [e.tensor.shape for e in edges], [e.gather_start(bucket, tuple(steps)) for e in edges]
        for i, step in enumerate(steps):
            flight = self._moves.start(step, values, shapes, layouts)
            for x in values:
                self._heap.drop(x.storage)
            if i < len(steps) - 1:
                values, layouts = self._moves.wait(flight, "transient"), [step.after(at) for at in layouts]
        return flight

    def finish(self) -> None:
        """Called at the end of a step: frees the weights that stayed."""
        for one in self._all:
            for x in one.weights or ():
                self._heap.drop(x.storage)
            one.weights = None

    def _wait(self, one: _Gather) -> list[Value]:
        assert one.flight is not None
        found, one.flight = self._moves.wait(one.flight, "gathered parameters"), None
        return found

    def take(self, b: int) -> list[Value]:
        """The members of bucket b, each with one user."""
        asked, one = self._protocol.take(b), self._all[b]
        for other in asked.starts:
            self._start(other)
        found = self._wait(one) if asked.waits else one.values
        assert found is not None, "a bucket stays for later microbatches or is waited for"
        one.values = found if asked.keeps else None
        if one.values is not None:
            for x in found:
                self._heap.keep(x.storage)
        if one.bucket.regather:
            self.origin.update({x.storage: (b, k) for k, x in enumerate(found)})
        return found

    def members(self, b: int) -> tuple[str, ...]:
        """Names of the parameters of bucket b."""
        return self._all[b].bucket.members

    def note(self, storage: int) -> tuple[int, int]:
        """Notes that backward will read `storage` once more; returns its bucket and position."""
        b, k = self.origin[storage]
        self._protocol.note(b, k)
        return b, k

    def read(self, b: int) -> None:
        """Called when backward reads from bucket b: waits for it."""
        asked, one = self._protocol.read(b), self._all[b]
        for other in asked.starts:
            self._start(other)
        if asked.waits:
            one.again = [*self._wait(one)]

    def again(self, b: int, k: int) -> Value:
        """Member k of bucket b, gathered again for a block that is computed again: with one user more, a note less."""
        self.read(b)
        value = self._all[b].again[k]
        assert value is not None, "more notes read than written"
        self._heap.keep(value.storage)
        self.done(b, k)
        return value

    def done(self, b: int, k: int) -> None:
        """Called when backward has read a note; the last reader frees the member.

        Nothing was gathered if no gradient came.
        """
        one = self._all[b]
        if not one.again:
            return
        last, value = self._protocol.release(b, k), one.again[k]
        if last and value is not None:
            self._heap.drop(value.storage)
            one.again[k] = None
