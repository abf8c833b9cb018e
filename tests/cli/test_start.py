"""The program starts with fixed hashes, and what depended on chance is the same in every process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoddl.capture.factory import Factory
from autoddl.cli import start
from autoddl.launch.train import built

SEEDED = """
import random, torch
torch.manual_seed(7)
random.seed(7)

def model():
    made = torch.nn.Linear(4, 4 + random.randrange(2))
    return made, (torch.randn(2, 4),)
"""


def test_the_command_starts_again_with_fixed_hashes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    def execv(path: str, args: list[str]) -> None:
        begun.append(args)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if sys.flags.hash_randomization:
        with pytest.raises(SystemExit):
            start.program()
        assert begun == [[sys.executable, *sys.orig_argv[1:]]] and os.environ["PYTHONHASHSEED"] == "0"


@pytest.mark.ranks
def test_the_shell_says_its_version_either_way() -> None:
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    said = [subprocess.run([sys.executable, "-m", "autoddl.cli", "--version"], env=env, capture_output=True, text=True,
                           check=True).stdout for env in (plain, plain | {"PYTHONHASHSEED": "1"})]
    assert said[0] == said[1] and "0.1.0" in said[0]


def test_a_file_that_seeds_gives_the_same_model_at_every_call(tmp_path: Path) -> None:
    path = tmp_path / "seeded.py"
    path.write_text(SEEDED)
    (one, first), (two, second) = (built(Factory(str(path), "model", {})) for _ in range(2))
    for x, y in zip([*one.parameters(), *first.args], [*two.parameters(), *second.args], strict=True):
        assert torch.equal(x, y)


@pytest.mark.ranks
@pytest.mark.parametrize(("imported", "again"), [("autoddl.cli.main", "0"), ("autoddl.cli.verbs", None)])
def test_ctrl_c_while_the_program_starts_leaves_no_traceback(tmp_path: Path, imported: str, again: str | None) -> None:
    """Sent at the moment a module is looked for, before the shell can answer; with and without a second start."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs ignore it
        "class Finder:\n    def find_spec(self, name, *_):\n"
        f"        name == {imported!r} and os.kill(os.getpid(), signal.SIGINT)\nsys.meta_path.insert(0, Finder())\n")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"} | {"PYTHONPATH": str(tmp_path)}
    code = "import sys\nfrom autoddl.cli.start import program\nprogram()"
    said = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True,
                          env=env | ({"PYTHONHASHSEED": again} if again else {}))
    assert said.returncode == -signal.SIGINT and not said.stdout + said.stderr
