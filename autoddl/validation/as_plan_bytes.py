"""The peak bytes of a published run as a plan, from those of the same few layers as its seconds (`as_plan`).

    flat     B(n) = B(1) + (n - 1) (B(2) - B(1))
    stages   B(stage with one layer) + (n - 1) (M(2) - M(1))        for every part of their bytes

M(n) is a middle stage with n layers. A rank has what the parts of its stages add up to at the fullest moment of its own
list of actions (`schedule.stage_bytes`). Of all ranks the fullest counts: where the first stage has fewer layers than
others, that is not the first.
"""

from dataclasses import asdict, replace
from functools import lru_cache, partial

from autoddl.core.degrees import Degrees
from autoddl.core.pipeline import Flight, flights_of, rank_moments
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import StageBytes
from autoddl.cost_models.profile import SHIPPED, Profile
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


def bytes_as_plan(run: Run, microbatch: int, profile: Profile = SHIPPED) -> float:
    """Peak bytes of the fullest rank of a run, by the plans that are chosen on a machine with a profile's constants.

    Raises Unpriced or InputError with the reason.
    """
    figure = _staged_bytes if run.pp > 1 else _flat_bytes
    return by_share(run, RunPlan.of(run, microbatch).under(profile), partial(figure, run))


def _flat_bytes(run: Run, asked: RunPlan) -> float:
    """Peak bytes without stages."""
    return with_all_layers(run, [flat_plan(asked, graph).plan.predicted.peak_bytes
                                 for graph in flat_graphs(run, asked)])


def _staged_bytes(run: Run, asked: RunPlan) -> float:
    """Peak bytes of the fullest rank of a pipeline."""
    name, _ = schedule_of(run)
    asked.check_schedule(run)
    schedule = generate(name, run.pp, asked.microbatches)
    flights, layers, last = flights_of(schedule), stage_layers(run), schedule.stages - 1
    parts = [_with_layers(asked, {0: FIRST, last: LAST}.get(s, MIDDLE), flight, count)
             for s, (flight, count) in enumerate(zip(flights, layers, strict=True))]
    return max(rank_bytes([parts[s] for s in one.stages], one)[0] for one in rank_moments(schedule, 1).values())


def _with_layers(asked: RunPlan, which: int, flight: Flight, count: int) -> StageBytes:
    """The bytes of a stage with so many layers; they are the same for any number of microbatches from two on."""
    few = Flight(min(flight.in_flight, 2), min(flight.waiting + flight.later, 1))
    own = _stage_bytes(asked, which, few)
    if count == 1:
        return own
    every = (asdict(one).values() for one in (own, _stage_bytes(asked, TWO, few), _stage_bytes(asked, MIDDLE, few)))
    return StageBytes(*({kind: x.get(kind, 0.0) + (count - 1) * (y.get(kind, 0.0) - z.get(kind, 0.0))
                         for kind in x | y | z} for x, y, z in zip(*every, strict=True)))


@lru_cache(maxsize=4_000)
def _stage_bytes(asked: RunPlan, which: int, flight: Flight) -> StageBytes:
    """The bytes of the first, a middle or the last stage with a layer, or of a middle one with TWO."""
    part = stage_cluster(asked.cluster, Degrees.parse(asked.degrees).pp)
    whole = model_graph(asked.shape, 4 if which == TWO else 3, asked.precision)
    cuts = uniform_cuts(whole, 4)[::2] if which == TWO else uniform_cuts(whole, 3)
    chosen = stage_plans(asked, whole, cuts)[MIDDLE if which == TWO else which]
    plan = replace(chosen.plan, in_flight=flight.in_flight, waiting=flight.waiting)
    found = with_memory_peak(plan, chosen.graph, asked.optimizer, part).predicted.parts
    assert found is not None
    return found
