"""Plans as people read them, and as other programs do.

Rows that differ only in the number of a layer are one row: `layers.0-31.q_proj.weight  S(0) B`.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from autoddl.cli.tables.assumption_rows import (
    assumption_rows,
    idle_rows,
    pin_rows,
    recompute_of,
    recomputed_rows,
    search_rows,
    utilisation_rows,
)
from autoddl.cli.tables.compressed_rows import compressed_rows, sparse_rows
from autoddl.cli.tables.own_rules_text import found_by_trying, what_to_write
from autoddl.cli.tables.pipeline_tables import pipeline_summary, pipeline_table
from autoddl.cli.tables.table_style import columns, grid, layout_legend
from autoddl.core.graph import Kind, graph_from_text
from autoddl.core.hubs import HUB
from autoddl.core.names import fold_rows
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.core.plan import Conversion, Plan
from autoddl.core.precision import Precision
from autoddl.cost_models import parse_cluster
from autoddl.cost_models.machine import FLOAT64_SHARE
from autoddl.cost_models.units import show_bytes, show_seconds
from autoddl.explain.assumptions import idle_axes, throughput
from autoddl.explain.rings import places_text, ring_text
from autoddl.explain.rows_that_meet import met_rows
from autoddl.explain.utilisation import model_flops_utilisation
from autoddl.operators.recurrent_work import is_recurrent_layer
from autoddl.operators.work import base

if TYPE_CHECKING:
    from autoddl.api import Comparison, Raced
    from autoddl.explain.run_seconds import StepAsRun
    from autoddl.launch.run import TrainingResult
    from autoddl.launch.verify import Verification

__all__ = [
    "comparison_rows",
    "comparison_table",
    "operator_rows",
    "parameter_rows",
    "plan_table",
    "raced_rows",
    "raced_table",
    "summary",
    "text",
    "training_table",
    "verification_table",
]

Row = tuple[str, ...]


def text(table: RenderableType) -> str:
    """Renders a table for this terminal, or 200 columns wide for a file."""
    console = Console() if sys.stdout.isatty() else Console(width=200, file=StringIO())
    with console.capture() as captured:
        console.print(table, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def summary(plan: Plan, ran: "StepAsRun | None" = None) -> dict[str, Any]:
    """The plan's figures under stable names, in seconds and bytes; of a plan that was read, how long planning took is
    null. What is had a second, and the utilisation, are of the step as it `ran`, where a program is named."""
    predicted, step = plan.predicted, None if ran is None else ran.seconds
    return {
        "model": plan.model, "cluster": plan.cluster, "mesh": str(plan.mesh), "predicted_seconds": predicted.seconds,
        "compute_seconds": predicted.compute, "communication_seconds": predicted.communication,
        "update_seconds": predicted.update,
        "bound_seconds": plan.bound, "gap": plan.gap, "proof": plan.proof, "peak_bytes": predicted.peak_bytes,
        "line_seconds": predicted.line_seconds, "line_bound_seconds": predicted.line_bound,
        "bytes": predicted.nbytes, "budget_bytes": plan.budget,
        "sent_bytes": predicted.volume, "sent_to_switches": predicted.in_switches,
        "candidates": plan.candidates, "wall_seconds": plan.timings.get("total"),
        "capture_seconds": plan.timings.get("capture"), "solve_seconds": plan.timings.get("solve"),
        "fallback_ops": predicted.fallback, "microbatches": plan.microbatches,
        "precision": plan.precision, "mfu": model_flops_utilisation(plan, step), "recompute": list(recompute_of(plan)),
        "optimizer": plan.source.get("optimizer"), "mine": plan.source.get("mine"),
        "left_out": list(plan.source.get("notes", ())), "tried": found_by_trying(plan),
        "per_second": throughput(plan, step), "idle_axes": list(idle_axes(plan)),
        "compress": list(plan.source.get("compress", ())), "sparse": plan.source.get("sparse"),
    } | pipeline_summary(plan)


def comparison_rows(found: Sequence["Comparison"], ran: Sequence["StepAsRun | None"]) -> list[dict[str, Any]]:
    """One object per plan, the found one first; an infeasible one has no figures. With a program, each has its step as
    it `ran`, and the ratio is of these."""
    return [{"name": one.name, "predicted_seconds": one.plan.predicted.seconds if one.plan else None,
             "peak_bytes": one.plan.predicted.peak_bytes if one.plan else None,
             "mesh": str(one.plan.mesh) if one.plan else None, "ratio": ratio, "detail": one.detail,
             "microbatches": one.plan.microbatches if one.plan else None}
            | (step.to_json() if step else {}) | (pipeline_summary(one.plan) if one.plan else {})
            for one, step, ratio in zip(found, ran, _ratios(found, ran), strict=True)]


def raced_rows(found: Sequence["Raced"]) -> list[dict[str, Any]]:
    """One object per solver."""
    return [{"name": one.name, "seconds": one.seconds, "bound_seconds": one.bound, "wall_seconds": one.wall,
             "detail": one.detail} for one in found]


def raced_table(found: Sequence["Raced"]) -> RenderableType:
    """Returns a row per solver: the seconds of its plan, its bound, and the time it took."""
    table = columns("solver", "plan", "no less than", "took", "")
    for one in found:
        figures = ("-", "-") if one.seconds is None or one.bound is None else (
            show_seconds(one.seconds), show_seconds(one.bound))
        table.add_row(one.name, *figures, show_seconds(one.wall), one.detail)
    return table


def plan_table(plan: Plan, ran: "StepAsRun | None" = None) -> RenderableType:
    """The configuration and its proof, what each layer does, and what each parameter group does; or its stages."""
    if plan.pipeline is not None:
        return pipeline_table(plan, ran)
    return Group(_figures(plan, ran), "", layout_legend(), "", _parameters(plan), "", _operators(plan))


def comparison_table(found: Sequence["Comparison"], ran: Sequence["StepAsRun | None"]) -> RenderableType:
    """Returns a row per plan, with the ratio of its seconds to those of the first.

    With a program these are of the step as it `ran`, each with the seconds between which 8 of 10 lie."""
    name = next((step.software for step in ran if step is not None), "")
    table = columns("plan", *((f"as run by {name}", "8 of 10 in") if name else ("seconds",)), "ratio", "memory", "mesh",
                    "")
    for one, step, ratio in zip(found, ran, _ratios(found, ran), strict=True):
        if one.plan is None:
            table.add_row(one.name, *["-"] * (len(table.columns) - 2), one.detail)
            continue
        table.add_row(one.name, *_seconds(one.plan, step), "-" if ratio is None else f"{ratio:.2f}",
                      show_bytes(one.plan.predicted.peak_bytes), _shape(one.plan) + _parts(one.plan), one.detail)
    said = (f"steps as {name} runs them, which the sums that the search compares may order otherwise; a tie is closer "
            "than predictions of one model on one machine can tell")
    return Group(table, "", said) if name else table


def _seconds(plan: Plan, step: "StepAsRun | None") -> tuple[str, ...]:
    """The seconds of a compared plan; of a step as it runs with those between which 8 of 10 lie."""
    if step is None:
        return (show_seconds(plan.predicted.seconds),)
    return show_seconds(step.seconds), " to ".join(map(show_seconds, step.between))


def _shape(plan: Plan) -> str:
    """The mesh of a plan; of one with stages their number, their meshes and the schedule."""
    if plan.pipeline is None:
        return str(plan.mesh)
    meshes = dict.fromkeys(str(stage.plan.mesh) for stage in plan.pipeline.stages)
    return f"{len(plan.pipeline.stages)} stages of {' or '.join(meshes)}, {schedule_title(plan.pipeline.name)}"


def _parts(plan: Plan) -> str:
    parts = f" x {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
    return parts + (f", {len(plan.recompute)} blocks recomputed" if plan.recompute else "")


def verification_table(checked: "Verification") -> RenderableType:
    """Returns the errors of a verified plan against one process, and the collectives that differ."""
    table = grid()
    table.add_row("loss", f"{checked.loss_error:.1e} relative error against one process")
    table.add_row("gradients", f"{checked.gradient_error:.1e} of the largest gradient")
    if checked.twice_error:
        table.add_row("twice as wide", f"{checked.twice_error:.1e} with every dtype of the recipe at twice its width")
    if checked.coded_error:
        table.add_row("compressed", f"{checked.coded_error:.1e} of the largest gradient with what is sent coded; the "
                                    "rows above are without")
        table.add_row("", f"no coded value is off by more than {checked.coded_share:.1%} of what its codec allows")
    if checked.sparse_loss:
        table.add_row("sparse", f"{checked.sparse_loss:.1e} of the gradients is neither sent nor kept in two steps; "
                                "the rows above are without")
    if checked.besides:
        table.add_row("besides", f"{checked.besides} collectives of exponents for which lossless messages had no room")
    table.add_row("collectives", f"{checked.collective_mismatches} mismatches between the plan and what ran")
    for text in checked.mismatches:
        table.add_row("", text)
    table.add_row("ranks", f"{checked.ranks}, computing in float64")
    if checked.note:
        table.add_row("note", checked.note)
    return table


def training_table(ran: "TrainingResult") -> RenderableType:
    """Returns the losses and step seconds of a training run."""
    table = grid()
    steps = f"{len(ran.losses)} steps on {ran.ranks} ranks" + f", {ran.first} of them from before" * bool(ran.first)
    table.add_row("loss", f"{ran.losses[0]:.6f} -> {ran.losses[-1]:.6f} in {steps}")
    measured = "none was left to do" if ran.step_seconds is None else f"{show_seconds(ran.step_seconds)} measured"
    table.add_row("step", f"{measured}, {show_seconds(ran.predicted_seconds)} predicted by the plan; "
                          "`compare-run` sets their parts side by side")
    if ran.note:
        table.add_row("note", ran.note)
    if ran.record:
        table.add_row("record", ran.record)
    return table


def _ratios(found: Sequence["Comparison"], ran: Sequence["StepAsRun | None"]) -> list[float | None]:
    """The seconds of every row over those of the first: of the steps as they run, where a program is named."""
    seconds = [step.seconds if step else one.plan.predicted.seconds if one.plan else None
               for one, step in zip(found, ran, strict=True)]
    return [one / seconds[0] if one is not None and seconds[0] else None for one in seconds]


def _figures(plan: Plan, ran: "StepAsRun | None") -> Table:
    """Mesh, time, memory, proof and search, a line each."""
    predicted, table = plan.predicted, grid()
    shares = ", ".join(f"{axis} {show_seconds(s)}" for axis, s in predicted.communication.items() if s > 0)
    kinds = ", ".join(f"{kind} {show_bytes(n)}" for kind, n in _descending(predicted.nbytes) if n)
    slow = ", ".join(f"{name} {show_seconds(s)}" for name, s in _descending(predicted.fallback))
    levels = ", ".join(f"{axis} lies in level {level}" for axis, level in plan.levels.items()
                       if level not in ("", axis))
    table.add_row("plan", f"{plan.model} on {plan.cluster}, {plan.mesh.size} rank{'s' * (plan.mesh.size > 1)} over "
                          f"{plan.backend}")
    table.add_row("mesh", f"{plan.mesh}{_parts(plan)}" + (f"  ({levels})" if levels else ""))
    for row in (*pin_rows(plan), *assumption_rows(plan, ran), *idle_rows(plan)):
        table.add_row(*row)
    if met := met_rows(plan):
        table.add_row("rows meet", met)
    if ring := ring_text(plan):
        table.add_row("attention", ring)
    if places := places_text(plan):
        table.add_row("images", f"split by {places}; neighbours send each other the borders")
    if precision := _precision(plan):
        table.add_row("precision", precision)
    for row in (*recomputed_rows(plan), *compressed_rows(plan), *sparse_rows(plan)):
        table.add_row(*row)
    if float64 := _float64(plan):
        table.add_row("float64", float64)
    table.add_row("step", f"{show_seconds(predicted.seconds)} predicted, the sum of compute "
                          f"{show_seconds(predicted.compute)}, "
                          f"communication {show_seconds(sum(predicted.communication.values()))}"
                          + (f" ({shares})" if shares else "")
                          + (f", update {show_seconds(predicted.update)}" if predicted.update else ""))
    if predicted.line_seconds is not None and predicted.line_bound is not None:
        table.add_row("overlap", f"{show_seconds(predicted.line_seconds)} is what this step takes on the time line, "
                                 "where parameters' collectives hide; no plan's time line is shorter than "
                                 f"{show_seconds(predicted.line_bound)}")
    for row in utilisation_rows(plan, ran):
        table.add_row(*row)
    table.add_row("memory", f"{show_bytes(predicted.peak_bytes)} at the peak: {kinds}")
    table.add_row("budget", f"{show_bytes(plan.budget)} a rank, of which the peak takes "
                            f"{predicted.peak_bytes / plan.budget:.1%}")
    which = "no plan of this configuration" if plan.source.get("mine") else "no plan"
    table.add_row("proof", f"{which} takes less than {show_seconds(plan.bound)} under the model: this one is at most "
                           f"{plan.gap:.2%} from the best ({plan.proof})")
    for row in search_rows(plan):
        table.add_row(*row)
    table.add_row("no rule", f"replicated on every rank: {slow}" if slow else "every operator has one")
    for i, line in enumerate(found_by_trying(plan)):
        table.add_row("" if i else "tried", line)
    for line in what_to_write(plan):
        table.add_row("", f"to split it, name the dims that may be: {line}")
    return table


def _precision(plan: Plan) -> str:
    """The recipe of dtypes; of a float32 module on a device that multiplies faster in bfloat16, that recipe's rate."""
    if plan.precision not in ("as-written", "float32"):
        stored = Precision.parse(plan.precision).stored
        return f"{plan.precision}: parameters and optimizer state in {stored}, used in bfloat16"
    if not {"graph", "cluster"} <= plan.source.keys():
        return ""
    graph = graph_from_text(plan.source["graph"])
    widest = {t.dtype for t in graph.tensors if t.kind is Kind.PARAMETER}
    peaks = dict(parse_cluster(plan.source["cluster"], "the plan's cluster").device.peaks)
    slow, fast = peaks.get("float32", 0.0), peaks.get("bfloat16", 0.0)
    if widest != {"float32"} or fast <= slow:
        return ""
    kinds = (("convolutions", any("conv" in base(op) for op in graph.ops)),
             ("recurrent layers", any(map(is_recurrent_layer, graph.ops))))
    faster = " and ".join(name for name, found in kinds if found and "tf32" in peaks)
    as_tf32 = f", {faster} {peaks['tf32'] / 1e12:.3g} as TF32" if faster else ""
    return (f"float32 throughout, at most {slow / 1e12:.3g} TFLOP/s a device{as_tf32}; with --precision bf16-mixed "
            f"products run at up to {fast / 1e12:.3g} TFLOP/s")


