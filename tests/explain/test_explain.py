"""Answers about a plan, from its file alone."""

import dataclasses
import json
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny
from planmaker import cluster_of
from random_problems import random_problem
from sampling import few_seeds, parametrize_or_slow
from shell import LAPTOP, shell

from autoddl import api
from autoddl.capture.capture import capture
from autoddl.core.errors import Infeasible, InputError, MismatchError
from autoddl.core.graph import graph_from_text, graph_to_text
from autoddl.core.layout import Layout
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import parse_cluster, parse_quantity
from autoddl.explain.breakdown import block_costs
from autoddl.explain.diff import difference
from autoddl.explain.explain import explain, price_of_pins, proved
from autoddl.explain.pareto import front_of_bytes, front_of_devices, least_bytes, resized
from autoddl.explain.relax import relaxations
from autoddl.planner.budget_search import BudgetSearch
from autoddl.planner.question import question_of, rebuild, solve_question
from autoddl.search import solve
from autoddl.search.certify.alternatives import alternatives, bounding_beliefs, pin_option
from autoddl.search.certify.min_marginals import compute_beliefs

MESH = "net=2,node=2"
PINS = ("blocks.*.up.weight: node=S(0)", "head.weight: net=S(1)")


@pytest.fixture(scope="module")
def free() -> Plan:
    """On a cluster where splitting pays; memory does not bind."""
    return api.plan(tiny.tiny(), cluster_of(MESH), mesh=MESH)


@pytest.fixture(scope="module")
def tight(free: Plan) -> Plan:
    """The same within fewer bytes than it would take."""
    least = least_bytes(rebuild(free).problem)
    return api.plan(tiny.tiny(), cluster_of(MESH), mesh=MESH, budget=0.5 * (least + free.predicted.peak_bytes))


@pytest.fixture(scope="module")
def insisted() -> Plan:
    return api.plan(tiny.tiny(), cluster_of(MESH), mesh=MESH, pins=PINS)


def test_a_graph_is_the_same_after_its_text() -> None:
    model = tiny.tiny()
    graph = capture(model, None).graph
    text = graph_to_text(graph)
    assert graph_from_text(text) == graph and "\n" not in text
    assert graph_from_text(text).fingerprint() == graph.fingerprint()
    with pytest.raises(InputError, match="make the plan again"):
        graph_from_text("{}")


def test_a_plan_comes_out_again_from_its_file(free: Plan, tight: Plan, insisted: Plan, tmp_path: Path) -> None:
    for plan in (free, tight, insisted):
        plan.save(tmp_path / "plan.json")
        made = rebuild(load_plan(tmp_path / "plan.json"))
        assert made.problem.cost(made.choice) == pytest.approx(plan.predicted.seconds, rel=1e-12)
        assert 0.5 * plan.predicted.peak_bytes < made.problem.nbytes(made.choice) <= plan.predicted.peak_bytes


def test_a_plan_of_another_version_is_refused(free: Plan) -> None:
    with pytest.raises(MismatchError, match="another version"):
        rebuild(replace(free, predicted=replace(free.predicted, seconds=2 * free.predicted.seconds)))
    with pytest.raises(InputError, match="make it again"):
        rebuild(replace(free, source={}))


def test_a_plan_whose_row_was_edited_is_refused(tight: Plan) -> None:
    for row in ({"backward nothing": 1.0}, {f"sideways {tight.decisions[0].name}": 1.0}):
        with pytest.raises(MismatchError, match="moments that its graph lacks"):
            rebuild(replace(tight, source=dict(tight.source) | {"row": row}))


def test_shares_add_up(free: Plan, tight: Plan) -> None:
    for plan in (free, tight):
        said = explain(plan)
        assert sum(share.seconds for share in said.blocks) == pytest.approx(plan.predicted.seconds)
        assert sum(share.nbytes for share in said.blocks) == pytest.approx(said.moment[1])
        assert {"blocks.0-1.up", "head"} <= {share.block for share in said.blocks}


