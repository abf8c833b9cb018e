"""Graph + mesh + cluster -> Problem: the only meeting of the graph and the cost model.

    seconds(plan) = sum over ops       forward + backward roofline of the local pieces, and what the kernel reduces itself
                  + sum over edges     conversion forward + conversion of the gradient back
    bytes(plan)   = sum over parameters  (value + gradient + optimizer) in the stored layout, gathered copies that are kept
                  + sum over edges and ops  what backward needs of activations
                  + max over ops and edges  operands, gradients and buffers of the moment

Every edge u -> v of a tensor costs  route(out(u) -> in(v)) + route(gradient(v) -> wanted(u)),  a table over the options
of both ends; ops and edges that are alike (same target, arguments, shapes and gradients) share their tables. A parameter's
collectives are coalesced into buckets, so its share of one is priced by bandwidth: the price of a full bucket times the
part that it fills.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from autoddl.conversion import COLLECTIVES, Routes, Step, routes
from autoddl.cost_models import Cluster, Group, collective, compute_seconds, copy_seconds
from autoddl.graph import Graph, Kind, Op, Tensor
from autoddl.hubs import HUB
from autoddl.layout import Layout, Mesh, local_shape
from autoddl.plan import BUCKET_BYTES
from autoddl.problem import Factor, Problem, Table
from autoddl.rules import Option
from autoddl.rules_nn import inner_collectives
from autoddl.space import Choice, Variable
from autoddl.work import keeps_input, keeps_output, kept_beside, work

__all__ = ["OPTIMIZERS", "Pricing", "problem_of"]

Array = npt.NDArray[np.float64]

OPTIMIZERS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2, "adafactor": 0}
"""Optimizer -> state tensors per parameter, in the parameter's dtype."""


@dataclass(frozen=True, slots=True)
class Pricing:
    """What a price depends on besides the choices. `graph` is the planned one."""

    graph: Graph
    mesh: Mesh
    cluster: Cluster
    optimizer: str = "adamw"

    def group(self, axes: tuple[int, ...]) -> Group:
        return Group(tuple((self.mesh.sizes[a], self.mesh.strides[a]) for a in axes))

    def step_seconds(self, step: Step, full: int, touched: int) -> float:
        """One step: the collective on a full buffer of `full` bytes; a local step copies (fill) or only looks (slice)."""
        if step.kind in COLLECTIVES:
            return collective(self.cluster, step.kind, self.group(step.axes), float(full)).seconds
        return copy_seconds(self.cluster.device, float(touched if step.kind == "fill" else 0))

    def bucket_seconds(self, step: Step, full: int, touched: int) -> float:
        """The same for a parameter, whose buffer is a part of a bucket."""
        if step.kind in COLLECTIVES and full < BUCKET_BYTES:
            return self.step_seconds(step, BUCKET_BYTES, touched) * full / BUCKET_BYTES
        return self.step_seconds(step, full, touched)


@lru_cache(maxsize=2000)
def _routes(shape: tuple[int, ...], itemsize: int, mesh: Mesh, cluster: Cluster, partial: bool, bucketed: bool) -> Routes:
    """Conversions of a tensor of `shape`; they depend on nothing else."""
    pricing = Pricing(Graph((), (), ()), mesh, cluster)
    return routes(shape, itemsize, mesh, pricing.bucket_seconds if bucketed else pricing.step_seconds, partial)


def routes_of(pricing: Pricing, tensor: Tensor) -> Routes:
    """The conversions that are open to `tensor` on this mesh and cluster."""
    bucketed = tensor.kind is Kind.PARAMETER
    return _routes(tensor.shape, tensor.itemsize, pricing.mesh, pricing.cluster, tensor.dtype != "bool", bucketed)


def _local(tensor: Tensor, layouts: tuple[Layout, ...], mesh: Mesh) -> Array:
    """Bytes of rank 0's piece in each layout."""
    sizes: dict[Layout, float] = {}
    for layout in layouts:
        if layout not in sizes:
            sizes[layout] = float(prod(local_shape(tensor.shape, layout, mesh)) * tensor.itemsize)
    return np.array([sizes[layout] for layout in layouts])


