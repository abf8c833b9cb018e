"""Pictures of plans, and the bytes held over a step."""

import json
from pathlib import Path

import pytest
from shell import FACTORY, LAPTOP, shell

from autoddl.core.plan import load_plan
from autoddl.explain.compare_run import foreseen, foreseen_bytes


@pytest.fixture(scope="module", params=["1", "2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of one microbatch, and one of two."""
    found = tmp_path_factory.mktemp("picture") / "plan.json"
    said = shell("plan", FACTORY, LAPTOP, "--microbatches", request.param, "-o", str(found))
    assert said.code == 0, said.err
    return found


def test_memory_rises_and_falls_within_the_budget(path: Path) -> None:
    plan = load_plan(path)
    line = foreseen_bytes(plan, foreseen(plan))
    always = line.nbytes[0]
    assert always < line.peak <= line.budget == plan.budget
    assert line.peak == pytest.approx(plan.predicted.peak_bytes)
    assert list(line.times) == sorted(line.times) and line.times[-1] <= foreseen(plan).step.seconds * (1 + 1e-9)


@pytest.mark.ranks  # on a new machine matplotlib asks fc-list for the fonts
@pytest.mark.parametrize("kind", ["svg", "png", "json"])
def test_every_kind_of_picture(path: Path, kind: str) -> None:
    out = path.with_suffix(f".{kind}") if kind == "svg" else path.parent / f"picture.{kind}"
    said = shell("draw", str(path)) if kind == "svg" else shell("draw", str(path), "-o", str(out))
    assert said.code == 0 and said.out == f"written: {out}\n", said
    start = {"svg": b"<?xml", "png": b"\x89PNG", "json": b"{"}[kind]
    assert out.read_bytes().startswith(start)
    if kind == "json":
        assert any(row["ph"] == "X" for row in json.loads(out.read_text())["traceEvents"])


def test_another_kind_is_refused(path: Path) -> None:
    said = shell("draw", str(path), "-o", str(path.parent / "picture.pdf"))
    assert said.code == 2 and ".svg, .png, .json" in said.err
