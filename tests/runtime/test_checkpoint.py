"""A checkpoint holds the model, not the plan: written under one plan it is read under others, bit for bit. Nothing but
checkpoints is ever replaced."""

import io
import os
import pickle
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from planmaker import random_plans
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from shell import FACTORY, shell
from tiny import tiny
from warm_launch import warm_launch

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.plan import Plan
from autoddl.launch.train import train as train_job
from autoddl.runtime.checkpoints import checkpoint
from autoddl.runtime.checkpoints.checkpoint_writer import CheckpointWriter
from autoddl.runtime.parallelize import ParallelModel, parallelize

STEPS = 2


def model() -> tuple[torch.nn.Module, Sample]:
    return zoo.gpt(layers=1, dtype=torch.float64, dropout=0.1)


@shared
def captured() -> Captured:
    return capture(*model())


def started(plan: Plan, weight: float = 0.1) -> tuple[ParallelModel, torch.optim.Optimizer]:
    parallel = parallelize(model()[0], plan, captured=captured())
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2, weight_decay=weight)


def train(parallel: ParallelModel, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(parallel.step(batch(parallel.steps)).item())
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
    return losses


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randint(0, 64, (4, 16), generator=draw), torch.randint(0, 64, (4, 16), generator=draw)


def whole(value: Any) -> torch.Tensor:
    found = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert isinstance(found, torch.Tensor)
    return found.detach().clone()


def state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: whole(p) for name, p in parallel.named_parameters()}
    for name, p in parallel.named_parameters():
        found.update({f"{name}/{key}": whole(value) for key, value in optimizer.state[p].items()})
    return found


def write(plan: Plan, path: str) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    parallel, optimizer = started(plan)
    before = train(parallel, optimizer, STEPS)
    checkpoint.save(parallel, optimizer, path)
    held = state(parallel, optimizer)
    return before, held, train(parallel, optimizer, STEPS)


def read(plan: Plan, path: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    parallel, optimizer = started(plan)
    checkpoint.load(parallel, optimizer, path)
    assert parallel.steps == STEPS
    return state(parallel, optimizer), train(parallel, optimizer, STEPS)


def plans(mesh: str, count: int) -> list[Plan]:
    return random_plans(*model(), mesh, count, seed=5, captured=captured())


def on_ranks_or_here(plan: Plan, function: Callable[..., Any], path: Path) -> list[Any]:
    """`function(plan, path)` on the plan's ranks, or in this process, which is one."""
    size = plan.mesh.size
    return on_ranks(size, function, plan, str(path)) if size > 1 else [function(plan, str(path))]


@pytest.mark.ranks
@parametrize_or_slow("loads", [(("a=2", "one=1"),)],
                     [(("one=1", "a=2"), ("a=2,b=2", "one=1")),
                      (("one=1", "one=1"), ("a=2,b=2", "a=4"), ("a=2,b=2", "a=2,b=2"))])
def test_saved_under_one_plan_and_loaded_under_others(tmp_path: Path, loads: Sequence[tuple[str, str]]) -> None:
    """The mesh that a checkpoint is saved on, and that of the plan that goes on from it."""
    held, losses = dict[str, dict[str, torch.Tensor]](), dict[str, list[float]]()
    for mesh in sorted({"one=1", *(saved for saved, _ in loads)}, reverse=True):
        plan = plans(mesh, 1)[0]
        _, held[mesh], losses[mesh] = on_ranks_or_here(plan, write, tmp_path / mesh)[0]
    for one, other in pairwise(held.values()):
        assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-7) for name in one)
    for saved, mesh in loads:
        plan = plans(mesh, 2)[1]
        for found, resumed in on_ranks_or_here(plan, read, tmp_path / saved):
            assert all(torch.equal(found[name], held[saved][name]) for name in held[saved])
            for expected in (losses[saved], losses["one=1"]):
                assert resumed == pytest.approx(expected, abs=2e-6)


