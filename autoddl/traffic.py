"""What a rank sends in one training step, in the order of the program: the relation that pricing, the runtime's
comparison across ranks and `verify` all read.

* An edge between ops sends its forward steps in forward and its backward steps in backward.
* A parameter's edge sends in *buckets*: parameters that take the same steps share one collective per step, in the order
  of their first use, up to `Plan.bucket_bytes` of payload. Gather buckets run forward (and again in backward if they
  are gathered anew), gradient buckets run backward, last used first.
* An op whose kernel reduces by itself (synchronised batch norm, vocabulary-parallel loss) sends that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoddl.conversion import COLLECTIVES, Step, payload
from autoddl.errors import InputError
from autoddl.graph import Graph, Kind, Op, Tensor
from autoddl.layout import Layout, Mesh
from autoddl.plan import Conversion, Decision, Plan
from autoddl.rules import Option, options
from autoddl.rules_nn import REDUCING, inner_collectives
from autoddl.work import VIEWS, base, keeps_input

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
    """Parameters (by fqn) that take the same steps together. `start`: the layout the steps lead from."""

    members: tuple[str, ...]
    steps: tuple[Step, ...]
    regather: bool = False


@dataclass(frozen=True, slots=True)
class ParameterEdge:
    """A parameter, its conversion, and whether backward needs the gathered value (its consumer saves it)."""

    tensor: Tensor
    conversion: Conversion
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    regather: bool
    saved: bool


def option_of(op: Op, graph: Graph, mesh: Mesh, decision: Decision | None) -> Option:
    """The signatures that the plan decided for `op`; without a decision for it, or a signature, InputError."""
    if decision is None or decision.target != op.target:
        raise InputError(f"the plan decides nothing for op {op.name} ({op.target}); make the plan again for this model")
    for option in options(op, graph, mesh):
        if option.inputs == decision.inputs and option.outputs == decision.outputs:
            return option
    raise InputError(f"op {op.name} ({op.target}) has no signature {', '.join(map(str, decision.inputs))} -> "
                     f"{', '.join(map(str, decision.outputs))}; make the plan again with this version")


def _reached(t: int, graph: Graph, uses: dict[int, tuple[tuple[int, int], ...]], differentiable: frozenset[int]
             ) -> bool:
    """Whether the backward of some op reads t, looking through hubs and views, which keep nothing of their own."""
    for i, k in uses[t]:
        op = graph.ops[i]
        view = base(op) in VIEWS
        if view and any(_reached(out, graph, uses, differentiable) for out in op.outputs):
            return True
        if not view and keeps_input(op, k, graph, differentiable):
            return True
    return False


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
                saved = _reached(t, graph, uses, differentiable)
                found.append(ParameterEdge(tensor, conversion, forward, backward, stored[tensor.fqn].regather, saved))
    return tuple(found)


def sends(steps: Iterable[Step]) -> bool:
    return any(step.kind in COLLECTIVES for step in steps)


def _payloads(tensor: Tensor, steps: tuple[Step, ...], start: Layout, mesh: Mesh, at: tuple[int, ...] | None
              ) -> tuple[int, ...]:
    """Full-buffer bytes of each step, 0 for the local ones."""
    sizes, here = [], start
    for step in steps:
        sizes.append(payload(step, tensor.shape, tensor.itemsize, here, mesh, at))
        here = step.after(here)
    return tuple(sizes)


def _fill_buckets(rows: Iterable[tuple[str, tuple[object, ...], tuple[Step, ...], bool, int]], limit: int
                  ) -> tuple[Bucket, ...]:
    """Rows (fqn, key, steps, regather, bytes) in order; a bucket closes when the next row of its key would overflow."""
    buckets: list[list[object]] = []
    open_at: dict[tuple[object, ...], int] = {}
    for fqn, key, steps, regather, nbytes in rows:
        at = open_at.get(key)
        if at is None or buckets[at][3] + nbytes > limit:  # type: ignore[operator]
            open_at[key] = at = len(buckets)
            buckets.append([[], steps, regather, 0])
        buckets[at][0].append(fqn)  # type: ignore[attr-defined]
        buckets[at][3] += nbytes  # type: ignore[operator]
    return tuple(Bucket(tuple(b[0]), b[1], b[2]) for b in buckets)  # type: ignore[arg-type]


def gather_buckets(plan: Plan, graph: Graph) -> tuple[Bucket, ...]:
    """Parameters whose stored layout must be gathered for use, in the order of first use."""
    rows = []
    for edge in parameter_edges(plan, graph):
        if sends(edge.forward):
            regather = edge.regather and edge.saved
            size = max(_payloads(edge.tensor, edge.forward, edge.conversion.source, plan.mesh, None))
            key = (edge.conversion.forward, edge.tensor.dtype, regather)
            rows.append((edge.tensor.fqn, key, edge.forward, regather, size))
    return _fill_buckets(rows, plan.bucket_bytes)


def gradient_buckets(plan: Plan, graph: Graph) -> tuple[Bucket, ...]:
    """Parameters whose gradients are reduced, the last used first: the order in which backward yields them."""
    rows = []
    for edge in reversed(parameter_edges(plan, graph)):
        if sends(edge.backward) and edge.conversion.gradient is not None:
            size = max(_payloads(edge.tensor, edge.backward, edge.conversion.gradient, plan.mesh, None))
            rows.append((edge.tensor.fqn, (edge.conversion.backward, edge.tensor.dtype), edge.backward, False, size))
    return _fill_buckets(rows, plan.bucket_bytes)


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
    """All collectives of one step on the rank at `coordinate` (rank 0). `graph` is the planned one (`hubs.planned`)."""
    mesh, at = plan.mesh, coordinate or (0,) * len(plan.mesh.axes)
    by_name = {t.name: t for t in graph.tensors}
    edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
    found: list[Sent] = []
    for conversion in plan.conversions:
        if by_name[conversion.tensor].kind is not Kind.PARAMETER:
            found += _of_edge(conversion, by_name[conversion.tensor], mesh, at)
    for bucket in gather_buckets(plan, graph):
        found += _of_bucket(bucket, edges, mesh, at, "forward", gradient=False)
        if bucket.regather:
            found += _of_bucket(bucket, edges, mesh, at, "backward", gradient=False)
    for bucket in gradient_buckets(plan, graph):
        found += _of_bucket(bucket, edges, mesh, at, "backward", gradient=True)
    decisions = {d.name: d for d in plan.decisions}
    for op in graph.ops:
        if op.target in REDUCING:
            option = option_of(op, graph, mesh, decisions.get(op.name))
            for direction, kind, axes, nbytes in inner_collectives(op, graph, option.inputs[0], option.inner, mesh, at):
                found.append(Sent(direction, kind, "+".join(mesh.names[a] for a in axes), nbytes, op.name))
    return tuple(found)
