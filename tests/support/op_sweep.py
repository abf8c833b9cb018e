"""Every differentiable operator of torch's own database as the middle of a small module, on four ranks.

    cases(share, seed)      the operators, or a seeded share of them
    sweep(found)            what two random plans of each did against one process, and what was refused

All is float64. The sizes that the database makes samples of are set to even numbers, so that they split. Parameters in
front of the operator and weights behind it have layouts of their own: what the operator reads and writes is converted.

The ranks are started once. A rank that no longer answers is started again behind the operator that stopped it.
"""

import contextlib
import io
import json
import os
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_plans import random_plan
from ranks import IMPORTED
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoddl.capture.capture import capture
from autoddl.core.errors import AutoDDLError
from autoddl.operators.kernels.custom_ops import DRAWING
from autoddl.runtime.parallelize import parallelize

__all__ = ["Result", "cases", "sweep"]

EVEN = {"XS": 2, "S": 4, "M": 8, "L": 16}
"""Sizes of samples: 3, 5, 10 and 20 in the database."""

CLOSE = 1e-9
SEEDS = (0, 1)
RANKS = 4


@dataclass(frozen=True, slots=True)
class Result:
    """What one operator did: `kind` is equal, refused, different or failed."""

    name: str
    kind: str
    detail: str


class Middle(nn.Module):
    """operator(x1 * p1, x2 * p2, ...) * weights, and its mean; other arguments are those of the sample."""

    def __init__(self, call: Any, sample: Any) -> None:
        super().__init__()
        self.call, self.kwargs = call, sample.kwargs
        self.leaves, self.spec = pytree.tree_flatten((sample.input, tuple(sample.args)))
        self.places = [k for k, leaf in enumerate(self.leaves) if _has_gradient(leaf)]
        self.scales = nn.ParameterList([torch.linspace(0.5, 1.5, self.leaves[k].numel(), dtype=torch.float64)
                                        .reshape(self.leaves[k].shape) for k in self.places])
        self.samples = tuple(self.leaves[k].detach().clone() for k in self.places)

    def forward(self, *given: Tensor) -> Tensor:
        leaves = list(self.leaves)
        for k, x, scale in zip(self.places, given, self.scales, strict=True):
            leaves[k] = x * scale
        first, others = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.call(first, *others, **self.kwargs))
        means = [_weighted(t) for t in found if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
        return torch.stack(means).sum()


def _weighted(t: Tensor) -> Tensor:
    t = t if t.layout == torch.strided else t.to_dense()
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    found: Tensor = (t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape)).mean()
    return found


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float64 and leaf.requires_grad and leaf.numel() > 0


@contextlib.contextmanager
def _even_sizes() -> Iterator[None]:
    """The modules of the database with even sizes."""
    import sys

    patched = []
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and all(hasattr(module, size) for size in ("S", "M")):
            patched += [(module, size, getattr(module, size)) for size in EVEN if hasattr(module, size)]
    for module, size, _ in patched:
        setattr(module, size, EVEN[size])
    try:
        yield
    finally:
        for module, size, before in patched:
            setattr(module, size, before)


def cases(share: float = 1.0, seed: int = 0) -> list[str]:
    """The names of the differentiable operators, with their variants; or a share of them."""
    names = list(_operators())
    return names if share == 1 else sorted(random.Random(seed).sample(names, round(share * len(names))))


def _operators() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{one.name}.{one.variant_test_name}".rstrip("."): one for one in op_db
            if one.supports_autograd and torch.float64 in one.dtypes}


def _sample(operator: Any) -> Any:
    """The first sample with something to split, else the first with a gradient; None where there is none.

    Of an operator that has no sample of even sizes, or fails with it, one of torch's own sizes is taken; and of those
    whose samples contain places, which are those of torch's own sizes.
    """
    if operator.variant_test_name == "offsets":
        return _chosen(operator)
    try:
        with _even_sizes():
            sample = _chosen(operator)
        if sample is not None:
            made = Middle(operator.op, sample)
            made(*made.samples)
        return sample
    except (RuntimeError, IndexError):
        return _chosen(operator)


def _chosen(operator: Any) -> Any:
    """The sample of `_sample`, with the sizes that the database has now."""
    torch.manual_seed(0)
    samples = [s for s, _ in zip(operator.sample_inputs("cpu", torch.float64, requires_grad=True), range(40),
                                 strict=False)
               if any(_has_gradient(leaf) for leaf in pytree.tree_leaves((s.input, s.args)))
               and not any(isinstance(leaf, Tensor) and leaf.numel() == 0
                           for leaf in pytree.tree_leaves((s.input, s.args, s.kwargs)))]

    def splits(s: Any) -> bool:
        return any(_has_gradient(x) and x.dim() and x.shape[0] % 4 == 0 for x in pytree.tree_leaves((s.input, s.args)))

    return next((s for s in samples if splits(s)), samples[0] if samples else None)


