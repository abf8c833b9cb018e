"""Ranks that are lost, plans for those that are left, and folders of launchers that were killed."""

import json
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shell import FACTORY, PAIR, shell
from tiny import tiny

import autoddl
from autoddl.core.errors import MachineError, MismatchError
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster
from autoddl.explain.spares import largest_parts, spare_plans
from autoddl.launch.elastic import read_elastic, spare_path
from autoddl.launch.launch import RanksLost, launch
from autoddl.launch.temporary import remove_abandoned, temporary_folder
from autoddl.runtime.checkpoints.checkpoint_series import kept_steps

ROOT = Path(__file__).parent.parent.parent


def ranks_running(folder: Path, text: str) -> list[str]:
    path = folder / "rank.py"
    path.write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(text))
    return [sys.executable, str(path)]


@pytest.mark.ranks
def test_ranks_that_died_without_a_word_or_hang_are_lost(tmp_path: Path) -> None:
    said = """
        from autoddl.core.errors import {0}
        from autoddl.launch.launch import report_failure
        report_failure({0}("the peer is gone"))
        sys.exit(2)
    """
    with pytest.raises(RanksLost, match="rank 1 was killed by SIGKILL") as lost:
        launch(3, ranks_running(tmp_path, "os.kill(os.getpid(), 9) if rank else time.sleep(60)"))
    assert lost.value.ranks == (1, 2)
    peers = "if rank == 1: time.sleep(60)" + textwrap.dedent(said.format("PeerError"))
    with pytest.raises(RanksLost, match="the peer is gone; rank 1 still ran") as lost:
        launch(3, ranks_running(tmp_path, peers))
    assert lost.value.ranks == (1,)
    with pytest.raises(MachineError, match="the peer is gone") as other:
        launch(2, ranks_running(tmp_path, "if rank: time.sleep(60)" + textwrap.dedent(said.format("MachineError"))))
    assert not isinstance(other.value, RanksLost)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan on two ranks, and those made ahead for what is left of them."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "pair.yaml").write_text(PAIR)
    assert shell("plan", FACTORY, str(folder / "pair.yaml"), "-o", str(folder / "plan.json"), "--spares", "1").code == 0
    return folder / "plan.json"


def test_spare_plans_are_made_ahead_and_read(planned: Path) -> None:
    plan = autoddl.load_plan(planned)
    spare = spare_path(planned, 1)
    assert autoddl.load_plan(spare).mesh.size == 1
    elastic = read_elastic(planned, plan, ["auto"])
    assert [one.plan.mesh.size for one in elastic.plans] == [2, 1]
    assert elastic.of_size(1) == elastic.plans[1] and elastic.of_size(3) is None
    found = elastic.for_at_most(1, planned.parent, lambda *_: None)
    assert found is not None and found.path == spare
    assert read_elastic(planned, plan, [str(spare)]).for_at_most(0, planned.parent, lambda *_: None) is None
    made = replace(elastic, plans=elastic.plans[:1]).for_at_most(1, planned.parent, lambda *_: None)
    assert made is not None and made.plan.mesh.size == 1
    other = planned.parent / "other.json"
    autoddl.plan(tiny(1), planned.parent / "pair.yaml").save(other)
    with pytest.raises(MismatchError, match="a plan of another model"):
        read_elastic(planned, plan, [str(other)])


def test_the_largest_parts_of_a_cluster() -> None:
    cluster = load_cluster(ROOT / "examples" / "clusters" / "a100-4x8.yaml")
    assert [[level.size for level in one.levels] for one in largest_parts(cluster, 31)] == [[7, 4], [8, 3]]
    assert [[level.size for level in one.levels] for one in largest_parts(cluster, 3)] == [[1, 3], [3, 1]]
    assert spare_plans(autoddl.load_plan(ROOT / "tests" / "plans" / "gpt-laptop.json"), 0) == ()


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from typing import Any
sys.path.append({support!r})
from tiny import tiny

def watch():
    while not list(Path({folder!r}).glob("step-*[0-9]")):
        time.sleep(0.01)
    Path({marker!r}).touch()
    os.kill(os.getpid(), signal.SIGKILL)

