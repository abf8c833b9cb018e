"""The cheapest network for a plan: every network is planned on, and a deadline picks the cheapest that meets it."""

import json
from pathlib import Path

import pytest
import zoo
from shell import FACTORY, shell

import autoddl
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import load_plan
from autoddl.cost_models import load_cluster
from autoddl.cost_models.network_prices import NETWORKS
from autoddl.explain.network_choice import cheapest_within, networks_of_plan
from autoddl.explain.run_seconds import step_as_run

CLUSTER = """name: sixteen
device: {name: slow, memory: 1 GB, bandwidth: 100 GB/s, peak: {float32: 100 GFLOP/s}}
levels: [{name: net, size: 16, bandwidth: 1 GB/s, latency: 5 us, topology: fat-tree%s}]
"""


def test_a_deadline_takes_the_cheapest_network_that_meets_it(tmp_path: Path) -> None:
    path, out = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    path.write_text(CLUSTER % "")
    model, sample = zoo.gpt(layers=1, B=16)
    plan = autoddl.plan(model, path, sample, max_axes=1)
    plan.save(out)
    found = networks_of_plan(plan, load_cluster(path))
    seconds = {one.name: one.seconds for one in found}
    assert list(seconds) == list(NETWORKS)
    assert seconds["fat tree"] == pytest.approx(plan.predicted.seconds)
    path.write_text(CLUSTER % ", oversubscription: 2")
    half = autoddl.plan(model, path, sample, max_axes=1)
    assert seconds["fat tree, half up"] == pytest.approx(half.predicted.seconds)
    assert half.predicted.seconds >= plan.predicted.seconds
    with pytest.raises(MismatchError, match="give the file that it was made with"):
        networks_of_plan(plan, load_cluster(path))

    loose = cheapest_within(found, 1e9)
    assert loose.dollars == min(one.dollars for one in found if one.seconds is not None)
    fastest = min(one.seconds for one in found if one.seconds is not None)
    tight = cheapest_within(found, fastest)
    assert tight.seconds == fastest and tight.dollars >= loose.dollars
    with pytest.raises(InputError, match="no network has a plan of at most"):
        cheapest_within(found, fastest / 2)

    path.write_text(CLUSTER % "")
    said = shell("network", str(path), "--cost", "--plan", str(out), "--deadline", "1000 s", "--json")
    assert said.code == 0 and json.loads(said.out)["cheapest"] == loose.name
    assert shell("network", str(path), "--cost", "--deadline", "1 s").code == 2


def test_the_plans_of_a_program_have_the_steps_that_it_runs(tmp_path: Path) -> None:
    path, out = tmp_path / "cluster.yaml", tmp_path / "plan.json"
    path.write_text(CLUSTER % "")
    assert shell("plan", FACTORY, str(path), "--max-axes", "1", "--software", "eager", "-o", str(out)).code == 0
    said = json.loads(shell("network", str(path), "--cost", "--plan", str(out), "--json").out)
    ran = step_as_run(load_plan(out))
    seconds = {row["network"]: row["seconds"] for row in said["rows"]}
    assert ran is not None and seconds["fat tree"] == pytest.approx(ran.seconds) != load_plan(out).predicted.seconds
    assert "best plan, as run by eager" in shell("network", str(path), "--cost", "--plan", str(out)).out
