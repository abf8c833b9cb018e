"""A plan's question asked again under a changed cluster: better resources never give a slower plan."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from measured_cluster import written
from planmaker import cluster_of
from sampling import parametrize_or_slow
from shell import shell

from autoddl import api
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, load_cluster, parse_cluster
from autoddl.explain.assumptions import batch_of
from autoddl.explain.changed_cluster import changed_cluster
from autoddl.explain.what_if import sensitivities, what_if
from autoddl.planner.pipelines.staged_steps import staged_step
from autoddl.planner.question import question_of, repriced, whole_question_of

CLUSTERS = Path(__file__).parent.parent.parent / "examples" / "clusters"
RACKS = load_cluster(CLUSTERS / "a100-4x8.yaml")

RANDOM = """
name: drawn
device: {{name: slow, kind: cpu, memory: {memory} kB, bandwidth: {rate} GB/s, peak: {{float32: {peak} GFLOP/s}}}}
levels:
  - {{name: node, size: {node}, bandwidth: {near} MB/s, latency: {close} us, topology: {topology}}}
  - {{name: net, size: {net}, bandwidth: {far} MB/s, latency: {away} us, topology: fat-tree, shared_by: {shared}}}
"""


def drawn(draw: random.Random, count: int) -> tuple[Plan, list[str]]:
    """A plan of a random small model on a random small cluster, and `count` changes that make a resource better."""
    text = RANDOM.format(memory=draw.choice((60, 10_000)), rate=draw.uniform(0.5, 50), peak=draw.uniform(0.05, 50),
                         node=draw.choice((1, 2, 3, 4)), net=draw.choice((1, 2, 3)), near=draw.uniform(10, 5000),
                         far=draw.uniform(1, 2000), close=draw.uniform(1, 100), away=draw.uniform(1, 2000),
                         topology=draw.choice(("switch", "ring", "fully-connected")),
                         shared=draw.choice(("null", "node")))
    model = tiny.tiny(draw.choice((1, 2)), draw.choice((8, 12, 16)), draw.choice((4, 6, 8)), 0.0)
    plan = api.plan(model, parse_cluster(text, "drawn"), max_axes=2, microbatches=draw.choice(((1,), (1, 2))),
                    recompute=draw.choice(("none", "none,full")).split(","))
    up = [f"{where}={draw.uniform(1.01, 8):.3f}x" for where in
          ("node.bandwidth", "net.bandwidth", "device.memory", "device.peak", "device.bandwidth", "device.speed")]
    down = [f"{where}={draw.uniform(0.1, 0.99):.3f}x" for where in ("node.latency", "net.latency", "device.launch")]
    more = [f"{level}.size={draw.choice((2, 3))}x" for level in ("node", "net")]
    return plan, draw.sample([*up, *down, *more], count)


def violations(seeds: range, count: int) -> Iterator[str]:
    """Yields what got slower where a resource got better, by more than the gap at which searches may stop."""
    for seed in seeds:
        try:
            plan, changes = drawn(random.Random(seed), count)
        except Infeasible:
            continue
        for change in changes:
            after = what_if(plan, [change]).after
            if after.predicted.seconds > plan.predicted.seconds * (1 + 1e-9 + after.gap):
                yield f"{seed}: {change}: {plan.predicted.seconds} -> {after.predicted.seconds}"


@parametrize_or_slow("seeds", [range(5, 6)], [range(first, first + 20) for first in range(0, 200, 20)])
def test_a_better_resource_never_gives_a_slower_plan(seeds: range) -> None:
    assert not list(violations(seeds, 2))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.plan(tiny.tiny(), cluster_of("net=2,node=2"), name="tiny")


def test_what_changes_nothing_finds_the_same_plan(plan: Plan) -> None:
    found = what_if(plan, ["net.bandwidth=1x"])
    assert found.after.predicted == plan.predicted and found.after.decisions == plan.decisions
    assert not found.difference.words and not found.difference.groups


def test_the_plan_after_is_that_of_the_changed_file(plan: Plan) -> None:
    changes = ["net.bandwidth=0.001x", "node.size=4", "device.memory=0.5 GB"]
    place = changed_cluster(cluster_of("net=2,node=2"), changes)[0]
    fresh = api.plan(tiny.tiny(), parse_cluster(place.to_yaml(), "changed"), name="tiny")
    after = what_if(plan, changes).after
    assert after.predicted == fresh.predicted and after.sample == fresh.sample
    assert after.fingerprint() == fresh.fingerprint()


def test_where_more_devices_are_slower_the_plan_uses_fewer_and_says_so(plan: Plan) -> None:
    slow = what_if(plan, ["net.latency=1 s", "node.latency=0.001 s"]).after
    found = what_if(slow, ["net.size=3"])
    assert found.after.mesh.size < found.devices == 6
    assert found.notes == (f"the fastest plan uses {found.after.mesh.size} of 6 devices: none with more is faster",)
    assert found.after.predicted.seconds <= slow.predicted.seconds


@pytest.fixture(scope="module")
def staged() -> Plan:
    """A plan with stages, whose links between the halves are slow."""
    place = changed_cluster(cluster_of("net=2,node=2"), ["net.bandwidth=1 MB/s"])[0]
    return api.plan(tiny.tiny(dropout=0.0), place, name="tiny", stages=(2,), microbatches=(2, 4))


def test_a_plan_with_stages_is_planned_again_with_all_that_was_asked_for(staged: Plan) -> None:
    assert staged.pipeline is not None and batch_of(staged) == (8, 48)
    same = what_if(staged, ["net.bandwidth=1x"])
    assert same.after.predicted.seconds == staged.predicted.seconds and same.after.cluster == staged.cluster
    assert same.after.fingerprint() == staged.fingerprint()
    faster = what_if(staged, ["node.bandwidth=2x"]).after
    assert faster.predicted.seconds <= staged.predicted.seconds and batch_of(faster) == (8, 48)


def test_one_per_cent_of_a_plan_with_stages_is_that_of_its_time_line(staged: Plan) -> None:
    rows = {row.resource: row for row in sensitivities(staged, searching=False)}
    assert "memory" not in rows and rows["device speed"].seconds > 0 and rows["net bandwidth"].seconds > 0
    question, graph = whole_question_of(staged), graph_from_text(staged.source["graph"])
    again = staged_step(staged, graph, changed_cluster(question.cluster, ["net.bandwidth=1.01x"])[0])
    assert rows["net bandwidth"].seconds == staged.predicted.seconds - again.timeline.makespan


def test_a_plan_with_stages_of_an_earlier_version_says_how_to_ask(staged: Plan) -> None:
    old = replace(staged, source={name: value for name, value in staged.source.items() if name != "asked"})
    with pytest.raises(InputError, match="make it again, or name a stage"):
        what_if(old, ["net.bandwidth=2x"])


def test_a_budget_equal_to_the_memory_follows_it_and_another_stays(plan: Plan) -> None:
    assert what_if(plan, ["device.memory=2x"]).after.budget == 2 * plan.budget
    given = replace(plan, budget=5e8)
    found = what_if(given, ["device.memory=2x"])
    assert found.after.budget == 5e8 and "was given, and stays" in found.notes[0]
    assert what_if(given, ["device.memory=2x", "budget=0.5x"]).after.budget == 2.5e8


def test_one_per_cent_is_worth_what_the_prices_say(plan: Plan) -> None:
    rows = {row.resource: row for row in sensitivities(plan)}
    place = question_of(plan).cluster
    assert repriced(plan, place) == pytest.approx(plan.predicted.seconds)
    faster = replace(place.device, bandwidth=1.01 * place.device.bandwidth, launch=place.device.launch / 1.01,
                     peaks=tuple((dtype, 1.01 * peak) for dtype, peak in place.device.peaks))
    seconds = repriced(plan, replace(place, device=faster))
    assert rows["device speed"].seconds == pytest.approx(plan.predicted.seconds - seconds)
    busy = plan.predicted.compute + plan.predicted.update
    assert rows["device speed"].seconds == pytest.approx(busy * (1 - 1 / 1.01), rel=0.2)
    assert rows["memory"].how == "not binding" and not rows["memory"].seconds
    assert all(row.seconds > -1e-12 for row in rows.values()) and rows["net bandwidth"].seconds > 0


def test_memory_is_worth_something_where_it_binds() -> None:
    tight = drawn(random.Random(1), 1)[0]
    memory = next(row for row in sensitivities(tight) if row.resource == "memory")
    more = what_if(tight, ["device.memory=1.01x"]).after
    assert memory.how == "re-planned" and memory.seconds == tight.predicted.seconds - more.predicted.seconds > 0


@pytest.mark.parametrize(("change", "says"), [
    ("nett.bandwidth=2x", "there is no 'nett.bandwidth' to change; did you mean 'net'? There are node, net, device"),
    ("net=2x", "there is no 'net' to change; there are node, net, device, each with the keys of a cluster file, like"),
    ("xyz.colour=2x", "there is no 'xyz.colour' to change; there are node, net, device"),
    ("net.colour=2x", "unknown key 'colour'; the keys are name"),
    ("net.bandwith=2x", "unknown key 'bandwith'; did you mean 'bandwidth'?"),
    ("net.bandwidth=3 us", "'us' is no unit of bytes/s"),
    ("net.bandwidth=3", "3 has no unit"),
    ("net.link=NVLink9", "'NVLink9' is no known link; did you mean 'NVLink5'?"),
    ("node.size=1.1x", "a whole number of children"),
    ("node.size=0", "at least 1"),
    ("device=A100", "'A100' names 3 devices"),
    ("device=Q9", "no known device"),
    ("device.memory=0x", "leaves nothing"),
    ("device.speed=3", "a speed is relative"),
    ("device.kind=2x", "no number to multiply"),
    ("net", "no change: write WHERE=VALUE"),
])
def test_a_change_that_cannot_be_made_says_so(change: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        changed_cluster(RACKS, [change])
    assert says in str(error.value) and change.partition("=")[0] in str(error.value)


@pytest.mark.parametrize("change", ["net.bandwidth=2x", "net.link=InfiniBand-NDR", "node.size=16", "device=H200",
                                    "device.peak.bfloat16=2x", "device.speed=2x", "net.oversubscription=2"])
def test_a_changed_cluster_reads_back_as_itself(change: str) -> None:
    found, made = changed_cluster(RACKS, [change])
    assert parse_cluster(found.to_yaml(), "again") == found != RACKS
    assert made[0].where == change.partition("=")[0] and made[0].before != made[0].after


def test_what_was_measured_of_a_changed_link_is_left_out_and_of_others_stays() -> None:
    link = {"ranks": 2, "bandwidth": 5e8, "latency": 1e-4, "error": 0.1}
    place = parse_cluster(written(links=[{"level": "all"} | link], host={"call": 1e-5, "message": 1e-5, "byte": 1e-9}),
                          "measured")
    faster = changed_cluster(place, ["all.bandwidth=2x"])[0]
    assert faster.levels[0].bandwidth == 2 * place.levels[0].bandwidth and not faster.measurements["links"]
    assert faster.levels[0].efficiency == place.levels[0].efficiency and faster.device == place.device
    quick = changed_cluster(place, ["device.speed=2x"])[0]
    curves = [json.loads(one.device.curves) for one in (place, quick)]
    assert [s / 2 for s in curves[0][0]["seconds"]] == pytest.approx(curves[1][0]["seconds"])
    assert quick.device.host is not None and quick.device.host.call == pytest.approx(5e-6)
    with pytest.raises(InputError, match="were timed"):
        changed_cluster(place, ["device.peak=2x"])
    other = changed_cluster(place, ["device=H200"])[0]
    assert (place.backend, other.backend, other.measured) == ("gloo", "nccl", "")


def test_measured_groups_of_a_level_follow_its_bandwidth() -> None:
    level = replace(RACKS.levels[1], group_bandwidth=((2, 2e10),))
    place: Cluster = replace(RACKS, levels=(RACKS.levels[0], level))
    assert changed_cluster(place, ["net.bandwidth=2x"])[0].levels[1].group_bandwidth == ((2, 4e10),)


def test_the_verb_prints_a_table_or_one_document(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    args = ("what-if", str(tmp_path / "plan.json"), "--set", "net.bandwidth=2x", "--sensitivity",
            "-o", str(tmp_path / "after.json"))
    said, asked = shell(*args, "--json"), what_if(plan, ["net.bandwidth=2x"])
    data = json.loads(said.out)
    assert said.code == 0 and data["after"]["seconds"] == asked.after.predicted.seconds
    assert data["before"]["seconds"] == plan.predicted.seconds and data["devices"] == 4
    assert {row["resource"] for row in data["sensitivity"]} >= {"net bandwidth", "node latency", "memory"}
    table = shell(*args).out
    assert "net.bandwidth" in table and "1% of" in table
    assert shell("show", str(tmp_path / "after.json")).code == 0


def test_bad_input_gets_one_line(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    for args, says, code in ((("--set", "net.bandwith=2x"), "did you mean 'bandwidth'", 2), ((), "nothing changes", 2),
                             (("--set", "device.memory=1 kB"), "", 3), (("--stage", "0"), "has no stages", 2)):
        said = shell("what-if", str(tmp_path / "plan.json"), *args)
        assert said.code == code and len(said.err.splitlines()) == 1 and says in said.err and not said.out
