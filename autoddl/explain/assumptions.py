"""Says what a plan takes for granted, how fast it trains in the user's own units, and which ranks do the same work.

    batch        the rows of the sample's first tensor times the microbatches; tokens where that tensor has integers in
                 rows
    throughput   batch / seconds of a step; of the step as its program runs it, where one is named
    idle axis    a mesh axis of more than one rank along which no op's work is split: its ranks repeat each other
    untried      an option that may make a step faster and that the search was not given
    odd value    a figure of the cluster outside all that is sold, or a likely slip of its unit (`cost_models.sold`)
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from autoddl.core.graph import graph_from_text
from autoddl.core.layout import PartialSum, Split
from autoddl.core.pipeline_proofs import TIME_OVER
from autoddl.core.pipeline_schedules import written_numbers
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, parse_cluster, show_bytes
from autoddl.cost_models.links import is_network
from autoddl.cost_models.sold import how_far, link_slip, thousands_slip
from autoddl.cost_models.units import show_rate, show_seconds
from autoddl.explain.rows_that_meet import where_rows_meet

__all__ = ["batch_of", "idle_axes", "odd_values", "throughput", "untried"]

WORTH = 0.05
"""The part of a step that communication takes where options that send less, or hide it, are worth a try."""


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


def throughput(plan: Plan, seconds: float | None = None) -> dict[str, float]:
    """Samples, and tokens where there are such, a second, with a step of so many seconds.

    By default these are those of the plan: by the time line where it was chosen by it."""
    found, line = batch_of(plan), plan.predicted.line_seconds
    if seconds is None:
        seconds = plan.predicted.seconds if line is None else line
    if found is None or not seconds:
        return {}
    rows, tokens = found
    each = {"samples": float(rows)} | ({"tokens": float(tokens)} if tokens is not None else {})
    return {what: count / seconds for what, count in each.items()}


def odd_values(cluster: Cluster) -> tuple[str, ...]:
    """Names what of a cluster's figures looks like a mistake, each with its place and, where one is near, its remedy.
    """
    device, found = cluster.device, list[str]()
    figures = [("memory", device.memory, "", "bytes"), ("bandwidth of memory", device.bandwidth, "", "bytes/s"),
               *(("peak", peak, f"{dtype} ", "flop/s") for dtype, peak in device.peaks)]
    for what, value, before, unit in figures:
        found += _odd(f"device {device.name}", what, value, before, unit, device.kind)
    for i, level in enumerate(cluster.levels):
        place = f"level {level.name}"
        found += _odd(place, "bandwidth", level.bandwidth, "", "bytes/s")
        if slip := link_slip(level.bandwidth, is_network(level, i), device.name):
            found.append(f"{place}: {slip}")
        found += _odd(place, "latency", level.latency, "", "seconds")
    return tuple(found)


def _odd(place: str, what: str, value: float, before: str, unit: str, kind: str = "cpu") -> list[str]:
    """A line about a figure that is far outside of what is sold, or a thousand times what was likely meant; or none."""
    by, meant = how_far(what, value), thousands_slip(what, value, kind)
    if not by and meant is None:
        return []
    more = by > 0 or (not by and meant is not None and meant < value)
    far = f", by a factor of {abs(by):,.0f}" if by else ""
    remedy = "" if meant is None else f"; if {_shown(meant, unit)} was meant, write that"
    if remedy and what == "peak" and kind == "gpu" and not more:
        remedy += "; if it is of processor cores, write kind: cpu"
    return [f"{place}: a {what} of {before}{_shown(value, unit)} is {'more' if more else 'less'} than any that is "
            f"sold{far}{remedy}"]


def _shown(value: float, unit: str) -> str:
    """A figure with its unit, rounded."""
    shown: dict[str, Callable[[float], str]] = {"bytes": show_bytes, "bytes/s": show_rate, "seconds": show_seconds,
                                                "flop/s": partial(show_rate, what="FLOP")}
    return shown[unit](value)


def idle_axes(plan: Plan) -> tuple[str, ...]:
    """Names of the axes of which the ranks repeat all work; of a plan with stages none are looked for."""
    if plan.pipeline is not None:
        return ()
    busy = {a for one in plan.decisions for layout in (*one.inputs, *one.outputs)
            for a, state in enumerate(layout) if isinstance(state, Split | PartialSum)}
    return tuple(axis.name for a, axis in enumerate(plan.mesh.axes) if axis.size > 1 and a not in busy)


def unweighed(plan: Plan) -> int:
    """The number of pipelines for which the time was over before a plan was found, and whose bounds are below the plan.
    """
    return sum(row["seconds"] is None and row["detail"] == TIME_OVER and row["bound"] < plan.predicted.seconds
               for row in plan.source.get("alternatives", ()))


def untried(plan: Plan, idle: float = 0.0) -> tuple[str, ...]:
    """Names the options that may make the step of a plan faster, and that its search was not given.

    `idle` is the part of the step in which ranks of stages compute nothing. Options that shorten computation come first
    where it takes longer than communication. The last one says more of a step of a plan that was made for no program.
    """
    source, predicted = plan.source, plan.predicted
    if plan.mesh.size == 1 or not source:
        return _unnamed_program(plan)
    sent = sum(predicted.communication.values()) > WORTH * predicted.seconds
    compiled = "software" in source or "cluster" not in source or parse_cluster(
        source["cluster"], "the plan's cluster").device.compiled
    recipe, staged = plan.precision.split(","), plan.pipeline is not None
    asked, left = max((source.get("asked") or {}).get("stages") or [1]) > 1, unweighed(plan)
    parts = _more_parts(plan) if idle > WORTH else ""
    texts = [text for text, wanted in (
        (f"--microbatches {parts} leaves shorter bubbles, as far as memory allows", bool(parts)),
        ("--overlap finds the plan whose communication hides best",
         sent and not staged and predicted.line_bound is None),
        ("--stages 1,2,4 --microbatches 4,8 has pipelines too", (sent or bool(idle_axes(plan))) and not staged
         and not asked and not source.get("mine") and (
             "graph" not in source or where_rows_meet(graph_from_text(source["graph"])) is None)),
        (f"--precision {plan.precision},reduce=bfloat16 sends gradients in half the bytes",
         sent and recipe[0] == "bf16-mixed" and not any(word.startswith("reduce=") for word in recipe)),
        ("--compress gradients=int8 sends gradients in a byte a value, with an error",
         sent and not source.get("compress") and not plan.sparse_sums),
        (f"a larger --stages-limit: {left} pipelines may be faster, and the time was over before", left > 0),
        ("--compiled prices programs of torch.compile", plan.backend != "gloo" and not compiled)) if wanted]
    first = texts[::-1] if sum(predicted.communication.values()) < predicted.compute else texts
    return (*first, *_unnamed_program(plan))


def _more_parts(plan: Plan) -> str:
    """Numbers of microbatches above those that a plan with stages was weighed with, as an option has them; or ""."""
    batch, asked = batch_of(plan), (plan.source.get("asked") or {}).get("microbatches") or [plan.microbatches]
    if batch is None or plan.pipeline is None or written_numbers(plan.pipeline.name) or plan.microbatches < max(asked):
        return ""
    more = [n for n in range(plan.microbatches + 1, batch[0] + 1) if batch[0] % n == 0]
    enough = [n for n in more if n >= len(plan.pipeline.ranks)]
    return ",".join(map(str, enough[:2] or more[-2:]))


def _unnamed_program(plan: Plan) -> tuple[str, ...]:
    """Names the option that says how a training program runs the plan, where published runs are of such devices.

    A stage has no step of its own, and no sample.
    """
    text = plan.source.get("cluster")
    if text is None or "software" in plan.source or not plan.sample or plan.backend == "gloo":
        return ()
    device = parse_cluster(text, "the plan's cluster").device
    if device.kind != "gpu":
        return ()
    named, instead = ("compiled", ", without --compiled,") if device.compiled else ("eager", "")
    return (f"--software {named}{instead} (or torchtitan, nemo ...) says how long a step takes as that training "
            "program runs it, and between which seconds 8 of 10 steps would lie",)
