"""Chooses the bucket size of a plan by its time line.

Large buckets start few collectives, small ones can start before backward ends; in between the predicted step is
shortest. Sizes that give the same buckets count as one. Ties go to the plan's own size, then to the largest. A bucket
is kept until it is sent, so the best size may lift the peak above the budget. Then the best that fits is taken.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoddl.core.graph import Graph
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster
from autoddl.schedule.buckets import gather_buckets, gradient_buckets, parameter_edges
from autoddl.schedule.issue_order import KnownPrices
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.schedule.timeline import predict_timeline

__all__ = ["SIZES", "best_buckets", "fitting_buckets"]

SIZES = tuple(2**k * 2**17 for k in range(9))
"""128 KiB to 32 MiB."""


def best_buckets(plan: Plan, graph: Graph, cluster: Cluster, sizes: Sequence[int] = SIZES) -> Plan:
    """The plan with the bucket size, its own or one of `sizes` in bytes, that makes the predicted step shortest.

    `graph` is the planned graph of one microbatch, `cluster` the one that the plan is for.
    """
    different: dict[object, Plan] = {}
    edges = parameter_edges(plan, graph)
    for nbytes in (plan.bucket_bytes, *sorted(sizes, reverse=True)):
        one = replace(plan, bucket_bytes=nbytes)
        different.setdefault((gradient_buckets(one, graph, edges), gather_buckets(one, graph, edges)), one)
    if len(different) == 1:
        return plan
    known = KnownPrices()
    return min(different.values(), key=lambda one: predict_timeline(one, graph, cluster, known=known).step.seconds)


def fitting_buckets(plan: Plan, graph: Graph, optimizer: str, cluster: Cluster) -> Plan:
    """The plan with the best bucket size whose peak is within the plan's budget, and with the bytes at that peak.

    Where no size is within the budget, every tensor is a bucket of its own.
    """
    best = with_memory_peak(best_buckets(plan, graph, cluster), graph, optimizer, cluster)
    if best.predicted.peak_bytes <= plan.budget:
        return best
    small = replace(plan, bucket_bytes=1)
    fits = [n for n in (plan.bucket_bytes, *SIZES) if n != best.bucket_bytes and with_memory_peak(
        replace(plan, bucket_bytes=n), graph, optimizer, cluster).predicted.peak_bytes <= plan.budget]
    return with_memory_peak(best_buckets(small, graph, cluster, fits), graph, optimizer, cluster)
