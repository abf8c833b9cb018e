"""Groups parameters into buckets that share collectives, and limits how many reductions are in flight at once.

Gather buckets are in the order of first use, gradient buckets in the order in which backward completes them. A bucket
closes at `Plan.bucket_bytes`.

A sparse sum chooses among all values of a bucket, and values of a block share a scale, whosesoever they are. So what
becomes of one member depends on the others. Members of such a bucket are repeated on the same axes. Were one repeated
where another is split, its copies would come to differ.

Waiting for the last step of a reduction frees the buffer that was sent, if that is larger than its result. This holds
after a reduce-scatter, but not after an all-reduce, whose buffer becomes the result. At most `IN_FLIGHT` buckets that
free memory are in flight, or as many as they have steps. Before another one starts, the oldest are waited for. So
memory is freed while backward still runs. The rule counts buckets and never looks at the time, so every rank does the
same in every run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoddl.core.codecs import CODECS
from autoddl.core.conversion import COLLECTIVES, Step, step_sizes
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.layout import B, Layout, Mesh, Split
from autoddl.core.plan import Conversion, Plan
from autoddl.core.state_layouts import added_layout, divide_steps, kept_layout, summed_layout
from autoddl.operators.recomputed import recomputed_ops
from autoddl.operators.work import read_back

__all__ = ["IN_FLIGHT", "PREFETCH", "Bucket", "frees_memory", "gather_buckets", "gradient_buckets", "has_collective",
           "overdue_buckets", "parameter_edges"]

IN_FLIGHT = 2
"""Buckets that free memory and are reduced at once, at most."""


PREFETCH = 2
"""Buckets that are gathered ahead of the one that is read."""

T = TypeVar("T")

_Kind = tuple[str, tuple[int, ...]]
"""The dtype of a member, and the axes on which it is repeated where that matters."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters (by fqn) that take the same conversion steps together.

    They take `steps` once in a training step, or in each microbatch with `per_microbatch`; with `regather` in backward
    again. The steps `once` are taken once: before the first gather of a step, or after the last reduction of one.
    """

    members: tuple[str, ...]
    steps: tuple[Step, ...]
    regather: bool = False
    per_microbatch: bool = False
    once: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class ParameterEdge:
    """A parameter on its way from its stored to its used layout, and its gradient on the way back.

        tensor            the parameter
        conversion        its conversion in the plan
        forward           steps from the stored layout, by way of W, to that of use
        backward          steps of the gradient, by way of G, to the stored layout
        kept              W, the layout of the weight that is kept (`core.state_layouts`)
        summed            G, the layout in which the gradients of several microbatches add up
        saved             whether backward reads its value, because its consumer saves it or is computed again
        microbatches      microbatches of a step
    """

    tensor: Tensor
    conversion: Conversion
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: Layout
    summed: Layout | None
    saved: bool
    microbatches: int = 1

    def gathers(self) -> Bucket:
        """A bucket of this parameter alone: what is gathered once a step, and what for every reader."""
        once, each = divide_steps(self.forward, self.conversion.source, self.kept)
        if not has_collective(each):
            return Bucket((self.tensor.fqn,), self.forward)
        several = self.microbatches > 1
        if not has_collective(once):
            return Bucket((self.tensor.fqn,), self.forward, self.saved, several)
        return Bucket((self.tensor.fqn,), each, self.saved, several, once)

    def reductions(self) -> Bucket:
        """A bucket of this parameter's gradient alone: what is reduced in every microbatch, and what at the end."""
        if self.microbatches == 1 or self.summed is None or self.conversion.gradient is None:
            return Bucket((self.tensor.fqn,), self.backward)
        each, last = divide_steps(self.backward, self.conversion.gradient, self.summed)
        if not has_collective(each):
            return Bucket((self.tensor.fqn,), self.backward)
        if not has_collective(last):
            return Bucket((self.tensor.fqn,), self.backward, per_microbatch=True)
        return Bucket((self.tensor.fqn,), each, per_microbatch=True, once=last)

    def gather_start(self, bucket: Bucket, steps: tuple[Step, ...]) -> Layout:
        """The layout in which `steps` of the parameter's bucket, those taken once or the others, begin."""
        return self.kept if bucket.once and steps is bucket.steps else self.conversion.source

    def gradient_start(self, bucket: Bucket, steps: tuple[Step, ...]) -> Layout:
        """The layout in which `steps` of the gradient's bucket, those taken once or the others, begin."""
        yielded = self.conversion.gradient or self.conversion.target
        return self.summed or yielded if bucket.once and steps is bucket.once else yielded

    @property
    def is_sparse(self) -> bool:
        """Whether the sum of its gradients is sparse, so that there is a residual."""
        return any(step.is_sparse for step in self.backward)

    @property
    def added(self) -> Layout | None:
        """The layout in which gradients of several microbatches add up; None where there are none."""
        yielded = self.conversion.gradient
        if self.microbatches == 1 or self.summed is None or yielded is None:
            return None
        each, last = map(has_collective, divide_steps(self.backward, yielded, self.summed))
        return added_layout(self.conversion.source, yielded, self.summed, (each, last))

    @property
    def is_direct(self) -> bool:
        """Whether the program reads the stored piece itself, without a step or a cast."""
        return not self.forward and not self.tensor.master


