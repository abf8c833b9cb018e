"""Counts the bytes of parameters' gradients on their way to .grad: the parameter protocol on counted storages.

The gradients of a bucket are there until they are in its send buffer. That buffer is there until it has been waited
for, and the result becomes .grad. Gradients that are reduced after the last of several microbatches add up in a copy of
the first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoddl.core.conversion import COLLECTIVES
from autoddl.core.layout import Layout, local_shape
from autoddl.operators.footprints.storages import Value, contiguous, is_contiguous
from autoddl.schedule.buckets import Bucket, ParameterEdge
from autoddl.schedule.memory_conversions import ConversionMemory, PendingStep
from autoddl.schedule.parameter_protocol import Advance, Fill, ReduceProtocol

__all__ = ["CountedReductions"]

Edges = Mapping[str, ParameterEdge]


@dataclass(slots=True, eq=False)
class _Reduction:
    """The gradients of a bucket on the way to their sum.

        bucket     the bucket, by names of parameters
        starts     layouts in which backward yields the gradients
        values     the gradients that are there
        flight     the collective in flight
        own        whether nothing else uses the values
        sums       sums of earlier microbatches in the layout G, where the bucket takes some steps once
    """

    bucket: Bucket
    starts: list[Layout]
    values: list[Value | None]
    flight: PendingStep | None = None
    own: bool = False
    sums: list[Value] | None = None


class CountedReductions:
    """Reduces gradients on the heap of `moves`; `grads` are the results, .grad by parameter."""

    def __init__(self, moves: ConversionMemory, edges: Edges, buckets: Sequence[Bucket]) -> None:
        self._heap, self._moves, self._edges = moves.heap, moves, edges
        self._all = [_Reduction(one, self._layouts(one), [None] * len(one.members)) for one in buckets]
        self._last = True
        self._protocol = ReduceProtocol(buckets)
        self.place = {fqn: (b, k) for b, one in enumerate(buckets) for k, fqn in enumerate(one.members)}
        self.grads: dict[str, Value] = {}
        self.begin(last=True)

    def _layouts(self, bucket: Bucket) -> list[Layout]:
        """The layouts in which backward yields the members' gradients."""
        return [self._edges[f].gradient_start(bucket, bucket.steps) for f in bucket.members]

    def begin(self, last: bool) -> None:
        """Called before a microbatch, the `last` of the step or not."""
        self._last = last
        self._protocol.begin(last)

    def add(self, fqn: str, gradient: Value, direct: bool) -> None:
        """Called when the gradient of `fqn` is there; `direct` says that autograd adds it up in the leaf.

        Autograd uses the gradient until it has been handed on. A piece of it, or of a larger tensor, is copied.
        """
        edge, heap = self._edges.get(fqn), self._heap
        if fqn in self.place:
            self._collect(*self.place[fqn], gradient)
            return
        given, x = heap.keep(gradient.storage), gradient
        if edge is not None:
            x = self._moves.cast(x, edge.tensor.gradient.itemsize, "gradients")
            if edge.backward:
                assert edge.conversion.gradient is not None
                x = self._moves.through(edge.backward, x, edge.tensor.shape, edge.conversion.gradient, "transient")
        taken = direct and x is gradient and heap.users[given] == 2
        shared = x.storage == given or heap.sizes[x.storage] > x.nbytes or not is_contiguous(x.shape, x.strides)
        self._deposit(fqn, self._own(x) if shared and not taken else x)
        heap.drop(given)

    def _own(self, x: Value) -> Value:
        """A copy in place of `x`, which loses a user."""
        copy = Value(self._heap.new(x.nbytes, "gradients"), x.shape, contiguous(x.shape), x.itemsize)
        self._heap.moment()
        self._heap.drop(x.storage)
        return copy

    def _deposit(self, fqn: str, x: Value) -> None:
        if fqn in self._edges:
            x = self._moves.cast(x, self._edges[fqn].tensor.stored.itemsize, "gradients")
        if fqn in self.grads:
            self._heap.drop(x.storage)
        else:
            self.grads[fqn] = x
            self._heap.name(x.storage, "gradients")

    def _collect(self, b: int, k: int, gradient: Value) -> None:
        """Adds one more gradient of a bucket. Autograd uses it until its reduction has started.

        A gradient to which later microbatches add theirs is copied.
        """
        one, given = self._all[b], self._heap.keep(gradient.storage)
        wide = self._edges[one.bucket.members[k]].tensor.gradient.itemsize
        cast = self._moves.cast(gradient, wide, "gradients")
        fresh, gradient = cast is not gradient, cast
        if one.values[k] is None:
            one.own = not self._protocol.is_due(b)
            kept = self._own(gradient) if one.own and not fresh else gradient
            self._heap.name(kept.storage, "gradients")
            one.values[k] = kept
        else:
            self._heap.drop(gradient.storage)
        self._do(self._protocol.arrive(b))
        self._heap.drop(given)

    def _do(self, asked: Iterable[Advance | Fill]) -> None:
        for step in asked:
            one = self._all[step.bucket]
            if isinstance(step, Fill):
                self._fill(one)
                continue
            if step.waits and one.flight is not None:
                one.values, one.flight = [*self._moves.wait(one.flight, "gradients")], None
            if step.step is not None:
                self._send(one, step.step)

    def _send(self, one: _Reduction, number: int) -> None:
        """Starts a step of the bucket, which uses the storages that it sends."""
        heap = self._heap
        if number == len(one.bucket.steps):
            self._add_sums(one)
        values = [x for x in one.values if x is not None]
        shapes = [self._edges[fqn].tensor.shape for fqn in one.bucket.members]
        step = (*one.bucket.steps, *one.bucket.once)[number]
        one.flight = self._moves.start(step, values, shapes, one.starts, inplace=one.own)
        one.starts = [step.after(at) for at in one.starts]
        one.own, one.values = one.own or step.kind in COLLECTIVES, [None] * len(one.values)
        heap.moment()
        for x in values:
            heap.drop(x.storage)

    def _add_sums(self, one: _Reduction) -> None:
        """Adds the sums of earlier microbatches to the values, and frees them."""
        for x in one.sums or ():
            self._heap.drop(x.storage)
        one.sums = None

    def _fill(self, one: _Reduction) -> None:
        """Makes zeros for the gradients that backward did not yield."""
        for k, (fqn, at) in enumerate(zip(one.bucket.members, one.starts, strict=True)):
            if one.values[k] is None:
                tensor = self._edges[fqn].tensor.gradient
                one.values[k] = self._heap.value(local_shape(tensor.shape, at, self._moves.mesh), tensor.itemsize,
                                                 "gradients")

    def finish(self) -> None:
        """Called at the end of a backward: starts the rest, waits, and deposits the results."""
        self._do(self._protocol.finish())
        for b in self._protocol.due:
            one = self._all[b]
            if one.bucket.once and not self._last:
                found = [x for x in one.values if x is not None]
                for x in found if one.sums is not None else ():
                    self._heap.drop(x.storage)
                one.sums, one.values = one.sums or found, [None] * len(one.values)
            for k, fqn in enumerate(one.bucket.members):
                value, one.values[k] = one.values[k], None
                if value is not None:
                    self._deposit(fqn, value)
            one.starts = self._layouts(one.bucket)
