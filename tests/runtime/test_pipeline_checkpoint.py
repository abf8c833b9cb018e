"""A checkpoint that stages wrote is read with any other number of them, bit for bit, and training goes on alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from random_plans import random_plan
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from staged_plans import even_cuts, staged_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl import recovery
from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.plan import Plan
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.parallelize import ParallelModel, parallelize

STEPS = 2
PARTS = 4


def model() -> tuple[nn.Module, Sample]:
    """Four blocks with a tied embedding."""
    return zoo.gpt(layers=4, B=8, dtype=torch.float64)


@shared
def captured() -> Captured:
    module, sample = model()
    return capture(module, parted(sample, PARTS))


def plan_of(stages: int, mesh: str) -> Plan:
    if stages == 1:
        return random_plan(captured(), 7, mesh, microbatches=PARTS)
    return staged_plan(captured(), even_cuts(captured().graph, stages), "1f1b", mesh, PARTS, seed=stages)


def started(plan: Plan) -> tuple[ParallelModel, torch.optim.Optimizer]:
    parallel = parallelize(model()[0], plan, captured=captured())
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def train(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(parallel.steps)
        batch = tuple(torch.randint(0, 64, (8, 16), generator=draw) for _ in range(2))
        losses.append(parallel.step(batch).item())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
    return losses


def whole(value: Any) -> Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, Tensor)
    return found.detach().clone()


def state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {name: whole(p) for name, p in parallel.named_parameters()}
    for name, p in parallel.named_parameters():
        found.update({f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()})
    return found


def write(plan: Plan, path: str) -> tuple[dict[str, Tensor], list[float]]:
    parallel, optimizer = started(plan)
    train(parallel, optimizer)
    checkpoint.save(parallel, optimizer, path)
    return state(parallel, optimizer), train(parallel, optimizer)


def read(plan: Plan, path: str) -> tuple[dict[str, Tensor], list[float]]:
    parallel, optimizer = started(plan)
    checkpoint.load(parallel, optimizer, path)
    assert parallel.steps == STEPS
    return state(parallel, optimizer), train(parallel, optimizer)


def run(plan: Plan, function: Any, path: Path) -> tuple[dict[str, Tensor], list[float]]:
    """What all ranks hold together, and the losses of any of them; where several hold something, they hold the same."""
    size, held = plan.mesh.size, dict[str, Tensor]()
    results = on_ranks(size, function, plan, str(path)) if size > 1 else [function(plan, str(path))]
    for found, _ in results:
        for name, value in found.items():
            assert torch.equal(held.setdefault(name, value), value), name
    return held, results[0][1]


@pytest.mark.ranks
@parametrize_or_slow("saved,loads", [((2, "one=1"), [(1, "one=1")])], [
    ((2, "one=1"), [(1, "all=4"), (4, "one=1"), (2, "all=2"), (2, "one=1")]),
    ((2, "all=2"), [(1, "one=1"), (1, "all=4"), (4, "one=1"), (2, "one=1")]),
    ((4, "one=1"), [(2, "all=2"), (1, "one=1")]),
    ((3, "one=1 / one=1 / all=2"), [(1, "one=1"), (2, "all=2"), (3, "all=2 / one=1 / one=1")]),
    ((1, "all=4"), [(2, "all=2"), (4, "one=1")])])
def test_saved_by_stages_and_read_by_others(tmp_path: Path, saved: tuple[int, str], loads: list[tuple[int, str]]
                                            ) -> None:
    held, losses = run(plan_of(*saved), write, tmp_path / "checkpoint")
    for stages, mesh in loads:
        found, resumed = run(plan_of(stages, mesh), read, tmp_path / "checkpoint")
        assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)
        assert resumed == pytest.approx(losses, rel=1e-9)


def whole_state(plan: Plan) -> bool:
    """A state of whole tensors is loaded, each stage its own part; a state of this rank is loaded again."""
    parallel, _ = started(plan)
    moved = {name: value + 1 for name, value in model()[0].state_dict().items()}
    parallel.load_state_dict(moved)
    loaded = all(torch.equal(whole(value), moved[name]) for name, value in parallel.state_dict().items())
    own = {name: value.clone() for name, value in parallel.state_dict().items()}
    parallel.load_state_dict({name: torch.zeros_like(value) for name, value in own.items()})
    parallel.load_state_dict(own)
    return loaded and all(torch.equal(whole(value), moved[name]) for name, value in parallel.state_dict().items())


@pytest.mark.ranks
@parametrize_or_slow("mesh", ["one=1"], ["all=2"])
def test_a_state_of_all_stages_is_loaded_into_each(mesh: str) -> None:
    plan = plan_of(2, mesh)
    assert all(on_ranks(plan.mesh.size, whole_state, plan))


class Averaged:
    """Averages of the weights that this rank has, by name."""

    def __init__(self, model: ParallelModel) -> None:
        self.shadow = {name: p.detach() * 2 for name, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"rate": 0.1, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rate"] == 0.1 and state["shadow"].keys() == self.shadow.keys()
        for name, value in self.shadow.items():
            value.copy_(state["shadow"][name])


def kept(plan: Plan, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    parallel, optimizer = started(plan)
    losses, ema = train(parallel, optimizer), Averaged(parallel)
    recovery.Keeper(folder, every=100).after_step(parallel, optimizer, ema=ema)
    keeper = recovery.Keeper(folder, every=1)
    keeper.save(parallel, optimizer, ema=ema)
    keeper.finish()
    return {name: whole(value) for name, value in ema.shadow.items()}, losses


def gone_on(plan: Plan, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    parallel, optimizer = started(plan)
    ema = Averaged(parallel)
    assert recovery.resume(folder, parallel, optimizer, ema=ema) == STEPS
    return {name: whole(value) for name, value in ema.shadow.items()}, []


@pytest.mark.ranks
@parametrize_or_slow("saved,loads", [((2, "one=1"), [(2, "one=1")])], [
    ((2, "one=1"), [(1, "one=1"), (2, "all=2"), (4, "one=1"), (1, "all=4")]),
    ((2, "all=2"), [(2, "all=2"), (1, "one=1")]),
    ((1, "all=4"), [(2, "one=1")])])
def test_averages_of_stages_are_read_by_others(tmp_path: Path, saved: tuple[int, str], loads: list[tuple[int, str]]
                                               ) -> None:
    held, _ = run(plan_of(*saved), kept, tmp_path)
    for one in loads:
        found, _ = run(plan_of(*one), gone_on, tmp_path)
        assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)
