"""A plan trained on this machine as if on its cluster: the same ranks, the same launcher, links as slow as there.

    step_seconds            of every step, the slowest rank's; the first one also makes the connections
    exposed_seconds         of a step in which a rank waits for collectives, hidden_seconds: in which collectives run
                            while it computes; mean of the ranks, median of the steps, as predicted on rank 0
    collective_mismatches   collectives of a step that the plan has and the record has not, or the other way round
    uplinks                 bytes a step that the plan sends over each uplink, and that the interfaces counted

The ranks share the cores of this machine; so the cluster's device should be a share of one of them.
"""

import json
import statistics
import sys
import tempfile
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
from autoddl.launch.launch import launch
from autoddl.launch.machine import check_ranks, free_bytes
from autoddl.launch.places import placed

__all__ = ["Crossed", "Rehearsal", "rehearse"]

PROCESS_BYTES = 0.25e9
"""What a rank takes before it has a model: the interpreter and torch."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Crossed:
    """Bytes a step over the uplink of ranks `first` .. `first + ranks - 1` into a unit of `level`.

    `planned` is the payload that leaves, `left` and `entered` what the interfaces counted, with headers.
    """

    level: str
    first: int
    ranks: int
    planned: float
    left: float
    entered: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What came of it; `note` says what was not as on the plan's cluster."""

    step_seconds: tuple[float, ...]
    predicted_seconds: float
    losses: tuple[float, ...]
    collective_mismatches: int
    uplinks: tuple[Crossed, ...]
    ranks: int
    note: str = ""
    mismatches: tuple[str, ...] = ()
    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    predicted_exposed_seconds: float | None = None
    predicted_hidden_seconds: float | None = None
    record: str | None = None

    @property
    def median_seconds(self) -> float:
        """The median step after the first."""
        return statistics.median(self.step_seconds[1:] or self.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """A loss that is no number is null: JSON has no word for it."""
        losses = tuple(loss if isfinite(loss) else None for loss in self.losses)
        return asdict(self) | {"losses": losses, "median_seconds": self.median_seconds}


def rehearse(path: Path, plan: Plan, factory: Factory, *, steps: int = 10, lr: float = 1e-3,
             cluster: Path | None = None, shaped: bool = True, timeout: float = 600.0, record: Path | None = None,
             progress: Progress | None = None) -> Rehearsal:
    """Train `steps` steps on shaped links, of the plan's cluster or of another; unshaped, on plain loopback.

    A collective that takes longer than `timeout` seconds, because a link or a rank is gone, ends the rehearsal. What
    every rank sends, and when, is written to `record`, for `compare_run`.
    """
    _check(plan, steps)
    machine, note = _machine(plan, cluster)
    tell = progress or (lambda what, done, total: None)
    temporary = tempfile.TemporaryDirectory(prefix="autoddl-rehearsal-")
    with temporary as name, placed(machine if shaped else None) as (uplinks, places):
        folder = Path(name)
        kept = record.resolve() if record is not None else folder / "record.jsonl"
        job = {"plan": str(path.resolve()), "factory": factory.to_json(), "steps": steps, "lr": lr, "folder": name,
               "timeout": timeout, "uplinks": [asdict(uplink) for uplink in uplinks], "record": str(kept)}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        launch(plan.mesh.size, [sys.executable, "-m", "autoddl.launch.rehearse_rank", str(folder / "job.json")],
               places=places, forked=True, tick=lambda: tell("rehearsing", len(_losses(folder)), steps))
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(plan.mesh.size)]
        made = _rehearsal(plan, found, _losses(folder), note if shaped else "on loopback, not shaped")
        return replace(_timed(made, plan, kept), record=str(record) if record is not None else None)


def _check(plan: Plan, steps: int) -> None:
    if is_rank():
        raise InputError("a rehearsal starts its own ranks: call it outside torchrun and srun")
    if steps < 2:
        raise InputError(f"{steps} step is too few to rehearse: the first makes the connections; take 2 or more")
    ranks = plan.mesh.size
    check_ranks(ranks, "plan for a smaller cluster of the kind")
    needed = ranks * (plan.predicted.peak_bytes + PROCESS_BYTES)
    free = free_bytes()
    if needed > free:
        raise InputError(f"{ranks} ranks of this plan need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free here: "
                         "plan for fewer ranks, or a smaller model or batch")


def _machine(plan: Plan, path: Path | None) -> tuple[Cluster, str]:
    """The cluster to build, and what to say if it is not the plan's own."""
    if path is None:
        if "cluster" not in plan.source:
            raise MismatchError("the plan does not say what its cluster was: give it with --cluster FILE")
        return parse_cluster(plan.source["cluster"], "the plan's cluster"), ""
    cluster = load_cluster(path)
    if cluster.size != plan.mesh.size:
        raise MismatchError(f"cluster {cluster.name} has {cluster.size} devices, the plan {plan.mesh.size} ranks "
                            f"(mesh '{plan.mesh}'): give a cluster of {plan.mesh.size}")
    same = cluster.fingerprint == plan.fingerprints.get("cluster")
    return cluster, "" if same else f"on {cluster.name}; the prediction is for {plan.cluster}"


def _losses(folder: Path) -> list[float]:
    written = folder / "losses-0"
    return [float(line) for line in written.read_text().split()] if written.exists() else []


def _rehearsal(plan: Plan, found: list[dict[str, Any]], losses: list[float], note: str) -> Rehearsal:
    seconds = tuple(max(step) for step in zip(*(one["step_seconds"] for one in found), strict=True))
    wrong = [f"rank {rank} {text}" for rank, one in enumerate(found) for text in one["mismatches"]]
    uplinks = tuple(Crossed(**row) for row in found[0]["uplinks"])
    return Rehearsal(seconds, plan.predicted.seconds, tuple(losses), len(wrong), uplinks, plan.mesh.size, note,
                     tuple(wrong[:20]))


def _timed(made: Rehearsal, plan: Plan, record: Path) -> Rehearsal:
    """With the exposed and hidden seconds of the record, and of the plan's time line where it says its source."""
    steps = later(read_record(record))
    line = foreseen(plan).step if "graph" in plan.source else None
    return replace(made, exposed_seconds=typical(steps, lambda step: step.exposed),
                   hidden_seconds=typical(steps, lambda step: step.hidden),
                   predicted_exposed_seconds=line.exposed if line else None,
                   predicted_hidden_seconds=line.hidden if line else None)
