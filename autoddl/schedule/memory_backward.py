"""Counts the bytes of backward of one microbatch on a heap, in the order of autograd: ops in reverse.

When the gradients of an op's inputs are made, its saved values and the gradients of its outputs are still there. They
are freed afterwards. The gradient of a broadcast input is summed to the input's shape. Gradients of several readers add
up in a third buffer, as in autograd where it may not write into the first (input_buffer.cpp). Gradients of a bucket are
handed on where the bucket was first read. The first op that reads back what runs again (`operators.recomputed`) waits
for that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from autoddl.core.graph import Op
from autoddl.core.hubs import HUB
from autoddl.operators.footprints.footprint import LocalOp
from autoddl.operators.footprints.storages import Value
from autoddl.operators.footprints.strides import back_through, elementwise_strides, gradient_strides
from autoddl.operators.work import VIEWS, base
from autoddl.schedule.memory_conversions import ConversionMemory
from autoddl.schedule.memory_gathers import CountedGathers
from autoddl.schedule.memory_program import BackwardNode, ParsedConversion, ParsedPlan
from autoddl.schedule.memory_reductions import CountedReductions

__all__ = ["BackwardMemory", "Recomputing"]


class Recomputing(Protocol):
    """Runs ops again in backward (`memory_forward`): before op i reads what they bring back, until it has."""

    def bring(self, i: int) -> None: ...
    def release(self, i: int) -> None: ...


class BackwardMemory:
    """Runs backward of one microbatch on the heap of `moves`.

    Forward made a record of each op (`nodes`). By op, `first` has the parameters of the buckets that it read first.
    Ops that run again are run by `again`.
    """

    def __init__(self, moves: ConversionMemory, program: ParsedPlan, gathers: CountedGathers,
                 reductions: CountedReductions, nodes: Sequence[BackwardNode], first: Mapping[int, list[str]],
                 again: Recomputing) -> None:
        self.moves, self.heap, self.program, self.gathers = moves, moves.heap, program, gathers
        self.reductions, self.nodes, self.first = reductions, nodes, first
        self.gradients: dict[int, Value] = {}
        self.arrived: dict[str, Value] = {}
        self.again = again

    def run(self, itemsize: int) -> None:
        """Runs backward, from the gradient of the loss, of `itemsize` bytes."""
        loss, given = self.program.graph.outputs[0], self.heap.value((), itemsize, "transient")
        self._add(loss, self._returned(self.program.conversions.get(("output", "loss")), loss, given))
        for i, op in reversed(list(enumerate(self.program.graph.ops))):
            self.heap.here = len(self.program.graph.ops) + i
            self._op(i, op, self.nodes[i])

    def _op(self, i: int, op: Op, node: BackwardNode) -> None:
        heap, call, found = self.heap, self.program.calls[i], dict[int, Value]()
        given = [self.gradients.pop(t) for t in op.outputs if t in self.gradients]
        if given and call.needs:
            self.again.bring(i)
            for b, _ in node.notes:
                self.gathers.read(b)
            found = self._of_inputs(replace(call, inputs=node.inputs), node, given[0])
        for b, k in node.notes:
            self.gathers.done(b, k)
        for storage in (*node.saved, *(x.storage for x in given)):
            heap.drop(storage)
        self.again.release(i)
        self._hand_on(i, op, found)

    def _of_inputs(self, call: LocalOp, node: BackwardNode, given: Value) -> dict[int, Value]:
        """The gradients by position of the input, each with one user."""
        heap = self.heap
        found = {k: self._of_input(k, call, node, given) for k in call.needs}
        made, alone = node.made, heap.users[given.storage] == 1
        heap.moment(made.back)
        if made.late:
            heap.moment(made.late - made.beside - given.nbytes * alone)
        for k, value in found.items():
            x = node.inputs[k]
            if value.shape != x.shape:
                found[k] = heap.value(x.shape, value.itemsize, "transient")
                heap.moment()
                heap.drop(value.storage)
        return found

    def _of_input(self, k: int, call: LocalOp, node: BackwardNode, given: Value) -> Value:
        """The gradient of input k: the output's own, a view of it, or new; not yet summed."""
        heap, made, x = self.heap, node.made, node.inputs[k]
        if call.op.target == HUB or (k in made.passes and (made.output_shaped or given.shape == x.shape)):
            return Value(heap.keep(given.storage), *given[1:])
        if base(call.op) in VIEWS:
            return back_through(heap, call.op, given, x.shape)
        if k in made.passes:
            strides = given.strides if len(given.shape) == len(x.shape) else (0,) * len(x.shape)
            return Value(heap.keep(given.storage), x.shape, strides, x.itemsize)
        shape = call.outputs[0] if made.output_shaped else x.shape
        strides = elementwise_strides(shape, (given,)) if made.output_shaped else gradient_strides(call, k, shape)
        return heap.value(shape, x.itemsize, "transient")._replace(strides=strides)

    def _hand_on(self, i: int, op: Op, found: Mapping[int, Value]) -> None:
        """Hands the gradients of the inputs of op i to those who wait for them, the last first."""
        for k, value in sorted(found.items(), reverse=True):
            t = op.inputs[k]
            fqn = self.program.parameter(t)
            if fqn is None:
                self._add(t, self._returned(self.program.edge(op, k), t, value))
            elif fqn in self.gathers.place:
                self.arrived[fqn] = value
            else:
                edge = self.program.edges.get(fqn)
                self.reductions.add(fqn, value, edge is None or edge.is_direct)
        for fqn in reversed(self.first.get(i, [])):
            if fqn in self.arrived:
                self.reductions.add(fqn, self.arrived.pop(fqn), False)

    def _returned(self, edge: ParsedConversion | None, t: int, value: Value) -> Value:
        """The gradient after its conversion back."""
        if edge is None or edge.gradient is None:
            return value
        return self.moves.through(edge.backward, value, self.program.graph.tensors[t].shape, edge.gradient, "transient",
                                  t in self.program.intermediates)

    def _add(self, t: int, value: Value) -> None:
        """Adds one more gradient of tensor t."""
        heap, before = self.heap, self.gradients.get(t)
        if before is None:
            self.gradients[t] = value
            return
        both = heap.new(value.nbytes, "transient")
        heap.moment()
        heap.drop(before.storage)
        heap.drop(value.storage)
        self.gradients[t] = Value(both, value.shape, elementwise_strides(value.shape, (before, value)), value.itemsize)
