"""Lists the collectives of one training step on one rank, in the order of the program.

The runtime compares this list across ranks before the first step, and `verify` with the collectives that ran.

An edge between ops sends its forward steps in forward and its backward steps in backward, in every microbatch.

Parameters are sent in *buckets*. Those that take the same steps share one collective per step, in the order of their
first use, up to about `Plan.bucket_bytes` of payload. Gather buckets run forward, and again in backward if they are
regathered. Gradient buckets run backward, last used first.

With m microbatches, the conversions of parameters happen as often as their layouts W and G say (`core.state_layouts`):

    stored -> W       once, in the first forward
    W -> used         m times forward, and m times backward if backward reads the weight
    yielded -> G      m times
    G -> stored       once, after the last backward

Backward sends the forward steps in front of the ops that it runs again once more (`operators.recomputed`).

A kernel that communicates by itself sends its own collectives: synchronised batch norm, vocabulary-parallel loss, and
experts to which tokens are sent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autoddl.core.conversion import COLLECTIVES, Step, group_size
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.layout import Mesh
from autoddl.core.plan import Conversion, Decision, Plan
from autoddl.operators.recomputed import copied_again, recomputed_ops
from autoddl.operators.rules.nn import REDUCING, inner_collectives
from autoddl.operators.rules.table import Option, options
from autoddl.schedule.buckets import Bucket, ParameterEdge, _payloads, gather_buckets, gradient_buckets, parameter_edges

__all__ = ["PlannedCollective", "option_of", "traffic", "traffic_of_activations"]


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective of the plan: `axes` as text (`net+node`), `nbytes` of its full buffer, `origin` for people.

    It is sent `again` where backward computes once more what forward has sent."""

    direction: str
    kind: str
    axes: str
    nbytes: int
    origin: str = ""
    again: bool = field(default=False, compare=False)


def option_of(op: Op, graph: Graph, mesh: Mesh, decision: Decision | None) -> Option:
    """The signature that the plan decided for `op`. Raises InputError without a decision, or a signature for it."""
    if decision is None or decision.target != op.target:
        raise InputError(f"the plan decides nothing for op {op.name} ({op.target}); make the plan again for this model")
    alike = [one for one in options(op, graph, mesh)
             if one.inputs == decision.inputs and one.outputs == decision.outputs]
    if alike:
        return min(alike, key=lambda one: bool(one.inner) != decision.inner)
    raise InputError(f"op {op.name} ({op.target}) has no signature {', '.join(map(str, decision.inputs))} -> "
                     f"{', '.join(map(str, decision.outputs))}; make the plan again with this version")


def _of_bucket(bucket: Bucket, steps: tuple[Step, ...], edges: dict[str, ParameterEdge], mesh: Mesh,
               at: tuple[int, ...], direction: str, gradient: bool) -> Iterator[PlannedCollective]:
    """One collective for each communicating step of `steps`, the bucket's own or those that it takes once."""
    members = [edges[fqn] for fqn in bucket.members]
    tensors = [one.tensor.gradient if gradient else one.tensor for one in members]
    starts = [one.gradient_start(bucket, steps) if gradient else one.gather_start(bucket, steps) for one in members]
    sizes = [_payloads(tensor, steps, start, mesh, at) for tensor, start in zip(tensors, starts, strict=True)]
    for step, column in zip(steps, zip(*sizes, strict=True), strict=True):
        if step.kind in COLLECTIVES:
            names = "+".join(mesh.names[a] for a in step.axes)
            kind, nbytes = step.sends(group_size(step, mesh), sum(column), tensors[0].itemsize)
            yield PlannedCollective(direction, kind, names, nbytes, ", ".join(bucket.members))


def _of_edge(conversion: Conversion, tensor: Tensor, mesh: Mesh, at: tuple[int, ...]) -> Iterator[PlannedCollective]:
    origin = f"{conversion.tensor} -> {conversion.op}"
    for direction, texts, start in (("forward", conversion.forward, conversion.source),
                                    ("backward", conversion.backward, conversion.gradient)):
        steps = tuple(Step.parse(text, mesh) for text in texts)
        if start is not None:
            for step, nbytes in zip(steps, _payloads(tensor, steps, start, mesh, at), strict=True):
                if step.kind in COLLECTIVES:
                    names = "+".join(mesh.names[a] for a in step.axes)
                    kind, sent = step.sends(group_size(step, mesh), nbytes, tensor.itemsize)
                    yield PlannedCollective(direction, kind, names, sent, origin)


def _repeated(sent: tuple[PlannedCollective, ...], again: bool) -> tuple[PlannedCollective, ...]:
    """The part that is sent once more in backward, where the op that reads is computed `again`."""
    return tuple(replace(one, direction="backward", again=True) for one in sent if one.direction == "forward" and again)


def traffic_of_activations(plan: Plan, graph: Graph, at: tuple[int, ...]) -> list[PlannedCollective]:
    """The collectives that convert activations and their gradients in a microbatch, on the rank at some coordinate."""
    by_name, found = {t.name: t for t in graph.tensors}, list[PlannedCollective]()
    again, copied = recomputed_ops(graph, plan.recompute), copied_again(graph, plan.recompute)
    for conversion in plan.conversions:
        if by_name[conversion.tensor].kind is not Kind.PARAMETER:
            sent = tuple(_of_edge(conversion, by_name[conversion.tensor], plan.mesh, at))
            found += sent + _repeated(sent, conversion.op in again or (conversion.op, conversion.slot) in copied)
    return found


def traffic(plan: Plan, graph: Graph, coordinate: tuple[int, ...] | None = None) -> tuple[PlannedCollective, ...]:
    """All collectives of one step on the rank at `coordinate`, by default rank 0.

    `graph` is the graph of one microbatch with its hubs (`hubs.add_hubs`).
    """
    mesh, at = plan.mesh, coordinate or (0,) * len(plan.mesh.axes)
    edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
    again = recomputed_ops(graph, plan.recompute)
    first, each, last = list[PlannedCollective](), list[PlannedCollective](), list[PlannedCollective]()
    for bucket in gather_buckets(plan, graph):
        gathers = each if bucket.per_microbatch else first
        first += _of_bucket(bucket, bucket.once, edges, mesh, at, "forward", gradient=False)
        gathers += _of_bucket(bucket, bucket.steps, edges, mesh, at, "forward", gradient=False)
        if bucket.regather:
            each += _of_bucket(bucket, bucket.steps, edges, mesh, at, "backward", gradient=False)
    each += traffic_of_activations(plan, graph, at)
    for bucket in gradient_buckets(plan, graph):
        reduced = each if bucket.per_microbatch else last
        reduced += _of_bucket(bucket, bucket.steps, edges, mesh, at, "backward", gradient=True)
        last += _of_bucket(bucket, bucket.once, edges, mesh, at, "backward", gradient=True)
    decisions = plan.index().decisions
    for op in graph.ops:
        if op.target in REDUCING:
            option = option_of(op, graph, mesh, decisions.get(op.name))
            inner = inner_collectives(op, graph, option.inputs, option.inner, mesh, at)
            sent = tuple(PlannedCollective(direction, kind, "+".join(mesh.names[a] for a in axes), nbytes, op.name)
                         for direction, kind, axes, nbytes in inner)
            each += sent + _repeated(sent, op.name in again)
    each.sort(key=lambda sent: sent.direction == "backward")
    return (*first, *each * plan.microbatches, *last)
