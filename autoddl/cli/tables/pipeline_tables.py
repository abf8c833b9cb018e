"""Plans with stages as people read them: the figures, the stages, and the schedule's time line.

    show PLAN                 figures, stages, time line
    show, explain, front, draw PLAN --stage 2      the same of one stage as of any plan
"""

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table

from autoddl.cli.tables.assumption_rows import (
    assumption_rows,
    pin_rows,
    recomputed_rows,
    search_rows,
    utilisation_rows,
)
from autoddl.cli.tables.compressed_rows import compressed_rows, sparse_rows
from autoddl.cli.tables.pipeline_text import draw_timeline, timeline_legend
from autoddl.cli.tables.table_style import columns, grid
from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import schedule_title, written_numbers
from autoddl.core.plan import Pipeline, Plan
from autoddl.cost_models.units import show_bytes, show_seconds
from autoddl.explain.pipeline_proof import ProvedPipeline
from autoddl.explain.staged_run import foreseen_stages, memory_of_ranks, ranks_of_stage, ranks_text, stage_beginnings
from autoddl.planner.pipelines.staged_steps import StagedStep
from autoddl.schedule.stage_lanes import copies_of

if TYPE_CHECKING:
    from autoddl.explain.run_seconds import StepAsRun

__all__ = ["pipeline_summary", "pipeline_table", "proof_table", "stage_of", "without_stages"]


def stage_of(plan: Plan, stage: int | None) -> Plan:
    """The plan itself without a number, else that of its stage. Raises InputError where it has no such stage."""
    if stage is None:
        return plan
    if plan.pipeline is None:
        raise InputError(f"this plan has no stages, and --stage {stage} asks for one: leave it out")
    if stage >= len(plan.pipeline.stages):
        raise InputError(f"this plan has stages 0 to {len(plan.pipeline.stages) - 1}, and no stage {stage}")
    return plan.pipeline.stages[stage].plan


def without_stages(plan: Plan, what: str) -> Plan:
    """The plan, if it has no stages. Raises InputError for a verb that answers for one stage at a time."""
    if plan.pipeline is not None:
        raise InputError(f"this plan has {len(plan.pipeline.stages)} stages, and {what} looks at one of them: name it "
                         f"with --stage N, from 0 to {len(plan.pipeline.stages) - 1}")
    return plan


def pipeline_table(plan: Plan, ran: "StepAsRun | None" = None) -> RenderableType:
    """The figures of a plan with stages, its stages, and its time line."""
    step = foreseen_stages(plan)
    drawn = draw_timeline(step.timeline, ranks=lambda part: ranks_text(plan, part))
    return Group(_figures(plan, step, ran), "", _stages(plan, step), "", drawn, "", _legend(plan, step))


def _legend(plan: Plan, step: StagedStep) -> Table:
    """What the names of the time line and the microbatches in flight mean."""
    assert plan.pipeline is not None
    table = grid()
    table.add_row("time line", timeline_legend(step.timeline))
    late = "; + 2 for W: two more, whose B has run and whose W has not" * any(
        stage.plan.waiting for stage in plan.pipeline.stages)
    table.add_row("in flight", "microbatches whose forward a stage has run and whose backward it has not, at most"
                               + late)
    return table


def _stage_count(pipeline: Pipeline) -> str:
    """Says how many stages there are, and on how many parts of the cluster where some share one."""
    stages, parts = len(pipeline.stages), len({one.first for one in copies_of(pipeline)})
    if parts == stages:
        return f"{stages} stages"
    each = stages // parts
    return f"{stages} stages on {parts} parts of the cluster, {each} chunks of the model on each (pp={parts},vp={each})"


