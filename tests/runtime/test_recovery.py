"""Training goes on from its last checkpoint as if nothing had happened, whatever happened while one was written."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from planmaker import random_plans
from ranks import on_ranks, shared

from autoddl import recovery
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.plan import Plan
from autoddl.runtime.checkpoints.checkpoint_series import check_series, kept_steps, path_of, settle
from autoddl.runtime.checkpoints.checkpoint_writer import CheckpointWriter
from autoddl.runtime.parallelize import parallelize

STEPS, EVERY = 5, 2


@shared
def captured() -> Captured:
    return capture(*zoo.regression(torch.float64))


def plan_on(mesh: str) -> Plan:
    return random_plans(*zoo.regression(torch.float64), mesh, 1, seed=5, captured=captured())[0]


class Loader:
    """Draws a batch's scale, by its own position and by the random numbers of three libraries."""

    def __init__(self) -> None:
        self.position = 0

    def batch(self) -> tuple[torch.Tensor, ...]:
        self.position += 1
        scale = self.position * (random.random() + np.random.random() + float(torch.rand(())))
        return tuple(value * scale for value in zoo.regression(torch.float64)[1].args)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def trained(plan: Plan, folder: str, stop: int = STEPS) -> list[float]:
    """Losses from the last checkpoint of `folder` on; it ends after `stop` steps, as a process that is killed does not:
    the checkpoint under way is finished."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    model = parallelize(zoo.regression(torch.float64)[0], plan, captured=captured())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    others = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7), "loader": Loader(),
              "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    first = recovery.resume(folder, model, optimizer, **others)
    assert first == model.steps
    losses = []
    with recovery.Keeper(folder, EVERY) as keeper:
        for _ in range(first, stop):
            losses.append(float(model.step(others["loader"].batch())))  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()
            others["scheduler"].step()  # type: ignore[attr-defined]
            keeper.after_step(model, optimizer, **others)
    return losses


def test_a_run_that_was_cut_off_goes_on_to_the_bit(tmp_path: Path) -> None:
    plan, whole, cut = plan_on("one=1"), str(tmp_path / "whole"), str(tmp_path / "cut")
    losses = trained(plan, whole)
    assert trained(plan, cut, 3) == losses[:3] and kept_steps(cut) == (2,)
    assert trained(plan, cut) == losses[2:] and kept_steps(cut) == (2, 4)
    assert sorted(one.name for one in Path(cut).iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.ranks
def test_it_goes_on_to_the_bit_on_the_same_mesh_and_nearly_so_on_another(tmp_path: Path) -> None:
    two, one = plan_on("a=2"), plan_on("one=1")
    losses = on_ranks(2, trained, two, str(tmp_path / "whole"))[0]
    on_ranks(2, trained, two, str(tmp_path / "cut"), 3)
    assert trained(one, str(tmp_path / "cut"), 4) == pytest.approx(losses[2:4], abs=1e-6)
    assert on_ranks(2, trained, two, str(tmp_path / "cut"))[0] == pytest.approx(losses[4:], abs=1e-6)
    on_ranks(2, trained, two, str(tmp_path / "same"), 3)
    assert on_ranks(2, trained, two, str(tmp_path / "same"))[0] == losses[2:]


def simple(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    model = parallelize(zoo.regression(torch.float64)[0], plan_on("one=1"), captured=captured())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is the state of its own step, not of those that ran meanwhile."""
    model, optimizer = simple(tmp_path)
    sample, held, original = zoo.regression(torch.float64)[1], threading.Event(), CheckpointWriter.write_data

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert held.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(CheckpointWriter, "write_data", slow)
    with recovery.Keeper(tmp_path / "kept", 1) as keeper:
        model.step(sample)
        optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        assert keeper.after_step(model, optimizer) and kept_steps(tmp_path / "kept") == ()
        model.step(sample)
        optimizer.step()
        held.set()
    again, other = simple(tmp_path)
    assert recovery.resume(tmp_path / "kept", again, other) == 1
    assert all(torch.equal(p, value) for p, value in zip(again.parameters(), before, strict=True))


