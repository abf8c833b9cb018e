"""Rehearses a plan on this machine as if on its cluster: the same ranks and launcher, on links as slow as there.

    step_seconds            of every step, the slowest rank's; the first one also makes the connections
    exposed_seconds         of a step in which a rank waits for collectives, hidden_seconds: in which collectives run
                            while it computes; mean of the ranks, median of the steps, as predicted on rank 0
    collective_mismatches   collectives of a step that the plan has and the record has not, or the other way round
    uplinks                 bytes a step that the plan sends over each uplink, and that the interfaces counted

The ranks share the cores of this machine, so the cluster's device should be a share of one core.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from autoddl.capture.factory import Factory
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.core.processes import is_rank
from autoddl.core.record import read_record
from autoddl.cost_models import Cluster, load_cluster, parse_cluster
from autoddl.explain.compare_run import foreseen
from autoddl.explain.record_statistics import later, typical
from autoddl.explain.run_seconds import as_planned
from autoddl.explain.staged_run import foreseen_waiting
from autoddl.explain.switch_facts import not_offered
from autoddl.launch.launch import launch, python_module
from autoddl.launch.machine import check_memory, check_ranks, over_gloo
from autoddl.launch.places import placed
from autoddl.launch.temporary import temporary_folder

__all__ = ["Rehearsal", "UplinkBytes", "rehearse"]


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class UplinkBytes:
    """The bytes of a step over the uplink of some ranks."""

    level: str
    """The level of the cluster into whose unit the uplink leads."""
    first: int
    """The first of the ranks behind the uplink, which are consecutive."""
    ranks: int
    """The number of ranks behind the uplink."""
    planned: float
    """Bytes of payload that leave, as planned."""
    left: float
    """Bytes that left, as the interface counted them, with headers."""
    entered: float
    """Bytes that entered, as the interface counted them, with headers."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The times, losses and bytes of a rehearsal; the module docstring says over which ranks and steps."""

    step_seconds: tuple[float, ...]
    """Seconds of every step."""
    predicted_seconds: float
    """Seconds of a step, as the plan predicts."""
    losses: tuple[float, ...]
    """The loss of every step."""
    collective_mismatches: int
    """The number of kinds of collectives, over all ranks, that differ between plan and record."""
    uplinks: tuple[UplinkBytes, ...]
    """Bytes over the uplinks, from the innermost level out."""
    ranks: int
    """The number of ranks that trained."""
    note: str = ""
    """How the rehearsal differed from the plan's cluster, in words; empty where it did not."""
    mismatches: tuple[str, ...] = ()
    """The first 20 of the collectives that differ, a line each."""
    exposed_seconds: float = 0.0
    """Seconds of a step in which ranks wait for collectives."""
    hidden_seconds: float = 0.0
    """Seconds of a step in which collectives run while the ranks compute."""
    predicted_exposed_seconds: float | None = None
    """Exposed seconds on the plan's time line; None where the plan does not contain its graph."""
    predicted_hidden_seconds: float | None = None
    """Hidden seconds on the plan's time line; None where the plan does not contain its graph, or has stages."""
    record: str | None = None
    """The path of the record, if one was asked for."""

    @property
    def median_seconds(self) -> float:
        """Returns the median seconds of a step after the first."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name; a loss that is NaN or infinite is None, because JSON has no word for it."""
        losses = tuple(loss if isfinite(loss) else None for loss in self.losses)
        return asdict(self) | {"losses": losses, "median_seconds": self.median_seconds}


