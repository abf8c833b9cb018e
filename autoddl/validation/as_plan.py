"""Prices a published run as a plan: a model, a cluster, degrees and a software profile, by the functions of `plan`.

    row -> model        a `Decoder` of the row's sizes, on the meta device                                `layers`
        -> cluster      known devices and links, whose programs are those of a profile                    `run_by`
        -> degrees      `tp=8,pp=4,dp=16,zero=1,sp,recompute=full`, the text of `plan --mine`             `core.degrees`
        -> seconds      of the best plan of these degrees, timed as the profile's program runs it         `run_step`

Layers are alike. So a model of one layer and one of two are planned, and the time of n layers follows:

    T(n) = T(1) + (n - 1) (T(2) - T(1))        of the device, of the host and of the update, each for itself

Of a pipeline the first, a middle and the last stage are planned, with a layer each. Every other layer of a stage takes
what the middle stage takes. The time line of the schedule has all stages and microbatches.

Memory is no bound here: the run fitted.

A profile changes the constants of the machine. Plans are chosen under it, or under another one and priced again: to see
what a constant does, the same plans are priced twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from time import perf_counter

from autoddl.core.degrees import Degrees
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Flight
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.pipeline_schedules import generate, splits_backward
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph, transfers_of
from autoddl.cost_models import Cluster
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.cost_models.timelines.pipelines import simulate_pipeline
from autoddl.planner.assemble import assemble
from autoddl.planner.candidates import Candidate, Solved, Space, under_policies
from autoddl.planner.degree_meshes import DegreesRegion, degree_mesh
from autoddl.planner.finish import finished_plan, on_cluster
from autoddl.planner.mesh_search import search
from autoddl.planner.options import PlanOptions
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.pipelines.part_ranks import ranks_of_parts
from autoddl.planner.pipelines.stage_plans import finish_stage, search_stage, stage_task
from autoddl.planner.pipelines.staged import stage_cluster
from autoddl.planner.pipelines.staged_steps import transfer_ends, transfer_seconds
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.planner.task import PlanTask
from autoddl.pricing.policies import NO_POLICIES
from autoddl.schedule.run_step import RunParts, run_parts, stage_run_seconds
from autoddl.schedule.stage_messages import busiest
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.run_parts import even_length, schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.templates import model_graph

__all__ = ["Chosen", "by_share", "flat_graphs", "flat_plan", "price_as_plan", "stage_plans", "task_of_run",
           "with_all_layers"]

UNBOUND = 1e18
"""Bytes of a budget that binds nothing."""


def price_as_plan(run: Run, microbatch: int, profile: Profile = SHIPPED, chosen: Profile | None = None) -> float:
    """Seconds of a step of a run with `microbatch` sequences a rank, on a machine with the constants of `profile`.

    Plans are chosen under the profile `chosen`, by default under `profile`. Raises Unpriced or InputError with the
    reason.
    """
    plain = RunPlan.of(run, microbatch)
    asked, at = plain.under(chosen or profile), plain.under(profile)
    seconds = by_share(run, asked, partial(_step_seconds, run, None if chosen is None else at))
    return seconds * (run.seq / even_length(run))


def by_share(run: Run, asked: RunPlan, figure: Callable[[RunPlan], float]) -> float:
    """A figure of a run, of whose layers only a share may be computed again."""
    found = figure(asked)
    if run.recomputed_share < 1 and asked.recomputes_all:
        none = figure(asked.without_recompute())
        return none + run.recomputed_share * (found - none)
    return found


def _step_seconds(run: Run, at: RunPlan | None, asked: RunPlan) -> float:
    """Seconds of the plans that `asked` chooses, on the machine of `at`; None for that of `asked`."""
    if run.pp > 1:
        return _staged_seconds(run, asked, at)
    few = [_flat_parts(asked, graph, at) for graph in flat_graphs(run, asked)]
    return RunParts(*(with_all_layers(run, part) for part in zip(*few, strict=True))).seconds


def flat_graphs(run: Run, asked: RunPlan) -> list[Graph]:
    """The run's model with one layer, and with two where it has as many."""
    return [model_graph(asked.shape, n, asked.precision) for n in range(1, min(run.layers, 2) + 1)]


def with_all_layers(run: Run, few: Sequence[float]) -> float:
    """A figure of all layers of a run, from that of one and of two."""
    return few[0] + (run.layers - 1) * (few[-1] - few[0])


