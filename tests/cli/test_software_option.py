"""`plan --software`: the plan of a program's kernels, and its step as the program runs it."""

import json
from pathlib import Path

from shell import FACTORY, LAPTOP, shell

from autoddl.core.plan import load_plan
from autoddl.cost_models.software import software_named
from autoddl.explain.run_seconds import seconds_as_run

ASKED = ("plan", FACTORY, LAPTOP, "--mine", "dp=4", "--set", "layers=2", "--set", "width=64")


def test_a_plan_says_how_a_program_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    eager, fused = (json.loads(shell(*ASKED, "--software", name, "-o", str(out), "--json").out)
                    for name in ("eager", "nemo"))
    assert fused["compute_seconds"] < eager["compute_seconds"]
    assert fused["as_run_seconds"] == seconds_as_run(load_plan(out), software_named("nemo"))
    assert fused["as_run_seconds"] == json.loads(shell("show", str(out), "--json").out)["as_run_seconds"]
    said = " ".join(shell(*ASKED, "--software", "nemo").out.split())
    assert "as run by nemo" in said and "half would take more than" in said
    assert shell("show", str(out)).out.startswith("as run by nemo: ")
    first = "as run by eager, operator by operator (--software compiled prices torch.compile)"
    assert shell(*ASKED, "--software", "eager").out.startswith(first)
    low, high = fused["as_run_interval"]
    assert low < fused["as_run_median"] < high


def test_a_plan_with_stages_says_so_too(tmp_path: Path) -> None:
    said = json.loads(shell(*ASKED[:4], "dp=2,pp=2", *ASKED[5:], "--microbatches", "2", "--software", "compiled",
                            "--json").out)
    assert said["as_run_seconds"] > said["compute_seconds"]


def test_what_contradicts_itself_is_refused() -> None:
    for more, word in ((("--software", "nemoo"), "did you mean 'nemo'"),
                       (("--software", "torchtitan", "--compiled"), "or take --software torchtitan-compiled")):
        said = shell(*ASKED, *more)
        assert said.code == 2 and word in said.err