def _float64(plan: Plan) -> str:
    """How float64 is priced on a device that lists no peak for it; empty where it does, or nothing is in float64."""
    if not {"graph", "cluster"} <= plan.source.keys():
        return ""
    device = parse_cluster(plan.source["cluster"], "the plan's cluster").device
    tensors = graph_from_text(plan.source["graph"]).tensors
    if "float64" in dict(device.peaks) or all(t.dtype != "float64" for t in tensors):
        return ""
    return f"{device.name} lists no peak for float64: priced at {FLOAT64_SHARE:g} of its float32 peak"


def _descending(parts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: -part[1])


def parameter_rows(plan: Plan) -> list[Row]:
    """Parameter groups: name, stored layout, what is split, used layout, what is sent forward and for the gradient."""
    names = _tensor_names(plan)
    used = {c.tensor: c for c in plan.conversions}
    rows = []
    for stored in plan.stored:
        edge = used.get(names[stored.fqn])
        rows.append((stored.fqn, str(stored.layout), stored.split if stored.split.strip("- ") else "", *_use(edge)))
    return _grouped(rows)


def _use(edge: Conversion | None) -> tuple[str, str, str]:
    if edge is None:
        return "as stored", "", ""
    return str(edge.target), ", ".join(edge.forward), ", ".join(edge.backward)


