"""Plans that ran: their measured steps, and what their steps take with other constants of the machine.

    seconds    of the time line with the update (`schedule.timeline`), of a plan with stages those of its schedule; with
               a software profile those of its program (`explain.run_seconds`)
    measured   the mean over the ranks, and of these the median over the steps after the first

The layouts stay. What they take is priced again where a constant is moved.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.core.record import read_record
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, Profile, parse_profile
from autoddl.cost_models.software import software_named
from autoddl.explain.compare_run import check_record, graph_of_plan
from autoddl.explain.record_statistics import later, typical
from autoddl.explain.run_seconds import seconds_as_run
from autoddl.planner.finish import on_cluster
from autoddl.planner.pipelines.staged_steps import staged_step
from autoddl.planner.question import space_of_plan
from autoddl.schedule.timeline import predict_timeline

__all__ = ["MOVED", "RanPlan", "plan_cluster", "priced_plan", "read_ran", "shares_at"]

MOVED = 1.02
"""Factor by which a constant is moved to see what it does: little, so that the same things are waited for."""

Seconds = Callable[[Profile], float]


@dataclass(frozen=True, slots=True)
class RanPlan:
    """A plan that ran, and the seconds of its steps."""

    row: str
    """Path of the plan."""
    seconds: float
    """Measured seconds of a step."""
    plan: Plan
    """The plan."""
    source: str = "plans that ran"
    """The group that errors are given for."""


def read_ran(path: Path) -> RanPlan:
    """Reads a plan and the record beside it, which `run` wrote. Raises MismatchError for the record of another plan."""
    plan, beside = load_plan(path), path.with_suffix(".record.jsonl")
    if not beside.exists():
        raise InputError(f"{path} has no record beside it ({beside.name}): run it first, with `autoddl run {path} "
                         "FILE.py:FACTORY`")
    record = read_record(beside)
    check_record(plan, record)
    return RanPlan(str(path), typical(later(record), lambda step: step.seconds), plan)


def plan_cluster(plan: Plan) -> Cluster:
    """The cluster of a plan, with the constants with which it was made."""
    return parse_cluster(plan.source["cluster"], "the plan's cluster")


def priced_plan(plan: Plan, software: str | None = None) -> Seconds:
    """Returns what gives the seconds of a plan's step with the constants of a profile, as its program runs it.

    A plan that was made with a profile has its constants already.
    """
    known, own = plan_cluster(plan), plan.source.get("profile")
    made = SHIPPED if own is None else parse_profile(json.dumps(own), "the plan's profile")
    graph = graph_of_plan(plan)
    space = space_of_plan(plan) if plan.pipeline is None else None

    def seconds(profile: Profile) -> float:
        moved = replace(SHIPPED, factors=tuple(a / b for a, b in zip(profile.factors, made.factors, strict=True)))
        cluster = moved.on(known)
        here = plan if space is None else on_cluster(plan, *space, cluster)
        if software is not None:
            return seconds_as_run(here, profile.by(software_named(software)), cluster)
        if here.pipeline is not None:
            return staged_step(here, graph, cluster).timeline.makespan
        return predict_timeline(here, graph, cluster).step.seconds + here.predicted.update

    return seconds


def shares_at(seconds: Seconds, profile: Profile) -> tuple[float, tuple[float, ...]]:
    """Returns the seconds at a profile and, by constant, the share d log T / d log x of it in them."""
    here = seconds(profile)
    return here, tuple((seconds(profile.times(name, MOVED)) / here - 1) / (MOVED - 1) for name in CONSTANTS)
