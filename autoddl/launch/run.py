"""Training under a plan from the shell: ranks started here, or this process as one rank of torchrun or srun."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from autoddl.capture.factory import Factory
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.core.processes import is_rank
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.explain.run_seconds import as_planned
from autoddl.explain.switch_facts import not_offered
from autoddl.launch.elastic import Elastic, PlanFile
from autoddl.launch.launch import RanksLost, launch, python_module
from autoddl.launch.machine import check_memory, most_ranks, over_gloo
from autoddl.launch.programs import factory_batch, plan_of_batch
from autoddl.launch.temporary import temporary_folder
from autoddl.runtime.checkpoints.checkpoint_series import check_series
from autoddl.runtime.switches.offered import offered_switches

__all__ = ["Checkpoints", "TrainingResult", "run"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of training: `step_seconds` is the median step after the first, `record` the file of every message.

    Where training went on from a checkpoint of `first` steps, the losses are those from before too. Where no step was
    left to do, `step_seconds` is None. The `note` says how the machine differs from the plan's cluster, and
    that nothing was there to resume."""

    losses: tuple[float, ...]
    step_seconds: float | None
    predicted_seconds: float
    ranks: int
    record: str | None = None
    first: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name; a loss that is NaN or infinite is None, because JSON has no word for it."""
        return asdict(self) | {"losses": tuple(loss if isfinite(loss) else None for loss in self.losses)}


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Where checkpoints are kept: of every `every`-th step the last `keep`; with `resume` the last is gone on from."""

    folder: Path
    every: int
    keep: int = 2
    resume: bool = False

    def to_json(self) -> dict[str, Any]:
        """The fields of a job."""
        return {"checkpoint": str(self.folder.resolve()), "every": self.every, "keep": self.keep, "resume": self.resume}


def run(path: Path, plan: Plan, factory: Factory, *, steps: int, lr: float, save: Path | None = None,
        cluster: Path | None = None, record: Path | None = None, checkpoints: Checkpoints | None = None,
        elastic: Elastic | None = None, timeout: float = 600.0, progress: Progress | None = None
        ) -> TrainingResult | None:
    """Trains `steps` steps with AdamW and returns the result; None on ranks other than the first.

    `record` is a file for every message of every rank, `save` a folder for a checkpoint. With `elastic` and
    `checkpoints` training goes on by a plan for fewer ranks where some are lost. Where the factory's batch is a further
    sample of the plan, the program for it is run. Ranks that torchrun starts run the
    plan of their number. `timeout` is the seconds that a rank waits for others. Raises MismatchError where `cluster` is
    not the plan's or the factory's model is not, and the error of a rank that fails."""
    if cluster is not None:
        _check_cluster(plan, cluster)
    if checkpoints is not None:
        if is_rank() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            checkpoints = replace(checkpoints, resume=True)
        check_series(checkpoints.folder, checkpoints.resume)
    program, said = (plan, "") if elastic else plan_of_batch(plan, factory)
    if said:
        with temporary_folder("program") as folder:
            path = folder / "plan.json" if record is None or is_rank() else record.with_suffix(".plan.json")
            program.save(path)
            ran = run(path, program, factory, steps=steps, lr=lr, save=save, record=record,
                      checkpoints=checkpoints, timeout=timeout, progress=progress)
        # of a record there is a plan beside it, with which compare-run compares
        return ran and replace(ran, note="; ".join(filter(None, (said + f", {path}" * path.exists(), ran.note))))
    if not is_rank():
        _check_model(plan, factory)
    job = {"task": "train", "factory": factory.to_json(), "steps": steps, "lr": lr, "timeout": timeout,
           "save": str(save) if save else None, "record": str(record.resolve()) if record else None,
           **(checkpoints.to_json() if checkpoints else {})}
    plans = elastic or Elastic((PlanFile(path.resolve(), plan),))
    tell = progress or (lambda what, done, total: None)
    found = _join(job, plans, tell) if is_rank() else _start(job, plans, tell)
    if found is None:
        return None
    anew = "" if checkpoints is None or not checkpoints.resume or found["first"] else \
        f"no checkpoint was in {checkpoints.folder}: training began with the first step"
    notes = anew, over_gloo(plan), "" if offered_switches() else not_offered(plan), _twice(plan)
    return TrainingResult(tuple(found["losses"]), found["step_seconds"], found["predicted_seconds"], found["ranks"],
                          found["record"], found["first"], "; ".join(filter(None, notes)))


def _twice(plan: Plan) -> str:
    """Says that the sums of a plan have a momentum besides that of AdamW; empty where they have none."""
    momentum = max((one.momentum for one in plan.sparse_sums.values()), default=0.0)
    return (f"sparse sums had a momentum of {momentum:g} and AdamW one of its own: SGD without momentum, in a loop of "
            "your own, is what they are for") if momentum else ""