def _middle(operator: Any) -> Middle | None:
    sample = _sample(operator)
    return None if sample is None else Middle(operator.op, sample)


def _one(operator: Any) -> tuple[str, str]:
    """(kind, detail) of one operator on this rank."""
    module = _middle(operator)
    if module is None:
        return "refused", "no sample with a gradient"
    batch = module.samples
    truth = module(*batch)
    try:
        gradients = torch.autograd.grad(truth, list(module.parameters()), allow_unused=True)
    except RuntimeError as error:
        return "refused", f"no gradient in one process: {str(error).splitlines()[0][:80]}"
    if not torch.allclose(truth, module(*batch), equal_nan=True):
        return "refused", "random draws, in one process too"
    try:
        captured = capture(module, batch)
        plans = [random_plan(captured, seed) for seed in SEEDS]
    except AutoDDLError as error:
        return "refused", " ".join(str(error).split())
    if any(op.target in DRAWING for op in captured.graph.ops):
        return "refused", "random draws, which the database seeds in one process"
    for seed, plan in zip(SEEDS, plans, strict=True):
        copy = _middle(operator)
        assert copy is not None
        parallel = parallelize(copy, plan, captured=captured)
        errors = [_distance(parallel.step(batch), truth)]
        for got, want in zip(copy.parameters(), gradients, strict=True):
            if want is not None and got.grad is not None:
                errors.append(_distance(got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad, want))
        if max(errors) > CLOSE:
            return "different", f"seed {seed} on {plan.mesh}: errors {', '.join(f'{e:.1e}' for e in errors)}"
    return "equal", ""


def _distance(found: Tensor, truth: Tensor) -> float:
    """The largest difference relative to the largest finite value; infinite where infinities are not the same."""
    found, truth = found.detach(), truth.detach()
    if found.shape != truth.shape:
        return torch.inf
    finite = truth.isfinite() & found.isfinite()
    if not found.isclose(truth, equal_nan=True)[~finite].all():
        return torch.inf
    if not finite.any():
        return 0.0
    return float((found - truth)[finite].abs().max() / truth[finite].abs().max().clamp(min=1e-3))


def _serve(rank: int, folder: str, names: Sequence[str], number: int) -> None:
    """One rank: all operators in turn, a line of a file for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store{number}", RANKS), rank=rank,
                            world_size=RANKS, timeout=timedelta(seconds=40))
    every = _operators()
    with (Path(folder) / f"{number}-{rank}").open("w", buffering=1) as file:
        for name in names:
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    kind, detail = _one(every[name])
            except BaseException as error:  # what an operator raises on ranks is the result
                kind, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            file.write(json.dumps([name, kind, detail]) + "\n")
            try:
                dist.barrier()
            except RuntimeError:
                os._exit(1)
    os._exit(0)


def sweep(names: Sequence[str], seconds: float = 120.0) -> Iterator[Result]:
    """The result of every operator: the worst of the ranks'. A rank has `seconds` for one operator."""
    context, left, number = mp.get_context("forkserver"), list(names), 0
    context.set_forkserver_preload([*IMPORTED, "torch.testing._internal.common_methods_invocations", "op_sweep"])
    with tempfile.TemporaryDirectory() as folder:
        while left:
            ranks = [context.Process(target=_serve, args=(rank, folder, left, number), daemon=True)
                     for rank in range(RANKS)]
            for rank in ranks:
                rank.start()
            done, last = 0, time.monotonic()
            while done < len(left):
                lines = [_lines(Path(folder) / f"{number}-{rank}") for rank in range(RANKS)]
                ended = any(rank.exitcode is not None for rank in ranks)
                while done < min(map(len, lines)):
                    yield _worst([Result(*one[done]) for one in lines])
                    done, last = done + 1, time.monotonic()
                if done < len(left) and (ended or time.monotonic() - last > seconds + 60 * (done == 0)):
                    known = [Result(*one[done]) for one in lines if len(one) > done]
                    yield _worst([*known, Result(left[done], "failed", "a rank ended or did not answer")])
                    done += 1
                    break
                time.sleep(0.05)
            for rank in ranks:
                rank.kill()
                rank.join()
            left, number = left[done:], number + 1


def _lines(path: Path) -> list[list[str]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def _worst(results: Sequence[Result]) -> Result:
    order = ("equal", "refused", "different", "failed")
    return max(results, key=lambda one: order.index(one.kind))
