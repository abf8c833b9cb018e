"""The verbs about this machine: doctor and init."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from shell import FACTORY, shell

from autoddl.cost_models import load_cluster
from autoddl.launch.doctor import Check, able_to_plan, examine


def test_doctor_says_what_is_there() -> None:
    said = shell("doctor")
    assert said.code == 0 and not said.err
    for what in ("Python", "torch", "ortools", "backends", "devices", "memory", "shaped links", "compiler"):
        assert what in said.out
    data = json.loads(shell("doctor", "--json").out)
    assert data["plans"] and [one["what"] for one in data["checks"]] == [one.what for one in examine()]


@pytest.mark.ranks
def test_doctor_fails_where_planning_cannot_work() -> None:
    asked = "import sys; sys.modules['torch'] = None; from autoddl.cli.main import main; main(['doctor'])"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    assert ran.returncode == 4 and not ran.stderr
    assert "everything: models are captured with it" in ran.stdout and "pip install torch==" in ran.stdout


def test_a_lack_that_planning_does_not_need_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    checks = {one.what: one for one in examine()}
    assert able_to_plan(tuple(checks.values()))
    assert "rehearse" in checks["shaped links"].prevents and "iproute2" in checks["shaped links"].prevents
    assert checks["matplotlib"].prevents == "`draw` as svg or png: pip install matplotlib"
    assert "torch.compile" in checks["compiler"].prevents and not checks["compiler"].good
    assert not able_to_plan((Check("torch", "none", "everything", needed=True),))


def test_init_writes_a_file_that_can_be_planned_for(tmp_path: Path) -> None:
    path, hosts = tmp_path / "cluster.yaml", tmp_path / "hosts"
    hosts.write_text("a\nb\n")
    said = shell("init", "-o", str(path), "--hosts", str(hosts))
    assert said.code == 0 and said.out.startswith(f"written: {path};")
    assert load_cluster(path).levels[-1].size == 2 and load_cluster(path).levels[-1].name == "net"
    assert shell("plan", FACTORY, str(path), "--set", "layers=1", "--max-axes", "1").code == 0


def test_init_writes_over_no_file_unless_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("mine\n")
    said = shell("init", "-o", str(path))
    assert (said.code, said.out) == (2, "") and said.err == (
        f"autoddl: {path} exists: --force writes over it, -o FILE takes another\n")
    assert path.read_text() == "mine\n"
    assert shell("init", "-o", str(path), "--force").code == 0 and load_cluster(path).size >= 1


def test_init_says_what_is_wrong_with_a_file_of_hosts(tmp_path: Path) -> None:
    said = shell("init", "-o", str(tmp_path / "c.yaml"), "--hosts", str(tmp_path / "none"))
    assert said.code == 2 and "cannot read the hosts" in said.err and len(said.err.splitlines()) == 1
    assert not (tmp_path / "c.yaml").exists()
