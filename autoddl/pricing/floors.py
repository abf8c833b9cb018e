"""Computes what no plan is below: the work of all ops split evenly, and what every rank has under any choice.

    floor    all work split evenly over all devices, with no communication
    cone     the ops that depend on no parameter, which every rank runs whole
    states   bytes of parameters, gradients and the optimizer's state, which some rank has its part of
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from math import prod

from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.layout import Layout
from autoddl.cost_models import Cluster, Kernel, least_seconds
from autoddl.operators.fusion import chains
from autoddl.operators.narrow_products import narrow_products
from autoddl.operators.ring import offers_ring
from autoddl.operators.work import weight_kernels, work
from autoddl.pricing.choices import Choice
from autoddl.pricing.kernel_prices import computed_dtype, kernel_of, op_seconds
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.price import Pricing

__all__ = ["cone_cost", "floor_passes", "floor_seconds", "floor_sums", "state_bytes"]


def floor_seconds(graph: Graph, cluster: Cluster) -> float:
    """Seconds that no plan is below: all work split evenly over all devices, with no communication."""
    return sum(floor_passes(graph, cluster, graph.differentiable()))


def floor_passes(graph: Graph, cluster: Cluster, differentiable: frozenset[int], weights: frozenset[int] = frozenset()
                 ) -> tuple[float, float, float]:
    """`floor_seconds` of forward, of backward, and of what waits for W if `weights` tell what depends on parameters.

    `differentiable` are the tensors with a gradient.
    """
    return floor_sums(graph, cluster, differentiable, weights, (len(graph.ops),))[0]


def floor_sums(graph: Graph, cluster: Cluster, differentiable: frozenset[int], weights: frozenset[int],
               ends: Sequence[int], *, loosely: bool = False) -> list[tuple[float, float, float]]:
    """`floor_passes` of the ops before each of some positions, which rise.

    Fused ops take nothing. `loosely` is for stages: ops that some stage may fuse take nothing then. Nor do those that
    depend on no parameter, which other stages compute.
    """
    dependent = graph.dependent() if loosely else frozenset[int]()
    fused = chains(graph, cluster.device.by_hand, loosely=loosely) if cluster.device.compiled else {}
    narrow = narrow_products(graph) if cluster.device.narrow else {}
    sums, known = [(0.0, 0.0, 0.0)], dict[Hashable, tuple[float, float, float]]()
    for op in graph.ops:
        dtype = cluster.device.narrow if op.name in narrow else computed_dtype(graph, op)
        is_free = op.name in fused or (loosely and dependent.isdisjoint(op.outputs))
        key = _likeness(graph, op, differentiable, weights), is_free, dtype
        if key not in known:
            known[key] = (0.0, 0.0, 0.0) if is_free else _op_floor(graph, op, cluster, dtype, differentiable, weights)
        sums.append((sums[-1][0] + known[key][0], sums[-1][1] + known[key][1], sums[-1][2] + known[key][2]))
    return [sums[end] for end in ends]


def _likeness(graph: Graph, op: Op, differentiable: frozenset[int], weights: frozenset[int]) -> Hashable:
    """A key that is equal for ops whose kernels are equal."""
    tensors = tuple([(t.shape, t.dtype, t.itemsize, t.kind, i in differentiable, i in weights) for i, t in
                     ((i, graph.tensors[i]) for i in (*op.inputs, *op.outputs))])
    return op.target, op.slots, tuple([pair for pair in op.args if pair[0] != "key"]), tensors


def _op_floor(graph: Graph, op: Op, cluster: Cluster, dtype: str, differentiable: frozenset[int],
              weights: frozenset[int]) -> tuple[float, float, float]:
    """The least seconds of an op's forward, of its backward, and of what waits for W."""
    shapes, found = [tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)], [0.0, 0.0, 0.0]
    forward, backward = work(op, graph, shapes[0], shapes[1], differentiable)
    late = weight_kernels(op, differentiable, weights, len(backward)) if weights else (False,) * len(backward)
    ways = [0] * len(forward) + [1 + waits for waits in late]
    for way, kernel in zip(ways, (*forward, *backward), strict=True):
        found[way] += kernel.times * _least(cluster, kernel_of(kernel, dtype), offers_ring(op, graph))
    return found[0], found[1], found[2]


def _least(cluster: Cluster, kernel: Kernel, rings: bool) -> float:
    """The least seconds of a kernel's part; most blocks of a causal ring have the curve of full attention."""
    found = least_seconds(cluster.device, kernel, cluster.size)
    if not rings or not kernel.kind.startswith("attention") or not kernel.shape[-1]:
        return found
    block = replace(kernel, shape=(*kernel.shape[:-1], 0), name=kernel.name.replace("causal", "full"))
    return min(found, least_seconds(cluster.device, block, cluster.size))


def state_bytes(graph: Graph, optimizer: str) -> float:
    """Bytes of all parameters that are read, their gradients and the optimizer's state at the update, each once.

    So some rank of n has no less than an n-th of them, however layouts and stages divide them.
    """
    flows, used, made = graph.differentiable(), {t for op in graph.ops for t in op.inputs}, optimizer_of(optimizer)
    return sum(prod(one.shape) * one.stored.itemsize * (2 + made.copies(one) if t in flows else 1)
               for t, one in enumerate(graph.tensors) if one.kind is Kind.PARAMETER and t in used)


def cone_cost(pricing: Pricing) -> tuple[float, float]:
    """(seconds, bytes) that every rank has under any choice.

    Seconds are those of the forward of the cone's ops, in one microbatch. Bytes are those of buffers, constants and
    idle parameters, and of the inputs of the whole batch.
    """
    graph = pricing.graph
    dependent, used = graph.dependent(), {t for op in graph.ops for t in op.inputs}
    whole = Layout.broadcast(pricing.mesh)
    cone = [(op, Choice((whole,) * len(op.inputs), (whole,) * len(op.outputs), (), ())) for op in graph.ops
            if not dependent.intersection(op.outputs)]
    seconds = sum(op_seconds(pricing, op, choice, frozenset()) for op, choice in cone)
    held = sum(t.nbytes * (pricing.microbatches if t.kind is Kind.INPUT else 1) for t in graph.tensors
               if t.kind in (Kind.BUFFER, Kind.CONSTANT, Kind.INPUT))
    idle = sum(t.nbytes for i, t in enumerate(graph.tensors) if t.kind is Kind.PARAMETER and i not in used)
    return seconds, float(held + idle)
