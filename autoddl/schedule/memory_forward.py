"""Counts the bytes of a microbatch on a heap, forward in the order of the generated program.

A block that backward computes again saves what it reads alone; `compute_again` runs its forward in backward, and then
its values are saved.

For each op its inputs are converted, its outputs made, and the values that backward reads are saved. A value is freed
after its last reader. Parameters are read as stored, after local steps, or a gathered bucket at a time. Backward is in
`memory_backward`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoddl.core.graph import Op
from autoddl.core.hubs import HUB
from autoddl.core.recompute import RecomputedPart
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


@dataclass(slots=True)
class _Block:
    """What a block that is computed again keeps, by tensor: values with a user, or values and where these are gathered
    again."""

    saved: dict[int, Value] = field(default_factory=dict)
    notes: dict[int, tuple[Value, tuple[int, int]]] = field(default_factory=dict)


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
        self.reader, self.blocks = self.program.last, dict[str, _Block]()
        nodes = self._all_forward()
        ends = [self._converted(t, self.program.conversions.get(("output", slot))) for t, slot in self.program.ends]
        for x in self.env.values():
            self.heap.drop(x.storage)
        BackwardMemory(self.moves, self.program, self.gathers, self.reductions, nodes, self.first, self).run(
            ends[0].itemsize)
        self.reductions.finish()
        if last:
            self.gathers.finish()
        self.heap.moment()
        for x in ends:
            self.heap.drop(x.storage)

    def _all_forward(self) -> dict[int, BackwardNode]:
        """Forward of all ops; returns the records of those that are not computed again."""
        begins = {part.ops[0]: part for part in self.program.parts}
        ends = {part.ops[-1]: part for part in self.program.parts}
        inside = {i for part in self.program.parts for i in part.ops}
        nodes = dict[int, BackwardNode]()
        for i in self.program.order:
            if i in begins:
                self._enter(begins[i])
            nodes[i] = self._forward(i, self.program.graph.ops[i], i not in inside, self.program.early.get(i))
            if i in ends:
                for x in self.blocks[ends[i].block.name].notes.values():
                    self.heap.drop(x[0].storage)
        return nodes

    def _enter(self, part: RecomputedPart) -> None:
        """Saves what a block reads from outside: as it is, or as a note where it will be gathered again."""
        kept = self.blocks[part.block.name] = _Block()
        for t in part.reads:
            fqn = self.program.parameter(t)
            x = self._used(self.env[t]) if fqn is None else self._parameter(part.ops[0], t, fqn)
            if x.storage in self.gathers.origin:
                kept.notes[t] = x, self.gathers.note(x.storage)
            else:
                kept.saved[t] = x

    def compute_again(self, part: RecomputedPart) -> dict[int, BackwardNode]:
        """Runs the forward of a block in backward; returns the records of its ops. `leave` ends its backward."""
        kept, stays = self.blocks.pop(part.block.name), len(self.program.graph.ops)
        for t, (x, (b, k)) in kept.notes.items():
            kept.saved[t] = x._replace(storage=self.gathers.again(b, k).storage)
        self.env = {t: kept.saved[t] for t in part.reads}
        self.reader = {t: i for i in part.ops for t in self.program.graph.ops[i].inputs} | dict.fromkeys(
            (*part.reads, *part.writes), stays)
        here = stays + part.ops[-1]
        return {i: self._forward(i, self.program.graph.ops[i], True, here) for i in part.ops}

    def forget(self, part: RecomputedPart) -> None:
        """Frees what a block keeps to which no gradient came."""
        kept = self.blocks.pop(part.block.name)
        for x in kept.saved.values():
            self.heap.drop(x.storage)
        for _, (b, k) in kept.notes.values():
            self.gathers.done(b, k)

    def leave(self) -> None:
        """Frees what a block read and wrote, at the end of its backward."""
        for x in self.env.values():
            self.heap.drop(x.storage)
        self.env = {}

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

    def _forward(self, i: int, op: Op, saves: bool, here: int | None = None) -> BackwardNode:
        """Forward of op i, which `saves` values for backward or not, at the place `here` of the step, by default i."""
        heap, inputs = self.heap, list[Value]()
        heap.here = i if here is None else here
        for k, t in enumerate(op.inputs):
            fqn = self.program.parameter(t)
            inputs.append(self._converted(t, self.program.edge(op, k)) if fqn is None else self._parameter(i, t, fqn))
            if t not in op.inputs[k + 1:]:
                self._read(i, t)
        call = replace(self.program.calls[i], inputs=tuple(inputs))
        node = self._viewed(call) if base(op) in VIEWS else self._computed(call, saves)
        for x in inputs:
            heap.drop(x.storage)
        for t in set(op.outputs):
            self._read(i, t)
        return node

    def _read(self, i: int, t: int) -> None:
        """Frees tensor t if op i is its last reader: the source of a conversion goes before the op runs."""
        if self.reader.get(t, i) == i and t in self.env:
            self.heap.drop(self.env.pop(t).storage)

    def _viewed(self, call: LocalOp) -> BackwardNode:
        x = call.inputs[0]
        for t, shape in zip(call.op.outputs, call.outputs, strict=True):
            self.env[t] = self._used(x) if call.op.target == HUB else view(self.heap, call.op, x, shape)
        self.heap.moment()
        return BackwardNode(call.inputs, Footprint())

    def _computed(self, call: LocalOp, saves: bool) -> BackwardNode:
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
        self.env.update(zip(call.op.outputs, outputs, strict=True))
        if not saves:
            for storage in saved:
                heap.drop(storage)
            return BackwardNode(call.inputs, made)
        for storage in [call.inputs[k].storage for k in made.saves] + [outputs[k].storage for k in made.keeps]:
            if storage in self.gathers.origin:
                notes.append(self.gathers.note(storage))
            else:
                saved.append(heap.keep(storage))
        return BackwardNode(call.inputs, made, tuple(saved), tuple(notes))