def task_of_run(asked: RunPlan, graph: Graph) -> PlanTask:
    """The task of planning a run's model, or fewer layers of it, with the run's degrees alone."""
    options = PlanOptions(mine=asked.degrees, precision=asked.precision, optimizer=asked.optimizer, workers=1,
                          budget=UNBOUND, microbatches=(asked.microbatches,)).configured()
    return PlanTask(add_hubs(graph), graph, {}, asked.cluster, UNBOUND, options, {"model": "", "factory": {}}, 0.0,
                    perf_counter())


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan of a whole model or a stage, the choices that it was made of, and its graph with hubs."""

    plan: Plan
    space: Space
    choice: tuple[int, ...]
    graph: Graph

    @classmethod
    def of(cls, plan: Plan, solved: Solved, graph: Graph) -> "Chosen":
        return cls(plan, Space(solved.pricing, NO_POLICIES, solved.variables), tuple(solved.solution.choice), graph)

    def on(self, cluster: Cluster | None) -> Plan:
        """The plan priced again on a cluster; None for as it was made."""
        return self.plan if cluster is None else on_cluster(self.plan, self.space, self.choice, cluster)


@lru_cache(maxsize=4_000)
def _flat_parts(asked: RunPlan, graph: Graph, at: RunPlan | None) -> RunParts:
    """Seconds of device, host and update of a step without stages."""
    chosen, place = flat_plan(asked, graph), at or asked
    return run_parts(chosen.on(None if at is None else at.cluster), chosen.graph, place.cluster, place.software)


@lru_cache(maxsize=512)
def flat_plan(asked: RunPlan, graph: Graph) -> Chosen:
    """The best plan without stages."""
    task = task_of_run(asked, graph)
    options = task.options
    plain = [Candidate(mesh, region_of(options), asked.microbatches) for mesh in allowed_meshes(task.cluster, options)]
    tried = under_policies(plain, options.recompute)
    found = search(task, tried)
    plan = finished_plan(task, found, len(tried), options, task.confirmed(asked.microbatches))
    return Chosen.of(plan, found.best, task.graph)


def _staged_seconds(run: Run, asked: RunPlan, at: RunPlan | None) -> float:
    """Seconds of a step of a pipeline: the time line of its schedule."""
    name, _ = schedule_of(run)
    asked.check_schedule(run)
    (first, middle, last), between = _three_stages(asked, model_graph(asked.shape, 3, asked.precision), name, at)
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
def _three_stages(asked: RunPlan, graph: Graph, name: str, at: RunPlan | None
                  ) -> tuple[Sequence[StageSeconds], float]:
    """The seconds of the first, a middle and the last stage, with a layer each, and those of a transfer."""
    place, parts = at or asked, Degrees.parse(asked.degrees).pp
    part = stage_cluster(place.cluster, parts)
    cuts = uniform_cuts(graph, 3)
    chosen = stage_plans(asked, graph, cuts)
    plans = [one.on(part if at else None) for one in chosen]
    seconds = tuple(stage_run_seconds(plan, one.graph, part, place.software, splits_backward(name))
                    for plan, one in zip(plans, chosen, strict=True))
    return seconds, _between(place.cluster, parts, plans, graph, cuts)


@lru_cache(maxsize=512)
def stage_plans(asked: RunPlan, graph: Graph, cuts: tuple[int, ...]) -> tuple[Chosen, ...]:
    """The best plans of the stages between cuts."""
    degrees = Degrees.parse(asked.degrees)
    alone = replace(asked, degrees=str(replace(degrees, pp=1)))
    part = stage_cluster(asked.cluster, degrees.pp)
    task, inner = task_of_run(alone, graph), replace(degrees, pp=1).on(part.size)
    within = [Candidate(degree_mesh(part, inner), DegreesRegion(inner, graph))]
    chosen = []
    for stage in cut_graph(graph, cuts):
        found = search_stage(task, stage, part, asked.microbatches, Flight(1, 0), within)
        own = stage_task(task, stage, part, asked.microbatches)
        made = assemble(found.best.pricing, found.best.solution, found.best.variables)
        chosen.append(Chosen.of(finish_stage(own, stage, found, made), found.best, own.graph))
    return tuple(chosen)


def _between(cluster: Cluster, parts: int, plans: Sequence[Plan], graph: Graph, cuts: tuple[int, ...]) -> float:
    """Seconds of the transfer of a microbatch from the first of `parts` stages to the next, or of its gradient."""
    found, ranks = [0.0, 0.0], ranks_of_parts(cluster, parts)
    for one in transfers_of(graph, cuts):
        if one.source == 0:
            tensor = next(tensor for tensor in graph.tensors if tensor.name == one.tensor)
            here, there = transfer_ends(one, plans)
            for way, ends in enumerate(((*here, *there), (*there, *here))):
                nbytes = busiest(tensor.shape, *ends) * tensor.itemsize
                found[way] += transfer_seconds(cluster, ranks, 0, 1, nbytes)
    return max(found)
