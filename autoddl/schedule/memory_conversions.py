"""The buffers of a conversion's steps, as `redistribute` and `pieces` make them on rank 0.

    all-reduce      a copy, in place                    slice   looks at a part
    all-gather      what is sent, what came             fill    zeros with the piece in its place; whole: as it is
    reduce-scatter  what is sent, what came
    all-to-all      what is sent, what came             several tensors are joined into one buffer

What is sent is no copy where the piece lies in one block; what came is none where it is joined along the first dim.
gloo has no reduce-scatter: it all-reduces a copy of its own (ProcessGroupGloo.cpp), which is counted where torch sees
it, when it is waited for. A reduction that is made of messages (`exchange`) receives each chunk beside its own, and is
seen where it runs at once and not in a thread of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from autoddl.core.conversion import COLLECTIVES, Step, group_size
from autoddl.core.layout import Layout, Mesh, Split, local_shape
from autoddl.cost_models import Algorithm, Cluster, Group, collective
from autoddl.operators.footprints.storages import Heap, Shape, Value, contiguous, is_contiguous

__all__ = ["Flight", "Moves"]


@dataclass(slots=True)
class Flight:
    """A collective under way: its buffers, and for each tensor the shape afterwards and the dim along which pieces are
    joined; `copied` are bytes of the backend's own."""

    held: list[int]
    got: int
    rows: int
    targets: list[tuple[Shape, int | None]]
    whole: bool = False
    wide: int = 4
    copied: float = 0.0
    done: list[Value] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Moves:
    """Runs steps on `heap`; `gloo`: by that backend, on `cluster` if that decides how (`transport`)."""

    heap: Heap
    mesh: Mesh
    gloo: bool
    cluster: Cluster | None = None

    def through(self, steps: Sequence[Step], x: Value, shape: Shape, layout: Layout, kind: str) -> Value:
        """`x`, a piece in `layout` of a tensor of `shape`, after all steps; one user of `x` less, one of the result."""
        for step in steps:
            if group_size(step, self.mesh) > 1:
                (after,) = self.wait(self.start(step, [x], [shape], [layout], True), kind)
                self.heap.drop(x.storage)
                x = after
            layout = step.after(layout)
        return x

    def start(self, step: Step, tensors: Sequence[Value], shapes: Sequence[Shape], layouts: Sequence[Layout],
              now: bool = False, inplace: bool = False) -> Flight:
        """Hand a step over, to be done `now` or beside; what is local is done in any case. The flight holds what it
        sends. `inplace`: one tensor may be overwritten by its sum."""
        after = [local_shape(s, step.after(at), self.mesh) for s, at in zip(shapes, layouts, strict=True)]
        heap = self.heap
        if step.kind not in COLLECTIVES:
            done = [_alone(heap, step, x, shape) for x, shape in zip(tensors, after, strict=True)]
            return Flight([], -1, 1, [], done=done)
        total, wide = sum(x.nbytes for x in tensors), tensors[0].itemsize
        if step.kind == "all-reduce":
            here = inplace and len(tensors) == 1 and is_contiguous(tensors[0].shape, tensors[0].strides)
            got = heap.keep(tensors[0].storage) if here else heap.new(total, "transient")
            return Flight([], got, 1, [(shape, None) for shape in after], True, wide, self._own(step, total, now))
        n, cut = group_size(step, self.mesh), step.target.dim if isinstance(step.target, Split) else None
        sizes = [prod(min(a, b) for a, b in zip(x.shape, shape, strict=True)) for x, shape in zip(tensors, after,
                                                                                                 strict=True)]
        rows = 1 if step.kind == "reduce-scatter" else n
        held = []
        if len(tensors) > 1 or not _in_a_block(tensors[0], cut):
            held.append(heap.new(sum(sizes) * wide * (1 if cut is None else n), "transient"))
        else:
            held.append(heap.keep(tensors[0].storage))
        join = step.source.dim if isinstance(step.source, Split) else None
        got = heap.new(sum(sizes) * wide * rows, "transient")
        copied = self._own(step, sum(sizes) * wide * n, now)
        return Flight(held, got, rows, [(shape, join) for shape in after], wide=wide, copied=copied)

    def _own(self, step: Step, nbytes: int, now: bool) -> float:
        """Bytes that gloo, or the messages, take for themselves to reduce a buffer of `nbytes`."""
        if not self.gloo or step.kind not in ("all-reduce", "reduce-scatter"):
            return 0.0
        extents = Group(tuple((self.mesh.sizes[a], self.mesh.strides[a]) for a in step.axes))
        if self.cluster is not None and collective(self.cluster, step.kind, extents, float(nbytes)
                                                   ).algorithm is Algorithm.LEVEL_RINGS:
            return nbytes * (1 - 1 / group_size(step, self.mesh)) * now
        return float(nbytes) * (step.kind == "reduce-scatter")

    def wait(self, flight: Flight, kind: str) -> list[Value]:
        """Wait for it: the tensors, of `kind`; the buffers go."""
        heap, found = self.heap, list[Value]()
        if flight.got < 0:
            return flight.done
        if flight.copied:
            heap.moment(flight.copied)
        for shape, join in flight.targets:
            alone = len(flight.targets) == 1
            if flight.whole or join is None or flight.rows == 1 or (alone and not prod(shape[:join]) > 1):
                found.append(Value(heap.keep(flight.got), shape, contiguous(shape), flight.wide))
            else:
                found.append(heap.value(shape, flight.wide, kind))
        heap.moment()
        for storage in (*flight.held, flight.got):
            heap.drop(storage)
        if heap.users[flight.got]:
            heap.name(flight.got, kind)
        return found


def _alone(heap: Heap, step: Step, x: Value, shape: Shape) -> Value:
    """A slice looks; a fill of a split tensor makes zeros of the whole, of a whole one rank 0 keeps what it has."""
    if step.kind == "slice" or not isinstance(step.source, Split):
        return Value(heap.keep(x.storage), shape, x.strides, x.itemsize)
    return heap.value(shape, x.itemsize, "transient")


def _in_a_block(x: Value, cut: int | None) -> bool:
    """Whether the pieces to send lie one after the other in memory."""
    if not is_contiguous(x.shape, x.strides):
        return False
    return cut is None or prod(x.shape[:cut]) <= 1
