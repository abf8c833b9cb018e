"""Whatever is wrong with what a person gives: one clear line, a code, no traceback, nothing left behind."""

import json
import math
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from sampling import parametrize_or_slow
from shell import FACTORY, LAPTOP, ROOT, Said, shell
from tiny import tiny
from warm_launch import warm_launch

import autoddl
from autoddl.capture.factory import Factory
from autoddl.cli.tables import plan_tables
from autoddl.core.errors import Infeasible, InputError, MachineError, MismatchError
from autoddl.core.processes import signals_raise, term_interrupts
from autoddl.launch.launch import launch
from autoddl.launch.run import run
from autoddl.planner.process_pool import mapper

TINY = FACTORY.removesuffix(":tiny")
ALONE = """
name: alone
device: {name: cpu, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}
levels: [{name: machine, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clusters of one and of two processes, and a plan for each."""
    made = tmp_path_factory.mktemp("bad")
    for size in (1, 2):
        (made / f"{size}.yaml").write_text(ALONE % size)
        autoddl.plan(tiny(), made / f"{size}.yaml").save(made / f"plan-{size}.json")
    return made


def refused(said: Said, *patterns: str, code: int = 2) -> None:
    """One line on stderr that says all of `patterns`, nothing on stdout, and the code."""
    assert said.code == code, said
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1, said.err
    assert said.err.startswith("autoddl: ") and "Traceback" not in said.err
    for pattern in patterns:
        assert re.search(pattern, said.err), said.err


def cluster(folder: Path, text: str) -> str:
    path = folder / "wrong.yaml"
    path.write_text(text)
    return str(path)


def test_a_missing_cluster_file(folder: Path) -> None:
    refused(shell("plan", FACTORY, "nowhere.yaml"), "cannot read cluster file 'nowhere.yaml'", "No such file")


@pytest.mark.parametrize(("text", "patterns"), [
    ("levels: [{name: a, size: 2", ("line 1", "no YAML")),
    (ALONE % 2 + "colour: blue\n", ("colour", "nearest|did you mean|keys are")),
    ((ALONE % 2).replace("1 GB/s", "1 GX/s"), ("'GX/s' is no unit of bytes/s", "did you mean")),
    ((ALONE % 2).replace("size: 2", "size: two"), ("size", "two|integer")),
])
def test_a_malformed_cluster_file(folder: Path, text: str, patterns: tuple[str, ...]) -> None:
    refused(shell("plan", FACTORY, cluster(folder, text)), "wrong.yaml", *patterns)


def test_a_model_that_cannot_be_captured_names_the_line(folder: Path) -> None:
    refused(shell("plan", f"{TINY}:branching", LAPTOP), r"tiny\.py:\d+", r"if y\.sum\(\) > 0")


def test_a_model_without_a_sample(folder: Path) -> None:
    refused(shell("plan", f"{TINY}:without_sample", LAPTOP), r"example_inputs\(\)", "sample")


@pytest.mark.parametrize(("factory", "pattern"), [
    ("nowhere.py:model", "there is no file 'nowhere.py'"),
    (f"{TINY}:tyni", "has no factory 'tyni'; it has tiny"),
    (TINY, "write FILE.py:NAME"),
    (f"{TINY}:failing", r"failed: RuntimeError: no weights here \(.*tiny\.py:\d+\)"),
    (f"{TINY}:not_a_module", "returned int; a factory returns a module"),
])
def test_a_factory_that_is_not_there(factory: str, pattern: str) -> None:
    refused(shell("plan", factory, LAPTOP), pattern)


@pytest.mark.parametrize(("text", "pattern"), [
    ("import sys\nsys.exit(0)\n", r"ends\.py does not run: SystemExit: 0 \(.*ends\.py:2\)"),
    ("def model():\n    raise SystemExit\n", r"ends\.py:model failed: SystemExit: +\(.*ends\.py:2\)"),
])
def test_a_factory_that_exits_is_no_success(tmp_path: Path, text: str, pattern: str) -> None:
    (tmp_path / "ends.py").write_text(text)
    refused(shell("plan", f"{tmp_path / 'ends.py'}:model", LAPTOP), pattern)


