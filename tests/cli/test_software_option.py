"""`plan --software`: the plan of a program's kernels, and its step as the program runs it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from shell import FACTORY, LAPTOP, shell

from autoddl.api import Comparison
from autoddl.cli.as_run import with_ties
from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan
from autoddl.cost_models import show_seconds
from autoddl.cost_models.intervals import Interval
from autoddl.cost_models.software import software_named
from autoddl.explain.run_seconds import StepAsRun, bare_cluster, seconds_as_run, step_seconds, with_program
from autoddl.explain.utilisation import model_flops_utilisation
from autoddl.explain.what_if import sensitivities, what_if

ASKED = ("plan", FACTORY, LAPTOP, "--mine", "dp=4", "--set", "layers=2", "--set", "width=64")
SMALL = ASKED[5:]


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


CLUSTER = """
name: pair
device: {device}
levels:
  - {{name: node, size: 4, bandwidth: 100 GB/s, latency: 5 us}}
"""


def planned(folder: Path, device: str, *more: str, name: str = "plan") -> Path:
    """A plan of the small model on four devices."""
    cluster, out = folder / f"{device}.yaml", folder / f"{name}.json"
    cluster.write_text(CLUSTER.format(device=device))
    assert shell("plan", FACTORY, str(cluster), *SMALL, *more, "-o", str(out)).code == 0
    return out


@pytest.mark.parametrize("options", [("--software", "torchtitan"), ("--software", "nemo-2022"), ("--compiled",)])
def test_what_if_plans_for_the_program_of_the_plan(tmp_path: Path, options: tuple[str, ...]) -> None:
    before, after = planned(tmp_path, "A100-80GB", *options), tmp_path / "after.json"
    anew = planned(tmp_path, "H100-80GB", *options, name="anew")
    found = json.loads(shell("what-if", str(before), "--set", "device=H100-80GB", "-o", str(after), "--json").out)
    shown = [json.loads(shell("show", str(path), "--json").out) for path in (before, anew, after)]
    for side, one in zip(("before", "after", "after"), shown, strict=True):
        assert found[side]["seconds"] == pytest.approx(one["predicted_seconds"])
        assert found[side]["throughput"] == pytest.approx(one["per_second"])
        for key in ("as_run_seconds", "as_run_interval"):
            assert (key in one) == ("--software" in options)
            assert key not in one or found[side][key] == pytest.approx(one[key])
    plans = [load_plan(path) for path in (anew, after)]
    assert plans[0].source.get("software") == plans[1].source.get("software")
    assert plans[0].source["bare"].splitlines()[1:] == plans[1].source["bare"].splitlines()[1:]
    assert plans[0].fingerprints["cluster"] == plans[1].fingerprints["cluster"]


def test_what_if_compares_steps_as_run(tmp_path: Path) -> None:
    said = shell("what-if", str(planned(tmp_path, "A100-80GB", "--software", "eager")), "--set", "device=H100-80GB").out
    rows = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    step = rows["step as run by eager"]
    assert step[5:7] == step[7:9]  # the host is what a step of so small a model waits for
    assert "8 of 10 steps lie in" in rows and "sum that the search compares" in rows and "step" not in rows


def test_what_one_per_cent_is_worth_is_of_the_step_as_run(tmp_path: Path) -> None:
    plan = load_plan(planned(tmp_path, "A100-80GB", "--software", "eager", "--mine", "dp=4"))
    summed = replace(plan, source={key: value for key, value in plan.source.items() if key != "software"})
    for one, hidden in ((plan, True), (summed, False)):
        links = {row.resource: row.seconds for row in sensitivities(one) if row.resource.startswith("node ")}
        assert len(links) == 2 and (sum(links.values()) == 0.0) == hidden


def test_what_if_of_a_stage_or_of_an_old_plan_says_the_way_out(tmp_path: Path) -> None:
    staged = planned(tmp_path, "A100-80GB", "--software", "eager", "--mine", "dp=2,pp=2", "--microbatches", "2")
    said = shell("what-if", str(staged), "--stage", "1", "--set", "node.bandwidth=2x")
    assert said.code == 2 and "as eager runs the plan" in said.err
    plan = load_plan(planned(tmp_path, "A100-80GB", "--software", "eager"))
    old = replace(plan, source={key: value for key, value in plan.source.items() if key != "bare"})
    with pytest.raises(InputError, match="made for eager, and does not keep its cluster without that"):
        what_if(old, ["device=H100-80GB"])


def test_speed_and_utilisation_are_of_the_step_as_run(tmp_path: Path) -> None:
    out = planned(tmp_path, "A100-80GB", "--software", "torchtitan")
    plan, data = load_plan(out), json.loads(shell("show", str(out), "--json").out)
    assert data["per_second"]["samples"] == pytest.approx(8 / data["as_run_seconds"])
    assert data["mfu"] == pytest.approx(model_flops_utilisation(plan, data["as_run_seconds"]))
    said = shell("show", str(out)).out
    for word in ("speed", "utilisation"):
        assert next(line for line in said.splitlines() if line.startswith(word)).endswith("as run by torchtitan")


def test_plans_with_fewer_devices_know_the_program_too(tmp_path: Path) -> None:
    out = planned(tmp_path, "A100-80GB", "--software", "eager")
    said = shell("plan", FACTORY, str(tmp_path / "A100-80GB.yaml"), *SMALL, "--software", "eager", "--spares", "1",
                 "-o", str(out)).err
    spare = load_plan(next(tmp_path.glob("plan.spare-*.json")))
    assert f"{show_seconds(step_seconds(spare))} a step" in said and step_seconds(spare) > spare.predicted.seconds
    assert spare.source["software"] == "eager"
    assert with_program(spare, bare_cluster(spare)).fingerprint == spare.fingerprints["cluster"]
    assert shell("what-if", str(out), "--set", "node.bandwidth=2x").code == 0


def test_compare_has_the_steps_of_plan_and_its_ties_are_of_these(tmp_path: Path) -> None:
    asked = ("compare", FACTORY, str(tmp_path / "A100-80GB.yaml"), *SMALL, "--mine", "dp=2,tp=2", "--software", "eager")
    mine = planned(tmp_path, "A100-80GB", "--mine", "dp=2,tp=2", "--software", "eager")
    rows = {row["name"]: row for row in json.loads(shell(*asked, "--json").out)}
    shown = json.loads(shell("show", str(mine), "--json").out)
    for key in ("predicted_seconds", "as_run_seconds", "as_run_interval"):
        assert rows["mine"][key] == pytest.approx(shown[key])
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["as_run_seconds"] / rows["found"]["as_run_seconds"])
    far = [row for row in rows.values() if row["predicted_seconds"] > 1.5 * rows["found"]["predicted_seconds"]]
    assert far and all("a tie with found" in row["detail"] for row in far)  # the host is what all of them wait for
    said = shell(*asked).out
    assert said.splitlines()[0].split("  ")[0] == "plan" and "as run by eager" in said and "8 of 10 in" in said
    assert f"{show_seconds(shown['as_run_interval'][0])} to {show_seconds(shown['as_run_interval'][1])}" in said
    assert "8 of 10" not in shell(*asked[:-2]).out


def test_a_row_that_is_shorter_as_it_runs_says_so() -> None:
    interval = Interval(0.5, 2.0, 0.01, 1, 1)
    rows = tuple(Comparison(name, None) for name in ("found", "near", "short", "long", "none"))
    steps = [StepAsRun("eager", seconds, interval, 0) for seconds in (1.0, 1.005, 0.9, 1.1)]
    assert [row.detail for row in with_ties(rows, [*steps, None])] == [
        "", "a tie with found", "shorter than found as it runs: the search compares sums of seconds", "", ""]
    assert with_ties(rows, [None, *steps]) == rows


def test_the_way_out_where_nothing_fits_has_the_step_as_run(tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(CLUSTER.format(device="A100-80GB").replace("size: 4", "size: 2"))
    asked = ("plan", FACTORY, str(tmp_path / "pair.yaml"), "--set", "layers=4", "--set", "batch=64", "--workers", "1",
             "--budget", "450 kB", "--software", "eager")
    found = re.search(r"--microbatches 2 \(a plan fits, at (.*?) a step or less\)", shell(*asked).err)
    made = json.loads(shell(*asked, "--microbatches", "2", "--json").out)
    assert found and found[1] == show_seconds(made["as_run_seconds"]) != show_seconds(made["predicted_seconds"])


def test_diff_has_the_steps_as_run_and_names_the_programs(tmp_path: Path) -> None:
    eager, compiled, plain = (planned(tmp_path, "A100-80GB", *more, name=name) for name, more in (
        ("eager", ("--software", "eager")), ("compiled", ("--software", "compiled")), ("plain", ())))
    found = json.loads(shell("diff", str(eager), str(compiled), "--json").out)
    steps = [step_seconds(load_plan(path)) for path in (eager, compiled)]
    assert found["totals"][0] == ["step as run", *steps, "s"] != found["totals"][1]
    assert "program: eager in the first, compiled in the second" in found["words"]
    other = json.loads(shell("diff", str(eager), str(plain), "--json").out)
    assert "program: eager in the first, none named in the second" in other["words"]
    assert other["totals"][0][0] == "step"
