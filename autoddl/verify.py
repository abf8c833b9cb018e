"""A plan against the truth: one process, no layouts, no collectives.

    loss_error              |loss of the ranks - loss of one process| / |loss|, the worst rank
    gradient_error          largest difference of any gradient's piece / the largest gradient
    collective_mismatches   collectives of a step that the plan has and the record has not, or the other way round

One process runs the captured program in float64; the ranks run the plan in float64 on the same batch, with the same
dropout masks, and each compares what it owns. The collectives are recorded in a second step in the plan's own dtype.
A model that changes dtypes inside has another program in float64: then all runs in the plan's dtype, says `note`.

A plan for more ranks than `max_ranks` runs with the same decisions on a smaller mesh of the same shape: every axis has
the least size that divides its own, so what was even stays even.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoddl.errors import InputError, MismatchError
from autoddl.factory import Factory
from autoddl.launch import launch
from autoddl.layout import Axis, Mesh
from autoddl.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autoddl.capture import Captured
    from autoddl.sample import Sample

__all__ = ["Verification", "shrunk", "verify"]

EXACT, SINGLE = 1e-9, 1e-5
"""Errors that rounding makes, in float64 and in float32."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Verification:
    """What came of it; `mismatches` says the first of the collectives that differ, `note` what was not as planned."""

    loss_error: float
    gradient_error: float
    collective_mismatches: int
    ranks: int
    dtype: str
    note: str = ""
    mismatches: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        limit = EXACT if self.dtype == "float64" else SINGLE
        return self.loss_error <= limit and self.gradient_error <= limit and not self.collective_mismatches

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def verify(plan: Plan, factory: Factory, *, max_ranks: int = 8, timeout: float = 1800.0,
           progress: Progress | None = None) -> Verification:
    """Run the plan on local ranks and compare."""
    tell = progress or (lambda what, done, total: None)
    tell("one process", 0, 2)
    small, note = shrunk(plan, max_ranks)
    with tempfile.TemporaryDirectory(prefix="autoddl-verify-") as name:
        folder = Path(name)
        wide = _write_truth(plan, small, factory, folder)
        if not wide:
            note = "; ".join(filter(None, [note, "the model changes dtypes inside, so nothing ran in float64"]))
        job = {"task": "check", "factory": factory.to_json(), "folder": name, "wide": wide}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        tell(f"{small.mesh.size} ranks", 1, 2)
        launch(small.mesh.size, [sys.executable, "-m", "autoddl.worker", str(folder / "job.json")], timeout=timeout)
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(small.mesh.size)]
    wrong = [f"rank {rank} {text}" for rank, one in enumerate(found) for text in one["mismatches"]]
    loss, gradient = (max(one[name] for one in found) for name in ("loss_error", "gradient_error"))
    dtype = "float64" if wide else "the model's dtypes"
    return Verification(loss, gradient, len(wrong), small.mesh.size, dtype, note, tuple(wrong[:20]))


def shrunk(plan: Plan, max_ranks: int) -> tuple[Plan, str]:
    """The plan itself, or its decisions on a mesh that fits, and what to say of it."""
    if plan.mesh.size <= max_ranks:
        return plan, ""
    sizes = [next((n for n in range(2, axis.size + 1) if axis.size % n == 0), 1) for axis in plan.mesh.axes]
    mesh = Mesh(tuple(Axis(axis.name, size) for axis, size in zip(plan.mesh.axes, sizes, strict=True)))
    if mesh.size > max_ranks:
        raise InputError(f"the plan is for {plan.mesh.size} ranks, and the least mesh of its shape, '{mesh}', needs "
                         f"{mesh.size}; allow them with --max-ranks {mesh.size}")
    note = f"{plan.mesh.size} ranks do not fit here: the decisions ran on mesh '{mesh}' instead of '{plan.mesh}'"
    return replace(plan, mesh=mesh, backend="gloo"), note


def _write_truth(plan: Plan, small: Plan, factory: Factory, folder: Path) -> bool:
    """Loss and gradients of one process as truth.pt, the plan in their dtype as wide.json; whether it is float64."""
    import torch

    from autoddl.capture import capture
    from autoddl.worker import built, cast

    model, batch = built(factory, drawn=True)
    captured = capture(model, batch)
    if captured.graph.fingerprint() != plan.fingerprints.get("model"):
        raise MismatchError(f"the plan was made for another model than {factory} gives: it is for {plan.model}; make "
                            "the plan again, or set the arguments it was made with (--set)")
    small.save(folder / "plan.json")
    targets = [op.target for op in captured.graph.ops]
    doubled = cast(batch, torch.float64)
    exact = capture(model.double(), doubled)
    wide = [op.target for op in exact.graph.ops] == targets
    if wide:
        batch, captured = doubled, exact
        small = replace(small, fingerprints={**plan.fingerprints, "model": exact.graph.fingerprint()},
                        sample=dict(exact.spec))
    else:
        model, batch = built(factory, drawn=True)
    small.save(folder / "wide.json")
    loss, gradients = _truth(model, batch, captured)
    torch.save({"loss": loss, "gradients": gradients}, folder / "truth.pt")
    return wide


def _truth(model: "nn.Module", batch: "Sample", captured: "Captured") -> "tuple[float, dict[str, Tensor]]":
    """Loss and gradients of the captured program."""
    from autoddl.values import arguments

    tensors = arguments(model, batch, captured)
    loss = captured.program(*tensors)[0]
    loss.backward()
    return float(loss.detach()), {t.fqn: tensor.grad for t, tensor in zip(captured.graph.tensors, tensors, strict=False)
                                  if t.trained and tensor.grad is not None}