def test_a_checkpoint_that_falls_between_updates_is_of_the_next_one(tmp_path: Path) -> None:
    model, optimizer = simple(tmp_path)
    sample = zoo.regression(torch.float64)[1]
    with recovery.Keeper(tmp_path / "kept", 3, keep=9) as keeper:
        for _ in range(3):  # updates, of four calls each: 4, 8, 12
            for _ in range(4):
                model.step(sample)
            optimizer.step()
            keeper.after_step(model, optimizer)
    assert kept_steps(tmp_path / "kept") == (4, 8, 12)
    with recovery.Keeper(tmp_path / "kept", 5, keep=9) as keeper:
        for _ in range(4):
            model.step(sample)
            keeper.after_step(model, optimizer)
    assert kept_steps(tmp_path / "kept") == (4, 8, 12, 15)


def test_a_full_disk_ends_training_with_a_line_and_keeps_the_last_checkpoint(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    folder, plan = tmp_path / "kept", plan_on("one=1")
    losses = trained(plan, str(folder), 3)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write_data", full)
        with pytest.raises(MachineError, match=r"step-00000004 was not written .*No space left on device"):
            trained(plan, str(folder))
    assert [one.name for one in folder.iterdir()] == ["step-00000002"]
    assert trained(plan, str(folder)) == trained(plan, str(tmp_path / "whole"))[2:] and losses


@pytest.mark.parametrize("left", ["step-00000006.writing/__0_0.distcp", "step-00000006/__0_0.distcp"])
def test_what_a_crash_left_is_removed_and_the_users_files_stay(tmp_path: Path, left: str) -> None:
    trained(plan_on("one=1"), str(tmp_path), 3)
    for name in (left, "notes.txt", "step-00000008/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert settle(tmp_path) == "" and kept_steps(tmp_path) == (2,)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["notes.txt", "step-00000002", "step-00000008"]


def test_a_checkpoint_without_its_name_gets_it(tmp_path: Path) -> None:
    trained(plan_on("one=1"), str(tmp_path), 3)
    path_of(tmp_path, 2).rename(tmp_path / "step-00000002.writing")
    assert settle(tmp_path) == "" and kept_steps(tmp_path) == (2,)


def test_a_damaged_checkpoint_is_refused_with_one_line(tmp_path: Path) -> None:
    plan = plan_on("one=1")
    trained(plan, str(tmp_path), 3)
    data = path_of(tmp_path, 2) / "__0_0.distcp"
    whole = data.read_bytes()
    for size in (len(whole) // 2, 10, 0):
        data.write_bytes(whole[:size])
        with pytest.raises(MismatchError, match="step-00000002 is damaged"):
            trained(plan, str(tmp_path))
    data.unlink()
    with pytest.raises(MismatchError, match="step-00000002 is damaged"):
        trained(plan, str(tmp_path))


def test_states_are_given_back_under_the_names_they_were_kept_by(tmp_path: Path) -> None:
    trained(plan_on("one=1"), str(tmp_path), 3)
    model, optimizer = simple(tmp_path)
    with pytest.raises(MismatchError, match=r"holds the states of loader, scaler, scheduler .* and loader were given"):
        recovery.resume(tmp_path, model, optimizer, loader=Loader())


def test_a_state_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    class Odd(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("here")}

    model, optimizer = simple(tmp_path)
    with pytest.raises(InputError, match="the state of odd cannot be kept"):
        recovery.Keeper(tmp_path, 1).save(model, optimizer, odd=Odd())


@pytest.mark.parametrize(("every", "keep"), [(0, 1), (1, 0)])
def test_numbers_of_steps_and_checkpoints_are_positive(tmp_path: Path, every: int, keep: int) -> None:
    with pytest.raises(InputError, match="both are 1 or more"):
        recovery.Keeper(tmp_path, every, keep)


def test_a_folder_with_checkpoints_is_not_begun_anew(tmp_path: Path) -> None:
    check_series(tmp_path / "new", resuming=False)
    trained(plan_on("one=1"), str(tmp_path), 3)
    check_series(tmp_path, resuming=True)
    with pytest.raises(InputError, match="has checkpoints up to step 2: go on from there"):
        check_series(tmp_path, resuming=False)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        check_series(tmp_path / "file", resuming=True)


def test_a_file_and_a_checkpoint_are_no_folder_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / ".metadata").write_bytes(b"")
    module = parallelize(zoo.regression(torch.float64)[0], plan_on("one=1"), captured=captured())
    for name, words in (("file", "is a file"), ("one", "is one checkpoint: give the folder above it")):
        with pytest.raises(InputError, match=words):
            recovery.resume(tmp_path / name, module)
    assert recovery.resume(tmp_path / "none", module) == 0
