"""Says what a plan takes for granted, how fast it trains in the user's own units, and which ranks do the same work.

    batch        the rows of the sample's first tensor times the microbatches; tokens where that tensor has integers in
                 rows
    throughput   batch / seconds of a step
    idle axis    a mesh axis of more than one rank along which no op's work is split: its ranks repeat each other
    odd value    a figure of the cluster far outside all that is sold (`cost_models.sold`)
"""

from collections.abc import Iterator, Mapping
from typing import Any

from autoddl.core.layout import PartialSum, Split
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, show_bytes
from autoddl.cost_models.sold import how_far
from autoddl.cost_models.units import show_rate, show_seconds

__all__ = ["batch_of", "idle_axes", "odd_values", "throughput"]


def _tensors(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the tensors of a described sample, in order."""
    if isinstance(tree, Mapping):
        if "tensor" in tree and "dtype" in tree:
            yield tree
            return
        tree = list(tree.values())
    for part in tree if isinstance(tree, list | tuple) else ():
        yield from _tensors(part)


def batch_of(plan: Plan) -> tuple[int, int | None] | None:
    """Rows of the global batch, and tokens where the rows are of such; None for a sample without a tensor of rows."""
    first = next((one for one in _tensors(plan.sample) if one["tensor"]), None)
    if first is None:
        return None
    shape = first["tensor"]
    rows = int(shape[0]) * plan.microbatches
    tokens = rows * int(shape[1]) if len(shape) == 2 and str(first["dtype"]).startswith("int") else None
    return rows, tokens


def throughput(plan: Plan) -> dict[str, float]:
    """Samples, and tokens where there are such, a second."""
    found = batch_of(plan)
    if found is None or not plan.predicted.seconds:
        return {}
    rows, tokens = found
    each = {"samples": float(rows)} | ({"tokens": float(tokens)} if tokens is not None else {})
    return {what: count / plan.predicted.seconds for what, count in each.items()}


def odd_values(cluster: Cluster) -> tuple[str, ...]:
    """Names what of a cluster's figures looks like a mistake, each with its place."""
    device = cluster.device
    figures = [(f"device {device.name}", "memory", device.memory, show_bytes(device.memory)),
               (f"device {device.name}", "bandwidth of memory", device.bandwidth, show_rate(device.bandwidth)),
               *((f"device {device.name}", "peak", peak, f"{dtype} {show_rate(peak, 'FLOP')}")
                 for dtype, peak in device.peaks)]
    for level in cluster.levels:
        figures += [(f"level {level.name}", "bandwidth", level.bandwidth, show_rate(level.bandwidth)),
                    (f"level {level.name}", "latency", level.latency, show_seconds(level.latency))]
    found = [(place, what, shown, how_far(what, value)) for place, what, value, shown in figures]
    return tuple(f"{place}: a {what} of {shown} is {'more' if by > 0 else 'less'} than any that is sold, by a factor "
                 f"of {abs(by):,.0f}" for place, what, shown, by in found if by)


def idle_axes(plan: Plan) -> tuple[str, ...]:
    """Names of the axes of which the ranks repeat all work; of a plan with stages none are looked for."""
    if plan.pipeline is not None:
        return ()
    busy = {a for one in plan.decisions for layout in (*one.inputs, *one.outputs)
            for a, state in enumerate(layout) if isinstance(state, Split | PartialSum)}
    return tuple(axis.name for a, axis in enumerate(plan.mesh.axes) if axis.size > 1 and a not in busy)