def damage(plan: Plan, path: str) -> str:
    """The second save fails on one rank while it writes."""
    parallel, optimizer = started(plan)
    checkpoint.save(parallel, optimizer, path)
    kept = state(parallel, optimizer)
    train(parallel, optimizer, 1)
    original = CheckpointWriter.write_data
    if parallel.groups.rank == 1:
        def failing(*args: Any, **kwargs: Any) -> Any:
            raise OSError("no space left on device")
        CheckpointWriter.write_data = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(MachineError, match="was not written"):
            checkpoint.save(parallel, optimizer, path)
    finally:
        CheckpointWriter.write_data = original  # type: ignore[method-assign]
    checkpoint.load(parallel, optimizer, path)
    found = state(parallel, optimizer)
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    return "kept"


@pytest.mark.ranks
@parametrize_or_slow("ranks", [2], [4])
def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, ranks: int) -> None:
    assert on_ranks(ranks, damage, plans(f"a={ranks}", 1)[0], str(tmp_path / "checkpoint")) == ["kept"] * ranks


def test_what_is_no_checkpoint_of_this_model(tmp_path: Path) -> None:
    parallel, optimizer = started(plans("one=1", 1)[0])
    with pytest.raises(InputError, match="is no checkpoint"):
        checkpoint.load(parallel, optimizer, tmp_path / "nothing")
    checkpoint.save(parallel, optimizer, tmp_path / "small")
    larger, sample = zoo.gpt(layers=2)
    other = parallelize(larger, random_plans(larger, sample, "one=1", 1)[0])
    with pytest.raises(MismatchError, match="does not fit this model"):
        checkpoint.load(other, None, tmp_path / "small")


def whole_state(plan: Plan) -> bool:
    parallel, _ = started(plan)
    expected, _ = model()
    moved = {name: value + 1 for name, value in expected.state_dict().items()}
    parallel.load_state_dict(moved)
    return all(torch.equal(whole(value), moved[name]) for name, value in parallel.state_dict().items())


@pytest.mark.ranks
@parametrize_or_slow("ranks", [2], [4])
def test_whole_tensors_are_loaded_into_pieces(ranks: int) -> None:
    (plan,) = random_plans(*model(), f"a={ranks}", 1, roles={"a": "zero"}, captured=captured())
    assert all(on_ranks(ranks, whole_state, plan))


def idle(path: str) -> list[list[float]]:
    """Losses of a model with a parameter that no loss reads: trained on, saved before and after a step, loaded with
    gradients there."""
    model, sample = zoo.regression(torch.float64)
    (plan,) = random_plans(model, sample, "a=2", 1)

    def fresh() -> tuple[ParallelModel, torch.optim.Optimizer]:
        parallel = parallelize(zoo.regression(torch.float64)[0], plan)
        return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)

    def steps(parallel: ParallelModel, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.zero_grad()
            found.append(parallel.step(sample).item())
            optimizer.step()
        return found

    losses = [steps(*fresh(), 6)]
    first = fresh()
    checkpoint.save(*first, f"{path}/before")
    before = steps(*first)
    checkpoint.save(*first, f"{path}/after")
    losses.append(before + steps(*first))
    for name, start in (("before", []), ("after", before)):
        again = fresh()
        again[0].step(sample)  # gradients are there
        checkpoint.load(*again, f"{path}/{name}")
        losses.append(start + steps(*again, 6 - len(start)))
    return losses


@pytest.mark.ranks
def test_a_checkpoint_changes_nothing_and_restores_all(tmp_path: Path) -> None:
    for losses in on_ranks(2, idle, str(tmp_path)):
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], rel=1e-12)


