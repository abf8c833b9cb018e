"""Compares one rank's step with the plan's collectives and with the truth of one process."""

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.factory import Factory
from autoddl.capture.float64 import TWICE, cast, cast_module, wide_default, widened
from autoddl.capture.sample import Sample, parted
from autoddl.core.plan import load_plan
from autoddl.core.precision import Precision
from autoddl.launch.jobs import Job
from autoddl.launch.train import built
from autoddl.runtime.parallelize import ParallelModel, parallelize

__all__ = ["check", "mismatches"]


def check(job: Job, captured: Captured | None = None) -> dict[str, Any]:
    """Runs a step as planned and one in float64; returns the errors of loss and gradients, and the mismatches.

    The errors are those of `verify`, of steps that send nothing coded. `coded_error` is that of the plan's own step
    where it does, and `coded_share` that of its messages. A mixed program runs a third step with every dtype twice as
    wide. A plan with sparse sums runs a few steps more (`sparse_loss`); their warm-up and their fall are one step here.
    A model that is `captured` already, with one microbatch, is not captured again.
    """
    factory, plan = Factory(**job["factory"]), load_plan(job["plan"])
    model, batch = built(factory, drawn=True)
    if captured is None:
        captured = capture(model, parted(batch, plan.microbatches), Precision.parse(plan.precision))
    parallel = parallelize(model, plan.with_warmup(1), batch, captured=captured, compile=False)
    parallel.recorder.checks = bool(plan.codecs)
    wrong, coded, lost = list[str](), 0.0, 0.0
    if plan.sparse_sums:
        lost = sparse_loss(parallel, factory, captured, wrong)
    else:
        parallel.step(batch)
    wrong += mismatches(parallel)
    share, besides = parallel.recorder.coded_share, len(parallel.recorder.besides)
    if plan.codecs:
        truth = torch.load(Path(job["folder"], "truth.pt"), map_location="cpu", weights_only=True, mmap=True)
        coded = _gradient_error(parallel, truth["gradients"])
    loss, gradient = _errors(factory, parallel, widened(captured), Path(job["folder"], "truth.pt"))
    twice = _errors(factory, parallel, widened(captured, TWICE), Path(job["folder"], "truth-twice.pt")) \
        if parallel.graph.mixed else (0.0,)
    return {"loss_error": loss, "gradient_error": gradient, "mismatches": wrong, "coded_error": coded,
            "coded_share": share, "besides": besides, "sparse_loss": lost,
            "twice_error": max(twice) if all(map(math.isfinite, twice)) else math.inf}


def _errors(factory: Factory, parallel: ParallelModel, wider: Captured, path: Path) -> tuple[float, float]:
    """The errors of loss and gradients in a step of a program in wider dtypes, against the truth at `path`."""
    model, batch = built(factory, drawn=True)
    exact = parallel.like(cast_module(model), wider)
    with wide_default():
        loss = float(exact.step(cast(batch)))
    truth = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return _part(abs(loss - truth["loss"]), abs(truth["loss"])), _gradient_error(exact, truth["gradients"])


def _gradient_error(parallel: ParallelModel, gradients: dict[str, Tensor]) -> float:
    """The largest difference of this rank's shards from the truth's, relative to the largest gradient."""
    largest = max(map(_largest, gradients.values()), default=0.0)
    worst = 0.0
    for name, parameter in parallel.named_parameters():
        if name in gradients:
            piece = gradients[name]
            for dim, (offset, size) in enumerate(parallel.piece(name)):
                piece = piece.narrow(dim, offset, size)
            grad = parameter.grad
            mine = torch.zeros_like(piece) if grad is None else getattr(grad, "_local_tensor", grad)
            worst = max(worst, _part(_largest(mine.cpu() - piece), largest))
    return worst


def sparse_loss(parallel: ParallelModel, factory: Factory, captured: Captured, wrong: list[str]) -> float:
    """How far what sparse steps summed and kept is from whole gradients, relative to the largest of these.

        sum of a step + residuals after it = gradient + residuals before it + momentum * velocities before it

    There is a step of the warm-up and one of the fall where there are such, one that renews thresholds, and one that
    does not. Lines about steps but the last that send more than they may are added to `wrong`. Parameters that several
    stages have are left out: their gradients are sums over stages, whose residuals other ranks have.
    """
    plan, (model, batch) = parallel.plan, built(factory, drawn=True)
    whole = parallel.like(model, captured)
    worst = largest = 0.0
    rules = plan.sparse_sums.values()
    for _ in range(2 + any(one.warmup for one in rules) + any(one.falls for one in rules)):
        wrong += over_limit(parallel)
        worst, largest = map(max, (worst, largest), _sparse_step(parallel, whole, batch))
    return _part(worst, largest)


def _sparse_step(parallel: ParallelModel, whole: ParallelModel, batch: Sample) -> tuple[float, float]:
    """Runs a step of both; returns the largest value that was lost or came twice, and the largest gradient."""
    stages = [] if parallel.plan.pipeline is None else [stage.plan for stage in parallel.plan.pipeline.stages]
    owners = Counter(one.fqn for stage in stages for one in stage.stored)
    kept = {name: many for name, many in parallel.residuals().items() if owners[name] < 2}
    due = {name: sum(one.due() for one in many) for name, many in kept.items()}
    for one in (parallel, whole):
        one.zero_grad()
        one.step(batch)
    sent, gradients = (dict(one.named_parameters()) for one in (parallel, whole))
    worst = largest = 0.0
    for name, many in kept.items():
        wanted = _piece(gradients[name])
        found = _piece(sent[name]) + sum(one.summed() for one in many) - due[name]
        worst, largest = max(worst, _largest(found - wanted)), max(largest, _largest(wanted))
    return worst, largest


def _piece(parameter: Tensor) -> Tensor:
    """This rank's piece of a parameter's gradient, which is there."""
    assert parameter.grad is not None
    return getattr(parameter.grad, "_local_tensor", parameter.grad)


def over_limit(parallel: ParallelModel) -> list[str]:
    """Returns a line per sparse sum of the last step that sent more words than it may."""
    return [f"a sparse sum over {one.axes} sent {one.words} words of {one.limit:.0f}"
            for one in parallel.recorder.sparse if not one.fits]


def _largest(tensor: Tensor) -> float:
    """The largest magnitude; 0 where there are no elements, NaN where any is NaN."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _part(difference: float, whole: float) -> float:
    """`difference` relative to `whole`; infinite where it is NaN, because no comparison finds NaN too large."""
    return difference / (whole or 1.0) if math.isfinite(difference) else math.inf


def mismatches(parallel: ParallelModel) -> list[str]:
    """Returns a line per kind of collective that the plan has and the recorder has not, or the other way round."""
    def rows(many: Iterable[Any]) -> Counter[str]:
        return Counter(f"{one.direction} {one.kind} over {one.axes} of {one.nbytes} bytes" for one in many)

    expected = rows(parallel.planned())
    recorded = rows(parallel.recorder.executed)
    return [f"not run: {text} x {n}" for text, n in (expected - recorded).items()] + \
           [f"not planned: {text} x {n}" for text, n in (recorded - expected).items()] + over_limit(parallel)