Edges = tuple[ParameterEdge, ...]

SPAN = 4
"""A bucket spans at most so many bucket sizes of parameters, its own and others."""


MORE = 0.25
"""A bucket may exceed its limit by this fraction."""


def parameter_edges(plan: Plan, graph: Graph) -> tuple[ParameterEdge, ...]:
    """The edge of every used parameter, in the order of first use."""
    index = plan.index()
    uses, differentiable = graph.consumers(), graph.differentiable()
    again, moved = recomputed_ops(graph, plan.recompute), _moved(plan)
    found = []
    for op in graph.ops:
        for slot, t in zip(op.slots, op.inputs, strict=True):
            tensor = graph.tensors[t]
            conversion = index.conversions.get((op.name, slot))
            if tensor.kind is Kind.PARAMETER and conversion is not None:
                forward = tuple(Step.parse(s, plan.mesh) for s in conversion.forward)
                backward = tuple(Step.parse(s, plan.mesh) for s in conversion.backward)
                saved = read_back(t, graph, uses, differentiable, again, moved)
                depths, gradient = index.stored[tensor.fqn].depths, conversion.gradient
                kept = kept_layout(conversion.source, conversion.target, depths)
                summed = None if gradient is None else summed_layout(conversion.source, gradient, depths)
                found.append(ParameterEdge(tensor, conversion, forward, backward, kept, summed, saved,
                                           plan.microbatches))
    return tuple(found)


def _moved(plan: Plan) -> frozenset[tuple[str, str]]:
    """The reads (op, slot) of a tensor that a conversion makes; a slice is a view, and so may be a partial sum."""
    return frozenset((c.op, c.slot) for c in plan.conversions if any(
        step.kind in COLLECTIVES or (step.kind == "fill" and isinstance(step.source, Split))
        for step in (Step.parse(text, plan.mesh) for text in c.forward)))


def has_collective(steps: Iterable[Step]) -> bool:
    """Whether any of the steps communicates."""
    return any(step.kind in COLLECTIVES for step in steps)


def _payloads(tensor: Tensor, steps: tuple[Step, ...], start: Layout, mesh: Mesh, at: tuple[int, ...] | None
              ) -> tuple[int, ...]:
    """Full-buffer bytes of each step, 0 for local ones."""
    return tuple(full for full, _ in step_sizes(steps, tensor.shape, tensor.itemsize, start, mesh, at))


def _joins(step: Step) -> bool:
    """Whether what the step makes of a value depends on other values of its bucket."""
    return step.is_sparse or (step.codec in CODECS and (CODECS[step.codec].scaled or CODECS[step.codec].group > 1))


