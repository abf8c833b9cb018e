"""Parses a plan once for acting out its step: ops on local pieces, conversions, last readers."""

from typing import NamedTuple

from autoddl.core.conversion import Step
from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.layout import Layout, local_shape
from autoddl.core.plan import Conversion, Decision, Plan
from autoddl.operators.footprints.footprint import Footprint, LocalOp, has_local_kernel
from autoddl.operators.footprints.storages import Value
from autoddl.operators.recomputed import recomputed_parts
from autoddl.operators.rules.nn import REDUCING
from autoddl.operators.work import intermediates
from autoddl.schedule.buckets import ParameterEdge, parameter_edges
from autoddl.schedule.traffic import option_of

__all__ = ["BackwardNode", "ParsedConversion", "ParsedPlan"]


class ParsedConversion(NamedTuple):
    """A conversion with its steps parsed: from `source` forward, and from `gradient` backward."""

    source: Layout
    forward: tuple[Step, ...]
    gradient: Layout | None
    backward: tuple[Step, ...]


class BackwardNode(NamedTuple):
    """The record of an op for its backward: the inputs as the op read them, its footprint, and the saved values.

    `saved` are storages, `notes` the bucket and position of parameters that are gathered again.
    """

    inputs: tuple[Value, ...]
    made: Footprint
    saved: tuple[int, ...] = ()
    notes: tuple[tuple[int, int], ...] = ()


class ParsedPlan:
    """A plan on its graph, parsed.

        edges          the parameters' edges by name
        conversions    parsed conversions by (op, slot)
        ends           tensors that the program returns, and their slots
        intermediates  tensors that ops compute, of which a slice is a copy
        parts          what backward runs again
        last           tensor -> place of the op that reads it last
        place          name of a parameter -> its tensor
        calls          the ops on local pieces, without the values that they read
        processor      whether the device is a CPU; `by_hand` whether its kernels are written by hand
    """

    def __init__(self, plan: Plan, graph: Graph, processor: bool = False, by_hand: bool = False) -> None:
        self.plan, self.graph, self.mesh, self.processor, index = plan, graph, plan.mesh, processor, plan.index()
        self.by_hand = by_hand
        self.edges: dict[str, ParameterEdge] = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
        self.conversions = {at: self._edge(c) for at, c in index.conversions.items()}
        self.intermediates = intermediates(graph)
        self.ends = [(graph.outputs[0], "loss"), *((new, graph.tensors[old].fqn) for old, new in graph.updates)]
        self.parts = recomputed_parts(graph, plan.recompute)
        self.last = {t: i for i, op in enumerate(graph.ops) for t in op.inputs}
        self.last.update({t: len(graph.ops) for t, _ in self.ends})
        self.place = {tensor.fqn: t for t, tensor in enumerate(graph.tensors) if tensor.kind is Kind.PARAMETER}
        self._flows, self._whole = graph.differentiable(), Layout.broadcast(plan.mesh)
        self.calls = [self._call(op, index.decisions.get(op.name)) for op in graph.ops]

    def _edge(self, c: Conversion) -> ParsedConversion:
        forward, backward = (tuple(Step.parse(s, self.mesh) for s in texts) for texts in (c.forward, c.backward))
        return ParsedConversion(c.source, forward, c.gradient, backward)

    def _call(self, op: Op, decision: Decision | None) -> LocalOp:
        tensors, whole = self.graph.tensors, self._whole
        reads, writes = (
            tuple([local_shape(tensors[t].shape, at, self.mesh) for t, at in zip(ts, layouts, strict=True)])
            for ts, layouts in ((op.inputs, decision.inputs if decision else (whole,) * len(op.inputs)),
                                (op.outputs, decision.outputs if decision else (whole,) * len(op.outputs))))
        flows = any(t in self._flows for t in op.outputs)
        needs = tuple([k for k, t in enumerate(op.inputs) if t in self._flows]) if flows else ()
        inner = op.target in REDUCING and bool(option_of(op, self.graph, self.mesh, decision).inner)
        return LocalOp(op, (), writes, tuple([tensors[t].itemsize for t in op.outputs]), needs,
                       has_local_kernel(op, self.graph, reads, inner), self.processor, inner,
                       tensors[op.inputs[0]].shape if op.inputs else (), self.by_hand)

    def edge(self, op: Op, k: int) -> ParsedConversion | None:
        """The conversion of input k of an op, None if it has none."""
        return self.conversions.get((op.name, op.slots[k]))

    def parameter(self, t: int) -> str | None:
        """The name of tensor t if it is a parameter, else None."""
        tensor = self.graph.tensors[t]
        return tensor.fqn if tensor.kind is Kind.PARAMETER else None
