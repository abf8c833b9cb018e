"""Pricing -> Problem: a table of costs for every op, parameter and edge; those that are alike share one.

    own(v)        forward and backward of an op, what it keeps and needs for the moment (`charges`); value, gradient and
                  optimizer state of a parameter
    edge(u, v)    conversion there + conversion of the gradient back, the copies kept, the buffers of the moment
    end(v)        from the op that writes the loss or a new buffer value to the program's end

Alike are variables with the same target, arguments, shapes, gradients and choices: a repeated block names the same
tables, and the search solves it once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.layout import Mesh
from autoddl.core.layout_codes import Codes, decode_states, local_shapes
from autoddl.core.problem import Factor, Problem, Table
from autoddl.operators.fusion import Chained
from autoddl.operators.work import keeps_input, keeps_output, read_back
from autoddl.pricing.choice_classes import Ports, pieces_of
from autoddl.pricing.choices import Choice, numbered
from autoddl.pricing.edge_tables import Use, counted, edge_table
from autoddl.pricing.memory_charges import Charges
from autoddl.pricing.price import OPTIMIZERS, Kernels, Pricing, cone_cost, end_seconds, inner_seconds
from autoddl.pricing.space import Variable

__all__ = ["Edge", "carries", "edges_of", "gathered_back", "problem_of", "saved_tensors"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edge:
    """Output `port` of variable `source` -> input `slot` of variable `target`."""

    source: int
    port: int
    target: int
    slot: int
    tensor: int


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


def kept(graph: Graph, edge: Edge, source: Variable, target: Variable, differentiable: frozenset[int],
         saved: frozenset[int]) -> tuple[bool, bool]:
    """Whether the reader's backward needs the value of this edge, and whether the writer's needs its own output.
    A hub reads for its consumers where it stands behind a parameter; else it is charged by itself, once."""
    assert isinstance(target.item, Op)
    if target.item.target == HUB:
        by_reader = isinstance(source.item, Tensor) and target.item.outputs[0] in saved
    else:
        by_reader = keeps_input(target.item, edge.slot, graph, differentiable)
    return by_reader, isinstance(source.item, Op) and keeps_output(source.item, differentiable)


def carries(edge: Edge, target: Variable, differentiable: frozenset[int]) -> bool:
    """Whether a gradient comes back along the edge: none does from what has no gradient itself, like an argmax."""
    assert isinstance(target.item, Op)
    return edge.tensor in differentiable and any(t in differentiable for t in target.item.outputs)


def gathered_back(graph: Graph, differentiable: frozenset[int]) -> frozenset[int]:
    """Parameters that are needed in backward too, where they are gathered again: read there themselves or in a view."""
    uses = graph.consumers()
    return frozenset(t for t, tensor in enumerate(graph.tensors)
                     if tensor.kind is Kind.PARAMETER and read_back(t, graph, uses, differentiable))


def saved_tensors(graph: Graph, differentiable: frozenset[int]) -> frozenset[int]:
    """Tensors that the backward of some op reads."""
    return frozenset(t for op in graph.ops for k, t in enumerate(op.inputs)
                     if keeps_input(op, k, graph, differentiable))


def _local(tensor: Tensor, layouts: Codes, mesh: Mesh) -> Array:
    """Bytes of rank 0's piece in the layout of each number."""
    elements: Codes = local_shapes(tensor.shape, decode_states(layouts, len(mesh.axes)), mesh).prod(axis=1)
    return (elements * tensor.itemsize).astype(np.float64)


def _op_table(pricing: Pricing, ports: Ports, op: Op, choices: Sequence[Choice], differentiable: frozenset[int],
              shared: bool, hubs: frozenset[int]) -> Table:
    """Unary costs of an op. `shared`: it is a hub of an activation that some consumer's backward reads; `hubs` are the
    tensors that hubs write."""
    graph, mesh, nothing = pricing.graph, pricing.mesh, np.zeros(len(choices))
    if op.target == HUB:
        own = _local(graph.tensors[op.outputs[0]], numbered(choices).outputs[0], mesh)
        return Table(nothing, own * shared, nothing)
    found, count = pieces_of(choices, [graph.tensors[t].shape for t in (*op.inputs, *op.outputs)], mesh), len(op.inputs)
    seconds, retained, transient = (np.zeros(len(found.shapes)) for _ in range(3))
    kernels = Kernels.of(pricing, op, differentiable)
    charges = Charges.of(op, graph, differentiable, hubs, pricing.cluster.device.kind == "cpu")
    inner = numbered(choices).inner[found.first].astype(bool).tolist()
    for c, (shapes, reduces) in enumerate(zip(found.shapes, inner, strict=True)):
        forward, backward = kernels.seconds(shapes[:count], shapes[count:])
        seconds[c] = sum((*forward, *backward))
        if reduces:
            seconds[c] += sum(inner_seconds(pricing, op, choices[found.first.item(c)]).values())
        retained[c], transient[c] = charges.of_pieces(shapes[:count], shapes[count:], reduces)
    return Table(seconds * pricing.microbatches, retained, transient, (found.classes,))