def test_a_signal_is_no_failure_of_the_factory(tmp_path: Path) -> None:
    (tmp_path / "ended.py").write_text("import os, signal\n"
                                       "def model():\n    os.kill(os.getpid(), signal.SIGTERM)\n")
    with pytest.raises(SystemExit) as ended, signals_raise():
        Factory.parse(f"{tmp_path / 'ended.py'}:model").build()
    assert ended.value.code == 128 + signal.SIGTERM


def test_sigterm_ends_a_search_as_an_interrupt_does_and_its_processes_with_it() -> None:
    with term_interrupts(), mapper(abs, 2) as run:
        for worker in active_children():
            os.kill(worker.pid or 0, signal.SIGTERM)  # `timeout` sends it to all of a group
        assert list(run([-1, -2])) == [1, 2]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert not active_children() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(("text", "pattern"), [
    ("layers", "sets nothing; write NAME=VALUE"),
    ("layers=[1,", "no Python literal"),
    ("layer=3", r"does not take these arguments.*layer.*tiny\(layers"),
])
def test_a_setting_that_sets_nothing(text: str, pattern: str) -> None:
    refused(shell("plan", FACTORY, LAPTOP, "--set", text), pattern)


@pytest.mark.parametrize(("options", "pattern"), [
    (("--mesh", "dp:4"), "a mesh looks like 'dp=4,tp=2'"),
    (("--mesh", "dp=3"), "laptop|4"),
    (("--pin", "attention"), "no pin"),
    (("--budget", "12 parsecs"), "'parsecs' is no unit of bytes"),
    (("--solver", "guess"), "'guess'.*exact"),
    (("--precision", "fp8"), "there is no precision 'fp8'"),
    (("--precision", "bf16-mixed"), "bfloat16, for which half-core lists no peak, only for float32, float64"),
    (("--optimizer", "lion"), "optimizer 'lion' is not known"),
])
def test_an_option_that_means_nothing(options: tuple[str, ...], pattern: str) -> None:
    refused(shell("plan", FACTORY, LAPTOP, *options), pattern)


def test_an_unknown_solver_is_refused_before_the_model_is_captured() -> None:
    said = shell("compare", f"{TINY}:branching", LAPTOP, "--solver", "exat")
    refused(said, "there is no solver 'exat'; there are exact, exhaustive, coordinate-descent, greedy, cp-sat")


@pytest.mark.parametrize("tolerance", [1.5, 1.0, -0.1, math.nan])
def test_a_tolerance_is_a_part(tolerance: float) -> None:
    with pytest.raises(InputError, match=f"a tolerance of {tolerance} is none.*at least 0 and below 1"):
        autoddl.plan(tiny(), LAPTOP, tolerance=tolerance)


@pytest.mark.parametrize(("options", "pattern", "code"), [
    (("--budget", "1 kB"), r"no plan takes less than [\d.]+ [kMG]B", 3),
    (("--budget", "1 kB", "--solvers", "--time-limit", "5"), r"no plan takes less than [\d.]+ [kMG]B", 3),
    (("--microbatches", "3"), "3 microbatches cut dim 0", 2),
])
def test_a_comparison_without_a_plan_fails_as_planning_does(options: tuple[str, ...], pattern: str, code: int) -> None:
    """Why no row has a plan is in the table, which comes first."""
    said = shell("compare", FACTORY, LAPTOP, "--set", "layers=1", "--max-axes", "1", "--json", *options)
    refused(replace(said, out=""), pattern, code=code)
    rows = json.loads(said.out)
    assert rows and all(row.get("predicted_seconds") is None and row["detail"] for row in rows)


def test_a_budget_that_nothing_meets(folder: Path) -> None:
    refused(shell("plan", FACTORY, LAPTOP, "--budget", "1 kB"), r"no plan takes less than [\d.]+ [kMG]B", code=3)
    with pytest.raises(Infeasible) as caught:
        autoddl.plan(tiny(), folder / "1.yaml", budget="1 kB")
    assert 1e3 == caught.value.budget < caught.value.needed < 1e7
    assert caught.value.is_proved and caught.value.needed <= caught.value.reachable < 1e7
    least = autoddl.plan(tiny(), folder / "1.yaml", budget=caught.value.reachable)
    assert least.predicted.peak_bytes <= caught.value.reachable
    refused(shell("plan", FACTORY, LAPTOP, "--budget", "1 kB", "--max-axes", "1"), "optimizer state alone take", code=3)