def inner_seconds(pricing: Pricing, op: Op, choice: Choice) -> dict[str, float]:
    """Seconds, by axes, that the op's own kernel spends reducing."""
    option, origin = Option((), choice.inputs, choice.outputs), (0,) * len(pricing.mesh.axes)
    found: dict[str, float] = {}
    for _, kind, axes, nbytes in inner_collectives(op, pricing.graph, option, pricing.mesh, origin):
        name = "+".join(pricing.mesh.names[a] for a in axes)
        found[name] = found.get(name, 0.0) + collective(pricing.cluster, kind, pricing.group(axes), float(nbytes)).seconds
    return found


def op_seconds(pricing: Pricing, op: Op, choice: Choice, differentiable: frozenset[int]) -> float:
    """Forward and backward of the local op; a hub and a view are free."""
    graph, mesh, device = pricing.graph, pricing.mesh, pricing.cluster.device
    inputs = tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(op.inputs, choice.inputs, strict=True))
    outputs = tuple(local_shape(graph.tensors[t].shape, c, mesh) for t, c in zip(op.outputs, choice.outputs, strict=True))
    dtype = graph.tensors[op.outputs[0]].dtype
    both = work(op, graph, inputs, outputs, differentiable)
    return sum(compute_seconds(device, w.flops, w.nbytes, dtype) for w in both if w.nbytes or w.flops)


def _op_table(pricing: Pricing, op: Op, choices: tuple[Choice, ...], differentiable: frozenset[int], shared: bool
              ) -> Table:
    """Unary costs of an op. `shared`: it is a hub of an activation that some consumer's backward reads."""
    graph, mesh = pricing.graph, pricing.mesh
    seconds, retained, transient = np.zeros(len(choices)), np.zeros(len(choices)), np.zeros(len(choices))
    if op.target == HUB:
        own = _local(graph.tensors[op.outputs[0]], tuple(c.outputs[0] for c in choices), mesh)
        return Table(seconds, own * shared, transient)
    for i, choice in enumerate(choices):
        seconds[i] = op_seconds(pricing, op, choice, differentiable)
        seconds[i] += sum(inner_seconds(pricing, op, choice).values()) if choice.inner else 0.0
    outputs = [_local(graph.tensors[t], tuple(c.outputs[k] for c in choices), mesh) for k, t in enumerate(op.outputs)]
    inputs = [_local(graph.tensors[t], tuple(c.inputs[k] for c in choices), mesh) for k, t in enumerate(op.inputs)]
    shapes = [tuple(local_shape(graph.tensors[t].shape, c.outputs[k], mesh) for k, t in enumerate(op.outputs))
              for c in choices]
    retained += np.array([kept_beside(op, shape, differentiable) for shape in shapes])
    transient += 2.0 * (sum(outputs) + sum(inputs))
    return Table(seconds, retained, transient)


def _parameter_table(pricing: Pricing, tensor: Tensor, choices: tuple[Choice, ...]) -> Table:
    """Value, gradient and optimizer state of what is stored."""
    own = _local(tensor, tuple(c.outputs[0] for c in choices), pricing.mesh)
    copies = 2 + OPTIMIZERS[pricing.optimizer] if tensor.trained else 1
    return Table(np.zeros(len(choices)), own * copies, np.zeros(len(choices)))


@dataclass(frozen=True, slots=True)
class Edge:
    """Output `port` of variable `source` -> input `slot` of variable `target`."""

    source: int
    port: int
    target: int
    slot: int
    tensor: int


def _positions(table: Routes, layouts: tuple[Layout, ...]) -> npt.NDArray[np.intp]:
    return np.array([table.index[layout] for layout in layouts], dtype=np.intp)


