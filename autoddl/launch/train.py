"""Trains one rank of a plan."""

import math
import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # which capture needs, as the next: forked ranks share what was imported before
import torch.export._trace
from torch import nn

from autoddl.capture.factory import Factory
from autoddl.capture.materialize import SEED, filled, materialised
from autoddl.capture.sample import Sample, as_sample, sample_for
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.launch.jobs import Job
from autoddl.launch.record_writer import RecordWriter
from autoddl.runtime import checkpoints as recovery
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.parallelize import ParallelModel, parallelize

TIMEOUT = 600.0
"""Seconds that a rank waits for the others, where a job says nothing else."""

__all__ = ["built", "one_step", "recorded", "train"]


def built(factory: Factory, drawn: bool = False) -> tuple[nn.Module, Sample]:
    """Returns the factory's model and batch, the same in every process, and at every call.

    With `drawn`, weights on the meta device get random values."""
    factory.function()  # its file may draw or seed when it is run, which is once
    random.seed(SEED)
    torch.manual_seed(SEED)
    model, given = factory.build()
    batch = filled(model, as_sample(given) if given is not None else sample_for(model))
    return materialised(model) if drawn else model, batch


def train(job: Job, tell: Callable[[float], None], ready: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Trains with AdamW on the factory's batch and returns the losses and the median seconds of a step.

    `tell` receives every loss; `ready` is called before the first step. A folder that cannot be written to is refused
    before it too. A loss that is not finite raises InputError: no checkpoint of such weights is saved, and one from
    before stays.

    With `checkpoint` a checkpoint of every `every`-th step and the last is kept there; `resume` goes on from it, with
    the losses from before."""
    if job.get("save"):
        checkpoint.check_writable(job["save"])
    plan, factory = load_plan(job["plan"]), Factory(**job["factory"])
    model, batch = built(factory)
    parallel = parallelize(model, plan, batch, timeout=job.get("timeout", TIMEOUT))
    optimizer, losses = torch.optim.AdamW(parallel.parameters(), lr=job["lr"]), Losses([])
    ready()
    first = _resumed(job, parallel, optimizer, losses, tell)
    log = recorded(job, plan) if first < job["steps"] else None  # with nothing to run, the record before stays
    seconds = []
    with _keeper(job) as keeper:
        for number in range(first, job["steps"]):
            loss, took = one_step(parallel, optimizer, batch, log, number - first)
            losses.every.append(loss)
            seconds.append(took)
            tell(loss)
            if not math.isfinite(loss):
                raise InputError(f"the loss of step {number + 1} of {job['steps']} is {loss}, so training ended there "
                                 "and saved nothing; a checkpoint from before is as it was: lower --lr, or look at the "
                                 "batch")
            if keeper is not None and not keeper.after_step(parallel, optimizer, losses=losses) \
                    and number + 1 == job["steps"]:
                keeper.save(parallel, optimizer, losses=losses)
    if job.get("save"):
        checkpoint.save(parallel, optimizer, job["save"])
    return {"losses": losses.every, "first": first,
            "step_seconds": statistics.median(seconds[1:] or seconds) if seconds else None}


@dataclass(frozen=True)
class Losses:
    """The losses of all steps, as a checkpoint keeps them, so that the curve goes on with the training."""

    every: list[float]

    def state_dict(self) -> dict[str, Any]:
        """The losses by name."""
        return {"every": list(self.every)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the losses of a checkpoint."""
        self.every[:] = state_dict["every"]


def _resumed(job: Job, parallel: ParallelModel, optimizer: torch.optim.Optimizer, losses: Losses,
             tell: Callable[[float], None]) -> int:
    """Goes on from the last checkpoint, with the learning rate of the job; returns the steps before."""
    if not job.get("resume"):
        return 0
    first = recovery.resume(job["checkpoint"], parallel, optimizer, losses=losses)
    for group in optimizer.param_groups:
        group["lr"] = job["lr"]
    for loss in losses.every:
        tell(loss)
    return first


def _keeper(job: Job) -> AbstractContextManager[recovery.Keeper | None]:
    """Returns the keeper of checkpoints, or None where the job asks for none."""
    if not job.get("checkpoint"):
        return nullcontext()
    return recovery.Keeper(job["checkpoint"], job["every"], job["keep"], job.get("timeout", TIMEOUT))


def recorded(job: Job, plan: Plan) -> RecordWriter | None:
    """Returns the writer of this rank's part of the record, None where the job asks for none.

    The first rank makes the file, so all ranks call this before they first meet."""
    if not job.get("record"):
        return None
    return RecordWriter(job["record"], plan, int(os.environ["RANK"]), alone=job.get("record_alone", False))


def one_step(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: Sample, log: RecordWriter | None,
             number: int) -> tuple[float, float]:
    """Runs step `number` on `batch` and returns its loss and its seconds, the optimizer included."""
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