def dying():
    if os.environ.get("RANK") == "1" and not Path({marker!r}).exists():
        threading.Thread(target=watch, daemon=True).start()
    return tiny()
"""


def test_lost_ranks_are_replaced_by_a_smaller_plan_from_the_last_checkpoint(
        planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def trained(job: dict[str, Any], plan: Plan, *_: object) -> dict[str, Any]:
        jobs.append((plan.mesh.size, job["resume"], job["plan"]))
        if len(jobs) == 1:
            raise RanksLost("rank 1 is gone", [1])
        return {"losses": [2.0, 1.0], "step_seconds": 1.0, "first": 1}

    monkeypatch.setattr("autoddl.launch.run._trained", trained)
    saving = ["--checkpoint", str(tmp_path / "kept"), "--no-record", "--json"]
    said = shell("run", str(planned), FACTORY, *saving, "--elastic", "auto")
    assert "rank 1 is gone; training goes on from the last checkpoint on 1 of the 1 ranks that are left" in said.err
    assert json.loads(said.out)["ranks"] == 1
    assert jobs == [(2, False, str(planned)), (1, True, str(spare_path(planned, 1)))]
    jobs.clear()
    said = shell("run", str(planned), FACTORY, *saving)
    assert said.code == 4 and said.err.strip() == "autoddl: rank 1 is gone"


@pytest.mark.ranks
@pytest.mark.slow
def test_training_goes_on_with_the_ranks_that_are_left_and_back_again(planned: Path, tmp_path: Path) -> None:
    """One of two ranks is killed after the first checkpoint; losses are those of an uninterrupted run."""
    kept, marker, path = tmp_path / "kept", tmp_path / "marker", tmp_path / "dying.py"
    path.write_text(KILLED.format(support=str(ROOT / "tests" / "support"), folder=str(kept), marker=str(marker)))
    options = [str(planned), f"{path}:dying", "--no-record", "--json"]
    saving = ["--checkpoint", str(kept), "--every", "20"]
    said = shell("run", *options, *saving, "--steps", "60", "--elastic", "auto")
    assert said.code == 0 and marker.exists(), said
    assert re.search("rank 1 was killed by SIGKILL; .*goes on from the last checkpoint on 1 of the 1 ranks", said.err)
    found = json.loads(said.out)
    assert found["ranks"] == 1 and found["first"] >= 20 and len(found["losses"]) == 60
    back = json.loads(shell("run", *options, *saving, "--steps", "70", "--resume").out)
    assert back["ranks"] == 2 and back["first"] == 60 and kept_steps(kept) == (60, 70)
    assert "no checkpoint" not in back["note"]
    new = ("--checkpoint", str(tmp_path / "new"), "--resume")
    whole = json.loads(shell("run", *options, *new, "--steps", "70").out)
    assert f"no checkpoint was in {tmp_path / 'new'}: training began with the first step" in whole["note"]
    assert back["losses"] == pytest.approx(whole["losses"], abs=1e-6)


@pytest.mark.parametrize("words", [("--resume",), ("--elastic", "auto")])
def test_going_on_takes_a_folder(planned: Path, words: tuple[str, ...]) -> None:
    said = shell("run", str(planned), FACTORY, *words)
    assert said.code == 2 and "say where they are kept, with --checkpoint FOLDER" in said.err


@pytest.mark.ranks
def test_folders_of_a_killed_launcher_are_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "autoddl-of-the-user"
    other.mkdir()
    code = ("import time\nfrom autoddl.launch.temporary import temporary_folder\n"
            "with temporary_folder('x'): print(flush=True), time.sleep(60)")
    killed = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert killed.stdout is not None and killed.stdout.readline()
    remove_abandoned()
    assert len([*tmp_path.glob("autoddl-x-*")]) == 1
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    with temporary_folder("y") as mine:
        remove_abandoned()
        assert {one.name for one in tmp_path.iterdir()} == {mine.name, other.name}
    assert [one.name for one in tmp_path.iterdir()] == [other.name]
