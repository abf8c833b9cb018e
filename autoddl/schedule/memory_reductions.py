"""Gradients of parameters on their way to .grad: `reducer` on bytes instead of tensors.

A bucket's gradients are there until they are in a buffer to send, and that until it has been waited for, with few under
way at once (`in_flight`); what came of them is .grad. Of several microbatches, gradients that are reduced behind the
last are added up in a copy of the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddl.core.conversion import COLLECTIVES
from autoddl.core.layout import Layout, local_shape
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.schedule.buckets import Bucket, ParameterEdge, frees, overdue
from autoddl.schedule.memory_conversions import Flight, Moves

__all__ = ["Reductions"]

Edges = Mapping[str, ParameterEdge]


@dataclass(slots=True, eq=False)
class _Reduction:
    """As the reducer's bucket: `own` values are nobody else's."""

    bucket: Bucket
    starts: list[Layout]
    values: list[Value | None]
    left: int = 0
    at: int = 0
    flight: Flight | None = None
    own: bool = False

    @property
    def more(self) -> bool:
        return self.at < len(self.bucket.steps)


class Reductions:
    """Gradients on their way to .grad, which `grads` holds by parameter."""

    def __init__(self, moves: Moves, edges: Edges, buckets: Sequence[Bucket]) -> None:
        self._heap, self._moves, self._edges = moves.heap, moves, edges
        self._all = [_Reduction(one, [edges[f].conversion.gradient or edges[f].conversion.target for f in one.members],
                                [None] * len(one.members)) for one in buckets]
        self.place = {fqn: (b, k) for b, one in enumerate(buckets) for k, fqn in enumerate(one.members)}
        self.grads: dict[str, Value] = {}
        self.begin(last=True)

    def begin(self, last: bool) -> None:
        self._next, self._last = 0, last
        self._due = [one for one in self._all if last or one.bucket.each]
        for one in self._all:
            one.left, one.at = len(one.bucket.members), 0

    def add(self, fqn: str, gradient: Value, direct: bool) -> None:
        """The gradient of `fqn` is there. `direct`: autograd adds it up in the leaf."""
        edge, heap = self._edges.get(fqn), self._heap
        if fqn in self.place:
            self._collect(*self.place[fqn], gradient)
        elif edge is not None and edge.backward:
            assert edge.conversion.gradient is not None
            piece = self._moves.through(edge.backward, gradient, edge.tensor.shape, edge.conversion.gradient,
                                        "transient")
            self._deposit(fqn, self._own(piece))
        else:
            self._deposit(fqn, gradient if direct and heap.users[gradient.storage] == 1 else self._own(gradient))

    def _own(self, x: Value) -> Value:
        """A copy in place of `x`."""
        copy = Value(self._heap.new(x.nbytes, "gradients"), x.shape, contiguous(x.shape), x.itemsize)
        self._heap.moment()
        self._heap.drop(x.storage)
        return copy

    def _deposit(self, fqn: str, x: Value) -> None:
        if fqn in self.grads:
            self._heap.drop(x.storage)
        else:
            self.grads[fqn] = x
            self._heap.name(x.storage, "gradients")

    def _collect(self, b: int, k: int, gradient: Value) -> None:
        """One more gradient of a bucket, held by autograd until its reduction has started; what is kept to be added to
        later is copied."""
        one, given = self._all[b], self._heap.keep(gradient.storage)
        if one.values[k] is None:
            one.own = not (self._last or one.bucket.each)
            kept = self._own(gradient) if one.own else gradient
            self._heap.name(kept.storage, "gradients")
            one.values[k] = kept
        else:
            self._heap.drop(gradient.storage)
        one.left -= 1
        while self._next < len(self._due) and self._due[self._next].left <= 0:
            self._start()
        self._heap.drop(given)

    def _start(self) -> None:
        earlier, new = self._due[:self._next], self._due[self._next]
        late = overdue([one for one in earlier if frees(one.bucket) and (one.more or one.flight is not None)],
                       frees(new.bucket))
        for one in earlier:
            if one.more or one in late:
                self._advance(one)
        self._advance(new)
        self._next += 1

    def _advance(self, one: _Reduction) -> bool:
        """Wait for the step under way and start the next, which holds what it sends."""
        heap = self._heap
        if one.flight is not None:
            one.values, one.flight = [*self._moves.wait(one.flight, "gradients")], None
        if not one.more:
            return False
        values = [x for x in one.values if x is not None]
        shapes = [self._edges[fqn].tensor.shape for fqn in one.bucket.members]
        step = one.bucket.steps[one.at]
        one.flight = self._moves.start(step, values, shapes, one.starts, inplace=one.own)
        one.starts, one.at = [step.after(at) for at in one.starts], one.at + 1
        one.own, one.values = one.own or step.kind in COLLECTIVES, [None] * len(one.values)
        heap.moment()
        for x in values:
            heap.drop(x.storage)
        return True

    def finish(self) -> None:
        """The end of a backward: start what is left, wait, deposit."""
        while self._next < len(self._due):
            for k, (fqn, at) in enumerate(zip(self._due[self._next].bucket.members, self._due[self._next].starts,
                                              strict=True)):
                one, tensor = self._due[self._next], self._edges[fqn].tensor
                if one.values[k] is None:
                    one.values[k] = self._heap.value(local_shape(tensor.shape, at, self._moves.mesh), tensor.itemsize,
                                                     "gradients")
            self._start()
        while sum([self._advance(one) for one in self._due]):
            pass
        for one in self._due:
            for k, fqn in enumerate(one.bucket.members):
                value, one.values[k] = one.values[k], None
                assert value is not None
                self._deposit(fqn, value)
            one.starts = [self._edges[f].conversion.gradient or self._edges[f].conversion.target
                          for f in one.bucket.members]
