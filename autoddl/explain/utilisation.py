"""Computes model-FLOP utilisation: the part of a step in which devices would do its products at their peaks.

    mfu = sum over kernels of flops / peak(dtype) / (seconds of the step * devices)        (Chowdhery et al. 2022, PaLM)

Flops are those of products, convolutions and attention, forward and backward, of the whole model. They are counted
once: work that several ranks repeat adds nothing.
"""

from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.operators.work import work

__all__ = ["model_flops_utilisation"]


def model_flops_utilisation(plan: Plan) -> float | None:
    """The predicted utilisation of a plan, between 0 and 1; None where the plan does not keep its graph."""
    if not {"graph", "cluster"} <= plan.source.keys() or not plan.predicted.seconds:
        return None
    graph = add_hubs(graph_from_text(plan.source["graph"]))
    device = parse_cluster(plan.source["cluster"], "the plan's cluster").device
    flows, ideal = graph.differentiable(), 0.0
    for op in graph.ops:
        if op.target != HUB:
            reads, writes = (tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs))
            forward, backward = work(op, graph, reads, writes, flows)
            flops = sum(one.flops for one in (*forward, *backward))
            ideal += flops / device.peak(graph.tensors[op.outputs[0]].dtype) if flops else 0.0
    return ideal * plan.microbatches / (plan.predicted.seconds * plan.mesh.size)
