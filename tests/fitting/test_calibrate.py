"""A profile is fitted to measured runs: hidden constants come out again, and few runs move little."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from published import ROW, run, table
from rich.console import Console
from shell import shell

from autoddl.cli.tables.calibration_tables import calibration_table
from autoddl.cli.tables.plan_tables import text
from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, SPREAD, load_profile
from autoddl.fitting.calibrate import FEWEST, Calibrated, calibrate_runs
from autoddl.fitting.prices import At, price_at
from autoddl.fitting.ran_plans import RanPlan
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.runs import Run
from autoddl.validation.software import unknown_programs

PLAN = Path(__file__).parent.parent / "plans" / "gpt-laptop.json"
SMALL = {"hidden": 512, "heads": 8, "vocab": 2048, "seq": 256, "global_batch": 16, "n_gpus": 2,
         "dp": 2, "tp": 1, "microbatch": 4, "precision": "bf16", "framework": "torchtitan", "layers": 1}
KINDS: tuple[dict[str, object], ...] = ({}, {"hidden": 2048, "heads": 16}, {"vocab": 32768}, {"seq": 2048},
                                        {"hidden": 1024, "microbatch": 8})
HIDDEN = SHIPPED.times("matmul", 1.2).times("memory", 1.15).times("host", 1.5)
"""The constants of the machine on which these runs are measured."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ...]:
    """Runs whose measured seconds are those of a machine with the hidden constants."""
    folder = tmp_path_factory.mktemp("runs")
    plain = [run(folder, **SMALL | kind | {"row_id": str(i), "source_id": f"source {i % 2}"})
             for i, kind in enumerate(KINDS)]
    return tuple(replace(one, seconds=price_as_plan(one, one.microbatch, HIDDEN)) for one in plain)


@pytest.fixture(scope="module")
def found(runs: tuple[Run, ...]) -> Calibrated:
    return calibrate_runs(runs)


def test_a_machine_with_other_constants_is_foreseen_after_a_calibration(found: Calibrated) -> None:
    before, fitted, left_out = (max(abs(1 / getattr(one, name) - 1) for one in found.errors)
                                for name in ("before", "fitted", "left_out"))
    assert before > 0.1 and fitted < 0.02 and left_out < 0.06
    assert found.profile["host"] == pytest.approx(1.5, rel=0.1)  # which these small runs wait for
    assert found.profile["outer_links"] == pytest.approx(1.0)  # which no run of one node tells anything of


def test_runs_say_how_sure_the_constants_are_that_decide_them(found: Calibrated) -> None:
    spread = {name: found.profile.covariance[i][i] ** 0.5 for i, name in enumerate(CONSTANTS)}
    assert spread["host"] < SPREAD["host"] / 5 and spread["outer_links"] == pytest.approx(SPREAD["outer_links"])


def test_a_source_is_foreseen_by_the_others(found: Calibrated) -> None:
    assert all(one.source_left_out is not None for one in found.errors)
    assert {one.run.source for one in found.errors} == {"source 0", "source 1"}


def test_shares_of_constants_are_what_moving_them_does(runs: tuple[Run, ...]) -> None:
    priced = price_at(At(runs[1]))
    assert priced.seconds == pytest.approx(price_as_plan(runs[1], 4))
    moved = price_as_plan(runs[1], 4, SHIPPED.times("matmul", 1.1))
    assert moved / priced.seconds - 1 == pytest.approx(0.1 * priced.shares[0], rel=0.1)
    assert 0.9 < sum(priced.shares) < 1.1  # nothing but these constants makes a step


def test_three_runs_do_not_fit_ten_constants(runs: tuple[Run, ...]) -> None:
    few = calibrate_runs([replace(one, seconds=1.01 * price_as_plan(one, one.microbatch)) for one in runs[:3]])
    assert all(abs(factor - 1) < 0.05 for factor in few.profile.factors)


def test_fewer_than_three_runs_are_refused(runs: tuple[Run, ...]) -> None:
    with pytest.raises(InputError, match=f"2 runs with a price .* give {FEWEST} or more"):
        calibrate_runs(runs[:2])
    unknown = replace(runs[0], device="Z80")
    with pytest.raises(InputError, match=r"2 runs with a price .* the first of 1 that were left out: .*Z80"):
        calibrate_runs([*runs[:2], unknown])


@pytest.mark.parametrize(("times", "said"), [(1000, "1000 times as long as the predicted"),
                                             (1 / 9, "9 times as short as the predicted")])
