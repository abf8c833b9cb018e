"""Plans pipelines as Megatron does: equal numbers of blocks in all stages, and one grid inside every stage.

    stages      n / D blocks each; the first also has what comes before the blocks, the last what comes behind. Where D
                does not divide n but n + 2, these ends count as a block each, as torchtitan and Llama 3 have it (Llama
                team 2024, section 3.3.2)
    grid        tensor parallel inside and data parallel outside, the same in all stages (`strategies`)
    schedule    given: 1F1B or interleaved, with all microbatches

What this does not fix is free, so the best of all numbers of stages, grids and microbatches is a fair rival.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from autoddl.core.degrees import Degrees
from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.graph import Graph, graph_to_text
from autoddl.core.hubs import needed_ops
from autoddl.core.pipeline_schedules import chunks_of, schedule_title
from autoddl.core.plan import Plan
from autoddl.core.recompute import Block, blocks_of
from autoddl.cost_models import Cluster
from autoddl.planner.candidates import Candidate
from autoddl.planner.degree_meshes import DegreesRegion, degree_mesh
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pins import allowed_meshes
from autoddl.planner.pipelines.pipeline_search import plan_of_cut
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged, stage_cluster
from autoddl.planner.pipelines.staged_steps import TriedCut
from autoddl.planner.pipelines.tried_cuts import try_cut
from autoddl.planner.question import graphs_beside, options_text
from autoddl.planner.strategies import grids_of_stages
from autoddl.planner.task import PlanTask

__all__ = ["UNIFORM", "Uniform", "blocks_of_stages", "check_degrees", "configured_pipeline", "uniform_cuts",
           "uniform_pipeline"]

UNIFORM = ("1f1b", "interleaved:2")
"""Schedules with which uniform pipelines are planned, whatever else is asked for."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """The best uniform pipeline of a schedule.

        plan        its plan
        data        ranks of a stage over which the batch is split
        tensor      ranks of a stage over which products are split
        blocks      blocks of every stage
    """

    plan: Plan
    data: int
    tensor: int
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        most = max(self.blocks)
        less = ", one less in the first and the last" if min(self.blocks) < most else ""
        return (f"data parallel {self.data} x tensor parallel {self.tensor}, {most} block{'s' * (most > 1)} a stage"
                f"{less}")


def blocks_of_stages(blocks: int, stages: int) -> tuple[int, ...]:
    """The blocks of each stage: equally many, or one less in the first and the last; none where neither can be."""
    if blocks % stages == 0:
        return (blocks // stages,) * stages
    each, left = divmod(blocks + 2, stages)
    return () if left else tuple(each - (s in (0, stages - 1)) for s in range(stages))


def uniform_cuts(graph: Graph, stages: int) -> tuple[int, ...]:
    """The positions at which a captured graph is cut into stages of equally many blocks, or one less at both ends.

    Raises InputError where there are no blocks, or not enough for that.
    """
    blocks, ops = _blocks(graph), len(needed_ops(graph))
    counts = blocks_of_stages(len(blocks), stages) if blocks else ()
    places = (*(block.start for block in blocks), *(block.end for block in blocks[-1:]))
    cuts = tuple(places[at] for at in accumulate(counts[:-1]))
    if not counts or {0, ops} & {*cuts}:
        raise InputError(f"{stages} stages cannot have equally many of the model's {len(blocks)} blocks, nor where "
                         "both ends count as one more: take a number that divides them, where each chunk of a part "
                         "counts (pp x vp)")
    return cuts


def _blocks(graph: Graph) -> tuple[Block, ...]:
    return blocks_of(replace(graph, ops=needed_ops(graph), outputs=graph.outputs[:1]))


def uniform_pipeline(task: PlanTask, schedule: str, progress: Progress | None = None) -> Uniform:
    """The fastest uniform pipeline with this schedule, of all numbers of stages and microbatches that are asked for.

    Raises what the last one lacks where there is none.
    """
    asked = [(d, m) for d in task.options.stages if d > 1 for m in task.options.microbatches]
    every: list[_Solved | Infeasible | InputError] = []
    for k, (parts, microbatches) in enumerate(asked):
        if progress:
            progress(f"uniform pipelines on {parts} parts, {schedule_title(schedule)}, {microbatches} microbatches", k,
                     len(asked))
        every += _attempts(task, schedule, parts, microbatches)
    solved = [one for one in every if isinstance(one, _Solved)]
    if not solved:
        raise next((one for one in reversed(every) if isinstance(one, AutoDDLError)),
                   InputError("a pipeline has 2 stages or more: ask for some, like stages=(2,)"))
    best = min(solved, key=lambda one: one.tried.seconds)
    blocks = blocks_of_stages(len(_blocks(best.part.graph)), best.part.stages)
    return Uniform(plan_of_cut(best.part, schedule, best.tried), *best.grid, blocks)


def check_degrees(cluster: Cluster, text: str) -> None:
    """Raises InputError where the configuration that `text` says has no mesh on `cluster`."""
    degrees = Degrees.parse(text).on(cluster.size)
    degree_mesh(stage_cluster(cluster, degrees.pp) if degrees.pp > 1 else cluster, replace(degrees, pp=1, vp=1))


def configured_pipeline(task: PlanTask, progress: Progress | None = None) -> Plan:
    """The uniform pipeline of the degrees that the options give, the fastest of all schedules that are asked for.

    Its bound is that of no other pipeline. Raises what the last schedule lacks where there is none.
    """
    plans, problem = list[Plan](), None
    for schedule in task.options.schedule:
        try:
            plans.append(uniform_pipeline(task, schedule, progress).plan)
        except (Infeasible, InputError) as error:
            problem = error
    if problem is not None and not plans:
        raise problem
    best = min(plans, key=lambda plan: plan.predicted.seconds)
    own = best.microbatches
    source = {"cluster": task.cluster.to_yaml(), "pins": list(task.options.pins), "mine": task.options.mine,
              "optimizer": task.options.optimizer, "graph": graph_to_text(task.variant(own).original),
              "asked": options_text(task.options), "parts": graphs_beside(task, own, task.options.microbatches)} | (
                  {"notes": list(task.notes)} if task.notes else {})
    return replace(best, source=source, proof="a pipeline of these degrees; no other was weighed")


@dataclass(frozen=True, slots=True)
class _Solved:
    """A uniform pipeline: its grid, its stages, and what was found for them."""

    grid: tuple[int, int]
    part: StageParts
    tried: TriedCut


def _attempts(task: PlanTask, schedule: str, parts: int, microbatches: int
              ) -> Iterator[_Solved | Infeasible | InputError]:
    """Yields for every grid of a stage the pipeline, or why there is none."""
    stages, graph = parts * chunks_of(schedule), task.variant(microbatches).original
    try:
        place, places = stage_cluster(task.cluster, parts), uniform_cuts(graph, stages)
        pipes = Staged(places, schedule, microbatches).pipes
        grids = _grids(place, task, graph)
    except InputError as error:
        yield error
        return
    plain = replace(task, options=replace(task.options, mine=None))
    for grid, within in grids.items():
        try:
            part = StageParts(plain, stages, parts, microbatches, places, pipes, within)
            yield _Solved(grid, part, try_cut(part, schedule, tuple(range(1, stages))))
        except (Infeasible, InputError) as error:
            yield error


def _grids(place: Cluster, task: PlanTask, graph: Graph) -> dict[tuple[int, int], tuple[Candidate, ...]]:
    """By (data parallel, tensor parallel) ranks, the grids to try in every stage: those of `mine`, or all."""
    if task.options.mine is None:
        every = grids_of_stages(allowed_meshes(place, task.options), graph)
        return {grid: (one,) for grid, one in every.items()}
    degrees = replace(Degrees.parse(task.options.mine), pp=1, vp=1).on(place.size)
    return {(degrees.dp, degrees.tp): (Candidate(degree_mesh(place, degrees), DegreesRegion(degrees, graph)),)}
