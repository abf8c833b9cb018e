"""Searches over pipelines: numbers of stages and microbatches, schedules, cuts, and the layouts of every stage.

A candidate has D stages, a schedule and m microbatches. Those whose first bound is least come first
(`pipeline_candidate`). A candidate is done once its bound is no better than the best plan, with stages or without.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_to_text
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pins import check_pins
from autoddl.planner.pipeline_candidate import Alternative, TriedCut, first_bound, search_cuts
from autoddl.planner.stage_parts import StageParts, places_of
from autoddl.planner.stage_plans import chunks_of, pipeline_plan, splits_backward, stage_cluster, without_recompute
from autoddl.planner.task import PlanTask

__all__ = ["PipelineFound", "plan_of_cut", "search_pipelines", "staged_plan"]


@dataclass(frozen=True, slots=True)
class PipelineFound:
    """The best pipeline, None where none beats what there was; the least bound of all candidates; and all of them.

    `needed` are the least bytes of a rank that some stage needs of those that were found not to fit.
    """

    plan: Plan | None
    bound: float
    alternatives: tuple[Alternative, ...]
    needed: float


def search_pipelines(task: PlanTask, best: float, progress: Progress | None = None) -> PipelineFound:
    """The fastest pipeline of all that the options allow and that takes less than `best` seconds.

    Raises InputError where the model or the cluster cannot be cut into so many stages.
    """
    options = task.options
    check_pins(options.pins, task.graph)
    asked = [(d, m, name) for d in options.stages if d > 1 for m in options.microbatches for name in options.schedule]
    parts: dict[tuple[int, int, int, bool], StageParts] = {}
    winner: tuple[StageParts, str, TriedCut] | None = None
    rows: list[Alternative] = []
    order: list[tuple[float, int, StageParts, str]] = []
    for d, m, name in asked:
        key = d, m, chunks_of(name), splits_backward(name)
        if key not in parts:
            parts[key] = _part(without_recompute(task, name), *key)
        order.append((first_bound(parts[key], name), len(order), parts[key], name))
    for k, (_, _, part, name) in enumerate(sorted(order, key=lambda one: one[:2])):

        def tell(what: str, k: int = k, best: float = best) -> None:
            if progress:
                progress(f"{what}, best {best:.4g} s", k, len(asked))

        row, found = search_cuts(part, name, best, tell)
        rows.append(row)
        if found is not None and found.seconds < best:
            best, winner = found.seconds, (part, name, found)
    plan = None if winner is None else plan_of_cut(*winner)
    needed = min((part.needed for part in parts.values()), default=inf)
    return PipelineFound(plan, min((row.bound for row in rows), default=inf), tuple(rows), needed)


def staged_plan(task: PlanTask, plain: Callable[[PlanTask, Progress | None], Plan] | None, progress: Progress | None
                ) -> Plan:
    """The fastest plan of all numbers of stages that the options allow; `plain` finds the one without stages.

    Its bound is that of all of them. Raises Infeasible, with what each alternative lacks, where none fits.
    """
    best, problem = None, None
    if plain is not None:
        try:
            best = plain(replace(task, options=replace(task.options, stages=(1,))), progress)
        except Infeasible as error:
            problem = error
    found = search_pipelines(task, best.predicted.seconds if best else inf, progress)
    bound = min(found.bound, best.bound if best else inf)
    source = {"alternatives": [row.to_json() for row in found.alternatives], "cluster": task.cluster.to_yaml(),
              "bound_without_stages": best.bound if best else None, "pins": list(task.options.pins),
              "optimizer": task.options.optimizer}
    if found.plan is not None:
        source["graph"] = graph_to_text(task.variant(found.plan.microbatches).original)
    if found.plan is not None:
        proof = "paths of its schedule over all cuts, and layouts of every stage" + (
            "; without stages: " + best.proof if best else "")
        return replace(found.plan, bound=min(bound, found.plan.predicted.seconds), proof=proof, source=source,
                       candidates=len(found.alternatives) + (best.candidates if best else 0),
                       timings={"capture": task.capture_seconds, "total": perf_counter() - task.began})
    if best is None:
        raise Infeasible(min(found.needed, problem.needed if problem else inf), task.budget,
                         "take more stages, recomputation, a smaller batch or a larger budget",
                         problem.reachable if problem else inf)
    return replace(best, bound=min(bound, best.predicted.seconds),
                   source=best.source | {"alternatives": source["alternatives"], "bound_without_stages": best.bound},
                   proof=f"{best.proof}; {len(found.alternatives)} pipelines by the paths of their schedules")


def plan_of_cut(part: StageParts, name: str, tried: TriedCut) -> Plan:
    """The plan of a cut that was solved, its stages with their best bucket sizes."""
    staged = part.staged(name, tried.cut)
    plans = [fitting_buckets(plan, add_hubs(graph.graph), part.task.options.optimizer, part.cluster)
             for plan, graph in zip(tried.plans, cut_graph(part.graph, staged.cuts), strict=True)]
    return pipeline_plan(part.task, staged, plans)


def _part(task: PlanTask, parts: int, microbatches: int, chunks: int, splits: bool) -> StageParts:
    """The stages of one candidate. Raises InputError where the cluster or the model cannot be cut so."""
    stage_cluster(task.cluster, parts)
    stages = parts * chunks
    if task.options.cut and chunks > 1:
        raise InputError(f"such a schedule has {chunks} stages on each of {parts} parts of the cluster, and "
                         f"cut names where {parts} stages begin: leave cut out, or take 1f1b or gpipe")
    places = places_of(task.variant(microbatches).original, task.options.cut)
    if len(places) < stages - 1:
        raise InputError(f"{stages} stages need {stages - 1} cuts, and this model can be cut at {len(places)} places, "
                         "the ends of its blocks: ask for fewer stages, or name the modules with cut")
    where = generate("zb-v", parts, microbatches).placement[0] if splits and chunks > 1 else ()
    return StageParts(task, stages, parts, microbatches, places, splits=splits, placement=where)
