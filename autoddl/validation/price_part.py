"""Prices one repeated part of a published run as the planner prices it: graph, region, exact choice, kernels.

    mesh      experts of several replicas (ep), context (cp), tensor (tp), the last innermost
    region    weights and stream as Megatron-LM cuts them (`megatron_region`); the exact solver finds the cheapest
              layouts for everything else
    sum       kernels (`kernels`), kernels of experts (`expert_kernels`), conversions, bytes kept (`saved_bytes`)
"""

from collections.abc import Iterator
from functools import lru_cache

from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster
from autoddl.operators.fusion import chains
from autoddl.operators.work import base
from autoddl.pricing.build_problem import edges_of, problem_of
from autoddl.pricing.price import Pricing, routes_of
from autoddl.pricing.space import variables
from autoddl.search import solve
from autoddl.validation.expert_kernels import bias_kernels, recompute_kernels, sorting_kernels
from autoddl.validation.kernels import op_kernels
from autoddl.validation.layers import EXPERT_WEIGHTS, INLET, MLP, Shape
from autoddl.validation.megatron_region import megatron_region
from autoddl.validation.part import Part, PartChoice, PartSpec, add_parts
from autoddl.validation.saved_bytes import local_numel, saved_bytes
from autoddl.validation.templates import part_graph

__all__ = ["price_part"]


@lru_cache(maxsize=5_000)
def price_part(spec: PartSpec, cluster: Cluster) -> Part:
    """Returns seconds and bytes of one part for one microbatch on one rank."""
    mesh = Mesh.parse(spec.mesh)
    found = _solve(spec.name, spec.shape, mesh, spec.sequence_parallel, spec.expert_axes, cluster)
    return add_parts((*_kernels(spec, found), *_expert_kernels(spec, mesh, cluster), *_conversions(spec, found),
                      *_expert_biases(spec, found), saved_bytes(spec.fuses, found)))


@lru_cache(maxsize=2_000)
def _solve(name: str, shape: Shape, mesh: Mesh, sequence_parallel: bool, expert_axes: str, cluster: Cluster
           ) -> PartChoice:
    """The cheapest choice of Megatron-LM's region."""
    pricing = Pricing(part_graph(name, shape), mesh, cluster)
    space = variables(pricing.graph, mesh, megatron_region(mesh, sequence_parallel, expert_axes))
    solution = solve(problem_of(pricing, space, None))
    chosen = tuple(v.choices[k] for v, k in zip(space, solution.choice, strict=True))
    return PartChoice(pricing, space, chosen, pricing.graph.differentiable(), chains(pricing.graph))


def _kernels(spec: PartSpec, found: PartChoice) -> Iterator[Part]:
    """Parameters of a rank, and kernels of the operators."""
    for item, choice in found.items():
        if isinstance(item, Tensor):
            local = float(local_numel(item, choice.outputs[0], found.pricing.mesh))
            yield Part(values=local, expert_values=local if item.fqn in EXPERT_WEIGHTS else 0.0)
        elif not _is_frame(found.pricing.graph, item):
            yield from op_kernels(spec, found, item, choice)


def _is_frame(graph: Graph, op: Op) -> bool:
    """Whether an op only brings x in or the loss out."""
    return any(graph.tensors[t].fqn == INLET for t in op.inputs) or not graph.tensors[op.outputs[0]].shape


def _expert_kernels(spec: PartSpec, mesh: Mesh, cluster: Cluster) -> Iterator[Part]:
    """Kernels of a mixture of experts besides its operators."""
    if spec.shape.experts:
        yield sorting_kernels(spec.shape, mesh, cluster.device)
        yield recompute_kernels(spec.shape, mesh, spec.expert_biases, cluster.device)


def _expert_biases(spec: PartSpec, found: PartChoice) -> Iterator[Part]:
    """Biases and clamps of experts, and what the device does before the host waits for them."""
    if spec.expert_biases:
        yield bias_kernels(spec.shape, found.pricing.mesh, spec.expert_axes, found.pricing.cluster.device)
        sent = add_parts(_conversions(spec, found)).dispatch_forward
        before = add_parts(_before_first_product(spec, found))
        yield Part(awaited=before.forward + sent / 2, awaited_operators=before.operators)


def _before_first_product(spec: PartSpec, found: PartChoice) -> Iterator[Part]:
    """Operators from the order of tokens to the experts' first product, with that."""
    for op, choice in found.operators():
        if op.module == MLP:
            yield from op_kernels(spec, found, op, choice)
            if base(op) == "aten.matmul":
                return


def _conversions(spec: PartSpec, found: PartChoice) -> Iterator[Part]:
    """Conversions of activations and of their gradients: around attention, around experts, and all others."""
    graph, experts = found.pricing.graph, spec.shape.experts > 0
    for edge in edges_of(graph, found.space):
        source, target = found.space[edge.source].item, found.space[edge.target].item
        if isinstance(source, Tensor) or (isinstance(target, Op) and _is_frame(graph, target)):
            continue
        table = routes_of(found.pricing, graph.tensors[edge.tensor], "activations")
        out, into = found.chosen[edge.source], found.chosen[edge.target]
        seconds = float(table.seconds[table.index[out.outputs[edge.port]], table.index[into.inputs[edge.slot]]])
        back = 0.0
        if edge.tensor in found.differentiable:
            back = float(table.seconds[table.index[into.gradients[edge.slot]], table.index[out.wanted[edge.port]]])
        if isinstance(target, Op) and base(target) == "aten.scaled_dot_product_attention":
            yield Part(context=seconds + back)
        elif experts and (_is_of_experts(source) or _is_of_experts(target)):
            yield Part(dispatch_forward=seconds, dispatch_backward=back)
        else:
            yield Part(sent_forward=seconds, sent_backward=back)


def _is_of_experts(item: Op | Tensor) -> bool:
    return isinstance(item, Op) and item.module.startswith(MLP)
