"""Makes the plan of a pipeline whose stages, schedule and microbatches are given: every stage is planned by itself.

A stage is a graph (`core.stages`) on its part of the cluster (`staged`), planned like any model. As many microbatches
are in flight as the schedule has there. Stages of one part share the budget of its ranks.

    stage        min of  m (f + b) + gather + reduce + update      over its meshes and layouts
                 where a stage has copies, m are the microbatches of one
    pipeline     makespan of the schedule with these seconds, and those of the transfers (`staged_steps`)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.pipeline import Flight, flights_of
from autoddl.core.plan import VERSION, Pipeline, Plan, Prediction, Stage
from autoddl.core.recompute import policy_of_part
from autoddl.core.stages import StageGraph, check_parameters, cut_graph, transfers_of
from autoddl.cost_models import Cluster
from autoddl.planner.assemble import Assembled, assemble, plan_of
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.candidates import Candidate, under_policies
from autoddl.planner.mesh_search import Found, search
from autoddl.planner.pins import allowed_meshes, pins_of_part, region_of
from autoddl.planner.pipelines.part_ranks import part_clusters, ranks_of_parts
from autoddl.planner.pipelines.staged import PIPE, Staged, mesh_of_parts
from autoddl.planner.pipelines.staged_steps import StagedStep, staged_step, transfer_ends, transfer_passes
from autoddl.planner.pipelines.stored_once import bytes_twice
from autoddl.planner.priced_bytes import PricedSearch
from autoddl.planner.question import source_of
from autoddl.planner.task import PlanTask
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.schedule.stage_bytes import rank_kinds
from autoddl.schedule.stage_lanes import stored_apart

__all__ = ["finish_stage", "pipeline_plan", "prices_of_stage", "search_stage", "solve_stages", "stage_candidates",
           "stage_task"]

ROUNDING = 1e-12
"""The part of a budget by which bytes that are summed in another order may be above it."""


def stage_task(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int) -> PlanTask:
    """The task of planning one stage on its part of the cluster, with the pins and the named blocks that it has."""
    graph = add_hubs(stage.graph)
    recompute = tuple(dict.fromkeys(policy_of_part(policy, graph) for policy in task.options.recompute))
    options = replace(task.options, microbatches=(microbatches,), stages=(1,), cut=(), recompute=recompute,
                      pins=pins_of_part(task.options.pins, graph, task.graph))
    return replace(task, graph=graph, original=stage.graph, spec={}, cluster=cluster, options=options, variants=None)


def search_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
                 within: Sequence[Candidate] = ()) -> Found:
    """The fastest layouts of one stage on its part of the cluster, with a bound of all of them.

    `within` are the meshes and regions to look into, by default all that the options allow. Raises Infeasible where no
    plan fits the budget with so many microbatches in flight.
    """
    return search(*stage_candidates(task, stage, cluster, microbatches, flight, within))


def prices_of_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
                    within: Sequence[Candidate] = ()) -> PricedSearch:
    """The search for the least seconds + price * bytes at the peak of one stage; all is as in `search_stage`."""
    return PricedSearch(*stage_candidates(task, stage, cluster, microbatches, flight, within))


def stage_candidates(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight,
                     within: Sequence[Candidate]) -> tuple[PlanTask, list[Candidate]]:
    """The task of a stage, and the candidates of its plans."""
    own = stage_task(task, stage, cluster, microbatches)
    free = within or [Candidate(mesh, region_of(own.options)) for mesh in allowed_meshes(cluster, own.options)]
    plain = [replace(one, microbatches=microbatches, in_flight=flight.in_flight, waiting=flight.waiting,
                     later=flight.later, stays=flight.is_several) for one in free]
    return own, under_policies(plain, own.options.recompute)


def finish_stage(task: PlanTask, stage: StageGraph, found: Found, made: Assembled) -> Plan:
    """The plan of what was found for a stage; `task` is that of the stage."""
    solved = found.best
    about = dict(task.about) | {
        "bound": min(found.bound, made.predicted.seconds), "budget": task.budget, "candidates": 1, "sample": {},
        "fingerprints": {"model": stage.graph.fingerprint(), "cluster": task.cluster.fingerprint,
                         "autoddl": str(VERSION)},
        "source": source_of(task, solved, task.options), "precision": task.options.precision}
    plan = plan_of(made, solved.pricing, solved.solution, about)
    return with_memory_peak(replace(plan, bucket_bytes=1), task.graph, task.options.optimizer, task.cluster)


def solve_stage(task: PlanTask, stage: StageGraph, cluster: Cluster, microbatches: int, flight: Flight) -> Plan:
    """The fastest plan of one stage, with the best bucket size. Raises Infeasible as `search_stage`."""
    found = search_stage(task, stage, cluster, microbatches, flight)
    made = assemble(found.best.pricing, found.best.solution, found.best.variables)
    own = stage_task(task, stage, cluster, microbatches)
    return fitting_buckets(finish_stage(own, stage, found, made), own.graph, own.options.optimizer, cluster)


def solve_stages(tasks: Sequence[PlanTask], staged: Staged, graphs: Sequence[StageGraph]) -> list[Plan]:
    """The fastest plan of every stage of a pipeline, by a task of its own. Raises as `pipeline_plan`."""
    schedule, parts = staged.schedule(), part_clusters(tasks[0].cluster, staged.parts, staged.sizes)
    return [solve_stage(task, graph, parts[at], staged.microbatches // schedule.pipes, flight) for task, graph, at,
            flight in zip(tasks, graphs, schedule.placement[0], flights_of(schedule), strict=True)]


def pipeline_plan(task: PlanTask, staged: Staged, plans: Sequence[Plan] = ()) -> Plan:
    """The plan of a pipeline; `plans` are those of its stages where they are known already.

    Its bound is that of no other pipeline: the caller knows more. Raises InputError where the graph or the cluster
    cannot be cut so. Raises Infeasible where a stage has no plan, or those of a rank are above the budget together.
    """
    staged = replace(staged, compress=task.options.compress)
    schedule, variant = staged.schedule(), task.confirmed(staged.microbatches)
    part_clusters(task.cluster, staged.parts, staged.sizes)
    graphs, ranks = cut_graph(variant.original, staged.cuts), ranks_of_parts(task.cluster, staged.parts, staged.sizes)
    check_parameters(graphs, staged.placement)
    plans = plans or solve_stages([task] * len(graphs), staged, graphs)
    if (apart := stored_apart(plans, graphs, staged.placement)) is not None:
        raise InputError(f"stages {apart.first} and {apart.second} run on the same ranks and share the parameter "
                         f"{apart.fqn}, but store other pieces of it: cut elsewhere, or take gpipe or 1f1b")
    ends = [*staged.cuts, len(needed_ops(variant.original))]
    stages = tuple(Stage((first, end), ranks[at], plan) for at, first, end, plan in
                   zip(schedule.placement[0], [0, *staged.cuts], ends, plans, strict=True))
    mesh = mesh_of_parts([end - first for first, end in ranks])
    whole = Plan(mesh=mesh, decisions=(), conversions=(), stored=(), inputs={}, predicted=plans[0].predicted,
                 bound=0.0, proof="", budget=task.budget, candidates=1, cluster=task.cluster.name,
                 backend=task.cluster.backend, levels={PIPE: task.cluster.levels[-1].name},
                 fingerprints={"model": variant.original.fingerprint(), "cluster": task.cluster.fingerprint,
                               "autoddl": str(VERSION)},
                 sample=dict(variant.spec), microbatches=staged.microbatches, precision=task.options.precision,
                 pipeline=Pipeline(staged.name, str(schedule), stages,
                                   _coded(task.cluster, plans, staged, variant.original)), **task.about)
    predicted = _predicted(whole, staged_step(whole, variant.original, task.cluster),
                           bytes_twice(plans, graphs, staged.placement), staged)
    if predicted.peak_bytes > task.budget * (1 + ROUNDING):
        raise Infeasible(0.0, task.budget, "the stages that were planned for the fullest rank do not fit it together: "
                         "take more stages or microbatches, 1f1b, or a larger budget", predicted.peak_bytes)
    return replace(whole, predicted=predicted)


def _coded(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph) -> tuple[str, ...]:
    """The lanes that are sent coded, with their codecs."""
    return tuple(f"{lane} as {sent.codec}" for one in transfers_of(graph, staged.cuts) for lane, sent in zip(
        one.lanes, transfer_passes(cluster, staged, graph, one, *transfer_ends(one, plans)), strict=True) if sent.codec)


def _predicted(plan: Plan, step: StagedStep, twice: Mapping[int, Mapping[str, float]], staged: Staged) -> Prediction:
    """The prediction of a plan with stages: seconds of the time line, the rest of the busiest and the fullest rank.

    Stages of one part have what they have at its fullest moment, less what they count twice.
    """
    assert plan.pipeline is not None
    groups = {at: [stage.plan for stage, place in zip(plan.pipeline.stages, staged.placement, strict=True)
                   if place == at] for at in sorted(set(staged.placement))}
    every = [{kind: nbytes - twice.get(at, {}).get(kind, 0.0)
              for kind, nbytes in rank_kinds(part, staged.moments.get(at)).items()} for at, part in groups.items()]
    fullest = max(every, key=lambda kinds: sum(kinds.values()))
    slowest = max(([one.predicted for one in part] for part in groups.values()),
                  key=lambda part: sum(one.seconds for one in part))
    return Prediction(step.timeline.makespan, sum(one.compute for one in slowest),
                      _summed(one.communication for one in slowest), _summed(one.volume for one in slowest),
                      fullest, {}, sum(one.update for one in slowest),
                      in_switches=_summed(one.in_switches for one in slowest))


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The sums by name."""
    found = Counter[str]()
    for part in parts:
        found.update(part)
    return dict(found)
