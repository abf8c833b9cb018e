"""Prices a published run as a plan: a model, a cluster, degrees and a software profile, by the functions of `plan`.

    row -> model        a `Decoder` of the row's sizes, on the meta device                                `layers`
        -> cluster      known devices and links, whose programs are those of a profile                    `run_by`
        -> degrees      `tp=8,pp=4,dp=16,zero=1,sp,recompute=full`, the text of `plan --mine`             `core.degrees`
        -> seconds      of the best plan of these degrees, timed as the profile's program runs it         `run_step`

Layers are alike. So a model of one layer and one of two are planned, and the time of n layers follows:

    T(n) = T(1) + (n - 1) (T(2) - T(1))

Of a pipeline the first, a middle and the last stage are planned, with a layer each. Every other layer of a stage takes
what the middle stage takes. The time line of the schedule has all stages and microbatches.

Memory is no bound here: the run fitted.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from time import perf_counter

from autoddl.api import plan_among
from autoddl.core.degrees import Degrees
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Flight
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph, transfers_of
from autoddl.cost_models import Cluster
from autoddl.cost_models.pipelines import simulate_pipeline
from autoddl.planner.assemble import assemble
from autoddl.planner.candidates import Candidate, under_policies
from autoddl.planner.degree_meshes import DegreesRegion, degree_meshes
from autoddl.planner.options import PlanOptions
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.pipelines.stage_plans import (
    finish_stage,
    search_stage,
    splits_backward,
    stage_cluster,
    stage_task,
    transfer_ends,
    transfer_seconds,
)
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.planner.task import PlanTask
from autoddl.schedule.run_step import run_seconds, stage_run_seconds
from autoddl.schedule.stage_messages import busiest, messages
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.run_parts import schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.templates import model_graph

__all__ = ["price_as_plan", "task_of_run"]

UNBOUND = 1e18
"""Bytes of a budget that binds nothing."""


def price_as_plan(run: Run, microbatch: int) -> float:
    """Seconds of a step of a run with `microbatch` sequences a rank. Raises Unpriced or InputError with the reason."""
    asked = RunPlan.of(run, microbatch)
    seconds = _step_seconds(run, asked)
    if run.recomputed_share < 1 and asked.recomputes_all:
        none = _step_seconds(run, asked.without_recompute())
        return none + run.recomputed_share * (seconds - none)
    return seconds


def _step_seconds(run: Run, asked: RunPlan) -> float:
    if run.pp > 1:
        return _staged_seconds(run, asked)
    few = min(run.layers, 2)
    times = [_flat_seconds(asked, model_graph(asked.shape, n, asked.precision)) for n in range(1, few + 1)]
    return times[0] + (run.layers - 1) * (times[-1] - times[0])


def task_of_run(asked: RunPlan, graph: Graph) -> PlanTask:
    """The task of planning a run's model, or fewer layers of it, with the run's degrees alone."""
    options = PlanOptions(mine=asked.degrees, precision=asked.precision, optimizer=asked.optimizer, workers=1,
                          budget=UNBOUND, microbatches=(asked.microbatches,)).configured()
    return PlanTask(add_hubs(graph), graph, {}, asked.cluster, UNBOUND, options, {"model": "", "factory": {}}, 0.0,
                    perf_counter())


@lru_cache(maxsize=4_000)
def _flat_seconds(asked: RunPlan, graph: Graph) -> float:
    """Seconds of a step without stages."""
    task = task_of_run(asked, graph)
    options = task.options
    plain = [Candidate(mesh, region_of(options), asked.microbatches) for mesh in allowed_meshes(task.cluster, options)]
    plan = plan_among(task, under_policies(plain, options.recompute))
    return run_seconds(plan, task.graph, task.cluster, asked.software)


def _staged_seconds(run: Run, asked: RunPlan) -> float:
    """Seconds of a step of a pipeline: the time line of its schedule."""
    name, _ = schedule_of(run)
    asked.check_schedule(run)
    (first, middle, last), between = _three_stages(asked, model_graph(asked.shape, 3, asked.precision), name)
    layers = stage_layers(run)
    ends = {0: first, len(layers) - 1: last}
    stages = [_with_layers(ends.get(s, middle), middle, n) for s, n in enumerate(layers)]
    columns = list(zip(*stages, strict=True))
    line = simulate_pipeline(generate(name, run.pp, asked.microbatches), columns[0], columns[1], columns[2],
                             (between,) * (len(layers) - 1), columns[4], gather_seconds=columns[3],
                             update_seconds=columns[5])
    if not name.startswith("zb"):
        return line.makespan
    spans = [[at for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
              if task.ranks == (rank,) for at in (start, end)] for rank in range(run.pp)]
    return max(max(span) - min(span) for span in spans)


def _with_layers(one: StageSeconds, middle: StageSeconds, layers: int) -> StageSeconds:
    """A stage with so many layers, from one with a single layer."""
    return StageSeconds(*(a + (layers - 1) * more for a, more in zip(one, middle, strict=True)))


@lru_cache(maxsize=4_000)
def _three_stages(asked: RunPlan, graph: Graph, name: str) -> tuple[Sequence[StageSeconds], float]:
    """The seconds of the first, a middle and the last stage, with a layer each, and those of a transfer."""
    degrees = Degrees.parse(asked.degrees)
    alone = replace(asked, degrees=str(replace(degrees, pp=1)))
    part, cuts = stage_cluster(asked.cluster, degrees.pp), uniform_cuts(graph, 3)
    task, inner = task_of_run(alone, graph), replace(degrees, pp=1).on(part.size)
    within = [Candidate(mesh, DegreesRegion(inner, graph)) for mesh in degree_meshes(part, inner)]
    plans, seconds = list[Plan](), list[StageSeconds]()
    for stage in cut_graph(graph, cuts):
        found = search_stage(task, stage, part, asked.microbatches, Flight(1, 0), within)
        own = stage_task(task, stage, part, asked.microbatches)
        made = assemble(found.best.pricing, found.best.solution, found.best.variables)
        plans.append(finish_stage(own, stage, found, made))
        seconds.append(stage_run_seconds(plans[-1], own.graph, part, asked.software, splits_backward(name)))
    return tuple(seconds), _between(asked.cluster, degrees.pp, plans, graph, cuts)


def _between(cluster: Cluster, parts: int, plans: Sequence[Plan], graph: Graph, cuts: tuple[int, ...]) -> float:
    """Seconds of the transfer of a microbatch from the first of `parts` stages to the next, or of its gradient."""
    found = [0.0, 0.0]
    for one in transfers_of(graph, cuts):
        if one.source == 0:
            tensor = next(tensor for tensor in graph.tensors if tensor.name == one.tensor)
            here, there = transfer_ends(one, plans)
            for way, ends in enumerate(((*here, *there), (*there, *here))):
                nbytes = busiest(messages(tensor.shape, *ends)) * tensor.itemsize
                found[way] += transfer_seconds(cluster, parts, 0, 1, nbytes)
    return max(found)
