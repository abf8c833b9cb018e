"""The rows of a plan's figures: what it takes for granted, how fast it trains, and what looks like a mistake."""

from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from autoddl.core.graph import graph_from_text
from autoddl.core.layout import Split
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster, show_bytes, show_seconds
from autoddl.cost_models.backends import EXECUTABLE
from autoddl.explain.assumptions import batch_of, idle_axes, odd_values, throughput, untried
from autoddl.explain.switch_facts import switch_texts
from autoddl.explain.utilisation import model_flops_utilisation
from autoddl.operators.expert_sizes import BALANCED, expert_load
from autoddl.planner.degree_meshes import degrees_meaning
from autoddl.planner.pins import parse_pin, pin_meaning

if TYPE_CHECKING:
    from autoddl.explain.run_seconds import StepAsRun

__all__ = ["assumption_rows", "idle_rows", "over_text", "pin_rows", "recompute_of", "recomputed_rows", "search_rows",
           "utilisation_rows"]


def pin_rows(plan: Plan) -> list[tuple[str, str]]:
    """Says what the configuration and the pins that a plan was asked for leave open, and what a plan leaves out."""
    mine, pins = plan.source.get("mine"), plan.source.get("pins", ())
    rows = [("mine", f"{mine}: {degrees_meaning(mine)}")] if mine else []
    if pins and "graph" in plan.source:
        graph = graph_from_text(plan.source["graph"])
        rows += [("pin", f"'{text}' {pin_meaning(parse_pin(text), graph)}") for text in pins]
    return rows + [("left out", text) for text in plan.source.get("notes", ())]


def assumption_rows(plan: Plan, ran: "StepAsRun | None" = None) -> list[tuple[str, str]]:
    """Says what was given or assumed, and samples and tokens a second; of the step as it `ran`, with a program."""
    found, rows = batch_of(plan), list[tuple[str, str]]()
    said = []
    if found is not None:
        tokens = f" ({found[1]:,} tokens)" if found[1] is not None else ""
        parts = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        said.append(f"a batch of {found[0]:,} rows{tokens}{parts}{_uneven(plan, found[0] // plan.microbatches)}")
    said.append("dtypes as the module has them" if plan.precision == "as-written" else plan.precision)
    if "optimizer" in plan.source:
        said.append(f"{plan.source['optimizer']}, whose state and update count")
    if load := _expert_load(plan):
        said.append(load)
    if not recompute_of(plan):
        said.append("no recomputation")
    rows.append(("assumes", "; ".join(said)))
    summed = "" if ran is None else ", by the sum that the search compares,"
    rows += [("also for", f"a batch of {_shapes(one['sample'])}, {show_seconds(one['seconds'])} a step{summed} and "
                          f"{show_bytes(one['peak_bytes'])} at the peak") for one in plan.source.get("samples", ())]
    if plan.backend not in EXECUTABLE:
        rows.append(("not run", over_text(plan.backend)))
    if speed := throughput(plan, None if ran is None else ran.seconds):
        rows.append(("speed", ", ".join(f"{rate:,.3g} {what}/s" if rate < 1000 else f"{rate:,.0f} {what}/s"
                                        for what, rate in speed.items()) + _by(ran)))
    if "cluster" in plan.source:
        rows += [("switches", text) for text in switch_texts(plan)]
        cluster = parse_cluster(plan.source["cluster"], "the plan's cluster")
        rows += [("unusual", text) for text in odd_values(cluster)]
        if plan.budget > (most := cluster.device.memory):
            rows.append(("unusual", f"a budget of {show_bytes(plan.budget)} is more than the {show_bytes(most)} that a "
                                    f"{cluster.device.name} has: such a plan may not run"))
    return rows


def utilisation_rows(plan: Plan, ran: "StepAsRun | None" = None) -> list[tuple[str, str]]:
    """Says which part of the devices' peak the model's products need, where the plan keeps its graph."""
    mfu = model_flops_utilisation(plan, None if ran is None else ran.seconds)
    return [] if mfu is None else [("utilisation", f"{mfu:.1%} of the peak of {plan.mesh.size} devices, in FLOPs of "
                                                   f"the model{_by(ran)}")]


def _by(ran: "StepAsRun | None") -> str:
    return "" if ran is None else f", as run by {ran.software}"