def test_a_row_that_no_machine_explains_is_left_out_and_named(runs: tuple[Run, ...], times: float, said: str) -> None:
    right = [replace(one, seconds=price_as_plan(one, one.microbatch)) for one in runs[:4]]
    found = calibrate_runs([*right[:3], replace(right[3], seconds=times * right[3].seconds)])
    assert [one.run.row for one in found.errors] == ["0", "1", "2"] and [one.run.row for one in found.unpriced] == ["3"]
    assert said in found.unpriced[0].reason and "look at the unit" in found.unpriced[0].reason
    assert found.profile.factors == calibrate_runs(right[:3]).profile.factors


def test_constants_that_are_worse_than_none_are_written_only_if_asked(tmp_path: Path, runs: tuple[Run, ...]) -> None:
    rows = [ROW | SMALL | kind | {"row_id": str(i), "iter_time_s": times * price_as_plan(one, one.microbatch)}
            for i, (kind, one, times) in enumerate(zip(KINDS, runs, (0.7, 1.5, 0.7, 1.5, 0.7), strict=True))]
    path, out = str(table(tmp_path, *rows)), tmp_path / "profile.yaml"
    said = shell("calibrate", path, "-o", str(out))
    assert said.code == 2 and not out.exists() and "written" not in said.out
    assert len(said.err.strip().splitlines()) == 1 and "is not written" in said.err and "--force" in said.err
    assert "these constants are worse than none" in said.out
    assert shell("calibrate", path, "-o", str(out), "--force").code == 0 and load_profile(out).runs == 5
    assert "say where, with -o FILE" in shell("calibrate", path, "--force").err


def test_programs_are_several_only_where_they_are(runs: tuple[Run, ...], found: Calibrated) -> None:
    other = replace(found.errors[0], run=replace(runs[0], framework="NeMo"))
    plan = replace(found.errors[0], run=RanPlan("a.json", 1.0, load_plan(PLAN)))
    for errors, software, said in (
            (found.errors, "torchtitan", "the runs are priced as run by torchtitan"),
            ((*found.errors, other), None, "the runs are priced as run by nemo, torchtitan, so the profile names no"),
            ((plan,), None, "these are plans that ran, without a program's profile")):
        shown = replace(found, errors=errors, profile=replace(found.profile, software=software))
        assert said in text(calibration_table(shown))


def test_the_table_says_what_each_constant_does(found: Calibrated) -> None:
    console = Console(width=150)
    with console.capture() as said:
        console.print(calibration_table(found))
    text = said.get()
    assert all(name in text for name in (*CONSTANTS, "source 0", "source 1", "a tenth more", "run left out"))
    rows = re.findall(r"^([0-4])  +source [01]  +[\d.]+ m?s  +[\d.]+ m?s \(([+-][\d.]+)%\)", text, re.MULTILINE)
    before = {one.run.row: 100 / one.before - 100 for one in found.errors}
    assert {row: float(error) for row, error in rows} == {
        row: pytest.approx(error, abs=0.06) for row, error in before.items()}


def test_a_framework_that_is_not_known_is_said_with_one_that_is_near(runs: tuple[Run, ...]) -> None:
    known, near, none = runs[0], replace(runs[1], framework="torchtitn"), replace(runs[2], framework="")
    assert unknown_programs([known]) == ()
    said = unknown_programs([known, near, none])
    assert len(said) == 2 and "row 1: the framework 'torchtitn' is not known" in said[0]
    assert "taken to run eager; did you mean 'torchtitan'" in said[0] and "row 2: no framework is named" in said[1]


def test_the_shell_writes_a_profile_that_validate_and_plan_read(tmp_path: Path, runs: tuple[Run, ...]) -> None:
    rows = [ROW | SMALL | kind | {"row_id": str(i), "iter_time_s": one.seconds}
            for i, (kind, one) in enumerate(zip(KINDS, runs, strict=True))]
    path, out = str(table(tmp_path, *rows)), tmp_path / "profile.yaml"
    said = shell("calibrate", path, "-o", str(out), "--json")
    assert said.code == 0, said.err
    data, profile = json.loads(said.out), load_profile(out)
    assert data["profile"] == json.loads(json.dumps(profile.to_json()))
    assert (profile.software, profile.devices, profile.runs) == ("torchtitan", ("A100-80GB",), 5)
    known = json.loads(shell("validate", path, "--by", "run", "--profile", str(out), "--json").out)
    plain = json.loads(shell("validate", path, "--by", "run", "--json").out)
    errors = [max(abs(row["error"]) for row in rows) for rows in (known, plain)]
    assert errors[0] < errors[1] / 4
