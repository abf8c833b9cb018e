"""The bytes that one rank holds, moment by moment of the step, in the order in which it acts.

    always      parameters as stored, the optimizer's state, buffers, constants, the batch
    forward     activations from when they are made until their last reader, or until the backward that reads them
    backward    gradients of activations while they are on their way; those of parameters from when they are made
    both        gathered parameters, the buffers of conversions, what a kernel needs for itself
    optimizer   AdamW in a loop over parameters holds the roots and the denominator of one and the denominator of the
                one before (torch.optim.adam, _single_tensor_adam); on an accelerator, on plain tensors, it goes over
                all at once (_multi_tensor_adam) and holds one such buffer for each

`memory_forward` and its neighbours act it out on a heap that counts bytes. All is of rank 0, whose pieces are the
largest. The peak is what the plan predicts and what the search holds to the budget; its own rows of moments
(`pricing.lifetimes`) never lie above this line.
"""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod

from autoddl.core.graph import Graph, Kind
from autoddl.core.layout import B, local_shape
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.storages import Heap, Value, contiguous
from autoddl.pricing.price import OPTIMIZERS
from autoddl.schedule.memory_forward import Stepping
from autoddl.schedule.memory_program import Program
from autoddl.schedule.timeline import Foreseen, Span

__all__ = ["MemoryLine", "foreseen_memory", "memory_line", "with_memory"]

MOST_PARTS = 3
"""Microbatches between the first and the last are alike."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """From `times[i]` seconds on, `nbytes[i]` are held; `budget` is what a rank has."""

    times: tuple[float, ...]
    nbytes: tuple[float, ...]
    budget: float

    @property
    def peak(self) -> float:
        return max(self.nbytes)


def foreseen_memory(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, most: int = MOST_PARTS) -> Heap:
    """The heap after a step of at most `most` of its microbatches. `graph` is the planned one, of one of them."""
    heap = Heap()
    stored, copies = _stored(heap, plan, graph, optimizer)
    given = {}
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind in (Kind.INPUT, Kind.BUFFER, Kind.CONSTANT):
            parts = plan.microbatches if tensor.kind is Kind.INPUT else 1
            storage = heap.new(tensor.nbytes * parts, "buffers and inputs")
            shape = local_shape(tensor.shape, plan.inputs[tensor.fqn], plan.mesh) if tensor.fqn in plan.inputs \
                else tensor.shape
            given[t] = Value(storage, shape, contiguous(shape), tensor.itemsize)
    few = replace(plan, microbatches=min(plan.microbatches, most))
    step = Stepping(heap, Program(few, graph, cluster.device.kind == "cpu"), stored, given, _deciding(plan, cluster))
    for part in range(few.microbatches):
        step.run(part == few.microbatches - 1)
    heap.here = 2 * len(graph.ops)
    plain = all(state == B for s in plan.stored for state in s.layout)
    _update(heap, step.reductions.grads, copies, cluster.device.kind != "cpu" and plain)
    return heap


def _deciding(plan: Plan, cluster: Cluster) -> Cluster | None:
    """The cluster, where the runtime asks it how to run collectives (`groups`)."""
    return cluster if "cluster" in plan.source and cluster.size == plan.mesh.size else None


def _stored(heap: Heap, plan: Plan, graph: Graph, optimizer: str) -> tuple[dict[str, Value], int]:
    """What is there before the step: the pieces of parameters by name, and how many copies the optimizer has: of those
    that get a gradient."""
    stored, copies, found = plan.index().stored, OPTIMIZERS[optimizer], {}
    flows = graph.differentiable()
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is Kind.PARAMETER:
            shape = local_shape(tensor.shape, stored[tensor.fqn].layout, plan.mesh)
            found[tensor.fqn] = heap.value(shape, tensor.itemsize, "parameters")
            if t in flows:
                heap.new(float(prod(shape) * tensor.itemsize * copies), "optimizer")
    return found, copies


def _update(heap: Heap, grads: dict[str, Value], copies: int, together: bool) -> None:
    """The optimizer's step on the parameters that have a gradient. Only Adam's kind needs memory of its own."""
    sizes = [float(x.nbytes) for x in grads.values()] if copies == 2 else []
    before = 0.0
    for nbytes in [sum(sizes)] if together else sizes:
        heap.moment(before + nbytes * (1 if together else 2))
        before = nbytes


def with_memory(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> Plan:
    """`plan`, whose prediction says the bytes by kind at the peak of its memory line."""
    heap = foreseen_memory(plan, graph, optimizer, cluster)
    return replace(plan, predicted=replace(plan.predicted, nbytes={k: v for k, v in heap.most.items() if v}))


def memory_line(plan: Plan, foreseen: Foreseen, graph: Graph, optimizer: str, cluster: Cluster) -> MemoryLine:
    """The line over the seconds of a predicted step: what an op holds is held from its start on, what one that takes no
    time holds when the one before it starts. `graph` is the planned one, of one microbatch."""
    heap = foreseen_memory(plan, graph, optimizer, cluster, plan.microbatches)
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in foreseen.computes:
        spans[span.name].append(span)
    count, end, now = len(graph.ops), foreseen.step.seconds, 0.0
    times, line, part = list[float](), list[float](), 0
    for n, (here, held) in enumerate(heap.line):
        if n and here < heap.line[n - 1][0] and here < count <= heap.line[n - 1][0]:
            part += 1
        now = max(now, end if here == 2 * count else _at(spans, graph.ops[here % count].name, here >= count, part, now))
        times.append(now)
        line.append(held)
    return MemoryLine(tuple(times), tuple(line), plan.budget)


def _at(spans: dict[str, list[Span]], name: str, backward: bool, part: int, now: float) -> float:
    """When the op starts, forward or backward, in a microbatch."""
    found = spans.get(name, [])
    place = 2 * part + backward
    return found[place].start if place < len(found) else now
