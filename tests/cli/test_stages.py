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
    wanted = sorted((rank, task.name, round(start * 1e6, 3)) for task, start in zip(line.tasks, line.starts, strict=True)
                    for rank in task.ranks)
    assert sorted((row["pid"], row["name"], row["ts"]) for row in rows if row["ph"] == "X") == wanted
    assert {row["args"]["name"] for row in rows if row["name"] == "process_name"} == {
        "predicted, rank 0", "predicted, rank 1"}
