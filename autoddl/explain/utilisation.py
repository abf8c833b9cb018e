"""Computes model-FLOP utilisation: the part of a step in which devices would do its products at their peaks.

    mfu = sum over kernels of flops / peak(dtype) / (seconds of the step * devices)        (Chowdhery et al. 2022, PaLM)

Flops are those of products, convolutions and attention, forward and backward, of the whole model. They are counted
once: work that several ranks repeat adds nothing. Backward counts at most twice forward: what attention in one kernel
computes again there is no work of the model. The peak of float32 convolutions and recurrent layers is that of TF32, as
PyTorch runs them.
"""

from collections.abc import Hashable, Iterator

from autoddl.core.graph import Graph, graph_from_text
from autoddl.core.plan import Plan
from autoddl.cost_models import Device, parse_cluster
from autoddl.cost_models.kernel import dtype_as_run
from autoddl.operators.work import work
from autoddl.pricing.kernel_prices import computed_dtype

__all__ = ["model_flops_utilisation"]


def model_flops_utilisation(plan: Plan, seconds: float | None = None) -> float | None:
    """The predicted utilisation of a plan, between 0 and 1; None where the plan does not keep its graph.

    `seconds` are those of a step, by default those that the search compares."""
    seconds = plan.predicted.seconds if seconds is None else seconds
    if not {"graph", "cluster"} <= plan.source.keys() or not seconds:
        return None
    graph = graph_from_text(plan.source["graph"])
    device = parse_cluster(plan.source["cluster"], "the plan's cluster").device
    ideal = sum(_ideal_seconds(graph, device))
    return ideal * plan.microbatches / (seconds * plan.mesh.size)


def _ideal_seconds(graph: Graph, device: Device) -> Iterator[float]:
    """Yields the seconds of every op at the device's peak, forward and backward. Equal ops are counted once."""
    flows, known = graph.differentiable(), dict[Hashable, float]()
    for op in graph.ops:
        reads, writes = ([graph.tensors[t] for t in ts] for ts in (op.inputs, op.outputs))
        key = (op.target, op.slots, op.args, *((t.shape, t.dtype, t.kind) for t in (*reads, *writes)),
               *(t in flows for t in (*op.inputs, *op.outputs)))
        if key not in known:
            forward, backward = work(op, graph, tuple(t.shape for t in reads), tuple(t.shape for t in writes), flows)
            ahead = sum(one.all_flops for one in forward)
            flops = ahead + min(2 * ahead, sum(one.all_flops for one in backward))
            kind, kernel = next(((one.kind, one.name) for one in forward if one.flops), ("", ""))
            dtype = dtype_as_run(kind, computed_dtype(graph, op), kernel)
            known[key] = flops / device.peak(dtype) if flops else 0.0
        yield known[key]