def _kind(dtype: str, steps: Iterable[Step], start: Layout) -> _Kind:
    """Returns what the members of a bucket with these steps have in common besides; one of them begins in `start`."""
    return dtype, tuple(a for a, state in enumerate(start) if state == B) if any(map(_joins, steps)) else ()


def _fill_buckets(rows: Iterable[tuple[Bucket, _Kind, int]], limit: int) -> tuple[Bucket, ...]:
    """Merges rows (bucket of one parameter, kind, bytes), in order, into buckets of the same steps and kind.

    A bucket closes when it has reached its limit, or when the next row would exceed it by more than MORE of it.
    It also closes when SPAN times the limit has passed since it was opened. Without SPAN, one bucket would hold the
    small parameters of all layers, and keep the large ones of every layer waiting or in memory. A little more than the
    limit is better than a bias alone in a bucket.
    """
    buckets: list[Bucket] = []
    filled: list[int] = []
    opened: list[int] = []
    passed, open_at = 0, dict[tuple[object, ...], int]()
    for bucket, kind, nbytes in rows:
        key = (bucket.once, bucket.steps, bucket.regather, bucket.per_microbatch, kind)
        at = open_at.get(key)
        room = at is not None and filled[at] < limit and filled[at] + nbytes <= (1 + MORE) * limit
        if at is not None and room and passed - opened[at] <= SPAN * limit:
            buckets[at] = replace(buckets[at], members=buckets[at].members + bucket.members)
            filled[at] += nbytes
        else:
            open_at[key] = len(buckets)
            buckets.append(bucket)
            filled.append(nbytes)
            opened.append(passed)
        passed += nbytes
    return tuple(buckets)


def gather_buckets(plan: Plan, graph: Graph, edges: Edges | None = None) -> tuple[Bucket, ...]:
    """Buckets of parameters whose stored layout must be gathered for use, in the order of first use.

    `edges` are the plan's parameter edges, if they are known already.
    """
    rows = []
    for edge in parameter_edges(plan, graph) if edges is None else edges:
        if has_collective(edge.forward):
            size = max(_payloads(edge.tensor, edge.forward, edge.conversion.source, plan.mesh, None))
            kind = _kind(edge.tensor.dtype, edge.forward, edge.conversion.source)
            rows.append((edge.gathers(), kind, size))
    return _fill_buckets(rows, plan.bucket_bytes)


def gradient_buckets(plan: Plan, graph: Graph, edges: Edges | None = None) -> tuple[Bucket, ...]:
    """Buckets of parameters whose gradients are reduced, in the order in which backward completes the buckets.

    Small parameters that are alike in every layer fill a bucket that is complete at the end. It must not keep the
    others waiting. The `edges` are the plan's parameter edges, if they are known already.
    """
    rows = []
    for edge in reversed(parameter_edges(plan, graph) if edges is None else edges):
        if has_collective(edge.backward) and edge.conversion.gradient is not None:
            size = max(_payloads(edge.tensor.gradient, edge.backward, edge.conversion.gradient, plan.mesh, None))
            kind = _kind(edge.tensor.gradient.dtype, edge.backward, edge.conversion.gradient)
            rows.append((edge.reductions(), kind, size))
    place = {bucket.members[0]: i for i, (bucket, _, _) in enumerate(rows)}
    return tuple(sorted(_fill_buckets(rows, plan.bucket_bytes), key=lambda bucket: place[bucket.members[-1]]))


def frees_memory(bucket: Bucket) -> bool:
    """Whether the bucket takes less memory when its last step is done."""
    return bool(bucket.steps) and bucket.steps[-1].kind in ("reduce-scatter", "all-to-all")


def overdue_buckets(under_way: Sequence[T], another: bool) -> Sequence[T]:
    """The buckets to wait for before the next one starts, out of those in flight that free memory, oldest first.

    `another` says whether the next one frees memory too.
    """
    return under_way[:max(0, len(under_way) + another - IN_FLIGHT)]
