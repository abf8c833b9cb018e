"""What backward of a part reads: each storage once, as its writer laid it out, and masks besides.

Nothing inside a fused chain is kept: its backward computes it again. Of what is kept, the core's is that of softmax and
its dropout, which selective recomputation drops.
"""

from math import prod

from autoddl.core.graph import Op, Tensor
from autoddl.core.layout import Layout, Mesh, local_shape
from autoddl.operators.work import VIEWS, base, keeps_output, kept_beside
from autoddl.pricing.build_problem import saved_tensors
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Variable

__all__ = ["add_saved", "is_core", "local_numel"]

_AGAIN = frozenset(f"aten.{name}" for name in ("gelu", "silu", "relu", "mul"))


def add_saved(total: dict[str, float], fuses: bool, pricing: Pricing, space: tuple[Variable, ...],
              chosen: tuple[Choice, ...], differentiable: frozenset[int]) -> None:
    """What backward reads, each storage once, as its writer laid it out; masks besides. Nothing inside a fused chain
    is kept: its backward computes it again."""
    graph, mesh = pricing.graph, pricing.mesh
    makers, users = graph.producers(), graph.consumers()
    layouts = {t: c for v, choice in zip(space, chosen, strict=True) if isinstance(v.item, Op)
               for t, c in zip(v.item.outputs, choice.outputs, strict=True)}
    wanted = saved_tensors(graph, differentiable) | {t for op in graph.ops if keeps_output(op, differentiable)
                                                     for t in op.outputs}
    found = set()
    for t in wanted:
        while t in makers and (base(graph.ops[makers[t]]) in VIEWS) and graph.ops[makers[t]].inputs[0] in layouts:
            t = graph.ops[makers[t]].inputs[0]
        inside = t in makers and base(graph.ops[makers[t]]) in _AGAIN and len(users[t]) == 1
        if not (fuses and inside and base(graph.ops[users[t][0][0]]) in _AGAIN):
            found.add(t)
    for t in found & layouts.keys():
        nbytes = local_numel(graph.tensors[t], layouts[t], mesh) * graph.tensors[t].itemsize
        total["saved"] += nbytes
        total["core_saved"] += nbytes * (is_core(graph.ops[makers[t]]) and graph.tensors[t].numel > 0
                                         and base(graph.ops[makers[t]]) in ("aten.softmax", "autoddl.dropout"))
    for v, choice in zip(space, chosen, strict=True):
        if isinstance(v.item, Op):
            local = tuple(local_shape(graph.tensors[t].shape, c, mesh)
                          for t, c in zip(v.item.outputs, choice.outputs, strict=True))
            mask = kept_beside(v.item, local, differentiable)
            total["saved"] += mask
            total["core_saved"] += mask * is_core(v.item)


def is_core(op: Op) -> bool:
    """The attention core: both products and what is between."""
    return op.module == "attention" and base(op) not in VIEWS


def local_numel(tensor: Tensor, layout: Layout, mesh: Mesh) -> int:
    """Elements of a rank's piece."""
    return prod(local_shape(tensor.shape, layout, mesh))
