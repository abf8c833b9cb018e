"""Lists the edges between the variables of a mesh, and says which of them carry gradients and weights for backward."""

from dataclasses import dataclass

from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.operators.work import read_back
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable

__all__ = ["Edge", "carries", "edges_of", "gathered_back"]


@dataclass(frozen=True, slots=True)
class Edge:
    """Leads from output `port` of variable `source` to input `slot` of variable `target`.

    Variables and `tensor`, the one that is carried, are positions: in the variables of the mesh and in the graph.
    """

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


def carries(edge: Edge, target: Variable, differentiable: frozenset[int]) -> bool:
    """Whether a gradient comes back along the edge: none does from what has no gradient itself, like an argmax."""
    assert isinstance(target.item, Op)
    return edge.tensor in differentiable and any(t in differentiable for t in target.item.outputs)


def gathered_back(pricing: Pricing, differentiable: frozenset[int]) -> frozenset[int]:
    """Positions of the parameters that backward needs, and that are gathered again for it.

    Backward reads them, themselves or a view of them, or computes an op again that reads them.
    """
    graph = pricing.graph
    uses = graph.consumers()
    return frozenset(t for t, tensor in enumerate(graph.tensors)
                     if tensor.kind is Kind.PARAMETER and read_back(t, graph, uses, differentiable, pricing.repeated))