@few_seeds(30, 120)
def test_min_marginals_of_random_problems_equal_solving_again(seeds: range) -> None:
    for seed in seeds:
        problem = replace(random_problem(seed), budget=None)
        known = compute_beliefs(problem)
        for v, size in enumerate(problem.sizes):
            for k, seconds in enumerate(known.marginal(v).tolist()):
                try:
                    expected = solve(pin_option(problem, v, k), "exhaustive").seconds
                except Infeasible:
                    expected = math.inf
                assert seconds == pytest.approx(expected, rel=1e-12), (seed, v, k, size)


def test_min_marginals_of_a_plan_equal_solving_again(free: Plan) -> None:
    made, random = rebuild(free), np.random.default_rng(0)
    problem = replace(made.problem, budget=None)
    known = compute_beliefs(problem)
    for _ in range(20):
        v = int(random.integers(len(problem.sizes)))
        k = int(random.integers(problem.sizes[v]))
        marginal = known.marginal(v)
        assert marginal.min() == pytest.approx(free.predicted.seconds, rel=1e-12)
        try:
            expected = solve(pin_option(problem, v, k)).seconds
        except Infeasible:
            expected = math.inf
        assert marginal[k] == pytest.approx(expected, rel=1e-12)


@parametrize_or_slow("count", [1], [2, 4])
def test_alternatives_under_a_budget_are_the_best_ones(tight: Plan, count: int) -> None:
    made = rebuild(tight)
    known, random = bounding_beliefs(made.problem, tight.predicted.seconds), np.random.default_rng(1)
    for v in random.choice(len(made.problem.sizes), count, replace=False).tolist():
        found = alternatives(made.problem, v, known, 2)
        seconds = [a.seconds for a in found if a.seconds is not None]
        expected = []
        for k in range(made.problem.sizes[v]):
            try:
                expected.append(solve(pin_option(made.problem, v, k)).seconds)
            except Infeasible:
                expected.append(math.inf)
        assert seconds[:2] == pytest.approx(sorted(expected)[:2])
        assert all(a.bound <= expected[a.option] * (1 + 1e-9) for a in found)


def test_names_are_explained(free: Plan) -> None:
    said = explain(free, ["blocks.*.up.weight", "head"])
    up = next(one for one in said.named if one.name == "blocks.0.up.weight")
    assert up.target == "parameter" and up.others[0].seconds == pytest.approx(free.predicted.seconds)
    best = [other for other in up.others if other.layouts == up.chosen]
    assert best[0].seconds == pytest.approx(free.predicted.seconds)
    names = {name for one in said.named for name in (one.name, *one.alike)}
    assert {"blocks.0.up.weight", "blocks.1.up.weight", "head (linear_4)"} <= names
    with pytest.raises(InputError, match=r"'nothing\.\*' matches no parameter"):
        explain(free, ["nothing.*"])


def test_the_bound_is_proved(free: Plan, tight: Plan, insisted: Plan) -> None:
    for plan in (free, insisted):
        checked = proved(plan)
        assert checked.gap < 1e-9 and checked.inequalities > checked.distinct > 0
    checked = proved(tight, everywhere=True)
    assert checked.bound <= tight.predicted.seconds and checked.meshes == (MESH,)
    assert checked.gap < 0.2


def test_a_changed_file_is_noticed(free: Plan) -> None:
    first = next(k for k, c in enumerate(free.conversions) if c.backward)
    one = free.conversions[first]
    longer = replace(one, backward=(*one.backward, f"{free.mesh.names[0]}: S(0)->B"))
    whole = {name: Layout.broadcast(free.mesh) for name in free.inputs}
    for changed, said in (
            (replace(free, conversions=(*free.conversions[:first], longer, *free.conversions[first + 1:])),
             f"conversion of {longer.tensor} for {longer.op} is not the one"),
            (replace(free, conversions=free.conversions[:-1]), "conversion that is missing is not"),
            (replace(free, inputs=whole), "inputs are not laid out"),
            (replace(free, predicted=replace(free.predicted, nbytes={"parameters": 1.0})), "at its peak, and has")):
        with pytest.raises(MismatchError, match=said):
            proved(changed)