@pytest.mark.parametrize(("budget", "pattern"), [("0", "above 0 bytes"), ("-1 GB", "no quantity"), ("1 XB", "no unit")])
def test_a_budget_that_is_none(budget: str, pattern: str) -> None:
    refused(shell("plan", FACTORY, LAPTOP, "--budget", budget), pattern)


def test_a_plan_whose_budget_was_edited_is_refused(folder: Path) -> None:
    made = autoddl.plan(tiny(), folder / "1.yaml")
    replace(made, budget=0.5 * made.predicted.peak_bytes).save(folder / "edited.json")
    refused(shell("show", str(folder / "edited.json")), "its peak of .* is above its budget of .*plan again")


@pytest.mark.parametrize(("pins", "pattern"), [
    (("nothing.*: pair=S(0)",), "matches no parameter and no module; parameters are tokens.weight"),
    (("head.weight: pair=S(0)", "head.*: pair=B"), r"'head\.weight: pair=S\(0\)' and 'head\.\*: pair=B' give "
                                                   "head.weight two states on axis pair; drop one"),
    (("pair=2", "pair=4"), "no mesh of cluster laptop fits the pins pair=2, pair=4; it has"),
    (("head.weight: net=S(0)",), "no mesh of cluster laptop fits the pins.*it has machine-pair=4; machine=2,pair=2"),
    (("head.weight: pair=P",), r"stored as B or as S of one of its dims, and head\.weight is \[64, 16\]"),
    (("head.weight: pair=S(2)",), r"stored as B or as S of one of its dims, and head\.weight is \[64, 16\]"),
])
def test_pins_that_cannot_be_kept(pins: tuple[str, ...], pattern: str) -> None:
    refused(shell("plan", FACTORY, LAPTOP, *(word for pin in pins for word in ("--pin", pin))), pattern)


SHAPES = {"alone": "[{name: machine, size: 1, bandwidth: 1 GB/s, latency: 60 us}]",
          "prime": "[{name: machine, size: 7, bandwidth: 1 GB/s, latency: 60 us}]",
          "six by five": "[{name: node, size: 6, bandwidth: 1 GB/s, latency: 60 us}, "
                         "{name: net, size: 5, bandwidth: 0.1 GB/s, latency: 90 us}]"}


@parametrize_or_slow("shape,arguments", [
    ("six by five", "layers=1"), ("six by five", "batch=1"), ("alone", "layers=0"), ("prime", "layers=2")], [
    ("six by five", "layers=2"), ("six by five", "layers=0"), ("alone", "layers=2"), ("alone", "layers=1"),
    ("alone", "batch=1"), ("prime", "layers=1"), ("prime", "layers=0"), ("prime", "batch=1")])
def test_a_cluster_or_model_of_an_odd_size_has_a_plan(shape: str, arguments: str, tmp_path: Path) -> None:
    """One device, a prime number of them, 5 nodes of 6; no block that repeats, none at all, a batch of one."""
    place = tmp_path / "odd.yaml"
    place.write_text((ALONE % 1).split("levels:")[0] + f"levels: {SHAPES[shape]}\n")
    made = tmp_path / "plan.json"
    said = shell("plan", FACTORY, str(place), "-o", str(made), "--set", arguments)
    assert said.code == 0, said
    found = autoddl.load_plan(made)
    assert found.mesh.size == {"alone": 1, "prime": 7, "six by five": 30}[shape]
    assert found.gap < 1e-3 and found.predicted.seconds > 0 and "lies in level )" not in said.out


def test_a_model_of_one_op_has_a_plan() -> None:
    said = shell("plan", f"{TINY}:one_op", LAPTOP)
    assert said.code == 0 and "Traceback" not in said.err, said


@pytest.mark.parametrize(("text", "pattern"), [
    ("{", "no plan: not JSON"), ("{}", "version None"), ('{"version": 99}', "version 99.*reads version 2"),
    ('{"version": 2, "mesh": "dp=2"}', "no plan: at"),
])
def test_a_file_that_is_no_plan_of_ours(folder: Path, text: str, pattern: str) -> None:
    (folder / "no-plan.json").write_text(text)
    refused(shell("show", str(folder / "no-plan.json")), pattern)


def test_a_plan_that_is_not_there_or_cannot_be_written(folder: Path) -> None:
    refused(shell("show", "nowhere.json"), "cannot read the plan nowhere.json")
    refused(shell("plan", FACTORY, str(folder / "1.yaml"), "-o", "/nowhere/p.json"), "cannot write /nowhere/p.json")


