"""Finds the best pipeline of a small chain whose ranks have several stages, by trying every layout of every stage.

Every stage is a block of the chain. Of its choices that give and take its tensors in the same layouts those are left
out than which another is no slower, and has no more bytes at any moment of their ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np
from every_pipeline import DIGITS, PARTS, Case, choice_at, port_layouts

from autoddl.core.cost_table import Array
from autoddl.core.pipeline import Flight, RankMoments, flights_of
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models import Cluster
from autoddl.planner.candidates import Candidate, build_network
from autoddl.planner.peaks import draft_of
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.part_ranks import part_clusters
from autoddl.planner.pipelines.stage_plans import stage_task
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import boundary_seconds, simulated
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import CostNetwork
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.schedule.stage_bytes import at_moments
from autoddl.schedule.stage_seconds import stage_seconds
from autoddl.search.exhaustive import score_every_choice

__all__ = ["best_sharing"]


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    """A choice of a stage: its plan, seconds, and bytes at every moment of its ranks."""

    plan: Plan
    seconds: StageSeconds
    nbytes: Array


def best_sharing(task: PlanTask, case: Case, parts: int = 2) -> float:
    """Seconds of the fastest pipeline with a block a stage that fits the budget; infinite where none does."""
    graph, best = task.variant(case.microbatches).original, inf
    staged = Staged(places_of(graph, ()), case.schedule, case.microbatches)
    schedule, clusters = staged.schedule(), part_clusters(case.cluster, parts, ())
    every = [list(_choices(task, stage, clusters[at], flight, staged.splits, staged.moments[at],
                           staged.moments[at].stages.index(s))) for s, (stage, at, flight) in enumerate(zip(
                               cut_graph(graph, staged.cuts), staged.placement, flights_of(schedule), strict=True))]
    halves = [[chosen for chosen in product(*(every[s] for s in one.stages))
               if float(np.sum([each.nbytes for each in chosen], axis=0).max()) <= task.budget]
              for one in staged.moments.values()]
    order = np.argsort([s for one in staged.moments.values() for s in one.stages])
    for here, there in product(*halves):
        chosen = [(*here, *there)[i] for i in order]
        busy = max(sum(sum(each.seconds[:3]) for each in half) for half in (here, there))
        if busy * case.microbatches < best:
            between = boundary_seconds(case.cluster, [each.plan for each in chosen], staged, graph)
            best = min(best, simulated(schedule, [each.seconds for each in chosen], between).makespan)
    return best


def _choices(task: PlanTask, stage: StageGraph, part: Cluster, flight: Flight, splits: bool, moments: RankMoments,
             number: int) -> Iterator[_One]:
    """The choices of a stage that matter; `number` is its own among those of its ranks."""
    own, m = stage_task(task, stage, part, task.options.microbatches[0]), task.options.microbatches[0]
    for mesh in allowed_meshes(part, own.options):
        candidate = Candidate(mesh, region_of(own.options), m, in_flight=flight.in_flight, waiting=flight.waiting,
                              later=flight.later)
        network = build_network(own, candidate)
        seconds = np.round(np.stack([score_every_choice(build_network(
            replace(own, counts=counts), candidate
        ).problem(None))[0] for counts in PARTS], axis=1), DIGITS)
        legal = np.flatnonzero(np.isfinite(seconds).all(axis=1))
        groups = port_layouts(network, legal)
        for group in np.unique(groups):
            yield from _undominated([_one(network, at, seconds[at], part, splits, moments, number)
                                     for at in legal[groups == group].tolist()])


def _one(network: CostNetwork, at: int, seconds: Array, part: Cluster, splits: bool, moments: RankMoments, number: int
         ) -> _One:
    """A choice of a network, with the seconds of its W where backward is split."""
    pricing = network.pricing
    plan = with_memory_peak(draft_of(network, choice_at(network, at)), pricing.graph, pricing.optimizer, part)
    late = round(stage_seconds(plan, pricing.graph, part, True).weight, DIGITS) if splits else 0.0
    forward, backward, *once = seconds.tolist()
    return _One(plan, StageSeconds(forward, backward - late, late, *once), at_moments([plan], moments, number)[0])


def _undominated(every: list[_One]) -> list[_One]:
    """Those than which no other is no slower and has no more bytes."""
    rows = np.array([(*one.seconds, *one.nbytes) for one in every])
    order, kept = np.lexsort(rows.T[::-1]), list[int]()
    for i in order.tolist():
        if not kept or not (rows[kept] <= rows[i]).all(axis=1).any():
            kept.append(i)
    return [every[i] for i in kept]
