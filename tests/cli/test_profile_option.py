"""`--profile`: plans are made, compared, proved and shown with the constants of a machine."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shell import FACTORY, LAPTOP, shell

from autoddl.core.errors import InputError
from autoddl.core.plan import load_plan
from autoddl.cost_models import load_cluster, parse_cluster
from autoddl.cost_models.profile import SHIPPED
from autoddl.explain.run_seconds import as_planned
from autoddl.launch.run import _check_cluster

ASKED = (FACTORY, LAPTOP, "--mine", "dp=4", "--set", "layers=2", "--set", "width=64")
SLOW = SHIPPED.times("matmul", 1.5).times("memory", 1.4).times("inner_links", 2.0).times("host", 3.0)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.yaml"
    path.write_text(SLOW.to_yaml())
    return str(path)


def test_plan_and_compare_have_the_seconds_of_the_machine(tmp_path: Path, profile: str) -> None:
    out = tmp_path / "plan.json"
    plain = json.loads(shell("plan", *ASKED, "--json").out)
    slow = json.loads(shell("plan", *ASKED, "--profile", profile, "-o", str(out), "--json").out)
    assert plain["compute_seconds"] < slow["compute_seconds"] < 1.5 * plain["compute_seconds"]
    sent, before = (sum(one["communication_seconds"].values()) for one in (slow, plain))
    assert before < sent < 2 * before
    rows = json.loads(shell("compare", *ASKED, "--profile", profile, "--json").out)
    mine = next(row for row in rows if row["name"] == "mine") if isinstance(rows, list) else rows["mine"]
    assert mine["predicted_seconds"] == slow["predicted_seconds"]


def test_a_plan_says_its_constants_and_its_proof_counts_them(tmp_path: Path, profile: str) -> None:
    out = tmp_path / "plan.json"
    assert shell("plan", *ASKED, "--profile", profile, "-o", str(out)).code == 0
    plan = load_plan(out)
    assert plan.source["profile"] == json.loads(json.dumps(SLOW.to_json()))
    assert parse_cluster(plan.source["cluster"], "the plan's") == SLOW.on(load_cluster(LAPTOP))
    assert shell("explain", str(out), "--proof").code == 0


def test_the_step_as_run_has_them_too(tmp_path: Path, profile: str) -> None:
    plain, slow = (json.loads(shell("plan", *ASKED, "--software", "eager", *more, "--json").out)
                   for more in ((), ("--profile", profile)))
    assert slow["as_run_seconds"] > plain["as_run_seconds"]


def test_the_software_of_a_profile_holds_where_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nemo.yaml"
    path.write_text("software: nemo\nconstants: {matmul: 1.1}\n")
    assert json.loads(shell("plan", *ASKED, "--profile", str(path), "--json").out)["software"] == "nemo"
    named = shell("plan", *ASKED, "--profile", str(path), "--software", "eager", "--json")
    assert json.loads(named.out)["software"] == "eager"


def test_a_profile_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    path.write_text("devices: [H100-80GB]\nconstants: {matmul: 1.1}\n")
    said = shell("plan", *ASKED, "--profile", str(path))
    assert said.code == 2 and "says nothing of half-core" in said.err


def test_the_machine_of_a_plan_is_the_same_one_with_and_without_what_is_known_of_it(tmp_path: Path, profile: str
                                                                                  ) -> None:
    for options in (("--profile", profile), ("--profile", profile, "--software", "megatron-2022"), ("--compiled",)):
        out = tmp_path / "plan.json"
        assert shell("plan", *ASKED, *options, "-o", str(out)).code == 0
        plan, machine = load_plan(out), load_cluster(LAPTOP)
        assert as_planned(plan, machine).fingerprint == plan.fingerprints["cluster"]
        other = replace(machine, device=replace(machine.device, memory=2 * machine.device.memory))
        assert as_planned(plan, other).fingerprint != plan.fingerprints["cluster"]
    unread = replace(plan, source={**plan.source, "profile": "constants: [1"})
    with pytest.raises(InputError, match="the plan's profile"):
        as_planned(unread, machine)


def test_a_plan_made_with_a_profile_runs_on_its_cluster_and_on_no_other(tmp_path: Path, profile: str) -> None:
    out, file = str(tmp_path / "plan.json"), tmp_path / "other.yaml"
    assert shell("plan", *ASKED, "--profile", profile, "-o", out).code == 0
    machine = load_cluster(LAPTOP)
    file.write_text(replace(machine, device=replace(machine.device, bandwidth=2e9)).to_yaml())
    said = shell("run", out, FACTORY, "--steps", "1", "--cluster", str(file), "--set", "layers=2", "--set", "width=64")
    assert said.code != 0 and "another cluster" in said.err
    _check_cluster(load_plan(Path(out)), Path(LAPTOP))


def test_what_if_keeps_the_profile_or_says_that_it_is_of_another_device(tmp_path: Path) -> None:
    cluster, known, out, after = (tmp_path / name for name in ("a100.yaml", "known.yaml", "plan.json", "after.json"))
    cluster.write_text("name: pair\ndevice: A100-80GB\nlevels: [{name: node, size: 4, bandwidth: 100 GB/s, "
                       "latency: 5 us}]\n")
    known.write_text(replace(SLOW, devices=("A100-80GB",)).to_yaml())
    asked = (FACTORY, str(cluster), *ASKED[4:], "--profile", str(known), "-o", str(out))
    assert shell("plan", *asked).code == 0
    for same in ("device=A100-80GB", "node.bandwidth='100 GB/s'", "node.latency=5us", "device.memory=1x"):
        found = json.loads(shell("what-if", str(out), "--set", same.replace("'", ""), "-o", str(after), "--json").out)
        assert found["after"]["seconds"] == pytest.approx(found["before"]["seconds"]), same
        made = load_plan(after)
        assert made.source["profile"] == load_plan(out).source["profile"]
        assert made.fingerprints["cluster"] == load_plan(out).fingerprints["cluster"]
    said = shell("what-if", str(out), "--set", "device=H100-80GB")
    assert said.code == 2 and "says nothing of H100-80GB" in said.err and len(said.err.strip().splitlines()) == 1
