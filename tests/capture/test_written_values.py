"""Programs that write in place become functional: the same losses, gradients and buffers as the module's own."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from autoddl.capture.capture import capture
from autoddl.capture.materialize import arguments
from autoddl.capture.rewrites.written_values import make_functional
from autoddl.capture.sample import as_sample

Steps = list[Callable[[list[Tensor], Tensor], Any]]


class Norms(nn.Module):
    """Batch norms that train, that are frozen and that keep no averages, with `relu_` and an average of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, bias=False), nn.Linear(8 * 16, 4)
        self.norm, self.frozen, self.plain = nn.BatchNorm2d(8), nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(
            8, track_running_stats=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.eval()
        h = self.norm(self.conv(x)).relu_() * 2
        h += 1
        h = self.norm(h).relu_()
        assert isinstance(self.mean, Tensor)
        self.mean.mul_(0.9).add_(h.detach().mean((0, 2, 3)), alpha=0.1)
        h = self.plain(self.frozen(h)).flatten(1)
        loss: Tensor = self.head(h.mul_(2.0).clamp_(max=3.0)).square().mean() + self.mean.sum()
        return loss


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each program that was captured was plain."""
    found: list[bool] = []

    def noted(program: ExportedProgram) -> bool:
        found.append(make_functional(program))
        return found[-1]

    monkeypatch.setattr("autoddl.capture.trace.make_functional", noted)
    return found


def compare(model: nn.Module, x: Tensor) -> None:
    """Loss, gradients and buffers of the program are those of the module, bit by bit."""
    eager, captured = copy.deepcopy(model), capture(model, x)
    loss, *new = captured.program(*arguments(model, as_sample(x), captured))
    truth = eager(x)
    assert torch.equal(loss, truth)
    if loss.requires_grad:
        loss.backward()
        truth.backward()
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or theirs.grad is None or torch.equal(ours.grad, theirs.grad)
    tensors, updates = captured.graph.tensors, captured.graph.updates
    changed = {tensors[old].fqn: value for (old, _), value in zip(updates, new, strict=True)}
    for (name, before), after in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(changed.get(name, before), after), name


def test_batch_norms_and_operators_in_place_need_no_second_trace(plain: list[bool]) -> None:
    torch.manual_seed(0)
    compare(Norms(), torch.randn(2, 3, 6, 6))
    assert plain == [True]


class Twins(nn.Module):
    """Two buffers that get one value, and one that gets the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.first, self.second, self.last = nn.Buffer(torch.zeros(6)), nn.Buffer(torch.zeros(6)), nn.Buffer(
            torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        loss: Tensor = h.square().mean()
        self.first.copy_(h.detach().mean(0))
        self.second.copy_(self.first)
        self.last.copy_(loss.detach())
        return loss


def test_buffers_that_get_one_value_have_results_of_their_own(plain: list[bool]) -> None:
    torch.manual_seed(0)
    compare(Twins(), torch.randn(4, 6))
    updates = capture(Twins(), torch.randn(4, 6)).graph.updates
    assert len({new for _, new in updates}) == len(updates) == 3


class Program(nn.Module):
    """Random steps over values and views of them, over inputs of (4, 6)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.register_buffer("state", torch.zeros(4, 6))
        self.steps: Steps = [draw.choice(STEPS)(draw.randrange(100), draw.randrange(100)) for _ in range(8)]

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.state, Tensor)
        values = [x + 1]
        for step in self.steps:
            step(values, self.state)
        loss: Tensor = torch.stack([(k + 1) * value.sum() for k, value in enumerate(values)]).sum()
        return loss


def _of(values: list[Tensor], k: int) -> Tensor:
    return values[k % len(values)]


STEPS: list[Callable[[int, int], Callable[[list[Tensor], Tensor], Any]]] = [
    lambda a, b: lambda v, s: v.append(_of(v, a) * 3 + _of(v, b)),
    lambda a, b: lambda v, s: v.append(_of(v, a).view(-1).view(4, 6)),
    lambda a, b: lambda v, s: v.append(_of(v, a) * _of(v, b)),
    lambda a, b: lambda v, s: v.append(s + _of(v, a)),
    lambda a, b: lambda v, s: _of(v, a).add_(_of(v, b), alpha=2),
    lambda a, b: lambda v, s: _of(v, a).mul_(2).clamp_(max=50),
    lambda a, b: lambda v, s: _of(v, a).copy_(_of(v, b)),
    lambda a, b: lambda v, s: _of(v, a)[0].fill_(b),
    lambda a, b: lambda v, s: _of(v, a).ge_(_of(v, b)),
    lambda a, b: lambda v, s: s.mul_(0.5).add_(_of(v, a)),
    lambda a, b: lambda v, s: s.copy_(_of(v, a)),
]


def check_random(plain: list[bool], seeds: range) -> None:
    for seed in seeds:
        compare(Program(seed), torch.arange(24.0).view(4, 6))
    assert True in plain and False in plain


def test_some_random_programs_that_write_in_place_equal_the_module(plain: list[bool]) -> None:
    check_random(plain, range(1, 4))


@pytest.mark.slow
def test_random_programs_that_write_in_place_equal_the_module(plain: list[bool]) -> None:
    check_random(plain, range(4, 64))
    assert plain.count(True) > 10