def _edge_table(pricing: Pricing, edge: Edge, source: Variable, target: Variable, keep: tuple[bool, bool], flows: bool
                ) -> Table:
    """Pairwise costs: `keep` says whether the reader's backward needs the value, and the writer's its own output."""
    tensor = pricing.graph.tensors[edge.tensor]
    table, reads = routes_of(pricing, tensor), tuple(c.inputs[edge.slot] for c in target.choices)
    writes = tuple(c.outputs[edge.port] for c in source.choices)
    here, there = _positions(table, writes), _positions(table, reads)
    seconds = table.seconds[np.ix_(here, there)].copy()
    converted = here[:, None] != there[None, :]
    before, after = _local(tensor, writes, pricing.mesh)[:, None], _local(tensor, reads, pricing.mesh)[None, :]
    parameter = isinstance(source.item, Tensor)
    alone = not (parameter or (isinstance(source.item, Op) and source.item.target == HUB))
    again = np.array([c.regather for c in source.choices])[:, None] if parameter else np.zeros((len(writes), 1), bool)
    retained = after * (converted | (alone and not keep[1])) * keep[0] * ~again + before * keep[1]
    transient = (before + after) * converted
    if parameter and keep[0]:
        seconds = seconds + np.where(again, seconds, 0.0)
    if flows:
        yields = tuple(c.gradients[edge.slot] for c in target.choices)
        back = table.seconds[np.ix_(_positions(table, yields), _positions(table, tuple(c.wanted[edge.port] for c in source.choices)))]
        seconds = seconds + back.T
        transient = transient + _local(tensor, yields, pricing.mesh)[None, :]
    return Table(seconds, retained, np.broadcast_to(transient, seconds.shape))


def edges_of(graph: Graph, variables: tuple[Variable, ...]) -> tuple[Edge, ...]:
    """Every edge between two variables."""
    written: dict[int, tuple[int, int]] = {}
    names = {t.name: i for i, t in enumerate(graph.tensors)}
    for v, variable in enumerate(variables):
        if isinstance(variable.item, Tensor):
            written[names[variable.item.name]] = (v, 0)
        else:
            written.update({t: (v, port) for port, t in enumerate(variable.item.outputs)})
    return tuple(Edge(*written[t], v, k, t) for v, variable in enumerate(variables) if isinstance(variable.item, Op)
                 for k, t in enumerate(variable.item.inputs) if t in written)


def end_seconds(pricing: Pricing, t: int, choice: Choice, port: int, flows: bool) -> float:
    """From an op to the program's end: the loss, or a buffer's new value, is needed whole by every rank."""
    tensor, whole = pricing.graph.tensors[t], Layout.broadcast(pricing.mesh)
    table = routes_of(pricing, tensor)
    back = table.seconds[table.index[whole], table.index[choice.wanted[port]]] if flows else 0.0
    return float(table.seconds[table.index[choice.outputs[port]], table.index[whole]] + back)


class _Tables:
    """Tables under construction, each made once per key."""

    def __init__(self) -> None:
        self.found: list[Table] = []
        self.index: dict[Hashable, int] = {}

    def number(self, key: Hashable, make: Callable[[], Table]) -> int:
        if key not in self.index:
            self.index[key] = len(self.found)
            self.found.append(make())
        return self.index[key]


def likeness(graph: Graph, variable: Variable, differentiable: frozenset[int], dependent: frozenset[int]) -> Hashable:
    """Equal for variables whose costs are equal: what is computed, on which shapes, with which gradients."""
    if isinstance(variable.item, Tensor):
        return (variable.item.shape, variable.item.dtype, variable.item.trained, id(variable.choices))
    op = variable.item
    tensors = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in differentiable, t in dependent)
                    for t in (*op.inputs, *op.outputs))
    args = tuple((k, v) for k, v in op.args if k != "key")
    return (op.target, op.slots, args, tensors, id(variable.choices))


def cone_cost(pricing: Pricing) -> tuple[float, float]:
    """Seconds and bytes of what every rank computes alike: the cone's ops forward; buffers, constants and idle parameters."""
    graph = pricing.graph
    dependent, used = graph.dependent(), {t for op in graph.ops for t in op.inputs}
    whole = Layout.broadcast(pricing.mesh)
    seconds = sum(op_seconds(pricing, op, Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ()), frozenset())
                  for op in graph.ops if not dependent.intersection(op.inputs))
    held = sum(t.nbytes for t in graph.tensors if t.kind in (Kind.BUFFER, Kind.CONSTANT, Kind.INPUT))
    idle = sum(t.nbytes for i, t in enumerate(graph.tensors) if t.kind is Kind.PARAMETER and i not in used)
    return seconds, float(held + idle)