def operator_rows(plan: Plan) -> tuple[list[Row], dict[Row, int]]:
    """Decisions by layer (an operator that reads parameters has its layer's name), and numbers of the others by kind.

    A row of a layer is its name, the operator, what it reads and what it writes; another row lacks the name.
    """
    names = _tensor_names(plan)
    owners = {name: fqn.rpartition(".")[0] or fqn for fqn, name in names.items()}
    owner = {c.op: owners[name] for c in plan.conversions if (name := c.tensor.removesuffix(".hub")) in owners}
    layers, others = list[Row](), dict[Row, int]()
    for decision in plan.decisions:
        row = (_short(decision.target), _texts(decision.inputs), _texts(decision.outputs))
        if decision.target == HUB:
            continue
        if decision.name in owner:
            layers.append((owner[decision.name], *row))
        else:
            others[row] = others.get(row, 0) + 1
    return _grouped(layers), others


def _parameters(plan: Plan) -> Table:
    table = columns("parameter", "stored", "split", "used", "forward", "gradient")
    for row in parameter_rows(plan):
        table.add_row(*row)
    return table


def _operators(plan: Plan) -> Table:
    layers, others = operator_rows(plan)
    table = columns("layer", "operator", "reads", "writes")
    for line in layers:
        table.add_row(*line)
    if layers and others:
        table.add_section()
    for kind, count in others.items():
        table.add_row(f"{count} ×", *kind)
    return table


def _tensor_names(plan: Plan) -> dict[str, str]:
    """The names that capture gave the parameters; without the graph, as torch makes them where no two are alike."""
    found = {s.fqn: "p_" + re.sub(r"[^a-zA-Z0-9]", "_", s.fqn).lower() for s in plan.stored}
    if "graph" in plan.source:
        tensors = graph_from_text(plan.source["graph"]).tensors
        found |= {t.fqn: t.name for t in tensors if t.kind is Kind.PARAMETER}
    return found


def _short(target: str) -> str:
    return target.removeprefix("aten.").removeprefix("autoddl.").removesuffix(".default")


def _texts(layouts: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(str(layout) for layout in layouts))


def _grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows whose names differ in the first number only, and in nothing else, are one; order of first appearance."""
    return [(name, *rest) for name, rest, _ in fold_rows((name, tuple(rest)) for name, *rest in rows)]