@pytest.mark.ranks
def test_a_place_that_cannot_be_written_is_told_before_the_work(folder: Path) -> None:
    """The factory fails, and the network needs root: neither is reached."""
    plan, missing, failing = str(folder / "plan-2.json"), folder / "missing", f"{TINY}:failing"
    for command in (("plan", failing, LAPTOP, "-o", str(missing / "x.json")),
                    ("run", plan, failing, "--record", str(missing / "x.json")),
                    ("rehearse", plan, failing, "--record", str(missing / "x.json")),
                    ("compare-run", plan, "no record", "--trace", str(missing / "x.json")),
                    ("measure", LAPTOP, "-o", str(missing / "x.json")),
                    ("draw", plan, "-o", str(missing / "x.png"))):
        refused(shell(*command), f"cannot write {missing}/x.*No such file or directory; make the folder {missing}")
    assert not missing.exists()
    refused(shell("plan", failing, LAPTOP, "-o", str(folder)), f"cannot write {folder}: it is a folder")
    refused(shell("run", plan, failing, "--save", f"{plan}/saved"), "plan-2.json/saved: Not a directory")
    with warm_launch():
        refused(shell("run", plan, failing, "--save", str(missing / "saved")), "no weights here", code=2)
    assert sorted(path.name for path in folder.glob("x*")) == []


