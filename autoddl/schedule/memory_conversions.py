"""Counts the buffers of a conversion's steps, as the room `runtime.collectives` makes them on rank 0.

    all-reduce      a copy, reduced in place             slice   a copy of a part; of a parameter or an input a view
    all-gather      a send and a receive buffer          fill    zeros with the piece in its place; whole: as it is
    reduce-scatter  a send and a receive buffer
    all-to-all      a send and a receive buffer          several tensors are joined into one buffer

Where the piece is contiguous, it is the send buffer. Where pieces are joined along the first dim, the receive buffer is
the result.

gloo has no reduce-scatter: it all-reduces a copy of its own (ProcessGroupGloo.cpp). This copy counts when the step is
waited for, which is where torch sees it. A reduction by messages (`exchange`) receives each chunk into a buffer of its
own. Torch sees that buffer where the reduction runs at once, and not where it runs in a thread of its own.

A coded step has the pieces that it codes, where these are not the tensor itself, and two rows more while it codes. It
sends from a buffer of bytes, and receives into one. It decodes into rows of values, one after a reduce-scatter, and has
two more meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autoddl.core.codecs import coded_bytes
from autoddl.core.conversion import COLLECTIVES, Step, group_size
from autoddl.core.layout import Layout, Mesh, Split, local_shape
from autoddl.cost_models import Algorithm, Cluster, Group, collective
from autoddl.operators.footprints.storages import Heap, Shape, Value, contiguous, is_contiguous

__all__ = ["ConversionMemory", "PendingStep"]


@dataclass(slots=True)
class PendingStep:
    """A collective in flight, or a local step that is done.

        sent        storages of the send buffers
        got         storage of the receive buffer, -1 for a local step
        rows        blocks that are received: one of each member, or one
        targets     for each tensor its shape afterwards, and the dim along which its blocks are joined
        whole       whether the receive buffer is the result itself
        itemsize    bytes of an element
        copied      bytes that the backend takes for itself
        decoded     bytes of the values that a coded step decodes; 0 where it is not coded
        done        results of a local step
    """

    sent: list[int]
    got: int
    rows: int
    targets: list[tuple[Shape, int | None]]
    whole: bool = False
    itemsize: int = 4
    copied: float = 0.0
    decoded: int = 0
    done: list[Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ConversionMemory:
    """Runs the steps of conversions on a heap.

    `gloo` says whether that is the backend; `cluster` decides how collectives run (`collectives.transport`), if given.
    """

    heap: Heap
    mesh: Mesh
    gloo: bool
    cluster: Cluster | None = None

    def through(self, steps: Sequence[Step], x: Value, shape: Shape, layout: Layout, kind: str,
                copies: bool = False) -> Value:
        """The piece `x` in `layout` of a tensor of `shape`, after all steps; the result has the user of `x`.

        With `copies` a slice is a copy.
        """
        for step in steps:
            if group_size(step, self.mesh) > 1:
                if copies and step.kind == "slice":
                    after = self.heap.value(local_shape(shape, step.after(layout), self.mesh), x.itemsize, kind)
                    self.heap.moment()
                else:
                    (after,) = self.wait(self.start(step, [x], [shape], [layout], True), kind)
                self.heap.drop(x.storage)
                x = after
            layout = step.after(layout)
        return x

    def start(self, step: Step, tensors: Sequence[Value], shapes: Sequence[Shape], layouts: Sequence[Layout],
              now: bool = False, inplace: bool = False) -> PendingStep:
        """Starts a step, to be waited for `now` or later; a local step is done at once.

        The result is a user of the storages that are sent. With `inplace`, the sum may overwrite a single tensor.
        """
        after = [local_shape(s, step.after(at), self.mesh) for s, at in zip(shapes, layouts, strict=True)]
        heap = self.heap
        if step.kind not in COLLECTIVES:
            done = [_alone(heap, step, x, shape) for x, shape in zip(tensors, after, strict=True)]
            return PendingStep([], -1, 1, [], done=done)
        total, itemsize = sum(x.nbytes for x in tensors), tensors[0].itemsize
        if step.is_sparse:
            got = heap.new(total, "transient")
            heap.moment(total + total / itemsize)  # magnitudes, and which of them are large
            return PendingStep([], got, 1, [(shape, None) for shape in after], True, itemsize)
        if step.kind == "all-reduce":
            here = inplace and len(tensors) == 1 and is_contiguous(tensors[0].shape, tensors[0].strides)
            got = heap.keep(tensors[0].storage) if here else heap.new(total, "transient")
            copied = self._own(step, total, now)
            return PendingStep([], got, 1, [(shape, None) for shape in after], True, itemsize, copied)
        n, cut = group_size(step, self.mesh), step.target.dim if isinstance(step.target, Split) else None
        sizes = [prod(min(a, b) for a, b in zip(x.shape, shape, strict=True)) for x, shape in zip(tensors, after,
                                                                                                 strict=True)]
        rows = 1 if step.kind == "reduce-scatter" else n
        sent = []
        if len(tensors) > 1 or not _in_a_block(tensors[0], cut):
            sent.append(heap.new(sum(sizes) * itemsize * (1 if cut is None else n), "transient"))
        else:
            sent.append(heap.keep(tensors[0].storage))
        join = step.source.dim if isinstance(step.source, Split) else None
        if step.codec:
            return self._coded(step, sent, sum(sizes) * itemsize, [(shape, join) for shape in after], itemsize)
        got = heap.new(sum(sizes) * itemsize * rows, "transient")
        copied = self._own(step, sum(sizes) * itemsize * n, now)
        return PendingStep(sent, got, rows, [(shape, join) for shape in after], itemsize=itemsize, copied=copied)

    def _coded(self, step: Step, sent: list[int], row: int, targets: list[tuple[Shape, int | None]], itemsize: int
               ) -> PendingStep:
        """Codes the pieces of `sent`, each `row` bytes, and starts to exchange them."""
        heap, n = self.heap, group_size(step, self.mesh)
        coded = coded_bytes(step.codec, n, row * n, itemsize)
        pieces = coded // n if step.kind == "all-gather" else coded
        out = heap.new(pieces, "transient")
        heap.moment(8.0 * row / itemsize)
        for storage in sent:
            heap.drop(storage)
        rows = 1 if step.kind == "reduce-scatter" else n
        return PendingStep([out], heap.new(coded, "transient"), rows, targets, itemsize=itemsize, decoded=row * rows)

    def _own(self, step: Step, nbytes: int, now: bool) -> float:
        """Bytes that gloo, or the messages, take for themselves to reduce a buffer of `nbytes`."""
        if not self.gloo or step.kind not in ("all-reduce", "reduce-scatter"):
            return 0.0
        extents = Group(tuple((self.mesh.sizes[a], self.mesh.strides[a]) for a in step.axes))
        if self.cluster is not None and collective(self.cluster, step.kind, extents, float(nbytes)
                                                   ).algorithm is Algorithm.LEVEL_RINGS:
            return nbytes * (1 - 1 / group_size(step, self.mesh)) * now
        return float(nbytes) * (step.kind == "reduce-scatter")

    def cast(self, x: Value, itemsize: int, kind: str) -> Value:
        """`x` with elements of `itemsize` bytes, in place of `x`, which loses a user; `x` itself if it has such."""
        if x.itemsize == itemsize:
            return x
        found = self.heap.value(x.shape, itemsize, kind)
        self.heap.moment()
        self.heap.drop(x.storage)
        return found

    def wait(self, flight: PendingStep, kind: str) -> list[Value]:
        """Waits for a step, and frees its buffers; returns the tensors, counted as `kind`."""
        heap, found = self.heap, list[Value]()
        if flight.got < 0:
            return flight.done
        if flight.copied:
            heap.moment(flight.copied)
        if flight.decoded:
            values = heap.new(flight.decoded, "transient")
            heap.moment(8.0 * flight.decoded / flight.rows / flight.itemsize)
            flight = replace(flight, sent=[*flight.sent, flight.got], got=values)
        for shape, join in flight.targets:
            alone = len(flight.targets) == 1
            if flight.whole or join is None or flight.rows == 1 or (alone and not prod(shape[:join]) > 1):
                found.append(Value(heap.keep(flight.got), shape, contiguous(shape), flight.itemsize))
            else:
                found.append(heap.value(shape, flight.itemsize, kind))
        heap.moment()
        for storage in (*flight.sent, flight.got):
            heap.drop(storage)
        if heap.users[flight.got]:
            heap.name(flight.got, kind)
        return found


def _alone(heap: Heap, step: Step, x: Value, shape: Shape) -> Value:
    """A local step: a slice is a view, a fill of a split tensor makes zeros; a whole tensor stays on rank 0."""
    if step.kind == "slice" or not isinstance(step.source, Split):
        return Value(heap.keep(x.storage), shape, x.strides, x.itemsize)
    return heap.value(shape, x.itemsize, "transient")


def _in_a_block(x: Value, cut: int | None) -> bool:
    """Whether the pieces to send are one after the other in memory."""
    if not is_contiguous(x.shape, x.strides):
        return False
    return cut is None or prod(x.shape[:cut]) <= 1
