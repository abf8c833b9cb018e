"""The shell: its verbs, a table for people, one JSON document for programs."""

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forget, on_ranks, start_server
from rich.console import Console
from sampling import parametrize_or_slow
from shell import FACTORY, LAPTOP, PAIR, ROOT, shell
from tiny import tiny
from torch import nn
from warm_launch import warm_launch

import autoddl
from autoddl import api
from autoddl.capture.factory import Factory, settings
from autoddl.cli.main import main
from autoddl.cli.tables import plan_tables
from autoddl.cli.tables.plan_tables import plan_table, summary
from autoddl.cost_models import parse_cluster
from autoddl.planner.mesh_search import Found, search

KEYS = {"predicted_seconds", "bound_seconds", "gap", "mesh", "peak_bytes", "wall_seconds", "capture_seconds",
        "solve_seconds", "candidates", "fallback_ops"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for two by two processes with something to send."""
    made = tmp_path_factory.mktemp("cli") / "plan.json"
    said = shell("plan", FACTORY, LAPTOP, "--mesh", "machine=2,pair=2", "--pin", "blocks.*.up.weight: pair=S(0)",
                 "--pin", "head.weight: machine=S(1)", "--set", "layers=3", "-o", str(made))
    assert said.code == 0, said
    assert said.err == ""
    return made


@pytest.mark.ranks
def test_help_fits_one_screen() -> None:
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    text = subprocess.run([sys.executable, "-m", "autoddl.cli", "--help"], env=environment, capture_output=True,
                          text=True, check=True).stdout
    lines = text.rstrip().splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 80
    for verb in ("plan", "show", "compare", "run", "verify"):
        assert f" {verb} " in text


def test_the_table_says_what_layers_and_parameters_do(path: Path) -> None:
    text = shell("show", str(path)).out
    for part in ("machine=2,pair=2", "compute", "communication", "pair", "1 configuration weighed",
                 "4 GB a rank, of which the peak takes",
                 "no plan takes less than", "every operator has one"):
        assert part in text, text
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}
    assert rows["blocks.0-2.up.weight"].startswith("B S(0) ")
    assert rows["head.weight"].startswith("S(1) B ") and "machine: S(1)->B" in rows["head.weight"]
    assert rows["blocks.0-2.up"].startswith("linear ")


def test_plan_prints_one_json_object(tmp_path: Path) -> None:
    said = shell("plan", FACTORY, LAPTOP, "--json", "--set", "layers=1")
    data = json.loads(said.out)
    assert data.keys() >= KEYS and said.err == ""
    assert 0 < data["bound_seconds"] <= data["predicted_seconds"] and data["gap"] < 1e-6
    parts = data["compute_seconds"], data["update_seconds"], *data["communication_seconds"].values()
    assert data["update_seconds"] > 0 and data["predicted_seconds"] == pytest.approx(sum(parts))
    assert data["fallback_ops"] == {} and data["candidates"] >= 2


@pytest.mark.ranks
@pytest.mark.slow
def test_a_plan_of_microbatches_is_made_shown_and_run(tmp_path: Path) -> None:
    made = str(tmp_path / "parts.json")
    said = shell("plan", FACTORY, LAPTOP, "--mesh", "machine-pair=4", "--microbatches", "2", "--workers", "1",
                 "-o", made)
    assert said.code == 0 and "machine-pair=4 x 2 microbatches" in said.out, said
    assert json.loads(shell("show", made, "--json").out)["microbatches"] == 2
    ran = subprocess.run([sys.executable, "-m", "autoddl.cli", "run", made, FACTORY, "--steps", "2", "--json"],
                         capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["losses"]) == 2
    assert "autoddl: 3 microbatches cut dim 0" in shell("plan", FACTORY, LAPTOP, "--microbatches", "3").err
    assert "whole numbers with commas" in shell("plan", FACTORY, LAPTOP, "--microbatches", "2;4").err
    assert "at least 1, not [0, 2]" in shell("plan", FACTORY, LAPTOP, "--microbatches", "0,2").err


def test_compare_takes_microbatches() -> None:
    rows = json.loads(shell("compare", FACTORY, LAPTOP, "--set", "layers=1", "--max-axes", "1", "--microbatches", "2",
                            "--workers", "1", "--json").out)
    assert {row["microbatches"] for row in rows if row["mesh"]} == {2}


def test_the_table_says_how_float64_is_priced_without_a_peak() -> None:
    device = "{name: V, kind: cpu, memory: 1 GB, bandwidth: 5 GB/s, peak: {float32: 1 GFLOP/s%s}}"
    machine = "{name: one, device: %s, levels: [{name: a, size: 1, bandwidth: 1 GB/s, latency: 10 us}]}"
    says = "V lists no peak for float64: priced at 0.5 of its float32 peak"
    for dtype, peaks, said in ((torch.float64, "", True), (torch.float64, ", float64: 1 GFLOP/s", False),
                               (torch.float32, "", False)):
        model = Summed().to(dtype)
        plan = autoddl.plan(model, parse_cluster(machine % (device % peaks), "one"), torch.zeros(4, 4, dtype=dtype))
        assert (says in plan_tables.text(plan_table(plan))) == said


def test_show_repeats_the_plan(path: Path) -> None:
    plan = autoddl.load_plan(path)
    assert json.loads(shell("show", str(path), "--json").out) == json.loads(json.dumps(summary(plan)))


@pytest.mark.ranks
def test_reading_a_plan_does_not_wait_for_torch(path: Path) -> None:
    code = (f"import sys; from autoddl.cli.main import main\ntry: main(['show', {str(path)!r}])\n"
            "finally: assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_plan_is_data(path: Path, tmp_path: Path) -> None:
    """The factory that a plan names is not run when the plan is read."""
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('ran')")
    data = json.loads(path.read_text()) | {"factory": {"file": str(trap), "name": "trap", "arguments": {}}}
    (tmp_path / "plan.json").write_text(json.dumps(data))
    assert shell("show", str(tmp_path / "plan.json")).code == 0


def test_the_plan_keeps_the_factorys_arguments_as_defaults(path: Path) -> None:
    plan = autoddl.load_plan(path)
    assert plan.factory["arguments"] == {"layers": 3}
    assert Factory.parse(FACTORY, {"width": 8}).with_defaults(plan.factory).arguments == {"layers": 3, "width": 8}
    assert Factory.parse(FACTORY.replace(":tiny", ":on_meta")).with_defaults(plan.factory).arguments == {}


def test_settings_are_literals_and_words() -> None:
    assert settings(["layers=4", "p=0.5", "tied=True", "sizes=[1, 2]", "name=bfloat16", "text='a b'"]) == {
        "layers": 4, "p": 0.5, "tied": True, "sizes": [1, 2], "name": "bfloat16", "text": "a b"}


def test_compare_lists_plans_and_the_found_one_is_fastest() -> None:
    said = shell("compare", FACTORY, LAPTOP, "--json", "--set", "layers=1")
    rows = json.loads(said.out)
    assert said.code == 0 and len(rows) == 8
    assert all(row.keys() >= {"name", "predicted_seconds", "peak_bytes"} for row in rows)
    assert rows[0]["predicted_seconds"] == min(row["predicted_seconds"] for row in rows if row["predicted_seconds"])
    assert {"data parallel", "ZeRO-3", "tensor parallel"} <= {row["name"] for row in rows}


LOUD = """
import torch
from torch import nn
print("loaded")

class Loud(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        print("called with", x.shape)
        return self.linear(x).square().mean()

    def example_inputs(self):
        print("asked for a batch")
        return torch.zeros(4, 8)

def loud():
    print("made")
    return Loud()
"""


@pytest.mark.ranks
def test_what_the_users_code_prints_is_not_in_the_answer(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    factory, made, two = f"{tmp_path / 'loud.py'}:loud", str(tmp_path / "plan.json"), str(tmp_path / "two.yaml")
    Path(two).write_text(PAIR)
    said = shell("plan", factory, two, "--microbatches", "1,2", "--json", "-o", made)
    assert json.loads(said.out)["microbatches"] == 1
    for word in ("loaded", "made", "called with", "asked for a batch"):
        assert word in said.err
    assert len(json.loads(shell("compare", factory, two, "--solvers", "--json").out)) == 5
    with warm_launch():
        said = shell("verify", made, factory, "--json")
    assert json.loads(said.out)["collective_mismatches"] == 0, said


def planned_for_two(folder: Path) -> Path:
    """A plan for two ranks."""
    (folder / "two.yaml").write_text(PAIR)
    made = shell("plan", FACTORY, str(folder / "two.yaml"), "--set", "layers=1", "-o", str(folder / "plan.json"))
    assert made.code == 0, made
    return folder / "plan.json"


def test_an_interrupted_comparison_shows_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the second search: before that has a plan, with one, and before there is any."""
    model, compared, searches = tiny(1), ["data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel"], list[int]()

    def interrupted(at: int, planned: bool, *given: Any) -> Found:
        searches.append(at)
        if len(searches) == at and not planned:
            raise KeyboardInterrupt
        return replace(search(*given), interrupted=len(searches) == at)

    for planned, why in ((False, "interrupted before it had a plan"), (True, "interrupted: its best so far")):
        searches.clear()
        monkeypatch.setattr(api, "search", partial(interrupted, 2, planned))
        rows = api.compare(model, LAPTOP)
        assert len(searches) == 2 and rows[0].plan is not None and not rows[0].interrupted
        assert [row.name for row in rows[1:6]] == compared and rows[1].detail.endswith(why)
        assert (rows[1].plan is not None and rows[1].plan.proof.endswith("; interrupted")) == planned
        assert {(row.plan, row.detail) for row in rows[2:]} == {(None, "not begun: interrupted")}
    searches.clear()
    monkeypatch.setattr(api, "search", partial(interrupted, 1, False))
    assert shell("compare", FACTORY, LAPTOP).code == 130 and len(searches) == 1


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_run_trains_and_saves(path: Path, tmp_path: Path, ranks: int) -> None:
    if ranks == 2:
        path = planned_for_two(tmp_path)
    said = shell("run", str(path), FACTORY, "--steps", "4", "--lr", "0.01", "--save", str(tmp_path / "saved"), "--json")
    assert said.code == 0, said
    data = json.loads(said.out)
    assert len(data["losses"]) == 4 and data["losses"][3] < data["losses"][0]
    assert data["step_seconds"] > 0 and data["predicted_seconds"] == autoddl.load_plan(path).predicted.seconds
    assert (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.ranks
@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_training_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    path, saved = planned_for_two(tmp_path), tmp_path / "saved"
    common = ("run", str(path), FACTORY, "--steps", "4", "--save", str(saved), "--lr")
    assert shell(*common, "0.01").code == 0
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    said = shell(*common, "1e30")
    assert said.code == 2 and "Traceback" not in said.err and said.err.count("\n") == 1
    assert re.search(r"the loss of step [234] of 4 is (nan|inf), so training ended there and saved nothing", said.err)
    assert before == {file.name: file.read_bytes() for file in saved.iterdir()}


def torchrun(command: tuple[str, ...]) -> str:
    """What the program prints under torchrun on two ranks."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "autoddl.cli",
                           *command], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_by_torchrun(rank: int, command: tuple[str, ...], out: str, port: int, _: object) -> None:
    """A rank with torchrun's environment runs the program, which ends the process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with open(f"{out}-{rank}", "w") as file, contextlib.redirect_stdout(file):
        main(command)


def forked(command: tuple[str, ...], out: str) -> str:
    """What the program prints on two ranks that have imported what they need."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = start_server().start(as_by_torchrun, (command, out, port), [Pipe()[1] for _ in range(2)])
    assert start_server().end(pids, kill=False) == [0, 0] and not Path(f"{out}-1").read_text()
    return Path(f"{out}-0").read_text()


@pytest.mark.ranks
@parametrize_or_slow("launched", [False], [True])
def test_run_joins_torchrun_trains_and_saves(tmp_path: Path, launched: bool) -> None:
    """Ranks that torchrun starts, or that have the environment that it gives."""
    made, saved = str(planned_for_two(tmp_path)), tmp_path / "saved"
    assert "net=2" in shell("show", made).out
    command = ("run", made, FACTORY, "--steps", "4", "--lr", "0.01", "--save", str(saved), "--json")
    losses = json.loads(torchrun(command) if launched else forked(command, str(tmp_path / "out")))["losses"]
    assert len(losses) == 4 and losses[3] < losses[0] and (saved / ".metadata").exists()


STEPS = re.compile(r"^step +\d+  loss (.*)$", re.MULTILINE)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_script_of_ones_own_runs_under_torchrun() -> None:
    """The example on its four ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4",
               str(ROOT / "examples" / "train.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in STEPS.findall(done.stdout)]
    assert len(losses) == 5 and losses[-1] < losses[0]


def output_of(script: str) -> str:
    """What this rank prints when it runs a script."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(script, run_name="__main__")
    return out.getvalue()


@pytest.mark.ranks
def test_a_script_of_ones_own_runs_on_ranks(tmp_path: Path) -> None:
    """The example on a cluster of two; it ends its process group."""
    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "laptop.yaml").write_text(PAIR)
    out, silent = on_ranks(2, output_of, str(shutil.copy(ROOT / "examples" / "train.py", tmp_path)))
    forget(2)
    losses = [float(loss) for loss in STEPS.findall(out)]
    assert len(losses) == 5 and losses[-1] < losses[0] and not silent


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "plan", interrupted)
    said = shell("plan", FACTORY, LAPTOP)
    assert said.code == 130 and said.out == "" and "Traceback" not in said.err


def test_every_example_says_how_it_runs() -> None:
    for example in (ROOT / "examples").glob("*.py"):
        first = example.read_text(encoding="utf-8").splitlines()[0]
        assert "Run: " in first, example


def test_the_table_of_a_plan_prints_at_any_width(path: Path) -> None:
    console = Console(width=60, file=io.StringIO())
    with console.capture() as text:
        console.print(plan_table(autoddl.load_plan(path)))
    assert max(len(line) for line in text.get().splitlines()) <= 60


def test_parameters_with_capital_letters_are_shown_with_their_use() -> None:
    """With the graph that the plan keeps, and of its names alone."""
    model = nn.Sequential(OrderedDict(Wi=nn.Linear(8, 8), wi=nn.Linear(8, 8), out=Summed()))
    made = api.plan(model, LAPTOP, (torch.zeros(8, 8),), mesh="machine=2,pair=2",
                    pins=("*.weight: pair=S(0)", "*.weight: pair=O"))
    lines = [" ".join(line.split()) for line in plan_tables.text(plan_table(made)).splitlines()]
    for layer in ("Wi", "wi"):
        assert f"{layer}.weight B S(0) - O B B pair: S(0)->B pair: B->S(0)" in lines
        assert f"{layer} linear B B B B" in lines
    assert "Wi.weight  B S(0)  - O    B B" in plan_tables.text(plan_table(replace(made, source={})))


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().sum()


def test_compare_solvers() -> None:
    rows = json.loads(shell("compare", FACTORY, LAPTOP, "--set", "layers=1", "--solvers", "--time-limit", "5",
                            "--json").out)
    by_name = {row["name"]: row for row in rows}
    assert by_name["exact"]["bound_seconds"] == pytest.approx(by_name["exact"]["seconds"], rel=1e-12)
    assert by_name["exact"]["seconds"] <= by_name["greedy"]["seconds"]


@pytest.mark.parametrize(("words", "pattern"), [
    (("compare", FACTORY, LAPTOP, "--solvers", "--microbatches", "1,2"), "drop --solver and --microbatches, or drop"),
    (("compare", FACTORY, LAPTOP, "--solvers", "--solver", "greedy"), "drop --solver and --microbatches, or drop"),
    (("explain", "a plan", "head.weight", "--proof"), "one question at a time, not NAME and --proof"),
    (("explain", "a plan", "--every-mesh", "--pins"), "one question at a time, not --proof and --pins")])
def test_words_that_would_be_ignored_are_refused(words: tuple[str, ...], pattern: str) -> None:
    said = shell(*words)
    assert said.code == 2 and pattern in said.err and said.out == "", said


def test_where_nothing_fits_the_first_cheap_way_out_is_named() -> None:
    words = ("plan", FACTORY, LAPTOP, "--set", "layers=1", "--set", "batch=64", "--mesh", "machine-pair=4")
    starved = shell(*words, "--budget", "1 kB")
    least = re.search(r"the smallest that is known takes ([0-9.]+) kB", starved.err)
    assert starved.code == 3 and least and " a plan fits, at " not in starved.err
    starved = shell(*words, "--budget", f"{0.8 * float(least[1])} kB")
    way = r"; add --(recompute full|microbatches \d( --recompute full)?) \(a plan fits, at .* a step or less\); or use"
    assert starved.code == 3 and re.search(way, starved.err), starved.err


def test_of_several_ways_out_each_is_named_with_its_seconds(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(PAIR)
    said = shell("plan", FACTORY, str(tmp_path / "pair.yaml"), "--set", "layers=4", "--set", "batch=64", "--workers",
                 "1", "--budget", "450 kB")
    way = (r"; add --microbatches 2 \(a plan fits, at (\d+) ms a step or less\) or --recompute full "
           r"\(a plan fits, at (\d+) ms a step or less\);")
    found = re.search(way, said.err)
    assert said.code == 3 and found and int(found[1]) < int(found[2]), said.err
