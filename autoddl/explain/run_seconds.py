"""Predicts the seconds of a plan's step as a training program runs it, from the plan alone.

    without stages   the time line of the plan, with what the program adds (`schedule.run_step`)
    with stages      the time line of the schedule, over the seconds of every stage with what the program adds

The plan was made on a cluster whose programs are those of the profile (`cost_models.software.run_by`), or it is priced
with the kernels of another one.

A program and a machine's profile are what is known of a machine, not another machine. So a file describes the cluster
of a plan if it does so with the plan's program and constants.
"""

from contextlib import suppress

from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import splits_backward
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.cost_models.intervals import Interval, interval_of
from autoddl.cost_models.profile import read_profile
from autoddl.cost_models.software import Software, run_by, software_named
from autoddl.explain.compare_run import graph_of_plan
from autoddl.explain.staged_run import foreseen_stages
from autoddl.operators.fusion import as_compiled
from autoddl.planner.pipelines.part_ranks import part_clusters
from autoddl.planner.pipelines.staged_steps import simulated
from autoddl.schedule.run_step import run_seconds, stage_run_seconds

__all__ = ["as_planned", "seconds_as_run", "sureness"]


def as_planned(plan: Plan, cluster: Cluster) -> Cluster:
    """A cluster with the program and the constants with which `plan` was made; without those that are of other devices.

    Raises InputError for a plan whose program or profile cannot be read.
    """
    software, told, text = (plan.source.get(key) for key in ("software", "profile", "cluster"))
    if software is not None:
        cluster = run_by(cluster, software_named(software))
    elif text is not None and parse_cluster(text, "the plan's cluster").device.compiled:
        cluster = as_compiled(cluster)
    if told is not None:
        profile = read_profile(told, "the plan's profile")
        with suppress(InputError):
            cluster = profile.on(cluster)
    return cluster


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
    return simulated(schedule, stages, foreseen_stages(plan).transfers).makespan
