"""Counts the bytes of a microbatch on a heap, forward in the order of the generated program.

For each op its inputs are converted, its outputs made, and the values that backward reads are saved. A value is freed
after its last reader. Parameters are read as stored, after local steps, or a gathered bucket at a time. Backward is in
`memory_backward`.
"""

from collections.abc import Mapping
from dataclasses import replace

from autoddl.core.graph import Op
from autoddl.core.hubs import HUB
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Heap, Value
from autoddl.operators.footprints.strides import elementwise_strides, output_strides, view
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.work import VIEWS, base
from autoddl.schedule.buckets import gather_buckets, gradient_buckets
from autoddl.schedule.memory_backward import BackwardMemory
from autoddl.schedule.memory_conversions import ConversionMemory
from autoddl.schedule.memory_gathers import CountedGathers
from autoddl.schedule.memory_program import BackwardNode, ParsedConversion, ParsedPlan
from autoddl.schedule.memory_reductions import CountedReductions

__all__ = ["MicrobatchMemory"]


class MicrobatchMemory:
    """Runs the microbatches of a parsed plan on a heap.

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
        self.gathers = CountedGathers(self.moves, edges, stored, gather_buckets(plan, graph, rows))
        self.reductions = CountedReductions(self.moves, edges, gradient_buckets(plan, graph, rows))

    def run(self, last: bool) -> None:
        """Runs forward and backward of a microbatch, the `last` or not."""
        self.gathers.begin(last)
        self.reductions.begin(last)
        self.last, self.env = last, {t: self._used(x) for t, x in self.given.items()}
        self.first: dict[int, list[str]] = {}
        nodes = [self._forward(i, op) for i, op in enumerate(self.program.graph.ops)]
        ends = [self._converted(t, self.program.conversions.get(("output", slot))) for t, slot in self.program.ends]
        for x in self.env.values():
            self.heap.drop(x.storage)
        BackwardMemory(self.moves, self.program, self.gathers, self.reductions, nodes, self.first).run(ends[0].itemsize)
        self.reductions.finish()
        if last:
            self.gathers.finish()
        self.heap.moment()
        for x in ends:
            self.heap.drop(x.storage)

    def _used(self, x: Value) -> Value:
        """`x`, with one more user."""
        self.heap.keep(x.storage)
        return x

    def _converted(self, t: int, edge: ParsedConversion | None) -> Value:
        """Tensor t after its conversion, with one more user."""
        x = self._used(self.env[t])
        if edge is None:
            return x
        return self.moves.through(edge.forward, x, self.program.graph.tensors[t].shape, edge.source, "activations")

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

    def _forward(self, i: int, op: Op) -> BackwardNode:
        heap, inputs = self.heap, list[Value]()
        heap.here = i
        for k, t in enumerate(op.inputs):
            fqn = self.program.parameter(t)
            inputs.append(self._converted(t, self.program.edge(op, k)) if fqn is None else self._parameter(i, t, fqn))
            if t not in op.inputs[k + 1:]:
                self._read(i, t)
        call = replace(self.program.calls[i], inputs=tuple(inputs))
        node = self._viewed(call) if base(op) in VIEWS else self._computed(call)
        for x in inputs:
            heap.drop(x.storage)
        for t in set(op.outputs):
            self._read(i, t)
        return node

    def _read(self, i: int, t: int) -> None:
        """Frees tensor t if op i is its last reader: the source of a conversion goes before the op runs."""
        if self.program.last.get(t, -1) <= i and t in self.env:
            self.heap.drop(self.env.pop(t).storage)

    def _viewed(self, call: LocalOp) -> BackwardNode:
        x = call.inputs[0]
        for t, shape in zip(call.op.outputs, call.outputs, strict=True):
            self.env[t] = self._used(x) if call.op.target == HUB else view(self.heap, call.op, x, shape)
        self.heap.moment()
        return BackwardNode(call.inputs, Footprint())

    def _computed(self, call: LocalOp) -> BackwardNode:
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
        saved, notes = list[int](), list[tuple[int, int]]()
        if made.beside:
            saved.append(heap.new(made.beside, "activations"))
        heap.moment(made.during)
        for storage in [call.inputs[k].storage for k in made.saves] + [outputs[k].storage for k in made.keeps]:
            if storage in self.gathers.origin:
                notes.append(self.gathers.note(storage))
            else:
                saved.append(heap.keep(storage))
        self.env.update(zip(call.op.outputs, outputs, strict=True))
        return BackwardNode(call.inputs, made, tuple(saved), tuple(notes))