def test_a_mesh_where_the_pins_leave_no_layout_needs_no_proof() -> None:
    """Rows of 6 tokens are not cut in 4."""
    made = api.plan(tiny.tiny(1), cluster_of("node=12"), pins=("tokens: node.0=S(1)",), max_axes=2)
    checked = proved(made, everywhere=True)
    assert "node.1=3,node.0=4" not in checked.meshes and len(checked.meshes) > 1
    assert checked.bound == pytest.approx(made.predicted.seconds)


def test_pins_have_a_price(free: Plan, insisted: Plan) -> None:
    rows = price_of_pins(insisted)
    assert [row.pin for row in rows] == [*PINS, "all pins"]
    assert rows[-1].seconds == pytest.approx(free.predicted.seconds)
    assert all(0 <= row.price <= rows[-1].price + 1e-12 for row in rows)
    assert price_of_pins(free) == ()


def test_the_front_falls_and_its_points_are_optimal(free: Plan) -> None:
    points = front_of_bytes(free, budgets=3)
    made = rebuild(free)
    assert points[-1].seconds == pytest.approx(free.predicted.seconds)
    assert points[0].nbytes >= least_bytes(made.problem)
    for a, b in pairwise(points):
        assert a.nbytes < b.nbytes and a.seconds > b.seconds
    for point in points[1:-1:3]:
        best = BudgetSearch(made.network, point.nbytes * (1 + 1e-12)).solve(None, 0.0, math.inf, 1e-3).solution
        assert best.bound <= point.seconds * (1 + 1e-9) and best.seconds <= point.seconds * (1 + 1.1e-3)
        assert point.bound is None or point.bound <= best.seconds * (1 + 1e-9)


def test_devices_are_the_divisors_of_the_outermost_level(free: Plan) -> None:
    points = front_of_devices(free)
    assert [point.devices for point in points] == [2, 4]
    assert points[1].seconds is not None and points[0].seconds is not None
    assert points[1].seconds <= free.predicted.seconds * (1 + 1e-9)
    assert resized(cluster_of("net=6,node=2"), 3).size == 6


TORUS = """
name: torus
device: {name: slow, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 MFLOP/s}}
levels: [{name: net, size: 4, bandwidth: 10 GB/s, latency: 1 us, %s}]
"""


def test_a_size_without_a_plan_says_why(free: Plan, insisted: Plan) -> None:
    """A pin of an axis that half the cluster has not, and a torus of sides that half of it has not."""
    half, whole = front_of_devices(replace(insisted, source=insisted.source | {"pins": ["net=2"]}))
    assert half.seconds is None and "no mesh of cluster test fits the pins net=2" in half.detail
    assert half.devices == 2 and whole.seconds is not None and whole.devices == 4
    text = TORUS % "topology: torus, dims: [2, 2]"
    one, half, whole = front_of_devices(replace(free, source=free.source | {"cluster": text}))
    assert (one.devices, half.devices, whole.devices) == (1, 2, 4)
    assert one.seconds is not None and one.mesh == "one=1" and whole.seconds is not None
    assert half.seconds is None and half.detail == (
        "level 'net' with 2 children instead of 4: dims [2, 2] make 4 children, but the size is 2; let them multiply "
        "to it, in a cluster file of its own")


def test_a_leaf_takes_the_children_that_are_left() -> None:
    place = parse_cluster(TORUS % "topology: fat-tree, leaf: 2, oversubscription: 4", "x")
    assert [resized(place, n).levels[0].leaf for n in (1, 2, 4, 8)] == [None, 2, 2, 2]
    assert resized(parse_cluster(TORUS % "topology: fat-tree, leaf: 4", "x"), 2).levels[0].leaf == 2
    with pytest.raises(InputError, match="leaf 2 does not divide the size 3"):
        resized(place, 3)


