"""What a checkpoint's writer writes is what torch.distributed.checkpoint writes, for less, in the second save as in the
first."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from planmaker import random_plans
from ranks import on_ranks, shared
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoddl import recovery
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import MachineError
from autoddl.runtime.checkpoints import checkpoint, checkpoint_writer
from autoddl.runtime.checkpoints.checkpoint import write
from autoddl.runtime.checkpoints.checkpoint_writer import CheckpointWriter, frame
from autoddl.runtime.checkpoints.repeated_planner import RepeatedPlanner
from autoddl.runtime.checkpoints.staging import Staging
from autoddl.runtime.checkpoints.state_collector import StateCollector
from autoddl.runtime.parallelize import parallelize

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64)


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_readers_of_zip_archives_read_a_tensor_between_its_frames(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (3, 5), (0, 4), (2, 1, 70)):
        value = values(dtype, shape)
        around, data = frame(dtype, value.shape), value.reshape(-1).view(torch.uint8).numpy().data
        file = io.BytesIO(around.head + data.tobytes() + around.tail_of(data))
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        file.seek(0)
        found = torch.load(file)
        assert found.dtype == dtype and found.shape == value.shape
        assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def read_by_torch(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint of plain tensors, by torch's own reader."""
    found = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else "" for name, value in state.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("large", [1 << 24, 16])
