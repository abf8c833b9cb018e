"""Verifies a plan: runs it on local ranks and compares with one process, which has no layouts and no collectives.

    loss_error              |loss of the ranks - loss of one process| / |loss|, the worst rank
    gradient_error          largest difference of any gradient's shard / the largest gradient
    collective_mismatches   collectives of a step that the plan has and the record has not, or the other way round

A NaN or an infinity of the ranks is an infinite error. One of the single process leaves nothing to compare with, and is
refused.

One process runs the captured program in float64. The ranks run the plan in float64 on the same batch, with the same
dropout masks, and each compares the shards that it stores. The collectives are recorded in a step in the plan's own
dtypes. With m microbatches the truth is the mean of m losses, each with its own masks.

A plan that sends values coded (`core.codecs`) is verified without; `coded_error` is how far the gradients are off with.
Each coded message is held to the error of its codec: `coded_share` is the largest part of that.

A plan with sparse sums (`core.sparse`) is verified without. Then steps run with them, after a warm-up of one step if
there is any. What each sent and what the ranks keep must add up to a whole gradient and what they kept before, with the
momentum (`sparse_loss`). No sum may send more words than its limit.

A program may use parameters in another dtype than they are stored in. It runs a second time, with every dtype replaced
by one of twice its width. This compares the casts too. float32 rounds there, so the limit is 1e-6 (`twice_error`).

A plan for more ranks than `max_ranks` runs with the same decisions on a smaller mesh of the same shape. Every axis gets
the smallest size above 1 that divides its own, so that even shards stay even. Stages stay as many, on smaller meshes.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import inf, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoddl.capture.factory import Factory
from autoddl.core.errors import InputError
from autoddl.core.graph import Kind, graph_from_text
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline_schedules import pipes_of
from autoddl.core.plan import Plan
from autoddl.core.precision import Precision
from autoddl.core.processes import free_bytes
from autoddl.cost_models.backends import EXECUTABLE
from autoddl.launch.launch import launch, python_module
from autoddl.launch.programs import plan_of_batch
from autoddl.launch.temporary import temporary_folder
from autoddl.planner.pipelines.staged import mesh_of_parts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autoddl.capture.capture import Captured
    from autoddl.capture.sample import Sample

__all__ = ["Verification", "shrink_plan", "verify"]

EXACT = 1e-9
"""Relative error above that of rounding in float64."""

ROUNDED = 1e-6
"""Relative error above that of rounding in float32, for recipes that compute in bfloat16."""

KEPT = 1e-5
"""Relative error above that of float32 sums of many values, in another order."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """The errors of a plan against one process; the module docstring has their formulas."""

    loss_error: float
    """Relative error of the loss."""
    gradient_error: float
    """Relative error of the gradients."""
    collective_mismatches: int
    """The number of kinds of collectives, over all ranks, that differ between plan and record."""
    ranks: int
    """The number of ranks that ran."""
    note: str = ""
    """How the run differed from the plan, in words; empty where it did not."""
    mismatches: tuple[str, ...] = ()
    """The first 20 of the collectives that differ, a line each."""
    twice_error: float = 0.0
    """The larger of both errors with every dtype twice as wide; 0 where the program is not mixed."""
    coded_error: float = 0.0
    """The error of the gradients where values are sent coded; 0 where none are."""
    coded_share: float = 0.0
    """The largest error of a coded value over what its codec allows; above 1 it has another error than it says."""
    sparse_loss: float = 0.0
    """The part of a gradient that sparse sums have neither sent nor kept; float32 rounds there."""
    besides: int = 0
    """The number of collectives, over all ranks, of exponents for which lossless rows had no room: no plan has them."""

    @property
    def passed(self) -> bool:
        """Whether all errors are those of rounding, and no collective differs."""
        return (self.loss_error <= EXACT and self.gradient_error <= EXACT and not self.collective_mismatches
                and self.twice_error <= ROUNDED and isfinite(self.coded_error) and self.coded_share <= 1
                and self.sparse_loss <= KEPT)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields and `passed` by name; an infinite error is None, because JSON has no word for it."""
        errors = {"loss_error": self.loss_error, "gradient_error": self.gradient_error,
                  "twice_error": self.twice_error, "coded_error": self.coded_error, "coded_share": self.coded_share,
                  "sparse_loss": self.sparse_loss}
        return asdict(self) | {name: error if isfinite(error) else None for name, error in errors.items()} | {
            "passed": self.passed}