def _parameter_table(pricing: Pricing, tensor: Tensor, choices: Sequence[Choice]) -> Table:
    """Value, gradient and optimizer state of what is stored."""
    own = _local(tensor, numbered(choices).outputs[0], pricing.mesh)
    copies = 2 + OPTIMIZERS[pricing.optimizer] if tensor.trained else 1
    return Table(np.zeros(len(choices)), own * copies, np.zeros(len(choices)))


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


def _itself(table: Table) -> Table:
    return table


def likeness(graph: Graph, variable: Variable, differentiable: frozenset[int], dependent: frozenset[int],
             hubs: frozenset[int], chained: Mapping[str, Chained]) -> Hashable:
    """Equal for variables whose costs are equal: what is computed, on which shapes, with which gradients, fused with
    what."""
    if isinstance(variable.item, Tensor):
        return (variable.item.shape, variable.item.dtype, variable.item.trained, id(variable.choices))
    op = variable.item
    tensors = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in differentiable, t in dependent,
                     t in hubs, graph.tensors[t].kind is Kind.PARAMETER)
                    for t in (*op.inputs, *op.outputs))
    args = tuple((k, v) for k, v in op.args if k != "key")
    return (op.target, op.slots, args, tensors, id(variable.choices), chained.get(op.name))


def _end_factors(pricing: Pricing, tables: _Tables, v: int, variable: Variable, alike: int, ends: dict[int, bool]
                 ) -> list[Factor]:
    """What it costs to bring an op's outputs to the program's end, where that is where they go."""
    assert isinstance(variable.item, Op)
    found = []
    for port, t in enumerate(variable.item.outputs):
        if t in ends:
            costs = np.array([end_seconds(pricing, t, c, port, ends[t]) for c in variable.choices])
            costs = counted(costs * pricing.microbatches, pricing.hidden)
            table = Table(costs, np.zeros_like(costs), np.zeros_like(costs))
            found.append(Factor((v,), tables.number(("end", alike, port, ends[t]), partial(_itself, table))))
    return found


def _of_parameter(graph: Graph, hub: Op) -> bool:
    return graph.tensors[hub.inputs[0]].kind is Kind.PARAMETER


def problem_of(pricing: Pricing, variables: tuple[Variable, ...], budget: float | None) -> Problem:
    """All costs of all choices. `budget`: bytes per device, None for no limit."""
    graph, tables, ports, factors = pricing.graph, _Tables(), Ports(), list[Factor]()
    differentiable, dependent = graph.differentiable(), graph.dependent()
    saved, read = saved_tensors(graph, differentiable), gathered_back(graph, differentiable)
    hubs = frozenset(t for op in graph.ops if op.target == HUB for t in op.outputs)
    ends = {graph.outputs[0]: True} | {new: False for _, new in graph.updates}
    classes: dict[Hashable, int] = {}
    alike = [classes.setdefault(likeness(graph, v, differentiable, dependent, hubs, pricing.chained), len(classes))
             for v in variables]
    for v, variable in enumerate(variables):
        key: Hashable = ("own", alike[v])
        if isinstance(variable.item, Tensor):
            make = partial(_parameter_table, pricing, variable.item, variable.choices)
        else:
            shared = (variable.item.target == HUB and not _of_parameter(graph, variable.item)
                      and variable.item.outputs[0] in saved)
            key = ("own", alike[v], shared)
            make = partial(_op_table, pricing, ports, variable.item, variable.choices, differentiable, shared, hubs)
            factors += _end_factors(pricing, tables, v, variable, alike[v], ends)
        factors.append(Factor((v,), tables.number(key, make)))
    for edge in edges_of(graph, variables):
        source, target = variables[edge.source], variables[edge.target]
        keep, flows = kept(graph, edge, source, target, differentiable, saved), carries(edge, target, differentiable)
        back = edge.tensor in read
        key = ("edge", alike[edge.source], edge.port, alike[edge.target], edge.slot, keep, flows, back)
        use = Use(graph.tensors[edge.tensor], edge.port, edge.slot, keep, flows, back)
        make = partial(edge_table, pricing, ports, source, target, use)
        factors.append(Factor((edge.source, edge.target), tables.number(key, make)))
    seconds, nbytes = cone_cost(pricing)
    seconds *= pricing.microbatches
    return Problem(tuple(v.name for v in variables), tuple(len(v.choices) for v in variables), tuple(tables.found),
                   tuple(factors), budget, seconds, nbytes)