def _figures(plan: Plan, step: StagedStep, ran: "StepAsRun | None") -> Table:
    assert plan.pipeline is not None
    predicted, table = plan.predicted, grid()
    table.add_row("plan", f"{plan.model} on {plan.cluster}, {plan.mesh.size} ranks over {plan.backend}")
    title, count = schedule_title(plan.pipeline.name), f"{plan.microbatches} microbatch{'es' * (plan.microbatches > 1)}"
    table.add_row("pipeline", f"{_stage_count(plan.pipeline)}, " + (
        title if written_numbers(plan.pipeline.name) else f"schedule {title}, {count}"))
    for row in (*pin_rows(plan), *assumption_rows(plan, ran), *recomputed_rows(plan), *compressed_rows(plan),
                *sparse_rows(plan)):
        table.add_row(*row)
    table.add_row("step", f"{show_seconds(predicted.seconds)} predicted; ranks do nothing in "
                          f"{step.idle:.1%} of it")
    for row in utilisation_rows(plan, ran):
        table.add_row(*row)
    kinds = ", ".join(f"{kind} {show_bytes(nbytes)}" for kind, nbytes in sorted(
        predicted.nbytes.items(), key=lambda one: -one[1]) if nbytes > 0)
    table.add_row("memory", f"{show_bytes(predicted.peak_bytes)} at the peak of the fullest rank"
                            f"{_fullest(plan, step)}: {kinds}")
    table.add_row("budget", f"{show_bytes(plan.budget)} a rank, of which the peak takes "
                            f"{predicted.peak_bytes / plan.budget:.1%}")
    bound = (f"no plan of these stages, schedules and microbatches takes less than {show_seconds(plan.bound)} under "
             f"the model: this one is at most {plan.gap:.2%} from the best ({plan.proof})")
    table.add_row("proof", bound if plan.bound else f"none: {plan.proof}")
    for row in search_rows(plan, step.idle):
        table.add_row(*row)
    return table


def _fullest(plan: Plan, step: StagedStep) -> str:
    """Says when the fullest rank has most, with which microbatches; nothing of a plan that does not keep it."""
    assert plan.pipeline is not None
    if any(stage.plan.predicted.parts is None for stage in plan.pipeline.stages):
        return ""
    every = memory_of_ranks(plan, step)
    rank = max(range(len(every)), key=lambda rank: every[rank].peak)
    most = every[rank]
    count = f" with {most.microbatches} microbatch{'es' * (most.microbatches > 1)} of its stages" * bool(
        most.microbatches)
    return f", {ranks_text(plan, rank)}, {most.when}{count}"


def _stages(plan: Plan, step: StagedStep) -> Table:
    """A row per stage: its ranks, modules, mesh, seconds and bytes."""
    assert plan.pipeline is not None
    beginnings = stage_beginnings(plan)
    table = columns("stage", "ranks", "begins with", "mesh", "forward", "backward", "once a step", "sends", "in flight",
                    "peak")
    for k, (stage, one) in enumerate(zip(plan.pipeline.stages, step.stages, strict=True)):
        table.add_row(str(k), ranks_of_stage(plan.pipeline, k), beginnings[k], str(stage.plan.mesh),
                      show_seconds(one.forward), show_seconds(one.backward + one.weight),
                      show_seconds(one.gather + one.reduce + one.update),
                      show_seconds(step.transfers[k]) if k < len(step.transfers) else "-",
                      str(stage.plan.in_flight) + (f" + {stage.plan.waiting} for W" if stage.plan.waiting else ""),
                      show_bytes(stage.plan.predicted.peak_bytes))
    return table


def pipeline_summary(plan: Plan) -> dict[str, Any]:
    """The figures that a plan with stages has besides those of any plan, under stable names."""
    if plan.pipeline is None:
        return {}
    return {"stages": len(plan.pipeline.stages), "schedule": plan.pipeline.name, "cuts": list(plan.pipeline.cuts),
            "stage_meshes": [str(stage.plan.mesh) for stage in plan.pipeline.stages],
            "stage_peak_bytes": [stage.plan.predicted.peak_bytes for stage in plan.pipeline.stages]}


def proof_table(checked: ProvedPipeline) -> RenderableType:
    """A table of what was checked of the bound of a plan with stages."""
    table = grid()
    table.add_row("bound", f"no plan of these stages, schedules and microbatches takes less than "
                           f"{show_seconds(checked.bound)}, under the model and the bounds of single stages")
    table.add_row("cost", f"this one takes {show_seconds(checked.seconds)}")
    table.add_row("gap", f"{checked.gap:.4%}")
    table.add_row("checked", f"{checked.paths} paths of {checked.candidates} candidates, all that were asked for"
                             + (" but those that are stated" if checked.stated else ""))
    for row in checked.stated:
        table.add_row("as stated", row)
    table.add_row("stages", "the bound of each stage of the plan is proved by --stage N --proof")
    return table