def _check_cluster(plan: Plan, path: Path) -> None:
    cluster = as_planned(plan, load_cluster(path))
    if cluster.fingerprint != plan.fingerprints.get("cluster"):
        text = plan.source.get("cluster")
        known = parse_cluster(text, "the plan's cluster").to_yaml().splitlines() if text else []
        other = [line.strip(" -") for line in cluster.to_yaml().splitlines() if line not in known]
        shown = f"its file has {other[0]!r}" if other else f"its name is {cluster.name}"
        raise MismatchError(f"the plan was made for another cluster, {plan.cluster}, than {path} describes: {shown}; "
                            "plan for this one, or give the plan's")


def _check_model(plan: Plan, factory: Factory) -> None:
    """Raises MismatchError where the factory's model is not the plan's, before ranks start, which check it whole."""
    from autoddl.capture.same_model import check_same_model

    check_same_model(plan, *factory_batch(factory))


def _job_of(job: dict[str, Any], file: PlanFile) -> dict[str, Any]:
    return {**job, "plan": str(file.path)}


def _told(found: dict[str, Any], job: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Returns what a rank found, and under which plan."""
    return {**found, "predicted_seconds": plan.predicted.seconds, "ranks": plan.mesh.size, "record": job["record"]}


def _join(job: dict[str, Any], elastic: Elastic, tell: Progress) -> dict[str, Any] | None:
    """This process is a rank already. One that torchrun starts again, with others, goes on from the last checkpoint."""
    world = int(os.environ["WORLD_SIZE"])
    file = elastic.of_size(world)
    if file is None:
        plan = elastic.plans[0].plan
        raise MismatchError(f"the plan's mesh '{plan.mesh}' has {plan.mesh.size} ranks, but {world} were started; "
                            f"start {plan.mesh.size}, or plan for {world}")
    from autoddl.launch.train import train

    plan, job = file.plan, _job_of(job, file)
    if job["record"] and os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:  # several machines: parts
        job = {**job, "record": f"{job['record']}.{os.environ['RANK']}", "record_alone": True}
    losses: list[float] = []

    def heard(loss: float) -> None:
        losses.append(loss)
        tell("training", len(losses), job["steps"])

    found = _told(train(job, heard), job, plan)
    return found if os.environ["RANK"] == "0" else None


def _start(job: dict[str, Any], elastic: Elastic, tell: Progress) -> dict[str, Any]:
    """All ranks on this machine; where some are lost, again with fewer."""
    file = elastic.plans[0]
    with temporary_folder("run") as folder:
        while True:
            try:
                return _told(_trained(_job_of(job, file), file.plan, folder, tell), job, file.plan)
            except RanksLost as lost:
                left = file.plan.mesh.size - len(lost.ranks)
                found = elastic.for_at_most(left, folder, tell) if "checkpoint" in job else None
                if found is None:
                    raise
                print(f"autoddl: {lost}; training goes on from the last checkpoint on {found.plan.mesh.size} of the "
                      f"{left} ranks that are left, by {found.path.name}", file=sys.stderr)
            file, job = found, {**job, "resume": True, "record": _next_record(job["record"], found.plan)}


def _next_record(record: str | None, plan: Plan) -> str | None:
    """The record of a plan that is run in another's place, beside that one's."""
    return record and str(Path(record).with_suffix(f".{plan.mesh.size}-ranks.jsonl"))


def _trained(job: dict[str, Any], plan: Plan, folder: Path, tell: Progress) -> dict[str, Any]:
    """Starts all ranks of `plan` here; returns what the first of them found."""
    most = most_ranks()
    if plan.mesh.size > most:
        raise InputError(f"the plan is for {plan.mesh.size} ranks, this machine takes {most} (4 a core, at least "
                         "16); start it on the cluster, with torchrun -m autoddl.cli run ... or srun autoddl run ...")
    check_memory(plan.mesh.size, plan.predicted.peak_bytes)
    for one in [*folder.glob("losses-*"), *folder.glob("result-*")]:
        one.unlink()  # of ranks that were lost
    (folder / "job.json").write_text(json.dumps({**job, "folder": str(folder)}), encoding="utf-8")

    def tick() -> None:
        written = folder / "losses-0"
        if written.exists():
            tell("training", len(written.read_text().splitlines()), job["steps"])
        else:
            tell(f"starting {plan.mesh.size} ranks, each of which captures the model", 0, 1)

    launch(plan.mesh.size, python_module("autoddl.launch.worker", str(folder / "job.json")), tick=tick, forked=True)
    found = json.loads((folder / "result-0.json").read_text())
    assert isinstance(found, dict), found
    return found
