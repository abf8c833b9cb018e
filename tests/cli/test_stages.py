"""Every verb with a plan that has stages: it answers for all of them, or says in one line how to ask."""

import json
from pathlib import Path

import pytest
from shell import FACTORY, PAIR, shell

from autoddl.core.plan import load_plan
from autoddl.explain.staged_run import foreseen_stages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster of two devices, and `plan.json` with a stage on each."""
    made = tmp_path_factory.mktemp("stages")
    (made / "pair.yaml").write_text(PAIR)
    said = shell("plan", FACTORY, str(made / "pair.yaml"), "--set", "dropout=0.0", "--stages", "2", "--microbatches",
                 "2", "-o", str(made / "plan.json"))
    assert said.code == 0, said
    return made


@pytest.mark.ranks  # on a new machine matplotlib asks fc-list for the fonts
@pytest.mark.parametrize(("kind", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_stages_are_drawn(folder: Path, kind: str, start: bytes) -> None:
    out = folder / f"picture.{kind}"
    assert shell("draw", str(folder / "plan.json"), "-o", str(out)).code == 0
    assert out.read_bytes().startswith(start)
    if kind == "svg":
        shown = out.read_text()
        assert all(f"<!-- {text} -->" in shown for text in (
            "rank 0", "rank 1", "rank 0 to rank 1", "rank 1 to rank 0", "0F0", "1B1", "activations",
            "budget, 1 GB, not in the picture", "rank 1, stage 1"))


def test_a_trace_has_every_task_of_the_schedule(folder: Path) -> None:
    assert shell("draw", str(folder / "plan.json"), "-o", str(folder / "picture.json")).code == 0
    rows = json.loads((folder / "picture.json").read_text())["traceEvents"]
    line = foreseen_stages(load_plan(folder / "plan.json")).timeline
    timed = zip(line.tasks, line.starts, strict=True)
    wanted = sorted((rank, task.name, round(start * 1e6, 3)) for task, start in timed for rank in task.ranks)
    assert sorted((row["pid"], row["name"], row["ts"]) for row in rows if row["ph"] == "X") == wanted
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "predicted, rank 0", "predicted, rank 1"}


def test_uniform_pipelines_are_compared(folder: Path) -> None:
    said = shell("compare", FACTORY, str(folder / "pair.yaml"), "--set", "dropout=0.0", "--stages", "1,2",
                 "--microbatches", "2", "--json")
    assert said.code == 0, said
    rows = {row["name"]: row for row in json.loads(said.out)}
    one = rows["uniform pipeline, 1f1b"]
    assert one["stages"] == 2 and one["detail"] == "data parallel 1 x tensor parallel 1, 1 block a stage"
    assert rows["found"]["predicted_seconds"] <= one["predicted_seconds"] and one["ratio"] >= 1
    other = rows["uniform pipeline, interleaved:2"]
    assert "4 stages cannot have equally many of the model's 2 blocks" in other["detail"] and "stages" not in other
    assert rows["data parallel"]["predicted_seconds"] and "stages" not in rows["data parallel"]


def test_solvers_are_not_compared_on_stages(folder: Path) -> None:
    said = shell("compare", FACTORY, str(folder / "pair.yaml"), "--stages", "2", "--solvers")
    assert said.code == 2 and "leave stages and cut out" in said.err and not said.out