def test_a_fully_connected_port_has_a_link_to_every_other_child() -> None:
    place = parse_cluster(TORUS % "topology: fully-connected", "x")
    assert [resized(place, n).levels[0].bandwidth for n in (2, 4, 7)] == pytest.approx([10e9 / 3, 10e9, 20e9])


@parametrize_or_slow("layers,given", [(0, 9_000)], [(2, 20_000)])
def test_what_would_fit_is_found_and_priced(layers: int, given: int) -> None:
    model, place = tiny.tiny(layers), cluster_of(MESH)
    with pytest.raises(Infeasible) as caught:
        api.plan(model, place, budget=given, max_axes=1)
    rows = relaxations(model, place, reachable=caught.value.reachable, budget=given, max_axes=1)
    assert [row.what for row in rows if "microbatches" in row.what] == [f"{n} microbatches" for n in (2, 4, 8)]
    assert len(rows) == 7 + (layers > 1)  # two layers are blocks, which can be recomputed
    fits = {row.what.split()[0]: row for row in rows if row.seconds is not None}
    budget = fits["a"].what.removeprefix("a budget of ")
    assert fits["a"].nbytes <= parse_quantity(budget, "bytes") <= 1.01 * caught.value.reachable
    assert api.plan(model, place, budget=budget, max_axes=1).predicted.seconds == pytest.approx(fits["a"].seconds)
    compared = api.compare(model, place, budget=budget, max_axes=1)[0]
    assert compared.plan is not None and compared.plan.predicted.peak_bytes <= parse_quantity(budget, "bytes")
    half = next(row for row in rows if row.what.startswith("half"))
    assert half.seconds is None or half.nbytes <= given
    assert all("needs" in row.detail for row in rows if row.seconds is None)


def test_the_budget_that_is_offered_is_enough() -> None:
    """Whatever the third digit is rounded to."""
    model, place = tiny.tiny(0), parse_cluster((TORUS % "").split("levels")[0] + "levels: []", "x")
    for needed in (50_449.0, 50_451.0):
        budget = relaxations(model, place, reachable=needed, budget=1.0, max_axes=1)
        assert {"a budget of 50.5 kB"} == {row.what for row in budget if "budget" in row.what}
    assert not [row for row in relaxations(model, place, reachable=math.inf, max_axes=1) if "budget" in row.what]


def test_one_device_and_a_torus_have_rows_that_say_why_there_are_no_more_devices() -> None:
    model, alone = tiny.tiny(0), parse_cluster((TORUS % "").split("levels")[0] + "levels: []", "x")
    rows = relaxations(model, alone, reachable=1e5, budget=1.0, max_axes=1)
    (row,) = [row for row in rows if "devices" in row.what]
    assert row.seconds is None and "cluster torus has no level for them: write one" in row.detail
    torus = parse_cluster(TORUS % "topology: torus, dims: [4]", "x")
    rows = relaxations(model, torus, reachable=1e5, budget=1.0, max_axes=1)
    assert [row.detail.partition(":")[0] for row in rows if "devices" in row.what] == [
        "level 'net' with 8 children instead of 4", "level 'net' with 16 children instead of 4"]


@parametrize_or_slow("layers", [0], [1])
def test_microbatches_are_offered_where_they_fit(layers: int) -> None:
    model, place = tiny.tiny(layers, batch=16), cluster_of(MESH)
    with pytest.raises(Infeasible) as caught:
        api.plan(model, place, budget=1.0, max_axes=1)
    needed = caught.value.needed
    rows = relaxations(model, place, reachable=caught.value.reachable, budget=0.999 * needed, max_axes=1)
    (row,) = [row for row in rows if "microbatches" in row.what]
    found = api.plan(model, place, budget=0.999 * needed, microbatches=(1, 2), max_axes=1)
    assert row.what == "2 microbatches" and row.seconds == pytest.approx(found.predicted.seconds, rel=2e-3)
    assert row.nbytes <= 0.999 * needed
    more = relaxations(model, place, reachable=caught.value.reachable, budget=1.0, microbatches=(1, 4), max_axes=1)
    assert {row.what for row in more if "microbatches" in row.what} == {"8 microbatches", "16 microbatches"}


