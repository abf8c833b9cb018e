"""Experiments narrow the choice between two plans: what they are worth by hand, and the loop from plan to profile."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from shell import FACTORY, PAIR, shell

from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import load_plan
from autoddl.core.record import Header, RecordedStep, header_text, step_text
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, load_profile
from autoddl.fitting.calibrate import calibrate
from autoddl.fitting.experiments import LEAST, SIGMA, BestOfTwo, Contender, Experiment, choice_of, name_experiments
from autoddl.fitting.parts import parts_of
from autoddl.fitting.ran_plans import priced_plan, read_ran

CLUSTERS = Path(__file__).parent.parent.parent / "examples" / "clusters"
SENDING = PAIR.replace("10 MFLOP/s", "100 MFLOP/s").replace("100 MB/s", "10 MB/s")
"""Two devices that compute and send for about as long: plans differ in what constants they hang on."""
SLOW = SHIPPED.times("matmul", 1.4).times("outer_links", 1.3).times("inner_links", 1.3)


def shares(**given: float) -> tuple[float, ...]:
    return tuple(given.get(name, 0.0) for name in CONSTANTS)


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan, and those of the runs to make first."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "pair.yaml").write_text(SENDING)
    said = shell("plan", FACTORY, str(folder / "pair.yaml"), "-o", str(folder / "plan.json"), "--measure-first", "3",
                 "--json")
    assert said.code == 0, said.err
    (folder / "said.json").write_text(said.out)
    return folder


def ran(path: Path, seconds: float) -> None:
    """Writes the record of a run of a plan that took so long."""
    plan = load_plan(path)
    head = Header(plan.fingerprint(), plan.model, str(plan.mesh), plan.cluster, plan.backend, plan.mesh.size, {})
    steps = [RecordedStep(step, rank, 0.0, seconds if step else 9.0, (), ())
             for step in range(3) for rank in range(plan.mesh.size)]
    path.with_suffix(".record.jsonl").write_text("".join([header_text(head), *map(step_text, steps)]))


def test_the_worth_of_an_experiment_is_the_fall_of_the_variance(plans: Path) -> None:
    choice = BestOfTwo(Contender("a", 1.0, shares(matmul=1.0)), Contender("b", 1.1, shares(outer_links=1.0)), 0.0)
    one = Experiment("wire", load_plan(plans / "plan.json"), 1.0, shares(outer_links=1.0))
    named = name_experiments(choice, [one], SHIPPED, 3)
    before = 0.1**2 + 0.25**2
    after = 0.1**2 + 1 / (1 / 0.25**2 + 1 / SIGMA**2)
    assert [(one.before, one.after) for one in named] == [pytest.approx((sqrt(before), sqrt(after)))]


def test_what_both_plans_share_is_worth_nothing(plans: Path) -> None:
    best, second = Contender("a", 1.0, shares(matmul=0.9, memory=0.1)), Contender("b", 1.1, shares(matmul=0.9))
    choice = BestOfTwo(best, second, 0.0)
    plan = load_plan(plans / "plan.json")
    common, own = (Experiment(name, plan, 1.0, shares(**{name: 1.0})) for name in ("matmul", "memory"))
    assert [one.experiment.name for one in name_experiments(choice, [common, own], SHIPPED, 3)] == ["memory"]


@pytest.mark.parametrize(("share", "named"), [(0.009, 0), (0.02, 1)])
def test_what_narrows_by_less_than_a_thousandth_is_not_named(plans: Path, share: float, named: int) -> None:
    best, second = (Contender(name, 1.0, shares(matmul=given)) for name, given in (("a", 0.5), ("b", 0.5 + share)))
    one = Experiment("all", load_plan(plans / "plan.json"), 1.0, shares(matmul=1.0))
    assert len(name_experiments(BestOfTwo(best, second, 0.0), [one], SHIPPED, 3)) == named


def test_where_all_steps_wait_for_the_host_nothing_is_to_be_measured(tmp_path: Path) -> None:
    (tmp_path / "gpus.yaml").write_text("name: gpus\ndevice: A100-80GB\n"
                                        "levels: [{name: node, size: 2, bandwidth: 100 GB/s, latency: 5 us}]\n")
    asked = ("plan", FACTORY, str(tmp_path / "gpus.yaml"), "--software", "eager", "-o", str(tmp_path / "plan.json"),
             "--measure-first", "3")
    said = shell(*asked).out
    assert "Steps here are as eager runs them." in said and "leaves of the constants' part" not in said
    line = " ".join(said[said.index("nothing needs to be measured first"):].split())
    assert "alike, to 0.0%" in line and not list(tmp_path.glob("plan.first-*.json"))
    data = json.loads(shell(*asked, "--json").out)
    assert data["measure_first"] == [] and data["choice"]["spread"] < LEAST


def test_of_experiments_that_say_as_much_the_cheapest_comes_first(plans: Path) -> None:
    choice = BestOfTwo(Contender("a", 1.0, shares(matmul=1.0)), Contender("b", 1.1, shares(host=1.0)), 0.0)
    plan = load_plan(plans / "plan.json")
    slow, quick = (Experiment(name, plan, seconds, shares(host=1.0))
                   for name, seconds in (("slow", 9.0), ("quick", 0.1)))
    assert name_experiments(choice, [slow, quick], SHIPPED, 1)[0].experiment.name == "quick"


def test_the_probability_of_a_choice_is_that_of_drawn_machines() -> None:
    first, second = Contender("a", 1.0, shares(matmul=0.8)), Contender("b", 1.05, shares(outer_links=0.6))
    choice = choice_of([second, first], SHIPPED)
    assert choice is not None and choice.best is first
    drawn = np.random.default_rng(1).multivariate_normal(np.zeros(8), np.array(SHIPPED.covariance), 40_000)
    faster = np.log(1.05) + drawn @ (np.array(second.shares) - np.array(first.shares)) > 0
    assert choice.sure == pytest.approx(faster.mean(), abs=0.01)
    assert choice_of([first], SHIPPED) is None
    wide = choice_of([second, first], SHIPPED, model=0.5)
    assert wide is not None and 0.5 < wide.sure < choice.sure


def test_parts_of_a_cluster_are_whole_units() -> None:
    parts = parts_of(load_cluster(CLUSTERS / "a100-4x8.yaml"))
    assert [part.size for part in parts] == [1, 2, 4, 8, 16]


def test_plan_names_runs_and_writes_their_plans(plans: Path) -> None:
    said = json.loads((plans / "said.json").read_text())
    assert said["choice"]["best_seconds"] < said["choice"]["second_seconds"] and 0.5 <= said["choice"]["sure"] <= 1
    assert 1 <= len(said["measure_first"]) <= 3
    for one in said["measure_first"]:
        assert one["spread_after"] < one["spread_before"] and one["command"].startswith(f"autoddl run {one['plan']}")
        assert load_plan(Path(one["plan"])).mesh.size == one["ranks"]


def test_a_plan_on_a_slower_machine_takes_its_seconds(plans: Path) -> None:
    plan = load_plan(plans / "plan.json")
    seconds = priced_plan(plan)
    assert seconds(SHIPPED) == pytest.approx(plan.predicted.seconds, rel=0.2)  # a time line, of what is summed there
    assert seconds(SHIPPED) < seconds(SHIPPED.times("matmul", 1.4)) < 1.4 * seconds(SHIPPED)
    everything = replace(SHIPPED, factors=(2.0,) * len(CONSTANTS))
    assert seconds(everything) == pytest.approx(2 * seconds(SHIPPED), rel=0.1)


def test_a_calibration_takes_the_results(plans: Path) -> None:
    paths = [Path(one["plan"]) for one in json.loads((plans / "said.json").read_text())["measure_first"]]
    paths = [*paths, plans / "plan.json"]
    for path in paths:
        ran(path, priced_plan(load_plan(path))(SLOW))
    found = calibrate(None, ran=paths)
    assert all(abs(1 / one.fitted - 1) < 0.03 < abs(1 / one.before - 1) for one in found.errors)
    out = plans / "profile.yaml"
    said = shell("calibrate", *(word for path in paths for word in ("--ran", str(path))), "-o", str(out))
    assert said.code == 0 and load_profile(out).runs == len(paths)
    cluster = parse_cluster(PAIR, "pair")
    assert load_profile(out).on(cluster) != cluster


def test_what_did_not_run_is_refused(plans: Path, tmp_path: Path) -> None:
    lonely = tmp_path / "lonely.json"
    lonely.write_text((plans / "plan.json").read_text())
    with pytest.raises(InputError, match=r"has no record beside it .* run it first"):
        read_ran(lonely)
    ran(plans / "plan.json", 1.0)
    other = next(path for path in plans.glob("plan.first-*.json") if load_plan(path).mesh.size == 1)
    (tmp_path / other.name).write_text(other.read_text())
    record = (plans / "plan.record.jsonl").read_text()
    (tmp_path / other.name).with_suffix(".record.jsonl").write_text(record)
    with pytest.raises(MismatchError, match="another plan"):
        read_ran(tmp_path / other.name)
    said = shell("calibrate")
    assert said.code == 2 and "nothing was measured" in said.err
    said = shell("plan", FACTORY, str(plans / "pair.yaml"), "--measure-first", "2")
    assert said.code == 2 and "say where, with -o PLAN" in said.err
