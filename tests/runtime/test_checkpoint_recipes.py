"""A checkpoint moves between recipes and meshes: equal to the bit where the stored dtypes are, else converted."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from random_plans import random_plan
from ranks import on_ranks, shared
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import MismatchError
from autoddl.core.plan import Plan
from autoddl.core.precision import RECIPES, Precision
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.parallelize import ParallelModel, parallelize

EVERY = tuple(product(RECIPES, RECIPES))
USUAL = (("bf16-mixed", "bf16"), ("bf16", "bf16-mixed"))


class Small(nn.Module):
    """Products, a norm whose parameters stay in float32 under bf16-mixed, and buffers that a step writes."""

    def __init__(self, counts: torch.dtype = torch.int64) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(13, 10), nn.BatchNorm1d(10), nn.Linear(10, 6, bias=False)
        self.register_buffer("counts", torch.arange(6).to(counts))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).relu()) * self.counts
        return y.square().mean()


def made(seed: int, counts: torch.dtype = torch.int64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return Small(counts), torch.randn(8, 13)


@shared
def _captured(recipe: str, counts: torch.dtype) -> Captured:
    return capture(*made(0, counts), Precision.parse(recipe))


@shared
def _planned(recipe: str, seed: int, mesh: str, counts: torch.dtype) -> Plan:
    return replace(random_plan(_captured(recipe, counts), seed, mesh), precision=recipe)


def started(recipe: str, seed: int, mesh: str, counts: torch.dtype = torch.int64
            ) -> tuple[ParallelModel, torch.optim.Optimizer]:
    plan, captured = _planned(recipe, seed, mesh, counts), _captured(recipe, counts)
    parallel = parallelize(made(seed, counts)[0], plan, captured=captured)
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers and the optimizer's state by name, whole."""
    def whole(value: Any) -> Tensor:
        found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
        return found.detach().clone()

    found = {name: whole(value) for name, value in parallel.state_dict().items()}
    for name, p in parallel.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()}
    return found


def _saved(recipe: str, path: str) -> dict[str, Tensor]:
    parallel, optimizer = started(recipe, 3, "machine=2,pair=2")
    for step in range(2):
        optimizer.zero_grad()
        parallel.step(made(step)[1])
        optimizer.step()
    checkpoint.save(parallel, optimizer, path)
    return state(parallel, optimizer)


def _moved(pairs: Sequence[tuple[str, str]], folder: str) -> dict[tuple[str, str], list[str]]:
    """On a rank: of every pair of recipes, what is not what was saved."""
    held = {recipe: _saved(recipe, f"{folder}/{recipe}") for recipe in {one for one, _ in pairs}}
    wrong = {}
    for before, after in pairs:
        parallel, optimizer = started(after, 5, "all=4")
        checkpoint.load(parallel, optimizer, f"{folder}/{before}")
        found = state(parallel, optimizer)
        assert found.keys() == held[before].keys() and parallel.steps == 2
        wrong[before, after] = [name for name, value in held[before].items()
                                if not torch.equal(found[name], value.to(found[name].dtype))]
        assert found["first.weight"].dtype is (torch.bfloat16 if after == "bf16" else torch.float32)
        parallel.step(made(2)[1])
        optimizer.step()
    return wrong


def _check(pairs: Sequence[tuple[str, str]], folder: Path) -> None:
    for before, after in pairs:
        _planned(before, 3, "machine=2,pair=2", torch.int64)
        _planned(after, 5, "all=4", torch.int64)
    for wrong in on_ranks(4, _moved, pairs, str(folder)):
        assert wrong == {pair: [] for pair in pairs}


@pytest.mark.ranks
@pytest.mark.slow
def test_a_checkpoint_moves_between_recipes_and_meshes(tmp_path: Path) -> None:
    _check(USUAL, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_it_moves_between_all_recipes(tmp_path: Path) -> None:
    _check(EVERY, tmp_path)


def _refused(folder: str) -> str:
    _saved("bf16-mixed", folder)
    parallel, optimizer = started("float32", 5, "all=4", torch.float32)
    before = state(parallel, optimizer)
    with pytest.raises(MismatchError) as error:
        checkpoint.load(parallel, optimizer, folder)
    after = state(parallel, optimizer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return str(error.value)


@pytest.mark.ranks
def test_what_converts_to_nothing_names_both_recipes(tmp_path: Path) -> None:
    _planned("bf16-mixed", 3, "machine=2,pair=2", torch.int64)
    _planned("float32", 5, "all=4", torch.float32)
    said = on_ranks(4, _refused, str(tmp_path / "one"))
    assert len({*said}) == 1 and "counts is int64 there, saved under the recipe bf16-mixed, and float32 here" in said[0]
    assert "under float32" in said[0]
