"""The memory line moment by moment: at every product of a step its bytes are those that torch's tracker has there."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import zoo
from planmaker import cluster_of
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autoddl.api import plan
from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.explain.compare_run import foreseen, foreseen_bytes
from autoddl.runtime.parallelize import parallelize

ONE = replace(cluster_of("core=1"), device=replace(cluster_of("core=1").device, kind="cpu"))
NEAR = 0.06
"""Relative, of the peak."""
PRODUCTS = ("aten.linear.default", "aten.addmm.default")


class Clock(TorchDispatchMode):
    """Notes the tracked bytes after every product."""

    def __init__(self, tracker: MemTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracker, self.nbytes = tracker, list[float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            snapshot = self.tracker.get_tracker_snapshot("current")
            self.nbytes.append(float(sum(one["Total"] for one in snapshot.values())))
        return found


class Rotary(nn.Module):
    """A block written by hand: RMSNorm without a module, a rotary embedding by chunks, gradients of cuts in between."""

    def __init__(self, layers: int, batch: int) -> None:
        super().__init__()
        self.batch, self.tokens, self.head = batch, nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(32)) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x, angle = self.tokens(ids), torch.outer(torch.arange(16.0), 10.0 ** -torch.arange(4.0))
        for scale, qkv in zip(self.scales, self.qkv, strict=True):
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
            q, k, v = (part.view(*part.shape[:2], 4, 8).transpose(1, 2) for part in qkv(normed).chunk(3, -1))
            q, k = (self.turned(part, angle.cos(), angle.sin()) for part in (q, k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).reshape(x.shape)
        loss: Tensor = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def made(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name == "rotary":
        return Rotary(2, 8), (torch.zeros(8, 16, dtype=torch.int64),)
    model, sample = getattr(zoo, name)()
    return model, sample


def recorded(model: nn.Module, sample: Any, one: Plan) -> list[float]:
    """Tracked bytes after every product of the second step, since the first makes the optimizer's state."""
    parallel = parallelize(model, one, sample)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker, (clock := Clock(tracker)):
            parallel.step(sample)
        optimizer.step()
        optimizer.zero_grad()
    return clock.nbytes


def drawn(one: Plan) -> list[float]:
    """Bytes of the line where every product begins: forward one, backward two, in every microbatch."""
    step, found = foreseen(one), list[float]()
    line = foreseen_bytes(one, step)
    products = {op.name for op in add_hubs(graph_from_text(one.source["graph"])).ops if op.target in PRODUCTS}
    for span in step.computes:
        if span.name in products:
            found += [max(n for t, n in zip(line.times, line.nbytes, strict=True) if t == span.start)] * (
                1 + span.number % 2)
    return found


@parametrize_or_slow("name,microbatches", [("rotary", 1), ("rotary", 4)], [
    ("gpt", 2), ("llama", 2), ("mixture", 1), ("neox", 1)])
def test_the_line_has_the_tracked_bytes_at_every_product(name: str, microbatches: int) -> None:
    model, sample = made(name)
    one = plan(model, ONE, sample, microbatches=(microbatches,), workers=1)
    assert drawn(one) == pytest.approx(recorded(model, sample, one), abs=NEAR * one.predicted.peak_bytes)


def test_moments_are_spread_over_the_step() -> None:
    """Where an op takes time in one direction alone, its moment is in the pass that it runs in."""
    model, sample = made("rotary")
    one = plan(model, ONE, sample, microbatches=(4,), workers=1)
    step = foreseen(one)
    line, end = foreseen_bytes(one, step), step.step.seconds
    assert list(line.times) == sorted(line.times)
    assert max(line.times.count(t) for t in set(line.times)) < len(line.times) / 20
    begun = [seconds for name, seconds in step.step.passes if name == "forward"] + [end]
    peaks = [max(n for t, n in zip(line.times, line.nbytes, strict=True) if begin <= t < until)
             for begin, until in pairwise(begun)]
    assert min(peaks) > 0.8 * max(peaks)