def _uneven(plan: Plan, rows: int) -> str:
    """Says so where the plan splits the rows of a microbatch into pieces of different sizes."""
    pieces = max((prod(size for size, state in zip(plan.mesh.sizes, layout, strict=True) if state == Split(0))
                  for layout in plan.inputs.values()), default=1)
    return f", in {pieces} uneven pieces of up to {ceil(rows / pieces):,}" if rows % pieces else ""


def _shapes(sample: Any) -> str:
    """The shapes of the tensors of a described sample."""
    if isinstance(sample, dict) and "tensor" in sample:
        return str(sample["tensor"])
    parts = sample.values() if isinstance(sample, dict) else sample if isinstance(sample, list) else ()
    return " and ".join(filter(None, map(_shapes, parts)))


def over_text(backend: str) -> str:
    """Says what cannot be done over a library of collectives over which no plan runs."""
    return (f"nothing was run or measured over {backend}: messages are priced as NCCL's, and `run` takes plans over "
            f"{' and '.join(EXECUTABLE)} alone; `verify` checks the plan on CPUs")


def recompute_of(plan: Plan) -> tuple[str, ...]:
    """The blocks that a plan, or a stage of it, computes again, as the plan names them."""
    stages = plan.pipeline.stages if plan.pipeline is not None else ()
    return tuple(name for one in (plan, *(stage.plan for stage in stages)) for name in one.recompute)


def recomputed_rows(plan: Plan) -> list[tuple[str, str]]:
    """Names the blocks that backward computes again, with their levels; of a plan with stages, those of each."""
    if plan.pipeline is None:
        return [("recomputed", _recomputed(plan))] if plan.recompute else []
    said = [f"stage {k}: {_recomputed(stage.plan)}" for k, stage in enumerate(plan.pipeline.stages)
            if stage.plan.recompute]
    return [("" if i else "recomputed", text) for i, text in enumerate(said)]


def _recomputed(plan: Plan) -> str:
    blocks: dict[str, list[str]] = {"": []}
    for name, _, level in (entry.partition(":") for entry in plan.recompute):
        blocks.setdefault(level, []).append(name)
    found = []
    for level, names in blocks.items():
        if names:
            shown = f"{names[0]} to {names[-1]}" if len(names) > 2 else " and ".join(names)
            found.append(f"{len(names)} block{'s' * (len(names) > 1)} in backward{', ' * bool(level)}{level}: {shown}")
    return "; ".join(found)


def _expert_load(plan: Plan) -> str:
    """Says what is assumed of the rows of experts, where the model has layers of them."""
    load = expert_load(graph_from_text(plan.source["graph"])) if "graph" in plan.source else None
    if load is None:
        return ""
    if load == BALANCED:
        return "experts chosen equally often"
    return f"{load:g} times the mean rows for the busiest experts"


def idle_rows(plan: Plan) -> list[tuple[str, str]]:
    """A row where ranks repeat each other's work."""
    idle, sizes = idle_axes(plan), dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    if not idle:
        return []
    axes = " and ".join(f"the {sizes[name]} ranks along {name}" for name in idle)
    return [("idle", f"{axes} all do the same work: sending would take longer than what it saves; a larger batch, or "
                     f"faster links there, may change that{_or_stages(plan)}")]


def _or_stages(plan: Plan) -> str:
    """Says so where stages may use ranks that repeat each other."""
    return ", and so may stages (--stages)" * any(text.startswith("--stages ") for text in untried(plan))


def search_rows(plan: Plan, idle: float = 0.0) -> list[tuple[str, str]]:
    """Says how much was weighed, and what was not and may be faster; `idle` is the part of a step of stages."""
    rows = [("search", f"{plan.candidates:,} configuration{'s' * (plan.candidates != 1)} weighed{_took(plan.timings)}")]
    return rows + [("" if i else "to try", text) for i, text in enumerate(untried(plan, idle))]


def _took(timings: Mapping[str, float]) -> str:
    """How long planning took, and parts of it that are known; a file does not say."""
    if not timings:
        return ""
    parts = ", ".join(f"{name} {show_seconds(timings[name])}" for name in ("capture", "solve") if name in timings)
    return f" in {show_seconds(timings['total'])} ({parts})"
