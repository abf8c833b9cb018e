"""What a rank sends in one training step, in the order of the program: the relation that pricing, the runtime's
comparison across ranks and `verify` all read.

* An edge between ops sends its forward steps in forward and its backward steps in backward, in every microbatch.
* A parameter's edge sends in *buckets*: parameters that take the same steps share one collective per step, in the order
  of their first use, up to about `Plan.bucket_bytes` of payload. Gather buckets run forward (and again in backward if
  they are gathered anew), gradient buckets run backward, last used first.
* With m microbatches a parameter that is kept is gathered once, in the first forward, and its gradients add up where
  backward yields them and are reduced once, behind the last backward. One that is gathered anew holds neither: all its
  buckets run in each microbatch.

      kept             1 gather                                 1 reduction of its gradient      a step
      gathered anew    m gathers forward, m backward if saved   m reductions of its gradient     a step

* An op whose kernel reduces by itself (synchronised batch norm, vocabulary-parallel loss) sends that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoddl.core.conversion import COLLECTIVES, Step, sizes
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.layout import Layout, Mesh
from autoddl.core.plan import Conversion, Decision, Plan
from autoddl.operators.rules.nn import REDUCING, inner_collectives
from autoddl.operators.rules.table import Option, options
from autoddl.operators.work import read_back

__all__ = ["Bucket", "Sent", "gather_buckets", "gradient_buckets", "option_of", "parameter_edges", "traffic"]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective: `axes` as text (`net+node`), `nbytes` its full buffer (see conversion), `origin` for people."""

    direction: str
    kind: str
    axes: str
    nbytes: int
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters (by fqn) that take the same steps together, in `each` of several microbatches or once a step; with
    `regather`, in backward again."""

    members: tuple[str, ...]
    steps: tuple[Step, ...]
    regather: bool = False
    each: bool = False


@dataclass(frozen=True, slots=True)
class ParameterEdge:
    """A parameter, its conversion, whether backward needs the gathered value (its consumer saves it), and whether it is
    converted in `each` of several microbatches."""

    tensor: Tensor
    conversion: Conversion
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regather: bool
    saved: bool
    each: bool = False


Edges = tuple[ParameterEdge, ...]

SPAN = 4
"""How many bucket sizes of parameters, its own and others, a bucket may span."""
MORE = 0.25
"""By what part of its limit a bucket may overflow."""


def option_of(op: Op, graph: Graph, mesh: Mesh, decision: Decision | None) -> Option:
    """The signatures that the plan decided for `op`; without a decision for it, or a signature, InputError."""
    if decision is None or decision.target != op.target:
        raise InputError(f"the plan decides nothing for op {op.name} ({op.target}); make the plan again for this model")
    for option in options(op, graph, mesh):
        if option.inputs == decision.inputs and option.outputs == decision.outputs:
            return option
    raise InputError(f"op {op.name} ({op.target}) has no signature {', '.join(map(str, decision.inputs))} -> "
                     f"{', '.join(map(str, decision.outputs))}; make the plan again with this version")


def parameter_edges(plan: Plan, graph: Graph) -> tuple[ParameterEdge, ...]:
    """Every used parameter in the order of first use."""
    stored = {s.fqn: s for s in plan.stored}
    conversions = {(c.op, c.slot): c for c in plan.conversions}
    uses, differentiable = graph.consumers(), graph.differentiable()
    found = []
    for op in graph.ops:
        for slot, t in zip(op.slots, op.inputs, strict=True):
            tensor = graph.tensors[t]
            conversion = conversions.get((op.name, slot))
            if tensor.kind is Kind.PARAMETER and conversion is not None:
                forward = tuple(Step.parse(s, plan.mesh) for s in conversion.forward)
                backward = tuple(Step.parse(s, plan.mesh) for s in conversion.backward)
                saved = read_back(t, graph, uses, differentiable)
                regather = stored[tensor.fqn].regather
                found.append(ParameterEdge(tensor, conversion, forward, backward, regather, saved,
                                           regather and plan.microbatches > 1))
    return tuple(found)


def sends(steps: Iterable[Step]) -> bool:
    return any(step.kind in COLLECTIVES for step in steps)


def _payloads(tensor: Tensor, steps: tuple[Step, ...], start: Layout, mesh: Mesh, at: tuple[int, ...] | None
              ) -> tuple[int, ...]:
    """Full-buffer bytes of each step, 0 for the local ones."""
    return tuple(full for full, _ in sizes(steps, tensor.shape, tensor.itemsize, start, mesh, at))


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
        key = (bucket.steps, bucket.regather, bucket.each, dtype)
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
            bucket = Bucket((edge.tensor.fqn,), edge.forward, regather, edge.each)
            rows.append((bucket, edge.tensor.dtype, size))
    return _fill_buckets(rows, plan.bucket_bytes)


def gradient_buckets(plan: Plan, graph: Graph, edges: Edges | None = None) -> tuple[Bucket, ...]:
    """Parameters whose gradients are reduced, in the order in which backward completes the buckets: what is small and
    alike in every layer fills one that is complete at the end, and must not keep the others waiting."""
    rows = []
    for edge in reversed(parameter_edges(plan, graph) if edges is None else edges):
        if sends(edge.backward) and edge.conversion.gradient is not None:
            size = max(_payloads(edge.tensor, edge.backward, edge.conversion.gradient, plan.mesh, None))
            rows.append((Bucket((edge.tensor.fqn,), edge.backward, each=edge.each), edge.tensor.dtype, size))
    place = {bucket.members[0]: i for i, (bucket, _, _) in enumerate(rows)}
    return tuple(sorted(_fill_buckets(rows, plan.bucket_bytes), key=lambda bucket: place[bucket.members[-1]]))


def _of_bucket(bucket: Bucket, edges: dict[str, ParameterEdge], mesh: Mesh, at: tuple[int, ...], direction: str,
               gradient: bool) -> Iterator[Sent]:
    """One collective per sending step of the bucket, its payload the sum of the members'."""
    starts = [edges[fqn].conversion.gradient if gradient else edges[fqn].conversion.source for fqn in bucket.members]
    sizes = [_payloads(edges[fqn].tensor, bucket.steps, start, mesh, at)
             for fqn, start in zip(bucket.members, starts, strict=True) if start is not None]
    for step, column in zip(bucket.steps, zip(*sizes, strict=True), strict=True):
        if step.kind in COLLECTIVES:
            names = "+".join(mesh.names[a] for a in step.axes)
            yield Sent(direction, step.kind, names, sum(column), ", ".join(bucket.members))