def test_another_number_of_processes_than_the_plans(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    refused(shell("run", str(folder / "plan-2.json"), FACTORY), "has 2 ranks, but 3 were started")
    with pytest.raises(MismatchError, match=r"2 processes.*3 run"):
        autoddl.parallelize(tiny(), autoddl.load_plan(folder / "plan-2.json"))


@pytest.mark.parametrize(("words", "said"), [
    ("width=8", r"its parameter tokens.weight has the shape \[64, 8\], and \[64, 16\] in.*, tiny with layers=2"),
    ("layers=3", r"the plan has no parameter blocks.2.norm.weight, which it has"),
    ("layers=1", r"it has no parameter blocks.1.norm.weight, which the plan has"),
    ("batch=4", r"input ids is int64\[4, 6\] in a microbatch, and int64\[8, 6\] in the plan")])
def test_a_plan_for_another_model_is_told_before_ranks_start(
        folder: Path, tmp_path: Path, words: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = autoddl.load_plan(folder / "plan-2.json")
    named = replace(one, factory=Factory.parse(FACTORY, {"layers": 2}).to_json())
    named.save(tmp_path / "plan.json")
    monkeypatch.setattr("autoddl.launch.run.launch", None)
    refused(shell("run", str(tmp_path / "plan.json"), FACTORY, "--no-record", "--set", words), said)


def test_progress_says_when_ranks_start_and_a_run_that_they_talk_by_another_library_than_priced(
        folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[tuple[str, int, int]]()

    def launched(ranks: int, command: list[str], *, tick: Callable[[], None], forked: bool) -> None:
        place = Path(command[-1]).parent
        tick()
        for text in ("", "2.5\n"):
            (place / "losses-0").write_text(text)
            tick()
        (place / "result-0.json").write_text('{"losses": [2.5], "first": 0, "step_seconds": 1.0}')

    monkeypatch.setattr("autoddl.launch.run.launch", launched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = folder / "plan-2.json"
    priced = replace(autoddl.load_plan(path), backend="nccl")
    ran = run(path, priced, Factory.parse(FACTORY), steps=3, lr=0.1, progress=lambda *said: told.append(said))
    starting = "starting 2 ranks, each of which captures the model"
    assert told == [(starting, 0, 1), ("training", 0, 3), ("training", 1, 3)]
    assert ran is not None and ran.note.startswith("priced for NCCL and run over gloo")
    assert "priced for NCCL" in plan_tables.text(plan_tables.training_table(ran))


def test_samples_of_other_shapes_come_from_a_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text("import torch\n\ndef lengths():\n    short = torch.zeros(8, 4, dtype=torch.int64)\n"
                    "    return [(short, short)]\n\ndef none():\n    return 3\n")
    said = shell("plan", FACTORY, str(folder / "1.yaml"), "--set", "layers=1", "--samples", f"{file}:lengths")
    assert said.code == 0 and re.search(r"also for +a batch of \[8, 4\] and \[8, 4\], ", said.out), said
    refused(shell("plan", FACTORY, str(folder / "1.yaml"), "--samples", f"{file}:none"),
            "returned int: it returns a list of batches")


def test_a_plan_for_another_model(folder: Path) -> None:
    refused(shell("verify", str(folder / "plan-2.json"), FACTORY, "--set", "width=8"), "another model")
    with pytest.raises(MismatchError, match="another model"):
        autoddl.parallelize(tiny(width=8), autoddl.load_plan(folder / "plan-1.json"))


def test_a_plan_for_another_cluster(folder: Path) -> None:
    said = shell("run", str(folder / "plan-2.json"), FACTORY, "--cluster", LAPTOP)
    refused(said, "another cluster", "laptop", "alone")


def test_a_plan_of_another_version(folder: Path) -> None:
    data = json.loads((folder / "plan-1.json").read_text()) | {"version": 0}
    (folder / "old.json").write_text(json.dumps(data))
    refused(shell("run", str(folder / "old.json"), FACTORY), "version 0.*make the plan again")


def test_a_batch_that_does_not_fit(folder: Path) -> None:
    model = autoddl.parallelize(tiny(), autoddl.load_plan(folder / "plan-1.json"))
    ids = torch.zeros(8, 5, dtype=torch.int64)
    with pytest.raises(MismatchError, match=r"ids is int64\[8, 5\], the plan was made for int64\[8, 6\]"):
        model.step((ids, ids))
    with pytest.raises(InputError, match="form of the plan's sample"):
        model.step(ids)


def error_under(files: list[str]) -> str:
    """The error on this rank, which is given the plan of its number."""
    with pytest.raises(MismatchError) as caught:
        autoddl.parallelize(tiny(), autoddl.load_plan(files[torch.distributed.get_rank()]))
    return str(caught.value)


@pytest.mark.ranks
def test_two_ranks_with_different_plans(folder: Path) -> None:
    autoddl.plan(tiny(), folder / "2.yaml", pins=["head.weight: machine=S(0)"]).save(folder / "plan-other.json")
    errors = on_ranks(2, error_under, [str(folder / "plan-2.json"), str(folder / "plan-other.json")])
    assert len({*errors}) == 1 and "rank 1 has another plan than rank 0" in errors[0]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_killed_in_a_step(folder: Path, stages: int) -> None:
    """As the test of the record that such a rank leaves, in a script of one's own; also the only rank of a stage."""
    path = folder / f"plan-killed-{stages}.json"
    autoddl.plan(tiny(), folder / "2.yaml", stages=(stages,), microbatches=(2,)).save(path)
    before = path.read_bytes()
    (folder / "rank.py").write_text(textwrap.dedent(f"""
        import os, sys, signal, threading
        sys.path.append({str(ROOT / "tests" / "support")!r})
        import autoddl
        from autoddl.launch.launch import leave, report_failure
        from tiny import tiny
        try:
            model = autoddl.parallelize(tiny(), autoddl.load_plan({str(path)!r}))
            batch = model.module.example_inputs()
            model.step(batch)
            if os.environ["RANK"] == "1":
                threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            while True: model.step(batch)
        except autoddl.AutoDDLError as error:
            report_failure(error)
            leave(2)
    """))
    with pytest.raises(MachineError, match="rank 1 was killed by SIGKILL; all ranks were ended"):
        launch(2, [sys.executable, str(folder / "rank.py")], timeout=120)
    assert path.read_bytes() == before
    running = [p for p in Path("/proc").glob("[0-9]*/cmdline") if _reads(p, str(folder / "rank.py"))]
    assert not running


def _reads(path: Path, text: str) -> bool:
    try:
        return text in path.read_bytes().decode()
    except OSError:
        return False


def test_a_write_that_fails_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (folder / "plan-1.json").read_bytes()

    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        autoddl.load_plan(folder / "plan-2.json").save(folder / "plan-1.json")
    assert (folder / "plan-1.json").read_bytes() == before


def test_debug_shows_the_traceback() -> None:
    said = shell("show", "nowhere.json", "--debug")
    assert said.code == 2 and "Traceback" in said.err and "cannot read the plan" in said.err


def test_steps_between_checkpoints_need_a_place_for_them(folder: Path) -> None:
    refused(shell("run", str(folder / "plan-1.json"), FACTORY, "--every", "2"), "--every.*--checkpoint FOLDER")
