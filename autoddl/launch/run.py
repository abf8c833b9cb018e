"""Training under a plan from the shell: ranks started here, or this process as one rank of torchrun or srun."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from autoddl.capture.factory import Factory
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.core.processes import is_rank
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch, python_module
from autoddl.launch.machine import check_memory, most_ranks

__all__ = ["TrainingResult", "run"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training: `step_seconds` is the median step after the first, `record` the file of every message."""

    losses: tuple[float, ...]
    step_seconds: float
    predicted_seconds: float
    ranks: int
    record: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name; a loss that is NaN or infinite is None, because JSON has no word for it."""
        return asdict(self) | {"losses": tuple(loss if isfinite(loss) else None for loss in self.losses)}


def run(path: Path, plan: Plan, factory: Factory, *, steps: int, lr: float, save: Path | None = None,
        cluster: Path | None = None, record: Path | None = None, progress: Progress | None = None
        ) -> TrainingResult | None:
    """Trains `steps` steps with AdamW and returns the result; None on ranks other than the first.

    `record` is a file for every message of every rank, `save` a folder for a checkpoint. Raises MismatchError where
    `cluster` is not the plan's, and the error of a rank that fails."""
    if cluster is not None:
        _check_cluster(plan, cluster)
    job = {"task": "train", "plan": str(path.resolve()), "factory": factory.to_json(), "steps": steps, "lr": lr,
           "save": str(save) if save else None, "record": str(record.resolve()) if record else None}
    tell = progress or (lambda what, done, total: None)
    found = _join(job, plan, tell) if is_rank() else _start(job, plan, tell)
    if found is None:
        return None
    return TrainingResult(tuple(found["losses"]), found["step_seconds"], plan.predicted.seconds, plan.mesh.size,
               str(record) if record else None)


def _check_cluster(plan: Plan, path: Path) -> None:
    cluster = load_cluster(path)
    if cluster.fingerprint != plan.fingerprints.get("cluster"):
        raise MismatchError(f"the plan was made for another cluster, {plan.cluster}, than {path} describes "
                            f"({cluster.name}): plan for this one")


def _join(job: dict[str, Any], plan: Plan, tell: Progress) -> dict[str, Any] | None:
    """This process is a rank already."""
    world = int(os.environ["WORLD_SIZE"])
    if world != plan.mesh.size:
        raise MismatchError(f"the plan's mesh '{plan.mesh}' has {plan.mesh.size} ranks, but {world} were started; "
                            f"start {plan.mesh.size}, or plan for {world}")
    from autoddl.launch.train import train

    if job["record"] and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:  # several machines: parts
        job = {**job, "record": f"{job['record']}.{os.environ['RANK']}", "record_alone": True}
    losses: list[float] = []

    def heard(loss: float) -> None:
        losses.append(loss)
        tell("training", len(losses), job["steps"])

    found = train(job, heard)
    return found if os.environ["RANK"] == "0" else None


def _start(job: dict[str, Any], plan: Plan, tell: Progress) -> dict[str, Any]:
    """All ranks on this machine."""
    most = most_ranks()
    if plan.mesh.size > most:
        raise InputError(f"the plan is for {plan.mesh.size} ranks, this machine takes {most}; start it on the cluster, "
                         "with torchrun -m autoddl.cli run ... or srun autoddl run ...")
    check_memory(plan.mesh.size, plan.predicted.peak_bytes)
    with tempfile.TemporaryDirectory(prefix="autoddl-run-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "folder": name}), encoding="utf-8")

        def tick() -> None:
            written = folder / "losses-0"
            tell("training", len(written.read_text().splitlines()) if written.exists() else 0, job["steps"])

        launch(plan.mesh.size, python_module("autoddl.launch.worker", str(folder / "job.json")), tick=tick,
               forked=True)
        found = json.loads((folder / "result-0.json").read_text())
        assert isinstance(found, dict), found
        return found
