"""The program of a rank of a rehearsal: `python -m autoddl.launch.rehearse_rank JOB.json`.

It trains as a rank of `run` does. It returns the seconds of each step, and the collectives of the last step that differ
from the plan. Rank 0 also returns the bytes per step over the uplinks. These leave out the first step, in which
connections are made.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddl.capture.factory import Factory
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import parse_cluster
from autoddl.cost_models.backends import EXECUTABLE
from autoddl.launch.check import mismatches
from autoddl.launch.jobs import serve
from autoddl.launch.shaped_network import Uplink, sent_over
from autoddl.launch.train import built, one_step, recorded
from autoddl.runtime.parallelize import ParallelModel, parallelize
from autoddl.runtime.switches.offered import offered_switches, with_offered
from autoddl.schedule.uplink_bytes import count_uplink_bytes

__all__ = ["trained"]

DRAIN_SECONDS = 0.1
"""Seconds to wait before counting; the queue of an uplink empties sooner."""


def trained(job: dict[str, Any], tell: Callable[[float], None]) -> dict[str, Any]:
    """Trains with AdamW on the factory's batch and returns the result of this rank; `tell` receives every loss."""
    plan, factory = load_plan(job["plan"]), Factory(**job["factory"])
    model, batch = built(factory)
    log = recorded(job, plan)
    parallel = parallelize(model, plan, batch, timeout=job["timeout"],
                           device=None if plan.backend in EXECUTABLE else "cpu")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=job["lr"])
    uplinks = [Uplink(**given) for given in job["uplinks"]]
    seconds, before = [], []
    for step in range(job["steps"]):
        if step == 1:
            before = _counted(uplinks)
        loss, took = one_step(parallel, optimizer, batch, log, step)
        seconds.append(took)
        tell(loss)
    return {"step_seconds": seconds, "mismatches": mismatches(parallel),
            "uplinks": _crossed(parallel, uplinks, before, _counted(uplinks), job["steps"] - 1)}


def _counted(uplinks: list[Uplink]) -> list[tuple[int, int]]:
    """Bytes over the uplinks until now, read by rank 0 while the others stand still."""
    if not uplinks:
        return []
    dist.barrier()
    time.sleep(DRAIN_SECONDS)
    found = [sent_over(uplink) for uplink in uplinks] if dist.get_rank() == 0 else []
    dist.barrier()
    return found


def _crossed(parallel: ParallelModel, uplinks: list[Uplink], before: list[tuple[int, int]],
             after: list[tuple[int, int]], steps: int) -> list[dict[str, Any]]:
    """Planned and counted bytes of a step over each uplink."""
    if not before or parallel.groups.rank != 0:
        return []
    planned = count_uplink_bytes(_as_run(parallel.plan), parallel.graph,
                                 [range(u.first, u.first + u.ranks) for u in uplinks])
    return [{"level": uplink.level, "first": uplink.first, "ranks": uplink.ranks, "planned": nbytes,
             "left": (new[0] - old[0]) / steps, "entered": (new[1] - old[1]) / steps}
            for uplink, nbytes, old, new in zip(uplinks, planned, before, after, strict=True)]


def _as_run(plan: Plan) -> Plan:
    """The plan, whose cluster has no switches that reduce where none are offered here."""
    if "cluster" not in plan.source:
        return plan
    cluster = with_offered(parse_cluster(plan.source["cluster"], "the plan's cluster"), offered_switches())
    return replace(plan, source={**plan.source, "cluster": cluster.to_yaml()})


def _work(job: dict[str, Any], losses: Path) -> Any:
    with open(losses, "w", buffering=1, encoding="utf-8") as file:
        return trained(job, lambda loss: print(repr(loss), file=file))


def main() -> None:
    """Runs the job that the command line names, as one rank."""
    serve(_work)


if __name__ == "__main__":
    main()
