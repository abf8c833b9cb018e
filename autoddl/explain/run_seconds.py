"""Predicts the seconds of a plan's step as a training program runs it, from the plan alone.

    without stages   the time line of the plan, with what the program adds (`schedule.run_step`)
    with stages      the time line of the schedule, over the seconds of every stage with what the program adds

The plan was made on a cluster whose programs are those of the profile (`cost_models.software.run_by`), or it is priced
with the kernels of another one.

A program and a machine's profile are what is known of a machine, not another machine. So a file describes the cluster
of a plan if it does so with the plan's program and constants. A plan with these keeps the cluster of its file too
(`bare_cluster`). What changes is changed there, before program and constants are brought back (`with_program`).
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import splits_backward
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.cost_models.intervals import Interval, interval_of
from autoddl.cost_models.profile import SHIPPED, Profile, read_profile
from autoddl.cost_models.software import Software, run_by, software_named
from autoddl.explain.compare_run import graph_of_plan
from autoddl.operators.fusion import as_compiled
from autoddl.planner.pipelines.part_ranks import part_clusters
from autoddl.planner.pipelines.staged_steps import simulated, staged_step
from autoddl.schedule.run_step import run_seconds, stage_run_seconds

__all__ = ["StepAsRun", "as_planned", "bare_cluster", "program_of", "seconds_as_run", "step_as_run", "step_seconds",
           "sureness", "told_like", "with_program"]

_TOLD = ("software", "profile")
"""What a plan says of the program and the constants with which it was made."""


@dataclass(frozen=True, slots=True)
class StepAsRun:
    """A plan's step as its program runs it, and how sure that is."""

    software: str
    """Name of the program."""
    seconds: float
    """Seconds of the step by the model, with what overlaps and what the program adds."""
    interval: Interval
    """How far measured steps are from such predictions."""
    runs: int
    """Number of runs of the machine's own profile; 0 where the interval is that of published runs."""

    @property
    def between(self) -> tuple[float, float]:
        """Seconds between which 8 of 10 steps would lie."""
        low, _, high = self.interval.of(self.seconds)
        return low, high

    def ties(self, other: "StepAsRun") -> bool:
        """Whether two steps of one model on one machine are too near to be told apart."""
        return max(self.interval, other.interval, key=lambda one: one.common).ties(self.seconds, other.seconds)

    def to_json(self) -> dict[str, Any]:
        """Returns program, seconds, median and interval under stable names."""
        low, median, high = self.interval.of(self.seconds)
        return {"software": self.software, "as_run_seconds": self.seconds, "as_run_median": median,
                "as_run_interval": [low, high]}


def _profile_of(plan: Plan) -> Profile:
    told = plan.source.get("profile")
    return SHIPPED if told is None else read_profile(told, "the plan's profile")


def program_of(plan: Plan) -> Software | None:
    """The program that a plan was made for, on its machine's host; None where none was named.

    Raises InputError for a plan whose program or profile cannot be read."""
    name = plan.source.get("software")
    return None if name is None else _profile_of(plan).by(software_named(name))


def as_planned(plan: Plan, cluster: Cluster) -> Cluster:
    """A cluster with the program and the constants with which `plan` was made; without those that are of other devices.

    Raises InputError for a plan whose program or profile cannot be read.
    """
    cluster, profile = _run_as(plan, cluster), _profile_of(plan)
    with suppress(InputError):
        cluster = profile.on(cluster)
    return cluster


def with_program(plan: Plan, cluster: Cluster) -> Cluster:
    """A cluster with the program and the constants with which `plan` was made.

    Raises InputError where these are of other devices, or cannot be read.
    """
    return _profile_of(plan).on(_run_as(plan, cluster))


def _run_as(plan: Plan, cluster: Cluster) -> Cluster:
    software, text = plan.source.get("software"), plan.source.get("cluster")
    if software is not None:
        return run_by(cluster, software_named(software))
    if text is not None and parse_cluster(text, "the plan's cluster").device.compiled:
        return as_compiled(cluster)
    return cluster


def bare_cluster(plan: Plan) -> Cluster:
    """The cluster of a plan as its file has it, without the program and the constants with which the plan was made.

    Raises InputError for a plan that does not keep it.
    """
    text = plan.source.get("bare")
    if text is None and any(key in plan.source for key in _TOLD):
        what = plan.source.get("software", "a profile")
        raise InputError(f"this plan was made for {what}, and does not keep its cluster without that: an earlier "
                         "version made it; make it again")
    return parse_cluster(text or plan.source["cluster"], "the plan's cluster")


def told_like(plan: Plan, made: Plan, bare: Cluster | None) -> Plan:
    """Returns `made`, with the program and constants of `plan`, and its cluster without them where that is known."""
    told = {key: plan.source[key] for key in _TOLD if key in plan.source}
    if bare is not None and "bare" in plan.source:
        told["bare"] = bare.to_yaml()
    return replace(made, source={**made.source, **told})


def sureness(plan: Plan) -> Interval:
    """How far published runs of the plan's kind were from their predictions."""
    text = plan.source.get("cluster")
    alone = text is not None and parse_cluster(text, "the plan's cluster").is_one_unit
    if plan.pipeline is None:
        return interval_of(1, any(stored.regather for stored in plan.stored), alone)
    return interval_of(len(plan.pipeline.stages), False, alone)


def seconds_as_run(plan: Plan, software: Software, cluster: Cluster | None = None) -> float:
    """Seconds of a step of `plan`, on its own cluster or another one of the same levels.

    Raises InputError for a plan that does not keep its graph and cluster.
    """
    graph = graph_of_plan(plan)
    cluster = cluster or parse_cluster(plan.source["cluster"], "the plan's cluster")
    if plan.pipeline is None:
        return run_seconds(plan, graph, cluster, software)
    pipeline, schedule = plan.pipeline, Schedule.parse(plan.pipeline.schedule)
    parts = part_clusters(cluster, len(pipeline.ranks), pipeline.sizes)
    stages = [stage_run_seconds(stage.plan, add_hubs(cut.graph), parts[at], software, splits_backward(pipeline.name))
              for stage, cut, at in zip(pipeline.stages, cut_graph(graph, pipeline.cuts), schedule.placement[0],
                                        strict=True)]
    return simulated(schedule, stages, staged_step(plan, graph, cluster).transfers).makespan


def step_as_run(plan: Plan) -> StepAsRun | None:
    """The step of a plan as its program runs it; None where no program was named."""
    software = program_of(plan)
    if software is None:
        return None
    profile = _profile_of(plan)
    return StepAsRun(plan.source["software"], seconds_as_run(plan, software),
                     sureness(plan).with_runs(profile.residual, profile.runs), profile.runs)


def step_seconds(plan: Plan) -> float:
    """Seconds of a plan's step: as its program runs it, where one was named, else those that the search compares."""
    ran = step_as_run(plan)
    return plan.predicted.seconds if ran is None else ran.seconds
