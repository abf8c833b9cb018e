"""The memory line against torch's own tracker, and against what the search charges."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from autoddl.api import plan
from autoddl.apply import parallelize
from autoddl.capture import capture
from autoddl.compare_run import foreseen
from autoddl.heap import contiguous, viewed
from autoddl.hubs import planned
from autoddl.memory_line import foreseen_memory, memory_line
from autoddl.plan import Plan, load_plan
from autoddl.rebuild import rebuild

ONE = replace(cluster_of("core=1"), device=replace(cluster_of("core=1").device, kind="cpu"))
NEAR = 0.05
"""Relative, of the peak."""


def tracked(model: torch.nn.Module, sample: object, made: Plan) -> int:
    """Bytes at the peak of the second step: the first makes the optimizer's state."""
    parallel = parallelize(model, made, sample)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            parallel.step(sample)
            optimizer.step()
            optimizer.zero_grad()
    return max(int(found["Total"]) for found in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.parametrize(("name", "options", "microbatches"), [
    ("gpt", {}, 1), ("gpt", {"dropout": 0.1}, 2), ("llama", {}, 1), ("vgg_bn", {}, 1), ("mixture", {"layers": 1}, 1)])
def test_the_predicted_peak_is_the_tracked_one(name: str, options: dict[str, float], microbatches: int) -> None:
    torch.manual_seed(0)
    model, sample = getattr(zoo, name)(**options)
    made = plan(model, ONE, sample, microbatches=(microbatches,))
    assert made.predicted.peak_bytes == pytest.approx(tracked(model, sample, made), rel=NEAR)
    assert made.predicted.peak_bytes <= made.predicted.charged


def test_the_line_stays_below_the_charge_and_ends_where_it_began() -> None:
    """But for the gradients, which the optimizer leaves to be zeroed."""
    model, sample = zoo.vit()
    made = plan(model, ONE, sample)
    line, problem = memory_line(made, foreseen(made)), rebuild(made)
    assert line.peak == pytest.approx(made.predicted.peak_bytes)
    assert line.bound == pytest.approx(problem.problem.nbytes(problem.choice)) and line.peak <= line.bound
    assert list(line.times) == sorted(line.times) and line.times[-1] <= foreseen(made).step.seconds * (1 + 1e-9)
    parts = made.predicted.nbytes
    assert sum(parts.values()) == pytest.approx(line.peak)
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"])


def test_a_plan_of_before_the_line_says_what_was_charged(tmp_path: Path) -> None:
    model, sample = zoo.gpt()
    made = plan(model, ONE, sample)
    path = tmp_path / "plan.json"
    made.save(path)
    assert load_plan(path).predicted.charged == made.predicted.charged > made.predicted.peak_bytes
    old = replace(made, predicted=replace(made.predicted, charged_bytes=None))
    old.save(path)
    assert load_plan(path).predicted.charged == old.predicted.peak_bytes


class Taught(nn.Module):
    """The teacher's weights are trained for all that capture knows, and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        guess = self.student(x)
        return nn.functional.mse_loss(guess, self.teacher(x).detach())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_is_gathered_again_for_no_gradient_is_held_no_longer_than_its_microbatch(microbatches: int) -> None:
    sample = (torch.zeros(8, 16),)
    graph, place = planned(capture(Taught(), sample).graph), cluster_of("node=4")
    for made in random_plans(Taught(), sample, "node=4", 20, regather=True, microbatches=microbatches):
        heap, once = (foreseen_memory(made, graph, "adamw", place, most) for most in (microbatches, 1))
        assert heap.held == once.held and heap.peak >= heap.held


def test_views_share_memory_where_torch_says_so() -> None:
    for shape, order, new in [
            ((4, 6, 8), (0, 1, 2), (24, 8)), ((4, 6, 8), (1, 0, 2), (24, 8)), ((4, 1, 8), (1, 0, 2), (32,)),
            ((2, 3, 4, 5), (0, 2, 1, 3), (2, 4, 15)), ((2, 3, 4, 5), (0, 1, 3, 2), (6, 5, 4))]:
        x = torch.empty(shape).permute(order)
        try:
            expected = x.view(new).stride()
        except RuntimeError:
            assert viewed(tuple(x.shape), x.stride(), new) is None
        else:
            assert viewed(tuple(x.shape), x.stride(), new) == expected
    assert contiguous((2, 3, 4)) == torch.empty(2, 3, 4).stride()
