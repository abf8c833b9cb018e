"""One repeated part of a published run, priced as the planner prices it: graph, region, exact choice, kernels.

    mesh      replicas' experts (ep), context (cp), tensor (tp), the last innermost
    region    weights and stream as Megatron-LM cuts them (`validate_region`); the rest of the layouts is what the exact
              solver finds cheapest
    F, B, W   kernels forward, backward to the inputs, backward to the weights (`validate_kernels`); what conversions
              take besides; bytes that backward reads (`validate_saved`)
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster, elementwise_seconds
from autoddl.operators.work import base
from autoddl.pricing.build_problem import edges_of, problem_of
from autoddl.pricing.price import Pricing, routes_of
from autoddl.pricing.space import Choice, Variable, variables
from autoddl.search import solve
from autoddl.validation.expert_biases import add_biased, add_repeated
from autoddl.validation.kernels import Asked, add_op
from autoddl.validation.layers import Shape
from autoddl.validation.megatron_region import megatron
from autoddl.validation.saved_bytes import add_saved, local_numel
from autoddl.validation.templates import graph_of

__all__ = ["Asked", "Part", "part"]


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of one microbatch on one rank. `core` is the share of forward that selective recomputation repeats, by
    operators that of `repeated`: every other product and all that is bound by memory, but not fused attention;
    `saved` are bytes kept for backward, `core_saved` those of the core; `modules` are seconds that recomputation of the
    second norm and of the experts' activation takes, `modules_saved` the bytes that it saves; `values` are parameters
    held by a rank, of which `expert_values` are cut among experts' ranks; `calls` are operators that the host starts,
    `begun` its seconds for kernels besides; `awaited` are seconds of the device at whose end the host waits, beyond its
    own for the kernels besides, `awaited_calls` the operators; `dispatch` is what brings tokens to their experts and
    back."""

    forward: float
    backward: float
    weight: float
    core: float
    repeated: float
    sent_forward: float
    sent_backward: float
    dispatch_forward: float
    dispatch_backward: float
    context: float
    saved: float
    core_saved: float
    values: float
    expert_values: float
    calls: float
    backward_calls: float
    begun: float
    backward_begun: float
    awaited: float
    awaited_calls: float
    modules: float
    modules_saved: float


@lru_cache(maxsize=2_000)
def _chosen(what: str, shape: Shape, mesh: Mesh, sequence: bool, experts: str, cluster: Cluster
            ) -> tuple[Pricing, tuple[Variable, ...], tuple[Choice, ...]]:
    pricing = Pricing(graph_of(what, shape), mesh, cluster)
    space = variables(pricing.graph, mesh, megatron(mesh, sequence, experts))
    solution = solve(problem_of(pricing, space, None))
    return pricing, space, tuple(v.choices[k] for v, k in zip(space, solution.choice, strict=True))


def _idle(graph: Graph, op: Op) -> bool:
    """Ops that only bring x in and the loss out."""
    return any(graph.tensors[t].fqn == "inlet" for t in op.inputs) or not graph.tensors[op.outputs[0]].shape


@lru_cache(maxsize=5_000)
def part(asked: Asked, cluster: Cluster) -> Part:
    """Price one part."""
    mesh = Mesh.parse(asked.mesh)
    pricing, space, chosen = _chosen(asked.what, asked.shape, mesh, asked.sequence, asked.experts, cluster)
    graph, differentiable = pricing.graph, pricing.graph.differentiable()
    total = dict.fromkeys(Part.__slots__, 0.0)
    for variable, choice in zip(space, chosen, strict=True):
        item = variable.item
        if isinstance(item, Tensor):
            local = float(local_numel(item, choice.outputs[0], mesh))
            total["values"] += local
            total["expert_values"] += local if item.fqn in ("mlp.up", "mlp.down") else 0.0
        elif not _idle(graph, item):
            add_op(total, asked, pricing, item, choice, differentiable)
    if asked.shape.experts:
        _add_sorting(total, asked.shape, mesh, cluster)
        add_repeated(total, asked.shape, mesh, asked.biased, cluster.device)
    _add_edges(total, pricing, space, chosen, differentiable, asked.shape.experts > 0)
    if asked.biased:
        add_biased(total, asked.shape, mesh, asked.experts, cluster.device)
        _add_awaited(total, asked, pricing, space, chosen, differentiable)
    add_saved(total, asked.fuses, pricing, space, chosen, differentiable)
    return Part(**total)


def _add_sorting(total: dict[str, float], shape: Shape, mesh: Mesh, cluster: Cluster) -> None:
    """Copies of tokens are put in the order of experts before they are sent and again by local expert, and back, which
    in the graph are views (Megatron-Core, moe/token_dispatcher.py: permute, sort_chunks_by_idxs, unpermute): per copy 1
    written of 1/top read, 2, 2; the mixing at the end is in the graph, but with its weights as a kernel of their own,
    which Megatron-Core multiplies in the activation: 2 forward and 3 backward less."""
    copies = 2.0 * shape.batch * shape.length * shape.top * shape.width / prod(mesh.sizes)
    total["forward"] += elementwise_seconds(cluster.device, copies * (3 + 1 / shape.top))
    total["backward"] += elementwise_seconds(cluster.device, copies * (2 + 1 / shape.top))


def _add_awaited(total: dict[str, float], asked: Asked, pricing: Pricing, space: tuple[Variable, ...],
                 chosen: tuple[Choice, ...], differentiable: frozenset[int]) -> None:
    """Operators and the exchange from the order of tokens to the experts' first product, for which the host waits."""
    found, mine = dict.fromkeys(total, 0.0), [(v.item, choice) for v, choice in zip(space, chosen, strict=True)
                                              if isinstance(v.item, Op) and v.item.module == "mlp"]
    for op, choice in mine:
        add_op(found, asked, pricing, op, choice, differentiable)
        if base(op) == "aten.matmul":
            break
    total["awaited"] += found["forward"] + total["dispatch_forward"] / 2
    total["awaited_calls"] += found["calls"]


def _add_edges(total: dict[str, float], pricing: Pricing, space: tuple[Variable, ...], chosen: tuple[Choice, ...],
               differentiable: frozenset[int], experts: bool) -> None:
    """Conversions of activations there and of their gradients back: around attention, experts, and the others."""
    graph = pricing.graph
    for edge in edges_of(graph, space):
        source, target = space[edge.source], space[edge.target]
        if isinstance(source.item, Tensor) or (isinstance(target.item, Op) and _idle(graph, target.item)):
            continue
        table = routes_of(pricing, graph.tensors[edge.tensor])
        out, into = chosen[edge.source], chosen[edge.target]
        steps = table.seconds[table.index[out.outputs[edge.port]], table.index[into.inputs[edge.slot]]]
        back = 0.0
        if edge.tensor in differentiable:
            back = table.seconds[table.index[into.gradients[edge.slot]], table.index[out.wanted[edge.port]]]
        core = isinstance(target.item, Op) and base(target.item) == "aten.scaled_dot_product_attention"
        kind = "dispatch" if experts and _expert(source.item, target.item) else "sent"
        total["context" if core else f"{kind}_forward"] += float(steps + back * core)
        total[f"{kind}_backward"] += float(back) * (not core)


def _expert(*ends: Op | Tensor) -> bool:
    """Whether an end is an op of the experts."""
    return any(isinstance(end, Op) and end.module.startswith("mlp") for end in ends)
