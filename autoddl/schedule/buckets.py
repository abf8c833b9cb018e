"""How many reductions of gradients are under way at once, so that what was sent is freed while backward still runs.

Waiting for a bucket's last step frees what it sent if that is larger than what comes: behind a reduce-scatter, but not
behind an all-reduce, whose buffer is what comes. Of the buckets that free at most `IN_FLIGHT` are under way, or as many
as they have steps: before another one starts the oldest are waited for. That depends on how many there are and never on
the time, so every rank does the same in every run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autoddl.core.conversion import COLLECTIVES, Step, step_sizes
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.layout import Layout, Mesh
from autoddl.core.plan import Conversion, Plan
from autoddl.operators.work import read_back

__all__ = ["IN_FLIGHT", "PREFETCH", "Bucket", "frees", "gather_buckets", "gradient_buckets", "overdue",
           "parameter_edges"]

IN_FLIGHT = 2
"""Buckets whose reductions are under way at once."""


PREFETCH = 2
"""Buckets that are gathered ahead of the one that is read."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters (by fqn) that take the same steps together, once a step or, with `per_microbatch`, in each of
    several microbatches; with `regather`, in backward again."""

    members: tuple[str, ...]
    steps: tuple[Step, ...]
    regather: bool = False
    per_microbatch: bool = False


@dataclass(frozen=True, slots=True)
class ParameterEdge:
    """A parameter, its conversion, whether backward needs the gathered value (its consumer saves it), and whether it is
    converted in each of several microbatches."""

    tensor: Tensor
    conversion: Conversion
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regather: bool
    saved: bool
    per_microbatch: bool = False


Edges = tuple[ParameterEdge, ...]

SPAN = 4
"""How many bucket sizes of parameters, its own and others, a bucket may span."""


MORE = 0.25
"""By what part of its limit a bucket may overflow."""


def parameter_edges(plan: Plan, graph: Graph) -> tuple[ParameterEdge, ...]:
    """Every used parameter in the order of first use."""
    index = plan.index()
    uses, differentiable = graph.consumers(), graph.differentiable()
    found = []
    for op in graph.ops:
        for slot, t in zip(op.slots, op.inputs, strict=True):
            tensor = graph.tensors[t]
            conversion = index.conversions.get((op.name, slot))
            if tensor.kind is Kind.PARAMETER and conversion is not None:
                forward = tuple(Step.parse(s, plan.mesh) for s in conversion.forward)
                backward = tuple(Step.parse(s, plan.mesh) for s in conversion.backward)
                saved = read_back(t, graph, uses, differentiable)
                regather = index.stored[tensor.fqn].regather
                found.append(ParameterEdge(tensor, conversion, forward, backward, regather, saved,
                                           regather and plan.microbatches > 1))
    return tuple(found)


def sends(steps: Iterable[Step]) -> bool:
    return any(step.kind in COLLECTIVES for step in steps)


def _payloads(tensor: Tensor, steps: tuple[Step, ...], start: Layout, mesh: Mesh, at: tuple[int, ...] | None
              ) -> tuple[int, ...]:
    """Full-buffer bytes of each step, 0 for the local ones."""
    return tuple(full for full, _ in step_sizes(steps, tensor.shape, tensor.itemsize, start, mesh, at))


def _fill_buckets(rows: Iterable[tuple[Bucket, str, int]], limit: int) -> tuple[Bucket, ...]:
    """Rows (bucket of one, dtype, bytes) in order; those that are alike share one, which closes when it has reached its
    limit, when the next would overflow it by more than MORE of that, or when SPAN times its limit has passed since it
    was opened: the small parameters of all layers in one bucket would keep the large ones of every layer waiting, or
    held. A little more than the limit is better than a bias alone in a bucket."""
    buckets: list[Bucket] = []
    filled: list[int] = []
    opened: list[int] = []
    passed, open_at = 0, dict[tuple[object, ...], int]()
    for bucket, dtype, nbytes in rows:
        key = (bucket.steps, bucket.regather, bucket.per_microbatch, dtype)
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
    """Parameters whose stored layout must be gathered for use, in the order of first use. `edges`: the plan's parameter
    edges, if they are there."""
    rows = []
    for edge in parameter_edges(plan, graph) if edges is None else edges:
        if sends(edge.forward):
            regather = edge.regather and edge.saved
            size = max(_payloads(edge.tensor, edge.forward, edge.conversion.source, plan.mesh, None))
            bucket = Bucket((edge.tensor.fqn,), edge.forward, regather, edge.per_microbatch)
            rows.append((bucket, edge.tensor.dtype, size))
    return _fill_buckets(rows, plan.bucket_bytes)


def gradient_buckets(plan: Plan, graph: Graph, edges: Edges | None = None) -> tuple[Bucket, ...]:
    """Parameters whose gradients are reduced, in the order in which backward completes the buckets: what is small and
    alike in every layer fills one that is complete at the end, and must not keep the others waiting."""
    rows = []
    for edge in reversed(parameter_edges(plan, graph) if edges is None else edges):
        if sends(edge.backward) and edge.conversion.gradient is not None:
            size = max(_payloads(edge.tensor, edge.backward, edge.conversion.gradient, plan.mesh, None))
            bucket = Bucket((edge.tensor.fqn,), edge.backward, per_microbatch=edge.per_microbatch)
            rows.append((bucket, edge.tensor.dtype, size))
    place = {bucket.members[0]: i for i, (bucket, _, _) in enumerate(rows)}
    return tuple(sorted(_fill_buckets(rows, plan.bucket_bytes), key=lambda bucket: place[bucket.members[-1]]))


def frees(bucket: Bucket) -> bool:
    """Whether the bucket holds less when its last step is done."""
    return bool(bucket.steps) and bucket.steps[-1].kind in ("reduce-scatter", "all-to-all")


def overdue(under_way: Sequence[T], another: bool) -> Sequence[T]:
    """Of the buckets that free and are under way, the oldest first, those to be waited for before the next one starts;
    `another`: that frees too."""
    return under_way[:max(0, len(under_way) + another - IN_FLIGHT)]