Trained = tuple[ParallelModel, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def trained() -> Trained:
    model, sample = zoo.regression(torch.float64)
    parallel = parallelize(model, random_plans(model, sample, "one=1", 1)[0])
    return parallel, torch.optim.AdamW(parallel.parameters(), lr=1e-2)


def saved(trained: Trained, path: Path, steps: int) -> None:
    """A checkpoint that is known by its count of steps."""
    trained[0].steps = steps
    checkpoint.save(*trained, path)


def loaded(trained: Trained, path: Path) -> int:
    trained[0].steps = -1
    checkpoint.load(*trained, path)
    return trained[0].steps


def noted(path: Path) -> Path:
    """A file of the user's own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    return path


@pytest.mark.parametrize(("target", "mine", "pattern"), [
    ("work", "work/notes.txt", "work is there and is no checkpoint"),
    ("work", "work/.metadata/index", "work is there and is no checkpoint"),
    ("work", "work", "work is there and is no checkpoint"),
    ("work", "work.writing/notes.txt", "work.writing, where the checkpoint .*work is written first, is there"),
    ("work", "work.writing", "work.writing, where the checkpoint .*work is written first, is there"),
    ("work/new", "work", "may not write into .*work"),
    (".", "notes.txt", "the current folder"),
    ("..", "notes.txt", "the current folder, one that holds it"),
    ("/proc", "notes.txt", "a mount point: give it a folder of its own, like /proc/checkpoint"),
])
def test_what_is_no_checkpoint_is_never_replaced(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                 target: str, mine: str, pattern: str) -> None:
    kept = noted(tmp_path / "here" / mine)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=pattern):
        checkpoint.check_writable(target)
    with pytest.raises(InputError, match=pattern):
        saved(trained, Path(target), 1)
    assert kept.read_text() == "mine"


def refused(plan: Plan, path: str) -> str:
    parallel, optimizer = started(plan)
    with pytest.raises(InputError) as error:
        checkpoint.save(parallel, optimizer, path)
    return str(error.value)


@pytest.mark.ranks
def test_every_rank_hears_of_a_refusal(tmp_path: Path) -> None:
    kept = noted(tmp_path / "work" / "notes.txt")
    said = on_ranks(2, refused, plans("a=2", 1)[0], str(tmp_path / "work"))
    assert all("work is there and is no checkpoint" in text for text in said) and kept.read_text() == "mine"


@pytest.mark.ranks
@parametrize_or_slow("target", ["work"], ["."])
def test_a_run_is_refused_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "one.yaml").write_text(
        "{name: one, levels: [{name: machine, size: 1, bandwidth: 1 GB/s, latency: 60 us}], device: "
        "{name: cpu, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}}")
    plan, kept = tmp_path / "plan.json", noted(tmp_path / "work" / "notes.txt")
    autoddl.plan(tiny(1), tmp_path / "one.yaml").save(plan)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="work is there and is no checkpoint"):
        train_job({"save": "work", "plan": "nowhere.json", "factory": {}}, print)
    with warm_launch():
        said = shell("run", str(plan), FACTORY, "--set", "layers=1", "--steps", "1", "--save", target)
    assert said.code == 2 and len(said.err.strip().splitlines()) == 1 and "give" in said.err, said
    assert kept.read_text() == "mine"


def test_an_empty_folder_and_a_checkpoint_are_replaced(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.mkdir()
    for steps in (1, 2):
        checkpoint.check_writable(path)
        saved(trained, path, steps)
        assert loaded(trained, path) == steps and not (path / ".replaced").exists()
    assert [folder.name for folder in tmp_path.iterdir()] == ["work"]


def test_what_the_user_keeps_beside_or_in_a_checkpoint_stays(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "work"
    saved(trained, path, 1)
    path.rename(tmp_path / "work.old")
    inside, beside = noted(path / "notes.txt"), noted(tmp_path / "work.old" / "notes.txt")
    inside.unlink()
    for steps in (2, 3):
        saved(trained, path, steps)
        noted(inside)
    saved(trained, path, 4)
    assert loaded(trained, path) == 4 and loaded(trained, tmp_path / "work.old") == 1
    assert inside.read_text() == beside.read_text() == "mine"


def test_a_link_stays_a_link(trained: Trained, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "work").symlink_to(tmp_path / "disk" / "run")
    for steps in (1, 2):
        saved(trained, tmp_path / "work", steps)
    assert (tmp_path / "work").is_symlink() and loaded(trained, tmp_path / "disk" / "run") == 2
    assert [folder.name for folder in (tmp_path / "disk").iterdir()] == ["run"]


def crash(number: int) -> Callable[[Any, Any], None]:
    """`os.rename` of a process that dies when it renames a folder, but for `number` of them."""
    original, calls = os.rename, iter(range(100))

    def rename(source: Any, target: Any) -> None:
        if Path(source).is_dir() and next(calls) == number:
            raise KeyboardInterrupt
        original(source, target)

    return rename


@pytest.mark.parametrize(("number", "found"), [(0, 1), (1, 2)])
def test_a_crash_at_a_rename_leaves_a_whole_checkpoint(trained: Trained, tmp_path: Path, number: int, found: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first the old one, before the second the new one; the next save clears up, or fails and keeps it."""
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    path = tmp_path / "work"
    saved(trained, path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash(number))
        with pytest.raises(KeyboardInterrupt):
            saved(trained, path, 2)
    assert path.exists() == (number == 0) and loaded(trained, path) == found
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_data", full)
        with pytest.raises(MachineError, match="was not written"):
            saved(trained, path, 3)
    assert loaded(trained, path) == found
    saved(trained, path, 4)
    assert loaded(trained, path) == 4 and [folder.name for folder in tmp_path.iterdir()] == ["work"]


def test_an_empty_folder_hides_no_checkpoint(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made by a script that starts again, in the place of one that a crash left unnamed."""
    path = tmp_path / "work"
    saved(trained, path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crash(1))
        with pytest.raises(KeyboardInterrupt):
            saved(trained, path, 2)
    path.mkdir()
    assert loaded(trained, path) == 2
    saved(trained, path, 3)
    assert loaded(trained, path) == 3 and [folder.name for folder in tmp_path.iterdir()] == ["work"]


def test_a_crash_after_the_renames_loses_nothing_of_the_users(trained: Trained, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.rename

    def rename(source: Any, target: Any) -> None:
        if Path(source).name == "notes.txt":
            raise KeyboardInterrupt
        original(source, target)

    path = tmp_path / "work"
    saved(trained, path, 1)
    notes = noted(path / "notes.txt")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            saved(trained, path, 2)
    assert not notes.exists() and loaded(trained, path) == 2
    notes.write_text("newer")
    for steps in (3, 4):
        saved(trained, path, steps)
        assert notes.read_text() == "newer" and (path / "notes.txt.replaced").read_text() == "mine"
        assert loaded(trained, path) == steps and not (path / ".replaced").exists()


def test_a_rank_that_is_gone_is_a_machine_error(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                ) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:29500")

    path = tmp_path / "work"
    saved(trained, path, 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for action, module, name in ((checkpoint.save, dcp, "save"), (checkpoint.load, dcp, "load"),
                                 (checkpoint.save, checkpoint, "first_value"),
                                 (checkpoint.load, checkpoint, "first_value")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, closed)
            patch.setattr(checkpoint, "_distributed", lambda shared=module is checkpoint: shared)
            with pytest.raises(MachineError, match="Connection closed by peer"):
                action(*trained, path)
    assert loaded(trained, path) == 1


def test_what_was_finished_under_another_name_is_read(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "work"
    saved(trained, path, 1)
    path.rename(tmp_path / "work.old")
    assert loaded(trained, path) == 1
    saved(trained, path, 2)
    path.rename(tmp_path / "work.writing")
    assert loaded(trained, path) == 2


def test_a_half_written_folder_is_cleared_up(trained: Trained, tmp_path: Path) -> None:
    noted(tmp_path / "work.writing" / "__0_0.distcp")
    saved(trained, tmp_path / "work", 1)
    assert [folder.name for folder in tmp_path.iterdir()] == ["work"]


class Command:
    """What runs `path.touch()` when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_crafted_checkpoint_runs_nothing(trained: Trained, tmp_path: Path) -> None:
    parallel, optimizer = trained
    ran, folder = tmp_path / "ran", tmp_path / "checkpoint"
    checkpoint.save(parallel, optimizer, folder)
    metadata = folder / ".metadata"
    whole = metadata.read_bytes()
    for crafted in (pickle.dumps(Command(ran)), pickle.dumps([1]), whole[:50], b""):
        metadata.write_bytes(crafted)
        with pytest.raises(MismatchError, match=r"is not read: its \.metadata is"):
            checkpoint.load(parallel, optimizer, folder)
    metadata.write_bytes(whole)
    saved = dcp.FileSystemReader(folder).read_metadata()
    name = next(n for n, kind in saved.state_dict_metadata.items() if type(kind).__name__ == "BytesStorageMetadata")
    file = io.BytesIO()
    torch.save(Command(ran), file)
    place = next(one for index, one in saved.storage_data.items() if index.fqn == name)
    with (folder / place.relative_path).open("r+b") as into:
        into.seek(0, 2)
        place.offset, place.length = into.tell(), file.tell()
        into.write(file.getvalue())
    metadata.write_bytes(pickle.dumps(saved))
    with pytest.raises(MismatchError, match="is damaged: its files are not as they were written"):
        checkpoint.load(parallel, optimizer, folder)
    assert not ran.exists()
