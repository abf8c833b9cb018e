"""Predicts the bytes in use on one rank at every moment of a step.

    always      parameters as stored, the optimizer's state, residuals of sparse sums, buffers, constants, the batch
    forward     activations from when they are made until their last reader, or until the backward that reads them
    backward    gradients of activations until they are read; those of parameters from when they are made
    both        gathered parameters, the buffers of conversions, temporaries of kernels
    in flight   where a stage of a pipeline has several microbatches in flight, their forwards run first, then backwards
                and forwards in turn, as in 1F1B: their activations are there at once
    waiting     where a schedule splits backward, what microbatches keep from B to W (`operators.waiting`), as many as
                wait beside the most in flight: counted all the time, so that the line is above what is in use
    later       of those in flight, this many wait at another time instead: what they keep more then, from the first
                backward on
    optimizer   AdamW in a loop over parameters has the roots and the denominator of one, and the denominator of the
                one before (torch.optim.adam, _single_tensor_adam); on an accelerator, on plain tensors, it goes over
                all at once (_multi_tensor_adam) and has one such buffer for each

A heap that counts bytes acts out the step (`memory_forward`, `memory_backward`). All is of rank 0, whose pieces are the
largest. The plan predicts its peak, which the search keeps within the budget. The search's own rows of moments
(`pricing.lifetimes`) are never above this line.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoddl.core.graph import RECEIVE, Graph, Kind, Tensor
from autoddl.core.layout import B, Layout, Mesh, local_shape
from autoddl.core.plan import Plan, StageBytes
from autoddl.core.stages import SEND
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.storages import Heap, Value, contiguous
from autoddl.operators.waiting import kept_for_weights
from autoddl.pricing.optimizers import Optimizer, optimizer_of
from autoddl.schedule.memory_forward import MicrobatchMemory
from autoddl.schedule.memory_program import ParsedPlan
from autoddl.schedule.stage_bytes import Passes
from autoddl.schedule.timeline import PredictedStep

__all__ = ["MemoryLine", "memory_line", "predict_memory", "with_memory_peak"]

MOST_PARTS = 3
"""Microbatches that are acted out at most, and as many more as are in flight: the others are like these."""

APART = 3
"""Microbatches in flight that are acted out one by one; each of the others keeps what the second does."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """The line: `nbytes[i]` are in use from `times[i]` seconds on, and `kinds[i]` of each kind.

    `budget` are the bytes that a rank has.
    """

    times: tuple[float, ...]
    nbytes: tuple[float, ...]
    budget: float
    kinds: tuple[Mapping[str, float], ...] = ()

    @property
    def peak(self) -> float:
        """The most bytes in use at any moment."""
        return max(self.nbytes)


def predict_memory(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, most: int = MOST_PARTS,
                   watched: bool = False) -> Heap:
    """The heap after a step of at most `most` of its microbatches, `watched` by kind of bytes or not.

    `graph` is the planned one, of one microbatch.
    """
    return _acted_out(plan, graph, optimizer, cluster, most, watched)[0]


def _acted_out(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster, most: int, watched: bool
               ) -> tuple[Heap, StageBytes | None]:
    """(the heap after a step, of a stage of a pipeline its bytes in parts)."""
    heap = Heap(watched=watched)
    kept = optimizer_of(optimizer)
    stored = _stored(heap, plan, graph, kept)
    given = {}
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind in (Kind.INPUT, Kind.BUFFER, Kind.CONSTANT):
            parts = plan.microbatches if tensor.kind is Kind.INPUT else 1
            storage = heap.new(tensor.nbytes * parts, "buffers and inputs")
            shape = local_shape(tensor.shape, plan.inputs[tensor.fqn], plan.mesh) if tensor.fqn in plan.inputs \
                else tensor.shape
            given[t] = Value(storage, shape, contiguous(shape), tensor.itemsize)
    in_flight = min(plan.in_flight, plan.microbatches)
    together = in_flight if watched else min(in_flight, APART)
    few = replace(plan, microbatches=min(plan.microbatches - in_flight, most - 1) + together)
    parsed = ParsedPlan(few, graph, cluster.device.kind == "cpu", cluster.device.by_hand)
    step = MicrobatchMemory(heap, parsed, stored, given, _deciding(plan, cluster))
    late = _waiting(plan, graph)
    waits = [heap.new(plan.waiting * late, "transient")] if plan.waiting and late else []
    moving = [*_in_transit(heap, plan, graph), *waits]
    is_stage = any(op.target in (SEND, RECEIVE) for op in graph.ops)
    passes = Passes(heap, {"transient": late} if late else {}, plan.waiting) if is_stage else None
    begun = [step.begun(part == few.microbatches - 1) for part in range(few.microbatches)]
    if passes is not None:
        step.gathers.ahead()
        passes.start()
    others, count = list[int](), in_flight - together
    for part in range(few.microbatches + together - 1):
        before = dict(heap.parts)
        if part < few.microbatches:
            begun[part].forward()
            if passes is not None:
                passes.ended("F")
        if part == 1 and count:
            others = _as_kept(heap, before, count)
        if part == few.microbatches + together - 2:
            for storage in others:
                heap.drop(storage)
        if passes is not None and others:
            passes.others = count if part < few.microbatches + together - 2 else 0
        if passes is not None and part == together - 1:
            moving += _later(heap, passes, plan.later, late)
        if part >= together - 1:
            begun[part - together + 1].backward()
            if passes is not None:
                passes.ended("B")
    heap.here = 2 * len(graph.ops)
    for storage in moving:
        heap.drop(storage)
    plain = all(state == B for s in plan.stored for state in s.layout)
    _update(heap, step.reductions.grads, kept, cluster.device.kind != "cpu" and plain)
    return heap, passes.in_parts(heap.of_pass or {}) if passes is not None else None


def _later(heap: Heap, passes: Passes, count: int, late: float) -> list[int]:
    """A storage as large as what so many microbatches keep more while they wait for W than while they are in flight."""
    passes.later = count * max(0.0, late - sum(passes.kept.values()))
    return [heap.new(passes.later, "transient")] if passes.later else []


def _as_kept(heap: Heap, before: Mapping[str, float], count: int) -> list[int]:
    """Storages as large as what is kept since `before`, `count` times."""
    return [heap.new(count * (nbytes - before.get(kind, 0.0)), kind) for kind, nbytes in list(heap.parts.items())
            if nbytes != before.get(kind, 0.0)]


def _in_transit(heap: Heap, plan: Plan, graph: Graph) -> list[int]:
    """A buffer for every tensor that the stage sends, and for every gradient that it sends back: those on their way.

    Coded messages count as whole ones: the rank has the values too while it codes.
    """
    decided, found = plan.index().decisions, list[int]()
    for op in graph.ops:
        if op.target in (SEND, RECEIVE):
            sends = op.target == SEND
            tensor = graph.tensors[op.inputs[0] if sends else op.outputs[0]]
            layout = decided[op.name].inputs[0] if sends else decided[op.name].outputs[0]
            found.append(heap.new(prod(local_shape(tensor.shape, layout, plan.mesh)) * tensor.itemsize, "transient"))
    return found


def _waiting(plan: Plan, graph: Graph) -> float:
    """Bytes that a microbatch which waits for W keeps for every op that waits (`operators.waiting`), if any waits.

    What several ops read in pieces of one size is there once.
    """
    decided, seen, found = plan.index().decisions, set[tuple[int, int]](), 0.0
    for i, kept in kept_for_weights(graph).items() if plan.waiting + plan.later else ():
        op, one = graph.ops[i], decided.get(graph.ops[i].name)
        if one is None:
            continue
        pieces = [_piece(graph.tensors[t], at, plan.mesh) for t, at in zip(op.outputs, one.outputs, strict=True)
                  ] if kept.results else []
        for k, storage in kept.reads:
            nbytes = _piece(graph.tensors[op.inputs[k]], one.inputs[k], plan.mesh)
            if storage is None or (storage, nbytes) not in seen:
                pieces.append(nbytes)
            if storage is not None:
                seen.add((storage, nbytes))
        found += sum(pieces)
    return found


def _piece(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    return prod(local_shape(tensor.shape, layout, mesh)) * tensor.itemsize


def _deciding(plan: Plan, cluster: Cluster) -> Cluster | None:
    """The cluster, where the runtime lets it decide how collectives run (`collectives.process_groups`), else None."""
    return cluster if "cluster" in plan.source and cluster.size == plan.mesh.size else None


def _stored(heap: Heap, plan: Plan, graph: Graph, optimizer: Optimizer) -> dict[str, Value]:
    """Puts parameters, optimizer state and residuals on the heap; returns the pieces of parameters by name.

    Only parameters with a gradient have optimizer state.
    """
    stored, found, sparse = plan.index().stored, {}, plan.sparse_sums
    flows = graph.differentiable()
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is Kind.PARAMETER:
            layout = stored[tensor.fqn].layout
            shape = local_shape(tensor.shape, layout, plan.mesh)
            found[tensor.fqn] = heap.value(shape, tensor.stored.itemsize, "parameters")
            if t in flows:
                heap.new(stored_bytes(tensor, layout, plan.mesh, optimizer)["optimizer"], "optimizer")
            if tensor.name in sparse:
                heap.new(float(prod(shape) * tensor.gradient.itemsize) * sparse[tensor.name].copies, "residuals")
    return found


def stored_bytes(tensor: Tensor, layout: Layout, mesh: Mesh, optimizer: Optimizer) -> dict[str, float]:
    """By kind, the bytes of a rank's piece of a trained parameter, and of the optimizer's state for it."""
    own = float(prod(local_shape(tensor.shape, layout, mesh)) * tensor.stored.itemsize)
    return {"parameters": own, "optimizer": own * optimizer.copies(tensor)}


def _update(heap: Heap, grads: dict[str, Value], optimizer: Optimizer, together: bool) -> None:
    """Runs the optimizer on the parameters that have a gradient. Only Adam and its variants need temporaries."""
    sizes = [float(x.nbytes) for x in grads.values()] if optimizer.is_adam else []
    before = 0.0
    for nbytes in [sum(sizes)] if together else sizes:
        heap.moment(before + nbytes * (1 if together else 2))
        before = nbytes


def with_memory_peak(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> Plan:
    """The plan, whose prediction has the bytes by kind at the peak of its memory line, and in parts of a stage."""
    heap, parts = _acted_out(plan, graph, optimizer, cluster, MOST_PARTS, watched=False)
    return replace(plan, predicted=replace(plan.predicted, nbytes={k: v for k, v in heap.most.items() if v},
                                           parts=parts))


def memory_line(plan: Plan, predicted: PredictedStep, graph: Graph, optimizer: str, cluster: Cluster) -> MemoryLine:
    """The memory line over the seconds of a predicted step. `graph` is the planned one, of one microbatch.

    Bytes of an op are in use from its start on, in its pass. Those of an op that takes no time in that pass are in use
    when the op before it starts. Where several microbatches are in flight, the passes come in another order than on the
    time line; each takes as long as there.
    """
    heap = predict_memory(plan, graph, optimizer, cluster, plan.microbatches, watched=True)
    count, end, now, number = len(graph.ops), predicted.step.seconds, 0.0, 0
    starts = {(span.name, span.number): span.start for span in predicted.computes}  # the op's own, behind a second run
    begun = [*(seconds for _, seconds in predicted.step.passes), end]
    shift, times = 0.0, list[float]()
    for (here, _), here_in in zip(heap.line, _passes(heap.line, count), strict=True):
        if here_in != number:
            ended = begun[number + 1] + shift
            number, shift = here_in, ended - begun[here_in]
            now = max(now, ended)
        start = starts.get((graph.ops[here % count].name, number))
        now = end if here == 2 * count else now if start is None else max(now, start + shift)
        times.append(now)
    return MemoryLine(tuple(times), tuple(nbytes for _, nbytes in heap.line), plan.budget,
                      tuple(heap.kinds_line))


def _passes(line: Sequence[tuple[int, float]], count: int) -> Iterator[int]:
    """Yields the number of the pass of every moment of a line; places of `count` ops are forward, then backward."""
    forwards, backwards, before = -1, -1, 2 * count
    for here, _ in line:
        if here < count:
            forwards += here < before
        elif here < 2 * count:
            backwards += before < count or here > before
        yield 2 * forwards if here < count else 2 * backwards + 1
        before = here
