"""The peak bytes of a published run as a plan, from those of the same few layers as its seconds (`as_plan`).

    flat     B(n) = B(1) + (n - 1) (B(2) - B(1))
    stages   the sum over the stages of a rank of  B(stage with one layer) + (n - 1) (M(2) - M(1))

M(n) is a middle stage with n layers. A stage has as many microbatches in flight as the schedule has there. The first
rank of a pipeline or the last is taken to have most.
"""

from dataclasses import replace
from functools import lru_cache, partial

from autoddl.core.degrees import Degrees
from autoddl.core.pipeline import Flight, flights_of
from autoddl.core.pipeline_schedules import generate
from autoddl.planner.pipelines.staged import stage_cluster
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.validation.as_plan import by_share, flat_graphs, flat_plan, stage_plans, with_all_layers
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.run_parts import schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.templates import model_graph

__all__ = ["bytes_as_plan"]

FIRST, MIDDLE, LAST, TWO = range(4)
"""The stages that are planned: three with a layer each, and a middle one with two."""


def bytes_as_plan(run: Run, microbatch: int) -> float:
    """Peak bytes of the fullest rank of a run. Raises Unpriced or InputError with the reason."""
    return by_share(run, RunPlan.of(run, microbatch), partial(_staged_bytes if run.pp > 1 else _flat_bytes, run))


def _flat_bytes(run: Run, asked: RunPlan) -> float:
    """Peak bytes without stages."""
    return with_all_layers(run, [flat_plan(asked, graph).plan.predicted.peak_bytes
                                 for graph in flat_graphs(run, asked)])


def _staged_bytes(run: Run, asked: RunPlan) -> float:
    """Peak bytes of the first rank of a pipeline or the last, whichever has more."""
    name, _ = schedule_of(run)
    asked.check_schedule(run)
    schedule = generate(name, run.pp, asked.microbatches)
    flights, layers, last = flights_of(schedule), stage_layers(run), schedule.stages - 1
    found = dict.fromkeys((0, run.pp - 1), 0.0)
    for s, (rank, flight, count) in enumerate(zip(schedule.placement[0], flights, layers, strict=True)):
        if rank in found:
            found[rank] += _stage_bytes(asked, {0: FIRST, last: LAST}.get(s, MIDDLE), flight)
        if rank in found and count > 1:
            more = _stage_bytes(asked, TWO, flight) - _stage_bytes(asked, MIDDLE, flight)
            found[rank] += (count - 1) * more
    return max(found.values())


@lru_cache(maxsize=4_000)
def _stage_bytes(asked: RunPlan, which: int, flight: Flight) -> float:
    """Peak bytes of the first, a middle or the last stage with a layer, or of a middle one with TWO."""
    part = stage_cluster(asked.cluster, Degrees.parse(asked.degrees).pp)
    whole = model_graph(asked.shape, 4 if which == TWO else 3, asked.precision)
    cuts = uniform_cuts(whole, 4)[::2] if which == TWO else uniform_cuts(whole, 3)
    chosen = stage_plans(asked, whole, cuts)[MIDDLE if which == TWO else which]
    plan = replace(chosen.plan, in_flight=flight.in_flight, waiting=flight.waiting)
    return with_memory_peak(plan, chosen.graph, asked.optimizer, part).predicted.peak_bytes
