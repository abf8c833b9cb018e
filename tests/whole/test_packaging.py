"""What is installed is what is here, and no global name is taken."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import autoddl

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINKED = {"autoddl.search": "search", "autoddl.cost_models": "cost_models"}
HOME = {**LINKED, "autoddl": "autoddl"}
FOLDERS = {".".join((name, *path.parent.relative_to(ROOT / folder).parts)): str(path.parent.relative_to(ROOT))
           for name, folder in HOME.items() for path in sorted((ROOT / folder).rglob("__init__.py"))
           if not any(part.is_symlink() for part in path.parents)}
"""package -> the folder it lies in, as found on disk."""


def test_packages_are_those_on_disk() -> None:
    setuptools = PROJECT["tool"]["setuptools"]
    assert sorted(setuptools["packages"]) == sorted(FOLDERS)
    assert setuptools["package-dir"] == {name: folder for name, folder in FOLDERS.items() if name.split(".")[1:2]
                                         and f"{name.replace('.', '/')}" != folder}
    modules = {path.parent for folder in HOME.values() for path in (ROOT / folder).rglob("*.py")
               if not any(part.is_symlink() for part in path.parents)}
    assert {str(folder.relative_to(ROOT)) for folder in modules} == set(FOLDERS.values()), "a folder without __init__"


def test_the_engines_are_relative_links() -> None:
    for name in ("search", "cost_models"):
        link = ROOT / "autoddl" / name
        assert link.is_symlink() and os.readlink(link) == f"../{name}"


def test_tests_are_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["search", "cost_models"])
def test_no_global_module_of_the_engines(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({name!r}) is not None)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path).returncode == 0


@pytest.mark.ranks
def test_importing_and_naming_do_not_wait_for_torch() -> None:
    code = ("import sys, autoddl, autoddl.core.plan; from autoddl.core.plan import Plan\n"
            "assert 'torch' not in sys.modules and callable(autoddl.plan) and autoddl.Plan is Plan\n"
            "assert autoddl.plan.__name__ == 'plan' and 'torch' not in sys.modules\n"
            "assert set(autoddl.__all__) <= set(dir(autoddl))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(getattr(autoddl, name) for name in autoddl.__all__)


@pytest.mark.ranks
def test_a_plan_is_read_at_once() -> None:
    """About 0.2 s on an idle machine, most of it pydantic. Seconds of the CPU count, so that other programs do not."""
    code = ("import sys, time; import autoddl; autoddl.load_plan(sys.argv[1])\n"
            "assert 'torch' not in sys.modules; print(time.process_time())")
    plan = ROOT / "tests" / "plans" / "mixture-two-racks-10g.json"
    done = [subprocess.run([sys.executable, "-c", code, plan], capture_output=True, text=True) for _ in range(3)]
    assert not any(one.returncode for one in done), done[0].stderr
    assert min(float(one.stdout) for one in done) < 1.0


def test_the_licence_and_the_notes_are_there() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert PROJECT["project"]["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) > 40


@pytest.mark.ranks
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="setuptools builds the wheel")
def test_the_wheel_holds_every_module_once(tmp_path: Path) -> None:
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("autoddl", "search", "cost_models", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-a", str(ROOT / name), str(copy / name)], check=True)
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = set(zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())
    expected = {f"{package.replace('.', '/')}/{path.name}" for package, folder in FOLDERS.items()
                for path in (ROOT / folder).glob("*.py")}
    expected |= {f"autoddl/cost_models/hardware/{path.name}" for path in (ROOT / "cost_models" / "hardware").glob("*")}
    expected |= {f"autoddl/validation/{path.name}" for path in (ROOT / "autoddl" / "validation").glob("*.yaml")}
    expected |= {f"autoddl/cost_models/{path.name}" for path in (ROOT / "cost_models").glob("*.yaml")}
    assert {n for n in names if ".dist-info/" not in n} == expected | {"autoddl/py.typed"}
