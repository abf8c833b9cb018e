"""The contracts between rooms fail when somebody breaks them: shown on a copy of the tree, one bad import at a time."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sampling import parametrize_or_slow

ROOT = Path(__file__).parent.parent.parent
LINTER = Path(sys.executable).parent / "lint-imports"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with its two links, and the contracts."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("autoddl", "search", "cost_models"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken(folder: Path) -> list[str]:
    """Names of the contracts that `lint-imports` reports as broken in `folder`; its exit status agrees."""
    done = subprocess.run([LINTER, "--no-cache", "--no-logo"], cwd=folder, capture_output=True, text=True)
    names = re.findall(r"^(.+) BROKEN", done.stdout, re.MULTILINE)
    assert done.returncode == bool(names) and "Contracts:" in done.stdout, done.stdout + done.stderr
    return names


@pytest.mark.ranks
def test_the_tree_keeps_all_contracts(copied: Path) -> None:
    assert broken(copied) == []


@pytest.mark.ranks
@parametrize_or_slow("file,line,contract", [
    ("autoddl/core/names.py", "from autoddl.cli import main", "rooms import downward"),
    ("autoddl/operators/rules/table.py", "from autoddl.operators.footprints import table",
     "operators: a rule knows no footprint, neither knows a kernel"),
    ("search/limits.py", "from autoddl.search import exact", "no circles among rooms, nor inside one"),
    ("cost_models/units.py", "from torch.utils import data", "plans are made and read without torch"),
    ("autoddl/planner/pins.py", "def f():\n    from autoddl.operators.kernels import nn",
     "plans are made and read without torch"),
    ("search/certify/certificate.py", "from autoddl.search.exact import exact",
     "a certificate is checked without the solver"),
    ("autoddl/api.py", "from autoddl.validation import validate",
     "only the shell and the fit to runs know the validation")], [
    ("autoddl/schedule/traffic.py", "from autoddl.planner import task", "rooms import downward"),
    ("autoddl/runtime/batches.py", "from autoddl.planner import pins", "rooms import downward"),
    ("search/limits.py", "from autoddl.cost_models import units", "rooms import downward"),
    ("autoddl/core/errors.py", "from autoddl.core import plan", "no circles among rooms, nor inside one"),
    ("autoddl/core/names.py", "import torch", "plans are made and read without torch"),
    ("autoddl/pricing/space.py", "from autoddl.capture import capture", "plans are made and read without torch")])
def test_a_bad_import_breaks_its_contract(copied: Path, file: str, line: str, contract: str) -> None:
    path = copied / file
    text = path.read_text(encoding="utf-8")
    path.write_text(f"{text}\n{line}\n", encoding="utf-8")
    try:
        assert contract in broken(copied)
    finally:
        path.write_text(text, encoding="utf-8")


def test_every_room_has_a_layer() -> None:
    rooms = {f"autoddl.{path.parent.name}" for path in (ROOT / "autoddl").glob("*/__init__.py")}
    modules = {f"autoddl.{path.stem}" for path in (ROOT / "autoddl").glob("*.py")} - {"autoddl.__init__"}
    layers = next(one["layers"] for one in CONTRACTS if one["name"] == "rooms import downward")
    assert rooms | modules == {name for layer in layers for name in layer.split(" | ")}


def test_rooms_that_may_load_torch_are_listed() -> None:
    """A new room is free of torch unless somebody adds it here."""
    found = {".".join(("autoddl", *path.parent.relative_to(ROOT / "autoddl").parts))
             for path in (ROOT / "autoddl").rglob("__init__.py")} - {"autoddl"}
    free = next(one["source_modules"] for one in CONTRACTS if one["name"] == "plans are made and read without torch")
    loads = {name for name in found if not any(f"{name}.".startswith(f"{one}.") for one in free)}
    assert loads == {"autoddl.adapters", "autoddl.operators", "autoddl.operators.kernels", "autoddl.operators.trials",
                     "autoddl.capture", "autoddl.capture.patches", "autoddl.capture.rewrites", "autoddl.runtime",
                         "autoddl.runtime.collectives", "autoddl.runtime.checkpoints",
                     "autoddl.explain", "autoddl.launch", "autoddl.calibrate", "autoddl.validation", "autoddl.fitting",
                     "autoddl.cli",
                     "autoddl.cli.tables"}