def test_answers_search_every_number_of_microbatches_that_was_asked_for() -> None:
    """Half the devices hold the batch in two parts alone."""
    model, place = tiny.tiny(1, batch=16), cluster_of(MESH)
    with pytest.raises(Infeasible) as caught:
        api.plan(model, resized(place, 1), budget=1.0)
    made, half = (api.plan(model, cluster, budget=0.999 * caught.value.needed, microbatches=(1, 2, 4))
                  for cluster in (place, resized(place, 1)))
    assert made.microbatches == 1 and half.microbatches > 1
    assert front_of_devices(made)[0].seconds == pytest.approx(half.predicted.seconds, rel=2e-3)
    whole = solve_question(replace(question_of(half), cluster=place)).best
    assert whole.solution.seconds == pytest.approx(made.predicted.seconds, rel=2e-3)
    assert "net=2,node=2 x 4 microbatches" in proved(made, everywhere=True).meshes
    old = replace(made, source={key: part for key, part in made.source.items() if key not in ("counts", "parts")})
    assert front_of_devices(old)[0].detail == "no plan fits the budget"


def test_a_strategy_beside_a_pinned_plan_has_no_pins() -> None:
    found, *others = api.compare(tiny.tiny(1), cluster_of(MESH), mesh=MESH, pins=PINS)
    assert found.plan is not None and found.plan.source["pins"] == list(PINS)
    for one in others:
        assert one.plan is not None and explain(one.plan).seconds == one.plan.predicted.seconds


def test_the_blocks_of_microbatches_add_up(free: Plan) -> None:
    made = api.plan(tiny.tiny(1), cluster_of(MESH), mesh=MESH, microbatches=(4,))
    blocks = block_costs(rebuild(made))
    assert sum(block.compute for block in blocks) == pytest.approx(made.predicted.compute, rel=1e-2)
    assert sum(block.seconds for block in blocks) == pytest.approx(made.predicted.seconds)
    assert "microbatches: 4 in the first, 1 in the second" in difference(made, free).words


def test_the_question_of_a_plan_has_the_same_answer_again(free: Plan) -> None:
    assert solve_question(question_of(free)).best.solution.seconds == pytest.approx(free.predicted.seconds)


def test_the_verbs_print_tables_and_json(free: Plan, insisted: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    insisted.save(path)
    assert "every operator has a rule" in shell("explain", str(path)).out
    assert "best plan with it" in shell("explain", str(path), "head.weight").out
    assert "inequalities" in shell("explain", str(path), "--proof").out
    assert "all pins" in shell("explain", str(path), "--pins").out
    assert json.loads(shell("explain", str(path), "head.weight", "--json").out)["named"][0]["name"] == "head.weight"
    assert json.loads(shell("explain", str(path), "--proof", "--json").out)["gap"] < 1e-9
    assert shell("explain", str(path), "nothing").code == 2


@pytest.mark.ranks
def test_explaining_does_not_wait_for_torch(free: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    free.save(path)
    code = (f"import sys; from autoddl.cli.main import main\ntry: main(['explain', {str(path)!r}, '--proof'])\n"
            "finally: assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_replicated_operators_are_listed(free: Plan) -> None:
    slow = dataclasses.replace(free, predicted=replace(free.predicted, fallback={"aten.strange.default": 1e-3}))
    assert explain(slow).unruled == (("aten.strange.default", 1e-3),)


def test_the_front_of_the_laptop_prints(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    api.plan(tiny.tiny(layers=0), LAPTOP, max_axes=1).save(path)
    assert "this plan" in shell("front", str(path)).out
    assert "device-seconds" in shell("front", str(path), "--devices").out


def test_a_plans_own_choice_is_priced_as_planned(tight: Plan) -> None:
    (head,) = explain(tight, ["head.weight"], count=1).named
    own = [other for other in head.others if other.layouts == head.chosen]
    assert own[0].seconds == pytest.approx(tight.predicted.seconds, rel=1e-12)
    assert sum(other.seconds is not None for other in head.others) >= 2