def verify(plan: Plan, factory: Factory, *, max_ranks: int = 8, timeout: float = 1800.0,
           progress: Progress | None = None, captured: "Captured | None" = None) -> Verification:
    """Runs a plan on local ranks and returns how far it is from one process.

    The model and batch are those of `factory`. A batch that is a further sample of the plan has a program of its own,
    which is verified. After `timeout` seconds the ranks are ended. As each part of the work
    begins, `progress(name, parts done, parts)` is called.

    A model that is `captured` already, with one microbatch, is not captured again. Ranks are forks of this process
    then, which must not have joined other processes; beside a GPU, whose threads no fork has, they start anew.

    Raises InputError where the plan needs more than `max_ranks`, MismatchError where it was made for another model, and
    the error of a rank that fails.
    """
    import torch

    tell = progress or (lambda what, done, total: None)
    tell("one process", 0, 2)
    plan, said = plan_of_batch(plan, factory)
    small, note = shrink_plan(plan, max_ranks)
    note = "; ".join(filter(None, (said, note)))
    small = _seated(small)
    if "graph" in plan.source:  # before a model is made that does not fit
        tensors = graph_from_text(plan.source["graph"]).tensors
        _check_memory(sum(prod(t.shape) for t in tensors if t.kind is Kind.PARAMETER), small.mesh.size)
    with temporary_folder("verify") as folder:
        _write_truth(plan, factory, folder, small.mesh.size, captured)
        small.save(folder / "plan.json")
        job = {"task": "check", "plan": str(folder / "plan.json"), "factory": factory.to_json(),
               "folder": str(folder)}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        tell(f"{small.mesh.size} ranks", 1, 2)
        command = python_module("autoddl.launch.worker", str(folder / "job.json"))
        here = None if captured is None or torch.cuda.is_available() else partial(_check_here, command[-1], captured)
        launch(small.mesh.size, command, timeout=timeout, forked=True, here=here)
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(small.mesh.size)]
    wrong = [f"rank {rank} {text}" for rank, one in enumerate(found) for text in one["mismatches"]]
    loss, gradient, twice, coded, share, lost = (_worst([one[name] for one in found]) for name in (
        "loss_error", "gradient_error", "twice_error", "coded_error", "coded_share", "sparse_loss"))
    return Verification(loss, gradient, len(wrong), small.mesh.size, note, tuple(wrong[:20]), twice, coded, share,
                        lost, sum(one["besides"] for one in found))


def _check_here(path: str, captured: "Captured") -> None:
    """Does what `autoddl.launch.worker` does with a job of checking, in a fork of a process that has captured."""
    import torch

    from autoddl.launch.check import check
    from autoddl.launch.jobs import serve

    torch.set_num_threads(1)  # those of the parent are not there
    sys.argv = ["check", path]
    serve(lambda job, losses: check(job, captured))


def _worst(errors: list[float]) -> float:
    """The largest error; infinite where any is NaN, because NaN is larger than nothing."""
    return max(error if isfinite(error) else inf for error in errors)


def shrink_plan(plan: Plan, max_ranks: int) -> tuple[Plan, str]:
    """Returns the plan itself, or its decisions on a mesh of at most `max_ranks`, and a note that says so.

    Raises InputError where the smallest mesh of its shape is larger."""
    if plan.mesh.size <= max_ranks:
        return plan, ""
    small = replace(plan, mesh=_least(plan.mesh)) if plan.pipeline is None else _fewer(plan)
    if small.mesh.size > max_ranks:
        raise InputError(f"the plan is for {plan.mesh.size} ranks, and the least mesh of its shape, '{small.mesh}', "
                         f"needs {small.mesh.size}; allow them with --max-ranks {small.mesh.size}")
    note = f"{plan.mesh.size} ranks do not fit here: the decisions ran on mesh '{small.mesh}' instead of '{plan.mesh}'"
    return replace(small, backend="gloo"), note


def _least(mesh: Mesh) -> Mesh:
    """The least mesh of this shape: of every axis, the smallest size above 1 that divides its own."""
    sizes = [next((n for n in range(2, axis.size + 1) if axis.size % n == 0), 1) for axis in mesh.axes]
    return Mesh(tuple(Axis(axis.name, size) for axis, size in zip(mesh.axes, sizes, strict=True)))


def _fewer(plan: Plan) -> Plan:
    """A plan with stages whose stages have the least meshes of their shapes; stages on the same ranks stay there.

    Raises InputError where these meshes differ in size, and a stage is on the ranks of others or has copies."""
    assert plan.pipeline is not None
    least = [_least(stage.plan.mesh) for stage in plan.pipeline.stages]
    sizes, places = {mesh.size for mesh in least}, plan.pipeline.ranks
    if len(sizes) > 1 and (len(places) < len(least) or pipes_of(plan.pipeline.name) > 1):
        raise InputError(f"the plan is for {plan.mesh.size} ranks, and the least meshes of its stages have different "
                         f"sizes ({', '.join(map(str, least))}); allow its own ranks with --max-ranks {plan.mesh.size}")
    parts = [places.index(stage.ranks) for stage in plan.pipeline.stages]
    sized = dict(zip(parts, (mesh.size for mesh in least), strict=True))
    ranks = list(pairwise(accumulate((sized[part] for part in range(len(places))), initial=0)))
    stages = tuple(replace(stage, ranks=ranks[part], plan=replace(stage.plan, mesh=mesh, backend="gloo"))
                   for stage, part, mesh in zip(plan.pipeline.stages, parts, least, strict=True))
    return replace(plan, mesh=mesh_of_parts(tuple(sized[part] for part in range(len(places)))),
                   pipeline=replace(plan.pipeline, stages=stages))


