"""Collects spans of moments with their bytes, by storage, and answers what decides how long they last."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod

from autoddl.core.conversion import COLLECTIVES, is_copy
from autoddl.core.graph import Graph
from autoddl.core.layout import Layout, Mesh, local_shape
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of
from autoddl.cost_models import Device
from autoddl.operators.footprints.footprint import Footprint, LocalOp
from autoddl.operators.footprints.storages import Value, contiguous
from autoddl.operators.footprints.table import footprint_of
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.optimizers import Optimizer
from autoddl.schedule.memory_program import ParsedConversion, ParsedPlan

__all__ = ["RankSpans"]


class RankSpans:
    """The spans of a rank under one plan, and what is asked of the plan to find them.

        spans        by storage, the moments over which it has so many bytes: (first, last, bytes)
        plan         the plan; `parsed` its program, `mesh` its mesh
        graph        the planned graph, with hubs; `count` its number of ops
        codecs       messages that may be coded
        flows        the tensors that have a gradient
        readers      by tensor, the ops that read it, with the input
        views        by op, whether it is a view
        reads        by op, the layouts of its inputs; `writes` those of its outputs
        whole        by op, its footprint on whole tensors; `local` that on the shards of a rank
        again        by op that runs again, its part; `part_at` by op of its block; `block` by op its block's name
        copies       the inputs (op, number) whose conversion runs again for an op that does not
        sparse       the parameters whose gradients add up sparse
    """

    def __init__(self, plan: Plan, graph: Graph, optimizer: Optimizer, device: Device, codecs: Sequence[str]) -> None:
        self.codecs, self.plan, self.graph, self.optimizer, self.count = codecs, plan, graph, optimizer, len(graph.ops)
        self.mesh, self.processor = plan.mesh, device.kind == "cpu"
        self.parsed = ParsedPlan(plan, graph, self.processor, device.by_hand)
        self.flows, self.readers = graph.differentiable(), graph.consumers()
        self.views = [base(op) in VIEWS for op in graph.ops]
        decided, whole = plan.index().decisions, Layout.broadcast(plan.mesh)
        self.reads = [decided[op.name].inputs if op.name in decided else (whole,) * len(op.inputs) for op in graph.ops]
        self.writes = [decided[op.name].outputs if op.name in decided else (whole,) * len(op.outputs)
                       for op in graph.ops]
        self.whole = [self.footprint(i, None) for i in range(self.count)]
        self.local = [self.footprint(i, plan.mesh) for i in range(self.count)]
        self.again = {i: part for part in self.parsed.parts for i in part.ops}
        self.copies = {at for part in self.parsed.parts for at in part.copies}
        self.part_at = {i: part for part in self.parsed.parts for i in range(part.block.start, part.block.end)}
        self.spans, self.sparse = defaultdict[Hashable, list[tuple[int, int, float]]](list), plan.sparse_sums
        self.block = {i: one.name for one in blocks_of(graph) for i in range(one.start, one.end)}

    def footprint(self, i: int, mesh: Mesh | None) -> Footprint:
        """The footprint of op i on the shards of a rank, or on whole tensors without a mesh."""
        if self.views[i]:
            return Footprint()
        op, call, tensors = self.graph.ops[i], self.parsed.calls[i], self.graph.tensors
        shapes = [tensors[t].shape if mesh is None else local_shape(tensors[t].shape, at, mesh)
                  for t, at in zip(op.inputs, self.reads[i], strict=True)]
        values = tuple([Value(-1, shape, contiguous(shape), tensors[t].itemsize)
                        for shape, t in zip(shapes, op.inputs, strict=True)])
        if mesh is None:
            return footprint_of(LocalOp(op, values, tuple([tensors[t].shape for t in op.outputs]), call.itemsizes,
                                        call.needs, False, call.on_cpu))
        return footprint_of(replace(call, inputs=values))

    def add(self, start: int, end: int, nbytes: float, storage: Hashable = None) -> None:
        """Adds bytes from moment `start` to moment `end`, if any; without a storage they have one of their own."""
        if start <= end and nbytes:
            self.spans[len(self.spans) if storage is None else storage].append((start, end, nbytes))

    def keep(self, start: int, i: int, nbytes: float) -> None:
        """Adds bytes from `start`, in forward, to the backward of op i; what runs again has them as its part does."""
        if i not in self.again:
            self.add(start, self.back(i), nbytes)
            return
        self.add(start, 2 * i + 1, nbytes)
        self.add(self.back(self.again[i].trigger), self.back(i), nbytes)

    def keep_input(self, start: int, i: int, k: int, nbytes: float) -> None:
        """Adds bytes of input k of op i from `start` to its backward, but for the time until it is converted again."""
        if (i, k) not in self.copies:
            self.keep(start, i, nbytes)
            return
        self.add(start, 2 * i + 1, nbytes)
        self.add(self.back(self.part_at[i].trigger), self.back(i), nbytes)

    def saved_input(self, i: int, k: int) -> None:
        """Input k of op i until its backward. Brought back, it is gone in between, unless a conversion copies it once.
        """
        nbytes = self.read(i, k) * (k in self.local[i].saves)
        if (i, k) in self.copies:
            self.keep_input(2 * i + 2, i, k, nbytes)
            return
        if not self.brought(i, k):
            self.keep(2 * i + 2, i, nbytes)
            return
        then = self.back(self.part_at[i].trigger)
        if self.copied(i, k):
            self.add(2 * i + 2, then - 1, self.read(i, k))
        self.add(then, self.back(i), nbytes)

    def brought(self, i: int, k: int) -> bool:
        """Whether op i, which does not run again, reads in input k what a part brings back, perhaps behind views."""
        if i in self.again or i not in self.part_at:
            return False
        writers, chain = self.graph.producers(), [self.graph.ops[i].inputs[k]]
        while (j := writers.get(chain[-1])) is not None and self.views[j] and j not in self.again:
            chain.append(self.graph.ops[j].inputs[0])
        return not set(chain).isdisjoint(self.part_at[i].noted)

    def back(self, i: int) -> int:
        """The moment of the backward of op i."""
        return 3 * self.count - 1 - i

    def piece(self, t: int, layout: Layout) -> float:
        """Bytes of a rank's piece of tensor t."""
        return float(prod(local_shape(self.graph.tensors[t].shape, layout, self.mesh)) * self.graph.tensors[t].itemsize)

    def read(self, i: int, k: int) -> float:
        """Bytes of input k of op i as the op reads it."""
        return self.piece(self.graph.ops[i].inputs[k], self.reads[i][k])

    def written(self, i: int, n: int) -> float:
        """Bytes of output n of op i as the op writes it."""
        return self.piece(self.graph.ops[i].outputs[n], self.writes[i][n])

    def yields(self, i: int) -> bool:
        """Whether a gradient comes to op i."""
        return any(o in self.flows for o in self.graph.ops[i].outputs)

    def savers(self, i: int, k: int) -> list[int]:
        """The ops whose backward reads input k of op i, perhaps behind views."""
        if not self.views[i]:
            return [i] * (k in self.whole[i].saves)
        return [s for o in self.graph.ops[i].outputs for at in self.readers[o] for s in self.savers(*at)]

    def converted(self, i: int, k: int) -> ParsedConversion | None:
        """The conversion of input k of op i if it sends."""
        found = self.parsed.edge(self.graph.ops[i], k)
        return found if found and any(step.kind in COLLECTIVES for step in found.forward) else None

    def copied(self, i: int, k: int) -> bool:
        """Whether the conversion of input k of op i makes a new tensor, as every slice of an intermediate tensor is."""
        found = self.parsed.edge(self.graph.ops[i], k)
        if found is None or self.graph.ops[i].inputs[k] not in self.parsed.intermediates:
            return bool(self.converted(i, k))
        return any(is_copy(step) for step in found.forward)

    def last_reader(self, t: int) -> int:
        """The last op that reads tensor t, perhaps behind views."""
        found = [j for j, _ in self.readers[t]]
        behind = [self.last_reader(o) for j in found if self.views[j] for o in self.graph.ops[j].outputs]
        return max([*found, *behind], default=0)