def _end_factors(pricing: Pricing, tables: _Tables, v: int, variable: Variable, alike: int, ends: dict[int, bool]
                 ) -> list[Factor]:
    """What it costs to bring an op's outputs to the program's end, where that is where they go."""
    assert isinstance(variable.item, Op)
    found = []
    for port, t in enumerate(variable.item.outputs):
        if t in ends:
            costs = np.array([end_seconds(pricing, t, c, port, ends[t]) for c in variable.choices])
            table = Table(costs, np.zeros_like(costs), np.zeros_like(costs))
            found.append(Factor((v,), tables.number(("end", alike, port, ends[t]), lambda table=table: table)))
    return found


def _of_parameter(graph: Graph, hub: Op) -> bool:
    return graph.tensors[hub.inputs[0]].kind is Kind.PARAMETER


def problem_of(pricing: Pricing, variables: tuple[Variable, ...], budget: float | None) -> Problem:
    """All costs of all choices. `budget`: bytes per device, None for no limit."""
    graph, tables, factors = pricing.graph, _Tables(), list[Factor]()
    differentiable, dependent = graph.differentiable(), graph.dependent()
    ends = {graph.outputs[0]: True} | {new: False for _, new in graph.updates}
    classes: dict[Hashable, int] = {}
    alike = [classes.setdefault(likeness(graph, v, differentiable, dependent), len(classes)) for v in variables]
    for v, variable in enumerate(variables):
        key: Hashable = ("own", alike[v])
        if isinstance(variable.item, Tensor):
            make = lambda item=variable.item, c=variable.choices: _parameter_table(pricing, item, c)  # noqa: E731
        else:
            shared = variable.item.target == HUB and not _of_parameter(graph, variable.item) and hub_keeps(
                graph, variable.item, differentiable)
            key = ("own", alike[v], shared)
            make = lambda o=variable.item, c=variable.choices, s=shared: _op_table(pricing, o, c, differentiable, s)  # noqa: E731
            factors += _end_factors(pricing, tables, v, variable, alike[v], ends)
        factors.append(Factor((v,), tables.number(key, make)))
    for edge in edges_of(graph, variables):
        source, target = variables[edge.source], variables[edge.target]
        keep, flows = kept(graph, edge, source, target, differentiable), edge.tensor in differentiable
        key = ("edge", alike[edge.source], edge.port, alike[edge.target], edge.slot, keep, flows)
        make = lambda e=edge, s=source, t=target, k=keep, f=flows: _edge_table(pricing, e, s, t, k, f)  # noqa: E731
        factors.append(Factor((edge.source, edge.target), tables.number(key, make)))
    seconds, nbytes = cone_cost(pricing)
    return Problem(tuple(v.name for v in variables), tuple(len(v.choices) for v in variables), tuple(tables.found),
                   tuple(factors), budget, seconds, nbytes)


def kept(graph: Graph, edge: Edge, source: Variable, target: Variable, differentiable: frozenset[int]) -> tuple[bool, bool]:
    """Whether the reader's backward needs the value of this edge, and whether the writer's needs its own output.
    A hub reads for its consumers where it stands behind a parameter; else it is charged by itself, once."""
    assert isinstance(target.item, Op)
    if target.item.target == HUB:
        by_reader = isinstance(source.item, Tensor) and hub_keeps(graph, target.item, differentiable)
    else:
        by_reader = keeps_input(target.item, edge.slot, graph, differentiable)
    return by_reader, isinstance(source.item, Op) and keeps_output(source.item, differentiable)


def hub_keeps(graph: Graph, hub: Op, differentiable: frozenset[int]) -> bool:
    """Whether the backward of any consumer reads the hub's value."""
    return any(keeps_input(op, k, graph, differentiable) for op in graph.ops for k, t in enumerate(op.inputs)
               if t == hub.outputs[0])