def _seated(plan: Plan) -> Plan:
    """The plan itself, or on CPUs where its ranks outnumber the GPUs, and where it is for other devices."""
    import torch

    here = plan.backend in EXECUTABLE and plan.mesh.size <= torch.cuda.device_count()
    return plan if here else replace(plan, backend="gloo")


def _write_truth(plan: Plan, factory: Factory, folder: Path, ranks: int, known: "Captured | None" = None) -> None:
    """Loss and gradients of one process, as truth.pt; of a mixed program in twice its dtypes, as truth-twice.pt."""
    import torch

    from autoddl.capture.capture import capture
    from autoddl.capture.float64 import TWICE, WIDEST, cast, cast_module, widened
    from autoddl.capture.materialize import materialised
    from autoddl.capture.same_model import check_captured
    from autoddl.capture.sample import parted
    from autoddl.capture.trace import check_held
    from autoddl.launch.train import built

    model, batch = built(factory)
    captured = known or capture(model, parted(batch, plan.microbatches), Precision.parse(plan.precision))
    check_captured(plan, model, captured)
    check_held(captured.graph, captured.constants)
    _check_memory(sum(p.numel() for p in model.parameters()), ranks)
    model = materialised(model)
    first = cast_module(copy.deepcopy(model)) if captured.graph.mixed else None
    for name, one, wider in (("truth", cast_module(model), WIDEST), ("truth-twice", first, TWICE)):
        if one is not None:
            torch.save(_truth(plan, one, widened(captured, wider), cast(batch)), folder / f"{name}.pt")


def _truth(plan: Plan, model: "nn.Module", captured: "Captured", batch: "Sample") -> dict[str, Any]:
    """Loss and gradients of all microbatches of a batch; what they do to the model's buffers stays."""
    from autoddl.capture.sample import parted

    loss = sum(_pass(captured, model, parted(batch, plan.microbatches, part), part, plan.microbatches)
               for part in range(plan.microbatches))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gradients = {t.fqn: grad for t in captured.graph.tensors
                 if t.trained and (grad := parameters[t.fqn].grad) is not None}
    _check_finite(loss, gradients)
    return {"loss": loss, "gradients": gradients}


def _check_finite(loss: float, gradients: "dict[str, Tensor]") -> None:
    """Raises InputError where one process yields NaN or infinity: then every plan does, and nothing can be compared."""
    wrong = [] if isfinite(loss) else [f"a loss of {loss}"]
    wrong += [f"a gradient of {name} that is not finite" for name, g in gradients.items() if not g.isfinite().all()]
    if wrong:
        raise InputError(f"there is nothing to compare the plan with: one process, without a plan, already gets "
                         f"{wrong[0]}; verify with weights and a batch of which the model makes numbers")


def _pass(captured: "Captured", model: "nn.Module", batch: "Sample", part: int, parts: int) -> float:
    """Forward and backward of microbatch `part` of `parts`, and what it does to buffers; its part of the loss."""
    import torch

    from autoddl.capture.float64 import seeded, wide_default
    from autoddl.capture.materialize import arguments

    with wide_default():
        found = seeded(captured.program, part)(*arguments(model, batch, captured))
        loss = found[0] / parts
        loss.backward()
    with torch.no_grad():
        updates = captured.graph.updates  # behind the loss and the other outputs
        for (old, _), new in zip(updates, found[len(found) - len(updates):], strict=True):
            model.get_buffer(captured.graph.tensors[old].fqn).copy_(new)
    return float(loss.detach())


def _check_memory(weights: int, ranks: int) -> None:
    """Every process holds the weights and their gradients in float64."""
    each, free = 16 * weights, free_bytes()
    fewer = int(free / each) - 1 if each else ranks
    if each * (ranks + 1) > free:
        other = f"allow fewer ranks (--max-ranks {fewer}), or " if fewer > 1 else ""
        raise InputError(f"{ranks + 1} processes with {weights / 1e6:,.0f} million weights in float64 need "
                         f"{each * (ranks + 1) / 1e9:.1f} GB, {free / 1e9:.1f} GB are free here: {other}plan and "
                         "verify a smaller model of the kind, as with --set layers=2")