def _of_edge(conversion: Conversion, tensor: Tensor, mesh: Mesh, at: tuple[int, ...]) -> Iterator[Sent]:
    origin = f"{conversion.tensor} -> {conversion.op}"
    for direction, texts, start in (("forward", conversion.forward, conversion.source),
                                    ("backward", conversion.backward, conversion.gradient)):
        steps = tuple(Step.parse(text, mesh) for text in texts)
        if start is not None:
            for step, nbytes in zip(steps, _payloads(tensor, steps, start, mesh, at), strict=True):
                if step.kind in COLLECTIVES:
                    yield Sent(direction, step.kind, "+".join(mesh.names[a] for a in step.axes), nbytes, origin)


def traffic(plan: Plan, graph: Graph, coordinate: tuple[int, ...] | None = None) -> tuple[Sent, ...]:
    """All collectives of one step on the rank at `coordinate` (rank 0). `graph` is the planned one (`hubs.planned`), of
    one microbatch."""
    mesh, at = plan.mesh, coordinate or (0,) * len(plan.mesh.axes)
    by_name = {t.name: t for t in graph.tensors}
    edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
    first, each, last = list[Sent](), list[Sent](), list[Sent]()
    for bucket in gather_buckets(plan, graph):
        gathers = each if bucket.each else first
        gathers += _of_bucket(bucket, edges, mesh, at, "forward", gradient=False)
        if bucket.regather:
            each += _of_bucket(bucket, edges, mesh, at, "backward", gradient=False)
    for conversion in plan.conversions:
        if by_name[conversion.tensor].kind is not Kind.PARAMETER:
            each += _of_edge(conversion, by_name[conversion.tensor], mesh, at)
    for bucket in gradient_buckets(plan, graph):
        reduced = each if bucket.each else last
        reduced += _of_bucket(bucket, edges, mesh, at, "backward", gradient=True)
    decisions = {d.name: d for d in plan.decisions}
    for op in graph.ops:
        if op.target in REDUCING:
            option = option_of(op, graph, mesh, decisions.get(op.name))
            for direction, kind, axes, nbytes in inner_collectives(op, graph, option.inputs[0], option.inner, mesh, at):
                each.append(Sent(direction, kind, "+".join(mesh.names[a] for a in axes), nbytes, op.name))
    each.sort(key=lambda sent: sent.direction == "backward")
    return (*first, *each * plan.microbatches, *last)
