"""What a launched rank runs: `python -m autoddl.worker JOB.json`.

A job is {"task": "train" or "check", "plan": a file, "factory": {...}, "folder": where results go, ...}. Rank r leaves
`result-r.json` there, or its one line for the launcher.
"""

import json
import math
import os
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.float64 import cast, widened
from autoddl.capture.materialize import SEED, filled, materialised
from autoddl.capture.sample import Sample, as_sample, parted, sample_for
from autoddl.core.errors import AutoDDLError
from autoddl.core.files import write_atomically
from autoddl.core.hubs import planned
from autoddl.core.layout import Layout, Mesh, extents
from autoddl.core.plan import Plan, load_plan
from autoddl.launch import leave, report_failure
from autoddl.runtime import checkpoint
from autoddl.runtime.parallelize import ParallelModel, parallelize
from autoddl.runtime.record_writer import RecordWriter
from autoddl.runtime.world import device_of
from autoddl.schedule.traffic import traffic

__all__ = ["Job", "built", "mismatches", "one_step", "recorded", "serve", "train"]

Job = dict[str, Any]


def built(factory: Factory, drawn: bool = False) -> tuple[nn.Module, Sample]:
    """The factory's model and batch, the same in every process; `drawn`: weights of the meta device get some values."""
    torch.manual_seed(SEED)
    model, given = factory.build()
    batch = filled(model, as_sample(given) if given is not None else sample_for(model))
    return materialised(model) if drawn else model, batch


def train(job: Job, tell: Callable[[float], None]) -> dict[str, Any]:
    """AdamW on the factory's batch; `tell` hears every loss. What cannot be saved to is refused before the first."""
    if job.get("save"):
        checkpoint.check(job["save"])
    plan, factory = load_plan(job["plan"]), Factory(**job["factory"])
    model, batch = built(factory)
    log = recorded(job, plan)
    parallel = parallelize(model, plan, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=job["lr"])
    losses, seconds = [], []
    for number in range(job["steps"]):
        loss, took = one_step(parallel, optimizer, batch, log, number)
        losses.append(loss)
        seconds.append(took)
        tell(loss)
    if job.get("save"):
        checkpoint.save(parallel, optimizer, job["save"])
    return {"losses": losses, "step_seconds": statistics.median(seconds[1:] or seconds)}


def recorded(job: Job, plan: Plan) -> RecordWriter | None:
    """This rank's part of the record that the job asks for; the first rank makes the file, so before all meet."""
    if not job.get("record"):
        return None
    return RecordWriter(job["record"], plan, int(os.environ["RANK"]), alone=job.get("record_alone", False))


def one_step(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: Sample, log: RecordWriter | None,
             number: int) -> tuple[float, float]:
    """Train on `batch`, step `number` of the run: the loss, and the seconds that it took with the optimizer."""
    recorder = parallel.recorder
    recorder.timed = log is not None
    start = time.perf_counter_ns()
    loss = parallel.step(batch)
    recorder.direction = "update"
    optimizer.step()
    optimizer.zero_grad()
    said = float(loss)
    end = time.perf_counter_ns()
    if log is not None:
        log.write(recorder, number, start, end)
    return said, (end - start) / 1e9


def check(job: Job) -> dict[str, Any]:
    """The collectives of a step against the plan's, then a step in float64 against the truth."""
    factory, plan = Factory(**job["factory"]), load_plan(job["plan"])
    model, batch = built(factory, drawn=True)
    parallel = parallelize(model, plan, batch)
    parallel.step(batch)
    wrong = mismatches(parallel)
    model, batch = built(factory, drawn=True)
    captured = widened(capture(model, parted(batch, plan.microbatches)))
    exact = ParallelModel(model.double(), plan, captured, planned(captured.graph), parallel.groups,
                          device_of(plan.backend), 0)
    loss = float(exact.step(cast(batch)))
    truth = torch.load(Path(job["folder"], "truth.pt"), map_location="cpu", weights_only=True, mmap=True)
    return {"loss_error": _part(abs(loss - truth["loss"]), abs(truth["loss"])), "mismatches": wrong,
            "gradient_error": _gradient_error(exact, truth["gradients"])}


def _gradient_error(parallel: ParallelModel, gradients: dict[str, Tensor]) -> float:
    """The largest difference of this rank's pieces from the truth's, as a part of the largest gradient there is."""
    largest = max(map(_largest, gradients.values()), default=0.0)
    stored = {s.fqn: s.layout for s in parallel.plan.stored}
    worst = 0.0
    for name, parameter in parallel.named_parameters():
        if name in gradients:
            whole = Layout.broadcast(parallel.plan.mesh)
            piece = _piece(gradients[name], stored.get(name, whole), parallel.plan.mesh,
                           parallel.groups.coordinate)
            grad = parameter.grad
            mine = torch.zeros_like(piece) if grad is None else getattr(grad, "_local_tensor", grad)
            worst = max(worst, _part(_largest(mine.cpu() - piece), largest))
    return worst


def _largest(tensor: Tensor) -> float:
    """The largest magnitude, 0 of no elements; NaN where any is."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _part(difference: float, whole: float) -> float:
    """`difference` as a part of `whole`; infinite where it is no number, which no comparison finds too large."""
    return difference / (whole or 1.0) if math.isfinite(difference) else math.inf


def _piece(whole: Tensor, layout: Layout, mesh: Mesh, at: tuple[int, ...]) -> Tensor:
    """The part of a tensor that the rank at `at` holds."""
    for dim, (offset, size) in enumerate(extents(tuple(whole.shape), layout, mesh, at)):
        whole = whole.narrow(dim, offset, size)
    return whole


def mismatches(parallel: ParallelModel) -> list[str]:
    """Collectives that the plan has and the record has not, or the other way round."""
    def rows(many: Iterable[Any]) -> Counter[str]:
        return Counter(f"{one.direction} {one.kind} over {one.axes} of {one.nbytes} bytes" for one in many)

    expected = rows(traffic(parallel.plan, parallel.graph, parallel.groups.coordinate))
    recorded = rows(parallel.recorder.executed)
    return [f"not run: {text} x {n}" for text, n in (expected - recorded).items()] + \
           [f"not planned: {text} x {n}" for text, n in (recorded - expected).items()]


def serve(work: Callable[[Job, Path], Any]) -> None:
    """Run `work(job, where losses go, line by line)` of the job that the command line names; its result, or one clear
    error, goes into the job's folder."""
    job: Job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, folder = os.environ["RANK"], Path(job["folder"])
    try:
        result = work(job, folder / f"losses-{rank}")
        write_atomically(folder / f"result-{rank}.json", json.dumps(result))
    except BaseException as error:
        report_failure(error)
        if job.get("debug"):
            traceback.print_exc()
        leave(2 if isinstance(error, AutoDDLError) else 1)
    leave(0)


def _work(job: Job, losses: Path) -> Any:
    if job["task"] != "train":
        return check(job)
    with open(losses, "w", buffering=1, encoding="utf-8") as file:
        return train(job, lambda loss: print(loss, file=file))


if __name__ == "__main__":
    serve(_work)
