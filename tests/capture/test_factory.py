"""Factories for planning: parameters take no memory, buffers keep their values, and what reads values says so."""

import re
from pathlib import Path

import pytest
import torch
import zoo
from sampling import parametrize_or_slow
from shell import FACTORY, LAPTOP, shell
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.patches.torch_parameters_patch import parameters_on_meta
from autoddl.core.errors import InputError


class Masked(nn.Module):
    """A buffer with infinities, and two names of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(8, 8))
        self.one, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.one.weight, self.other.weight = weight, weight
        self.mask: Tensor
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.other(self.one(x)) + self.mask
        loss: Tensor = scores.softmax(-1).square().mean()
        return loss


def masked() -> tuple[nn.Module, Tensor]:
    return Masked(), torch.randn(8, 8)


def reading() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(8, 8))
    assert float(next(model.parameters()).detach().abs().sum()) > 0
    return Masked(), torch.randn(8, 8)


def huge() -> nn.Module:
    """Four thousand GB of parameters, a GB each."""
    return nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(4000)))


def test_parameters_take_no_memory_and_the_graph_is_that_of_the_model() -> None:
    factory = Factory.parse(f"{__file__}:masked")
    model, sample, line = factory.shaped()
    assert line == "" and all(p.is_meta for p in model.parameters()) and not any(b.is_meta for b in model.buffers())
    assert len(list(model.parameters())) == 1
    assert capture(model, sample).graph == capture(*factory.build()).graph


@parametrize_or_slow("name", ["tied", "vgg_bn"], [
    "gpt", "gpt2", "llama", "neox", "phi3", "mixture", "bert", "t5", "vit", "resnet", "regression",
    "turned"])
def test_a_plan_made_without_values_is_one_of_the_model_with_them(name: str) -> None:
    """The graph, and so the fingerprint that a run compares, does not depend on values of parameters."""
    graph = capture(*zoo.named(name)).graph
    with parameters_on_meta():
        model, sample = zoo.named(name)
    assert all(p.is_meta for p in model.parameters()) and capture(model, sample).graph == graph


def test_a_model_larger_than_any_memory_is_made() -> None:
    model, _, line = Factory.parse(f"{__file__}:huge").shaped()
    assert sum(p.nbytes for p in model.parameters()) == 4000 * 2**30 and line == ""


def test_a_factory_that_reads_values_is_called_with_memory_and_says_where() -> None:
    said = shell("plan", f"{__file__}:reading", LAPTOP)
    assert said.code == 0
    assert re.search(r"reading reads values of its parameters \(.*test_factory.py:\d+\), so they were made in memory",
                     said.err)
    assert shell("plan", FACTORY, LAPTOP).err == ""


def test_a_factory_that_reads_more_than_is_free_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoddl.capture.factory.free_bytes", lambda: 100.0)
    with pytest.raises(InputError, match=r"reads values .*, which take 0\.0 GB or more, and 0\.0 GB are free here"):
        Factory.parse(f"{__file__}:reading").shaped()


def test_a_factory_that_fails_fails_as_before(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("def model():\n    raise ValueError('no such size')\n")
    with pytest.raises(InputError, match="failed: ValueError: no such size"):
        Factory.parse(f"{path}:model").shaped()