def rehearse(path: Path, plan: Plan, factory: Factory, *, steps: int = 10, lr: float = 1e-3,
             cluster: Path | None = None, shaped: bool = True, timeout: float = 600.0, record: Path | None = None,
             progress: Progress | None = None) -> Rehearsal:
    """Trains `steps` steps on shaped links, of the plan's cluster or of another, and returns what was measured.

    `path` is the file of `plan`; without `shaped` the links are plain loopback. A collective that takes longer than
    `timeout` seconds, because a link or a rank is gone, ends the rehearsal. Every message of every rank goes into the
    file `record`, which `compare_run` reads.

        InputError      this machine cannot run so many ranks, or `steps` is below 2
        MismatchError   the cluster has another number of devices
        MachineError    links cannot be shaped here

    The error of a rank that fails is raised as well.
    """
    _check(plan, steps)
    machine, note = _machine(plan, cluster)
    tell = progress or (lambda what, done, total: None)
    with temporary_folder("rehearsal") as folder, placed(machine if shaped else None) as (uplinks, places):
        kept = record.resolve() if record is not None else folder / "record.jsonl"
        job = {"plan": str(path.resolve()), "factory": factory.to_json(), "steps": steps, "lr": lr,
               "folder": str(folder),
               "timeout": timeout, "uplinks": [asdict(uplink) for uplink in uplinks], "record": str(kept)}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        launch(plan.mesh.size, python_module("autoddl.launch.rehearse_rank", str(folder / "job.json")),
               places=places, forked=True, tick=lambda: tell("rehearsing", len(_losses(folder)), steps))
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(plan.mesh.size)]
        made = _rehearsal(plan, found, _losses(folder), _note(plan, machine, note, shaped))
        return replace(_timed(made, plan, kept), record=str(record) if record is not None else None)


def _check(plan: Plan, steps: int) -> None:
    if is_rank():
        raise InputError("a rehearsal starts its own ranks: call it outside torchrun and srun")
    if steps < 2:
        raise InputError(f"{steps} step is too few to rehearse: the first makes the connections; take 2 or more")
    check_ranks(plan.mesh.size, "plan for a smaller cluster of the kind")
    check_memory(plan.mesh.size, plan.predicted.peak_bytes)


def _machine(plan: Plan, path: Path | None) -> tuple[Cluster, str]:
    """The cluster to build, and a note where it is not the plan's own."""
    if path is None:
        if "cluster" not in plan.source:
            raise MismatchError("the plan does not say what its cluster was: give it with --cluster FILE")
        return parse_cluster(plan.source["cluster"], "the plan's cluster"), ""
    cluster = load_cluster(path)
    if cluster.size != plan.mesh.size:
        raise MismatchError(f"cluster {cluster.name} has {cluster.size} devices, the plan {plan.mesh.size} ranks "
                            f"(mesh '{plan.mesh}'): give a cluster of {plan.mesh.size}")
    same = as_planned(plan, cluster).fingerprint == plan.fingerprints.get("cluster")
    return cluster, "" if same else f"on {cluster.name}; the prediction is for {plan.cluster}"


def _note(plan: Plan, machine: Cluster, note: str, shaped: bool) -> str:
    """The note, and that switches of the plan's cluster do not reduce where they are not built."""
    said = note if shaped else "on loopback, not shaped"
    built = [level.name for level in machine.levels[1:] if level.size > 1 and level.reduces is not None]
    return "; ".join(filter(None, (said, over_gloo(plan), not_offered(plan, built if shaped else ()))))


def _losses(folder: Path) -> list[float]:
    written = folder / "losses-0"
    return [float(line) for line in written.read_text().split()] if written.exists() else []


def _rehearsal(plan: Plan, found: list[dict[str, Any]], losses: list[float], note: str) -> Rehearsal:
    seconds = tuple(max(step) for step in zip(*(one["step_seconds"] for one in found), strict=True))
    wrong = [f"rank {rank} {text}" for rank, one in enumerate(found) for text in one["mismatches"]]
    uplinks = tuple(UplinkBytes(**row) for row in found[0]["uplinks"])
    return Rehearsal(seconds, plan.predicted.seconds, tuple(losses), len(wrong), uplinks, plan.mesh.size, note,
                     tuple(wrong[:20]))


def _timed(made: Rehearsal, plan: Plan, record: Path) -> Rehearsal:
    """With the exposed and hidden seconds of the record, and of the time line of a plan that says its source."""
    steps = later(read_record(record))
    made = replace(made, exposed_seconds=typical(steps, lambda step: step.exposed),
                   hidden_seconds=typical(steps, lambda step: step.hidden))
    if plan.pipeline is not None:
        return replace(made, predicted_exposed_seconds=foreseen_waiting(plan))
    line = foreseen(plan).step if "graph" in plan.source else None
    return replace(made, predicted_exposed_seconds=line.exposed if line else None,
                   predicted_hidden_seconds=line.hidden if line else None)
