"""States beside the model's: a rank's pieces are kept as the model's are, on any mesh; the rest is that of rank 0."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from planmaker import random_plans
from ranks import on_ranks, shared
from tiny import tiny
from torch import Tensor
from torch.distributed.tensor import DTensor

import autoddl
from autoddl import recovery
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import AutoDDLError, InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.parallelize import ParallelModel, parallelize

STEPS = 3


@shared
def captured() -> Captured:
    return capture(*zoo.regression(torch.float64))


def plan_on(mesh: str, seed: int = 5) -> Plan:
    return random_plans(*zoo.regression(torch.float64), mesh, 1, seed=seed, captured=captured())[0]


class Averaged:
    """Averages of the weights by name, in a list, and beside a number."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.count = model, 0
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.listed = [p.detach() * 2 for p in model.parameters()]

    def update(self) -> None:
        self.count += 1
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.3)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {f"module.{name}": value for name, value in self.shadow.items()}, "count": self.count,
                "more": [0.5, tuple(self.listed)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        for name, value in self.shadow.items():
            value.copy_(state["shadow"][f"module.{name}"])
        assert state["more"][0] == 0.5 and isinstance(state["more"][1], tuple)
        for value, other in zip(self.listed, state["more"][1], strict=True):
            value.copy_(other)


class Whole(Averaged):
    """Gives whole tensors, for which the ranks communicate."""

    def state_dict(self) -> dict[str, Any]:
        return {name: whole(value) for name, value in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.shadow.items():
            found = state[name]
            assert not isinstance(found, DTensor)
            local = torch.distributed.tensor.distribute_tensor(
                found, value.device_mesh, value.placements, src_data_rank=None) if isinstance(value, DTensor) else found
            value.copy_(local)


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def made(plan: Plan, kind: type[Averaged]) -> tuple[ParallelModel, torch.optim.Optimizer, Averaged]:
    model = parallelize(zoo.regression(torch.float64)[0], plan, captured=captured())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), kind(model)


def everything(model: ParallelModel, optimizer: torch.optim.Optimizer, ema: Averaged) -> dict[str, Tensor]:
    found = {f"ema/{name}": whole(value) for name, value in ema.shadow.items()}
    found |= {f"listed/{n}": whole(value) for n, value in enumerate(ema.listed)}
    for name, p in model.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()
                  if key not in ("calls", "more")}
        found[f"{name}/more"] = whole(optimizer.state[p]["more"]["slow"][0])
    return found


def saved(plan: Plan, folder: str, kind: type[Averaged]) -> dict[str, Tensor]:
    model, optimizer, ema = made(plan, kind)
    with recovery.Keeper(folder, every=1) as keeper:
        for n in range(STEPS):
            model.step(zoo.regression(torch.float64)[1])
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            for p in model.parameters():
                optimizer.state[p]["own"] = p.detach() * 3
                optimizer.state[p]["calls"], optimizer.state[p]["more"] = n, {"slow": {0: p.detach() - 1}}
            keeper.after_step(model, optimizer, ema=ema)
    return everything(model, optimizer, ema)


def resumed(plan: Plan, folder: str, kind: type[Averaged]) -> dict[str, Tensor]:
    model, optimizer, ema = made(plan, kind)
    for value in ema.shadow.values():
        value.zero_()
    assert recovery.resume(folder, model, optimizer, ema=ema) == STEPS
    assert all(optimizer.state[p]["calls"] == STEPS - 1 for p in model.parameters())
    if kind is Averaged:
        assert ema.count == STEPS
    return everything(model, optimizer, ema)


def run(function: Any, plan: Plan, *args: Any) -> dict[str, Tensor]:
    """What the ranks of a plan return: the same on all of them."""
    found: list[dict[str, Tensor]] = (on_ranks(plan.mesh.size, function, plan, *args) if plan.mesh.size > 1 else
                                      [function(plan, *args)])
    for one in found:
        assert one.keys() == found[0].keys() and all(torch.equal(one[name], found[0][name]) for name in one)
    return found[0]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "meshes"), [
    (Averaged, ("a=2,b=2", "a=2,b=2", "one=1")), (Whole, ("a=2,b=2", "a=2,b=2")),
    pytest.param(Averaged, ("a=2,b=2", "a=4", "a=2"), marks=pytest.mark.slow),
    pytest.param(Averaged, ("one=1", "a=2,b=2", "a=2"), marks=pytest.mark.slow),
    pytest.param(Whole, ("a=4", "a=2", "one=1"), marks=pytest.mark.slow)])
def test_pieces_of_other_states_are_read_on_any_mesh(kind: type[Averaged], meshes: tuple[str, ...], tmp_path: Path
                                                     ) -> None:
    expected = run(saved, plan_on(meshes[0]), str(tmp_path), kind)
    for number, mesh in enumerate(meshes[1:]):
        found = run(resumed, plan_on(mesh, seed=5 if mesh == meshes[0] else number), str(tmp_path), kind)
        names = [name for name in expected if kind is Averaged or not name.startswith("listed")]
        assert all(torch.equal(found[name], expected[name]) for name in names)


