"""The peak bytes of a published run as a plan, from those of the same few layers as its seconds (`as_plan`).

    flat     B(n) = B(1) + (n - 1) (B(2) - B(1))
    stages   B(stage with one layer) + (n - 1) (M(2) - M(1))

M(n) is a middle stage with n layers. A stage has as many microbatches in flight as the schedule has there. Where a rank
has several stages, this holds for every part of their bytes (`schedule.stage_bytes`). The rank has what these add up to
at its fullest moment. The first rank of a pipeline or the last is taken to have most.
"""

from dataclasses import asdict, replace
from functools import lru_cache, partial

from autoddl.core.degrees import Degrees
from autoddl.core.pipeline import Flight, flights_of, rank_moments
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import StageBytes
from autoddl.planner.pipelines.staged import stage_cluster
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.schedule.stage_bytes import rank_bytes
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
    every, found = rank_moments(schedule), list[float]()
    for rank in (0, run.pp - 1):
        stages = [_with_layers(asked, {0: FIRST, last: LAST}.get(s, MIDDLE), flights[s], layers[s])
                  for s, at in enumerate(schedule.placement[0]) if at == rank]
        found.append(rank_bytes([parts for _, parts in stages], every[rank])[0] if rank in every else stages[0][0])
    return max(found)


def _with_layers(asked: RunPlan, which: int, flight: Flight, count: int) -> tuple[float, StageBytes]:
    """(peak bytes of a stage with so many layers, its bytes in parts)."""
    own = _stage_bytes(asked, which, flight)
    if count == 1:
        return own
    two, one = (_stage_bytes(asked, n, flight) for n in (TWO, MIDDLE))
    every = zip(*(asdict(parts).values() for _, parts in (own, two, one)), strict=True)
    parts = [{kind: x.get(kind, 0.0) + (count - 1) * (y.get(kind, 0.0) - z.get(kind, 0.0)) for kind in x | y | z}
             for x, y, z in every]
    return own[0] + (count - 1) * (two[0] - one[0]), StageBytes(*parts)


@lru_cache(maxsize=4_000)
def _stage_bytes(asked: RunPlan, which: int, flight: Flight) -> tuple[float, StageBytes]:
    """Peak bytes of the first, a middle or the last stage with a layer, or of a middle one with TWO; and in parts."""
    part = stage_cluster(asked.cluster, Degrees.parse(asked.degrees).pp)
    whole = model_graph(asked.shape, 4 if which == TWO else 3, asked.precision)
    cuts = uniform_cuts(whole, 4)[::2] if which == TWO else uniform_cuts(whole, 3)
    chosen = stage_plans(asked, whole, cuts)[MIDDLE if which == TWO else which]
    plan = replace(chosen.plan, in_flight=flight.in_flight, waiting=flight.waiting)
    predicted = with_memory_peak(plan, chosen.graph, asked.optimizer, part).predicted
    assert predicted.parts is not None
    return predicted.peak_bytes, predicted.parts