def test_torch_reads_every_kind_of_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(checkpoint_writer, "LARGE", large)
    state: dict[str, Any] = {"turned": values(torch.float32, (4, 6)).t(), "part": values(torch.float64, (9, 3))[2:5],
                             "text": "words", "one": torch.tensor(7), "none": torch.empty(0, 2),
                             "wide": values(torch.bfloat16, (64, 8))}
    write(state, tmp_path / "one", "one")
    found = read_by_torch(tmp_path / "one", state)
    assert found.pop("text") == "words" and all(torch.equal(value, state[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_the_system_takes_in_part_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "AT_ONCE", 3)
    monkeypatch.setattr(os, "writev", lambda number, parts: os.write(number, b"".join(parts)[:5]))
    state: dict[str, Any] = {"a": values(torch.float32, (5, 3)), "none": torch.empty(0),
                             "b": values(torch.int64, (2,)), "text": "words"}
    write(state, tmp_path / "one", "one")
    found = read_by_torch(tmp_path / "one", state)
    assert found.pop("text") == "words" and all(torch.equal(value, state[name]) for name, value in found.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_second_save_is_planned_by_the_first_while_only_values_change(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, writer, planned = Staging(), CheckpointWriter(), []
    original = RepeatedPlanner._create_global_plan

    def counted(self: RepeatedPlanner, plans: Any) -> Any:
        planned.append(1)
        return original(self, plans)

    monkeypatch.setattr(RepeatedPlanner, "_create_global_plan", counted)
    first: dict[str, Any] = {"a": values(torch.float32, (2, 3)),
                             "b": {"c": values(torch.float64, (4,))}, "text": "short"}
    longer: dict[str, Any] = {**first, "text": "a longer one " * 99, "a": first["a"] + 1}
    wider = {**longer, "a": values(torch.float32, (3, 3))}
    more = {**wider, "d": values(torch.int64, (2,))}
    for number, (state, plans) in enumerate([(first, 1), (longer, 1), (first, 1), (wider, 2), (more, 3), (more, 3),
                                             (first, 4)]):
        write(staging.copied(state), tmp_path / str(number), "it", writer=writer)
        flat = {name: value for name, value in state.items() if name != "b"} | {"b.c": state["b"]["c"]}
        found = read_by_torch(tmp_path / str(number), flat)
        assert len(planned) == plans and found.pop("text") == state["text"]
        assert all(torch.equal(value, flat[name]) for name, value in found.items())


def test_a_copy_is_not_touched_by_what_training_does_next() -> None:
    value, extra = torch.ones(3), [1]
    staging = Staging()
    copied = staging.copied({"part": {"value": value}, "extra": extra})
    value.add_(1)
    extra.append(2)
    assert torch.equal(copied["part"]["value"], torch.ones(3)) and copied["extra"] == [1]
    assert staging.copied({"part": {"value": value}})["part"]["value"] is copied["part"]["value"]


def saved_and_changed(folder: str) -> list[float]:
    """Saves on two ranks, of which the second alone gets another tensor, then loses it; sums of what torch reads."""
    mesh, rank, found = init_device_mesh("cpu", (2,)), dist.get_rank(), []
    staging, writer = Staging(), CheckpointWriter()
    for number, extra in enumerate((False, False, True, True, False)):
        split = DTensor.from_local(torch.full((2, 3), float(number + rank)), mesh, [Shard(0)])
        state: dict[str, Any] = {"split": split, f"mine.{rank}": torch.tensor(float(number)),
                                 "whole": DTensor.from_local(torch.full((5,), float(number)), mesh, [Replicate()])}
        if extra and rank == 1:
            state["extra"] = torch.tensor(100.0)
        path = Path(folder, str(number))
        write(staging.copied(state), path, path, writer=writer)
        into = {"split": torch.zeros(4, 3), "whole": torch.zeros(5), "mine.0": torch.zeros(()),
                "mine.1": torch.zeros(())} | ({"extra": torch.zeros(())} if extra else {})
        dcp.load(into, checkpoint_id=path)
        found.append(sum(float(value.sum()) for value in into.values()))
    return found


@pytest.mark.ranks
def test_a_rank_whose_state_changes_makes_all_plan_anew(tmp_path: Path) -> None:
    expected = [6.0 * (2 * n + 1) + 5.0 * n + 2.0 * n + 100.0 * (n in (2, 3)) for n in range(5)]
    assert on_ranks(2, saved_and_changed, str(tmp_path)) == [expected, expected]


@shared
def captured() -> Captured:
    return capture(*zoo.regression(torch.float64))


def kept_after_a_failure(folder: str, mesh: str) -> list[bool]:
    """The first and the third save fail on the last rank, after which the keeper saves again."""
    model = parallelize(zoo.regression(torch.float64)[0], plan(mesh), captured=captured())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sample, original, last = zoo.regression(torch.float64)[1], CheckpointWriter._write, 0
    keeper = recovery.Keeper(folder, 1)
    for number in range(4):
        model.step(sample)
        optimizer.step()
        if number % 2 == 0 and model.groups.rank == model.plan.mesh.size - 1:
            CheckpointWriter._write = full  # type: ignore[method-assign, assignment]
        keeper.after_step(model, optimizer)
        try:
            keeper.finish()
            last = number + 1
        except MachineError as error:
            assert number % 2 == 0 and "No space left on device" in str(error)
        finally:
            CheckpointWriter._write = original  # type: ignore[method-assign]
    again = parallelize(zoo.regression(torch.float64)[0], plan(mesh), captured=captured())
    other = torch.optim.AdamW(again.parameters(), lr=1e-2)
    assert last == 4 and recovery.resume(folder, again, other) == 4
    return [torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True)]


def full(self: CheckpointWriter, item: WriteItem, planner: object, file: object) -> int:
    raise OSError(28, "No space left on device")


def plan(mesh: str) -> Any:
    return random_plans(*zoo.regression(torch.float64), mesh, 1, seed=5, captured=captured())[0]


class Nested(torch.optim.SGD):
    """An optimizer whose state is more than tensors and numbers."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["more"] = {"there": p.detach() + 1}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, Nested])
def test_every_save_collects_what_torch_collects(kind: Any) -> None:
    """From before the first step on."""
    model = parallelize(zoo.regression(torch.float64)[0], plan("one=1"), captured=captured())
    optimizer, collector = kind(model.parameters(), lr=1e-2), StateCollector()
    for _ in range(3):
        mine, whole = collector.state(model, optimizer), checkpoint.snapshot(model, optimizer)
        assert mine.keys() == whole.keys() and mine["steps"] == whole["steps"]
        for part in ("model", "optimizer"):
            assert mine[part].keys() == whole[part].keys()
            for name, value in whole[part].items():
                same = isinstance(value, torch.Tensor) and value.data_ptr() == mine[part][name].data_ptr()
                assert same or mine[part][name] == value
        model.step(zoo.regression(torch.float64)[1])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks
def test_after_a_save_that_failed_the_next_one_is_whole(tmp_path: Path) -> None:
    assert all(kept_after_a_failure(str(tmp_path / "one"), "one=1"))
    assert all(map(all, on_ranks(2, kept_after_a_failure, str(tmp_path / "two"), "a=2")))


def test_a_checkpoint_that_torchs_writer_wrote_is_read(tmp_path: Path) -> None:
    """As all were before."""
    model = parallelize(zoo.regression(torch.float64)[0], plan("one=1"), captured=captured())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.step(zoo.regression(torch.float64)[1])
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(checkpoint.snapshot(model, optimizer), checkpoint_id=tmp_path / "one", no_dist=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(model, optimizer, tmp_path / "one")
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
