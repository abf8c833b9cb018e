"""Plans other programs of a plan with stages: evaluation, and batches of other shapes.

    training graph      op ... op | op ... op | op ...        cut by the plan
    another graph       op op ... | op ...    | op ...        cut where its ops are those of the same stage

The graphs are those of one module, so their ops are alike. Dropout and updates of buffers may be left out or added. Ops
are matched in order by module and kind. Every stage is then planned by itself, on its own mesh, with the stored
layout of every parameter pinned.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from torch import nn

from autoddl.capture.capture import Captured
from autoddl.capture.sample import Sample, parted
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op, graph_from_text, graph_to_text
from autoddl.core.hubs import needed_ops
from autoddl.core.pipeline import Schedule
from autoddl.core.plan import Pipeline, Plan
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models import parse_cluster
from autoddl.planner.options import PlanOptions
from autoddl.planner.pins import pins_of_layouts
from autoddl.planner.pipelines.stage_plans import pipeline_plan, solve_stages
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.task import task_of

__all__ = ["divides", "staged_variant"]

LIKE = ("1f1b", "zb-v")
"""Schedules of fewer microbatches than zb-h1 and zb-h2, or dualpipe-v, with the same places of stages."""


def staged_variant(module: nn.Module, plan: Plan, batch: Sample, options: PlanOptions,
                   captures: Callable[[int], Captured] | None = None) -> Plan:
    """A plan with the stages of `plan`, for `module` on such a batch; `options` are those of every stage but its mesh.

    `captures` has the module captured with one of so many microbatches; by default it is captured here.

    A batch whose rows the microbatches do not divide has fewer of them. Where the schedule of `plan` has none of so
    few, another with the same places runs them. Raises InputError where the module cannot be cut into the same stages,
    and where no schedule runs such microbatches.
    """
    assert plan.pipeline is not None
    cluster = parse_cluster(plan.source["cluster"], "the plan's cluster")
    name, parts = _schedule(plan, plan.pipeline, batch)
    task = task_of(module, cluster, batch, replace(options, microbatches=(parts,)).configured(), plan.model, None,
                   captures)
    graph, known = task.confirmed(parts).original, graph_from_text(plan.source["graph"])
    staged = Staged(matched_cuts(known, graph, plan.pipeline.cuts), name, parts, sizes=plan.pipeline.sizes)
    graphs = cut_graph(graph, staged.cuts)
    _check_same(cut_graph(known, plan.pipeline.cuts), graphs)
    tasks = [replace(task, options=replace(task.options, mesh=str(stage.plan.mesh),
                                           pins=pins_of_layouts(stage.plan, one.graph)))
             for stage, one in zip(plan.pipeline.stages, graphs, strict=True)]
    made = pipeline_plan(task, staged, solve_stages(tasks, staged, graphs))
    return replace(made, source={"cluster": cluster.to_yaml(), "graph": graph_to_text(graph)})


def _schedule(plan: Plan, pipeline: Pipeline, batch: Sample) -> tuple[str, int]:
    """The name of a schedule with the places of that of `plan`, and the most microbatches of such a batch that it runs.

    Raises InputError where there is none.
    """
    counts = [n for n in range(plan.microbatches, 0, -1) if plan.microbatches % n == 0 and divides(batch, n)]
    places, problems = Schedule.parse(pipeline.schedule).placement, []
    for name in (pipeline.name, *LIKE):
        for parts in counts:
            try:
                if Staged(pipeline.cuts, name, parts, sizes=pipeline.sizes).schedule().placement == places:
                    return name, parts
            except InputError as error:
                problems.append(str(error))
    raise InputError(f"its rows make no more than {counts[0]} of the plan's {plan.microbatches} microbatches. "
                     f"{problems[0]}. Drop such a batch, or pad its rows")


def divides(batch: Sample, microbatches: int) -> bool:
    """Whether the rows of a batch make so many microbatches."""
    try:
        parted(batch, microbatches)
    except InputError:
        return False
    return True


def matched_cuts(known: Graph, graph: Graph, cuts: Sequence[int]) -> tuple[int, ...]:
    """The positions in `graph` of the ops with which stages of the `known` graph begin, or of the next that it has."""
    before, after = ([_kind(op) for op in needed_ops(one)] for one in (known, graph))
    same = {block.a + k: block.b + k for block in SequenceMatcher(None, before, after, False).get_matching_blocks()
            for k in range(block.size)}
    return tuple(next((same[at] for at in range(cut, len(before)) if at in same), len(after)) for cut in cuts)


def _kind(op: Op) -> tuple[str, str]:
    """The module of an op, and its name up to what evaluation has in place of it."""
    return op.module, op.target.removesuffix(".default").removesuffix("_functional").removesuffix("_no_training")


def _check_same(known: Sequence[StageGraph], graphs: Sequence[StageGraph]) -> None:
    """Raises InputError where a stage has a parameter that it has not in the plan."""
    for s, (before, after) in enumerate(zip(known, graphs, strict=True)):
        there, here = ({t.fqn for t in one.graph.tensors if t.kind is Kind.PARAMETER} for one in (before, after))
        for name in sorted(here - there):
            raise InputError(f"stage {s} would read {name}, which another stage has: plan without stages")
