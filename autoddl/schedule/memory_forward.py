"""Counts the bytes of a microbatch on a heap, forward in the order of the generated program.

For each op its inputs are converted, its outputs made, and the values that backward reads are saved. A value is freed
after its last reader. Parameters are read as stored, after local steps, or a gathered bucket at a time. Backward is in
`memory_backward`.

An op that backward runs again (`operators.recomputed`) saves nothing, nor do others save what is brought back, or
converted again. The tensors that are read for that are kept until `bring` runs it; then all that would have been saved
has its users.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace

from autoddl.core.graph import Op
from autoddl.core.hubs import HUB
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Heap, Value
from autoddl.operators.footprints.strides import elementwise_strides, output_strides, view
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.work import VIEWS, base
from autoddl.schedule.buckets import gather_buckets, gradient_buckets
from autoddl.schedule.memory_backward import BackwardMemory
from autoddl.schedule.memory_conversions import ConversionMemory
from autoddl.schedule.memory_gathers import CountedGathers
from autoddl.schedule.memory_program import BackwardNode, ParsedConversion, ParsedPlan
from autoddl.schedule.memory_reductions import CountedReductions

__all__ = ["MicrobatchMemory"]


@dataclass(slots=True)
class _Segment:
    """A part that runs again.

        part     its ops
        kept     what they read, by tensor, each with a user
        notes    what they read and is gathered again, by tensor, and where
        wants    tensor, or converted input (op, number), that is brought back -> the other ops that read it back, as
                 often as they do
        brought  op -> the storages that its backward reads back, after the second run
        has_run  whether that was
    """

    part: RecomputedPart
    kept: dict[int, Value] = field(default_factory=dict)
    notes: dict[int, tuple[Value, tuple[int, int]]] = field(default_factory=dict)
    wants: dict[int | tuple[int, int], list[int]] = field(default_factory=dict)
    brought: dict[int, list[int]] = field(default_factory=dict)
    has_run: bool = False


class MicrobatchMemory:
    """Runs the microbatches of a parsed plan on a heap: each is `begun`, then runs forward and backward.

    Several may be in flight. They share parameters, gathers and reductions.

        heap       counts the bytes; `heap.here` is i in forward of op i, and i + number of ops in its backward
        program    the parsed plan
        stored     the pieces of parameters that this rank stores, by name
        given      inputs, buffers and constants, by tensor
        cluster    decides how collectives run, if given
    """

    def __init__(self, heap: Heap, program: ParsedPlan, stored: Mapping[str, Value], given: Mapping[int, Value],
                 cluster: Cluster | None) -> None:
        plan, graph, edges = program.plan, program.graph, program.edges
        self.heap, self.program, self.stored, self.given = heap, program, stored, given
        self.moves, rows = ConversionMemory(heap, plan.mesh, plan.backend == "gloo", cluster), tuple(edges.values())
        self.locals: dict[str, Value] = {}
        self.last = True
        self.gathers = CountedGathers(self.moves, edges, stored, gather_buckets(plan, graph, rows))
        self.reductions = CountedReductions(self.moves, edges, gradient_buckets(plan, graph, rows))

    def begun(self, last: bool) -> "MicrobatchMemory":
        """Another microbatch, the `last` or not."""
        made = copy(self)
        made.last = last
        return made

    def forward(self) -> None:
        """Runs forward."""
        self.gathers.begin(self.last)
        self.env = {t: self._used(x) for t, x in self.given.items()}
        self.first: dict[int, list[str]] = {}
        self.reader = self.program.last
        segments = [_Segment(part) for part in self.program.parts]
        self.segments = {i: segment for segment in segments for i in segment.part.ops}
        self.asked, self.triggers = dict(self.segments), {segment.part.trigger: segment for segment in segments}
        self.copies = {copy: segment for segment in segments for copy in segment.part.copies}
        self.known: dict[int, tuple[_Segment, int | tuple[int, int]]] = {}
        self.nodes = [self._forward(i, op) for i, op in enumerate(self.program.graph.ops)]
        self.ends = [self._converted(t, self.program.conversions.get(("output", slot)))
                     for t, slot in self.program.ends]
        for x in self.env.values():
            self.heap.drop(x.storage)
        self.parts = segments

    def backward(self) -> None:
        """Runs backward."""
        self.reductions.begin(self.last)
        BackwardMemory(self.moves, self.program, self.gathers, self.reductions, self.nodes, self.first, self).run(
            self.ends[0].itemsize)
        for segment in self.parts:
            self._forget(segment)
        self.reductions.finish()
        if self.last:
            self.gathers.finish()
        self.heap.moment()
        for x in self.ends:
            self.heap.drop(x.storage)

    def _keep_read(self, segment: _Segment, t: int, x: Value) -> None:
        """Keeps `x`, tensor t that a part reads: as it is, or as a note where it will be gathered again."""
        if t in segment.kept or t in segment.notes or t not in segment.part.reads:
            return
        if x.storage in self.gathers.origin:
            segment.notes[t] = x, self.gathers.note(x.storage)
        else:
            segment.kept[t] = self._used(x)

    def bring(self, i: int) -> None:
        """Runs the part again from which backward of op i is the first to read."""
        segment = self.asked.get(i) or self.triggers.get(i)
        if segment is None or segment.has_run:
            return
        segment.has_run = True
        for t, (x, (b, k)) in segment.notes.items():
            segment.kept[t] = x._replace(storage=self.gathers.again(b, k).storage)
        self.gathered_again = {segment.kept[t].storage for t in segment.notes}
        ops, end = self.program.graph.ops, len(self.program.graph.ops)
        self.env, reads = dict(segment.kept), segment.part.reads
        self.reader = {t: j for j in segment.part.steps for t in ops[j].inputs} | dict.fromkeys(reads, end)
        for j in segment.part.steps:
            if self.segments.get(j) is segment:
                self._forward(j, ops[j], segment)
            else:
                self._copy_again(j, segment)
        self._forget(segment)

    def _copy_again(self, i: int, segment: _Segment) -> None:
        """Converts inputs of op i again, which runs once."""
        op = self.program.graph.ops[i]
        for k, t in enumerate(op.inputs):
            if (i, k) in segment.part.copies and self._is_moved(op, k):
                x = self._converted(t, self.program.edge(op, k))
                for saver in segment.wants.pop((i, k), ()):
                    segment.brought.setdefault(saver, []).append(self.heap.keep(x.storage))
                self.heap.drop(x.storage)
        for t in set(op.inputs):
            self._read(i, t)

    def _is_moved(self, op: Op, k: int) -> bool:
        """Whether input k of an op is converted."""
        edge = self.program.edge(op, k)
        return edge is not None and bool(edge.forward)

    def release(self, i: int) -> None:
        """Frees what backward of op i read back."""
        segment = self.asked.get(i)
        for storage in segment.brought.pop(i, ()) if segment is not None else ():
            self.heap.drop(storage)

    def _forget(self, segment: _Segment) -> None:
        """Frees what a part read."""
        for x in segment.kept.values():
            self.heap.drop(x.storage)
        for _, (b, k) in segment.notes.values() if not segment.has_run else ():
            self.gathers.done(b, k)
        segment.kept, segment.notes = {}, {}

    def _used(self, x: Value) -> Value:
        """`x`, with one more user."""
        self.heap.keep(x.storage)
        return x

    def _converted(self, t: int, edge: ParsedConversion | None) -> Value:
        """Tensor t after its conversion, with one more user."""
        x = self._used(self.env[t])
        if edge is None:
            return x
        return self.moves.through(edge.forward, x, self.program.graph.tensors[t].shape, edge.source, "activations",
                                  t in self.program.intermediates)

    def _parameter(self, i: int, t: int, fqn: str) -> Value:
        """The value of a parameter for op i; the first reader of a bucket takes all of it."""
        if t not in self.env and fqn in self.gathers.place:
            b, _ = self.gathers.place[fqn]
            self.first.setdefault(i, []).extend(self.gathers.members(b))
            for member, x in zip(self.gathers.members(b), self.gathers.take(b), strict=True):
                self.env[self.program.place[member]] = x
        elif t not in self.env:
            self.env[t] = self._local(fqn)
        return self._used(self.env[t])

    def _local(self, fqn: str) -> Value:
        """A parameter after its cast and local steps, which run in the first microbatch and stay until the last."""
        edge, x = self.program.edges.get(fqn), self.locals.pop(fqn, None)
        if x is None:
            x = self._used(self.stored[fqn])
            if edge is not None:
                kind, shape = "gathered parameters", edge.tensor.shape
                x = self.moves.through(edge.forward, x, shape, edge.conversion.source, kind)
                x = self.moves.cast(x, edge.tensor.itemsize, kind)
        if edge is not None and not edge.is_direct and not self.last:
            self.locals[fqn] = self._used(x)
        return x

    def _forward(self, i: int, op: Op, again: _Segment | None = None) -> BackwardNode:
        """Forward of op i; that of `again` runs in backward."""
        heap, inputs = self.heap, list[Value]()
        heap.here = i if again is None else heap.here
        segment = self.segments.get(i)
        for k, t in enumerate(op.inputs):
            fqn = self.program.parameter(t)
            x = None if fqn is None else self._parameter(i, t, fqn)
            copier = self.copies.get((i, k)) if self._is_moved(op, k) else None
            if again is None and (one := segment or copier) is not None:
                self._keep_read(one, t, self.env[t])
            inputs.append(self._converted(t, self.program.edge(op, k)) if x is None else x)
            if copier is not None and all(x.storage != inputs[-1].storage for x in copier.kept.values()):
                self.known.setdefault(inputs[-1].storage, (copier, (i, k)))
            if t not in op.inputs[k + 1:]:
                self._read(i, t)
        call = replace(self.program.calls[i], inputs=tuple(inputs))
        node = self._viewed(call) if base(op) in VIEWS else self._computed(i, call, again)
        for x in inputs:
            heap.drop(x.storage)
        if segment is not None:
            self._bring_back(segment, op, again is not None)
        for t in set(op.outputs):
            self._read(i, t)
        return node

    def _read(self, i: int, t: int) -> None:
        """Frees tensor t if op i is its last reader: the source of a conversion goes before the op runs."""
        if self.reader.get(t, i) == i and t in self.env:
            self.heap.drop(self.env.pop(t).storage)

    def _bring_back(self, segment: _Segment, op: Op, again: bool) -> None:
        """Notes that a part brings back the results of `op`; when it runs `again`, those who wait get them."""
        for t in op.outputs:
            if t not in segment.part.noted or t not in self.env:
                continue
            storage = self.env[t].storage
            if again:
                for i in segment.wants.pop(t, ()):
                    segment.brought.setdefault(i, []).append(self.heap.keep(storage))
            elif all(x.storage != storage for x in segment.kept.values()):
                self.known.setdefault(storage, (segment, t))

    def _viewed(self, call: LocalOp) -> BackwardNode:
        x = call.inputs[0]
        for t, shape in zip(call.op.outputs, call.outputs, strict=True):
            self.env[t] = self._used(x) if call.op.target == HUB else view(self.heap, call.op, x, shape)
        self.heap.moment()
        return BackwardNode(call.inputs, Footprint())

    def _computed(self, i: int, call: LocalOp, again: _Segment | None) -> BackwardNode:
        heap, made = self.heap, footprint_of(call)
        if made.before:
            heap.moment(made.before)
        outputs = [heap.value(shape, wide, "activations")
                   for shape, wide in zip(call.outputs, call.itemsizes, strict=True)]
        shape = call.outputs[0]
        strides = elementwise_strides(shape, call.inputs) if made.output_shaped else output_strides(call, shape)
        outputs[0] = outputs[0]._replace(strides=strides)
        if made.slack:
            heap.grow(outputs[0].storage, made.slack)
        saved = list[int]()
        if made.beside:
            saved.append(heap.new(made.beside, "activations"))
        heap.moment(made.during)
        self.env.update(zip(call.op.outputs, outputs, strict=True))
        storages = [call.inputs[k].storage for k in made.saves] + [outputs[k].storage for k in made.keeps]
        if again is not None:
            again.brought[i] = saved + [heap.keep(x) for x in storages if x not in self.gathered_again]
            return BackwardNode(call.inputs, made)
        notes = [self.gathers.note(x) for x in storages if x in self.gathers.origin]
        rest = [x for x in storages if x not in self.gathers.origin]
        if i in self.segments:
            for storage in saved:
                heap.drop(storage)
            return BackwardNode(call.inputs, made, (), tuple(notes))
        for storage in rest:
            if storage in self.known:
                segment, t = self.known[storage]
                segment.wants.setdefault(t, []).append(i)
                self.asked[i] = segment
            else:
                saved.append(heap.keep(storage))
        return BackwardNode(call.inputs, made, tuple(saved), tuple(notes))