class Held:
    """An object with a given state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def said(plan: Plan, folder: str) -> list[str]:
    """What keepers say of states that differ among the ranks, before any checkpoint is due, and what they refuse."""
    model, optimizer, ema = made(plan, Averaged)
    rank, found = model.groups.rank, list[str]()
    local = {n: p.to_local() for n, p in enumerate(model.parameters()) if isinstance(p, DTensor)}
    assert any(value.shape != p.shape for value, p in zip(local.values(), model.parameters(), strict=True))
    for state in ({"same": [1, "text", torch.ones(3)]}, {"same": 1, "places": {"here": rank // 2}}, {"own": local}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recovery.Keeper(folder, every=100).after_step(model, optimizer, odd=Held(state), ema=ema)
        found += [str(one.message) for one in caught]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    pieces = [("names", {f"name{rank % 2}": Held({})}), ("keys", {"odd": Held({"a": {(1, 2): ema.listed[0]}})}),
              ("sums", {"odd": Held({"a": DTensor.from_local(torch.ones(2), mesh, [torch.distributed.tensor.Partial(),
                                                                                torch.distributed.tensor.Shard(0)])})})]
    for _, others in pieces:
        try:
            recovery.Keeper(folder, every=100).after_step(model, optimizer, **others)
        except AutoDDLError as error:
            found.append(str(error))
    split = next(p for p in model.parameters() if p.to_local().shape != p.shape)  # type: ignore[attr-defined]
    optimizer.state[split]["own"] = split.to_local().clone()  # type: ignore[attr-defined]
    try:
        recovery.Keeper(folder, every=1).save(model, optimizer)
    except InputError as error:
        found.append(str(error))
    return found


@pytest.mark.ranks
def test_what_differs_among_ranks_is_said_in_one_line(tmp_path: Path) -> None:
    first, *others = on_ranks(4, said, plan_on("a=2,b=2"), str(tmp_path))
    assert first[0].startswith("the state of odd is another on rank 2 than on rank 0, places for one: a checkpoint ")
    assert first[1].startswith("the state of odd is another on rank ")
    wanted = ("of name0: give the same names", "under the key (1, 2), which", "parts of a sum that was not taken",
              "with this rank's piece as a plain tensor")
    assert len(first) == 2 + len(wanted) and all("\n" not in line for line in first)
    for one in (first[2:], *others):
        assert len(one) == len(wanted) and all(word in line for word, line in zip(wanted[1:], one[1:], strict=True))


@pytest.mark.parametrize(("key", "value", "words"), [
    ("own", "text", "'own', a str: a checkpoint keeps tensors"), ("own", {"in": [1]}, "'in', a list: a checkpoint"),
    ("a.b", 1, "the key 'a.b', and dots part the names")])
def test_an_own_key_that_could_not_be_read_back_is_refused(key: str, value: object, words: str, tmp_path: Path) -> None:
    model, optimizer, _ = made(plan_on("one=1"), Averaged)
    optimizer.state[next(model.parameters())][key] = value
    with pytest.raises(InputError, match=rf"the optimizer's state of \S+ has {words}"):
        checkpoint.save(model, optimizer, tmp_path / "one")


DOCS = Path(__file__).parents[2] / "docs" / "training.md"
PLACE = """
name: four
device: {name: cpu, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}
levels: [{name: machine, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""


def documented(path: str, folder: str) -> list[float]:
    """The losses that the lines of the docs end with, every=2 steps, twice: the second time from the checkpoint."""
    lines = DOCS.read_text().partition("## Averaged weights")[2].partition("\n## ")[0].split("```python")[1:]
    code = "".join(one.partition("```")[0] for one in lines).replace("every=100", "every=2").replace("0.999", "0.9")
    found, batches = list[float](), [tuple(torch.randint(0, 64, (2, 8, 6), generator=torch.Generator().manual_seed(n)))
                                     for n in range(4)]
    with contextlib.chdir(folder):
        for part in (batches[:3], batches[2:]):
            model = autoddl.parallelize(tiny(1, dropout=0.0), autoddl.load_plan(path))
            scope: dict[str, Any] = {
                "torch": torch, "autoddl": autoddl, "recovery": recovery, "model": model, "batches": part,
                "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}
            exec(code, scope)
            found += [float(scope["loss"]), float(scope["averaged_loss"]), float(model(batches[0]))]
            assert model.steps == len(part) + 2 * (len(found) > 3)
        saved = tiny(1, dropout=0.0)
        autoddl.load_safetensors(saved, "averaged")
        found.append(float(saved.eval()(*batches[3]).detach()))
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_the_lines_of_the_docs_average_weights_as_one_process_does(tmp_path: Path) -> None:
    found = []
    for size, options in ((4, {"mine": "dp=2,tp=2"}), (1, {})):
        path, folder = tmp_path / f"{size}.json", tmp_path / f"on{size}"
        folder.mkdir()
        autoddl.plan(tiny(1, dropout=0.0), parse_cluster(PLACE % size, "test"), workers=1,
                     **options).save(path)  # type: ignore[arg-type]
        given = documented, str(path), str(folder)
        found.append(on_ranks(4, *given)[0] if size == 4 else given[0](*given[1:]))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert found[0][1] != found[0][2] and found[0][6] == pytest.approx(found[0][4], rel=1e-4)
