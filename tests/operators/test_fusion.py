"""Elementwise ops in a row as the one kernel that a compiler makes of them: by hand, in plans, and in their files."""

import json
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest
import torch
import zoo
from sampling import parametrize_or_slow
from shell import FACTORY, LAPTOP, shell
from torch import Tensor, nn

from autoddl.api import plan
from autoddl.capture.capture import capture
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Layout, Mesh
from autoddl.core.plan import load_plan
from autoddl.core.stages import crossing, cut_graph
from autoddl.cost_models import elementwise_seconds, load_cluster, parse_cluster
from autoddl.operators.fusion import ALONE, Chained, as_compiled, chains, fused_ends, with_fused_ends
from autoddl.planner.question import problem_on, question_of, rebuild
from autoddl.pricing.floors import floor_seconds
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice

ROWS, WIDTH = 32, 16
SIZE = 4 * ROWS * WIDTH


class Row(nn.Module):
    """Three elementwise ops in a row, the last of two inputs, and one whose output two read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        fused = torch.relu(torch.tanh(y)) * x
        both = fused @ self.weight
        return (both.neg() @ both.T).sum()


def test_a_chain_moves_its_ends_and_launches_once() -> None:
    graph = add_hubs(capture(Row(), (torch.zeros(ROWS, WIDTH),)).graph)
    found = {op.target.split(".")[1]: chains(graph).get(op.name, ALONE) for op in graph.ops}
    assert found["tanh"] == Chained(0.5, False) and found["relu"] == Chained(1.0, True)
    assert found["mul"] == Chained(1 / 3, True) and found["matmul"] == ALONE
    assert found["neg"] == ALONE  # what it reads another reads too

    place = load_cluster(LAPTOP)
    whole, ones = Layout.broadcast(Mesh.parse("all=4")), {}
    for name, cluster in (("eager", place), ("compiled", as_compiled(place))):
        pricing = Pricing(graph, Mesh.parse("all=4"), cluster)
        ones[name] = [sum(pass_seconds(pricing, op, Choice((whole,) * len(op.inputs), (whole,), (), ()),
                                       graph.differentiable())[0])
                      for op in graph.ops if op.target.split(".")[1] in ("tanh", "relu", "mul")]
    device = place.device
    assert sum(ones["eager"]) == pytest.approx(sum(elementwise_seconds(device, n * SIZE) for n in (2, 2, 3)))
    assert sum(ones["compiled"]) == pytest.approx(elementwise_seconds(device, 3 * SIZE))  # y, x, and the product
    assert ones["compiled"][1] == 0.0
    assert floor_seconds(graph, as_compiled(place)) < floor_seconds(graph, place)


class Gated(nn.Module):
    """A softmax and its dropout, which a gate reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        gated = self.dropout(torch.softmax(x @ self.weight, -1)) * torch.tanh(self.weight.sum())
        return (torch.relu(gated @ self.weight) + x).sum()


class Again(nn.Module):
    """Ops that depend on no parameter, which every stage computes again, are read by the first product and behind it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        again = torch.exp(x @ x.T @ x)
        return (torch.relu(again @ self.weight + again) @ self.weight).sum()


@pytest.mark.parametrize("model", [Row, Gated, Again])
@pytest.mark.parametrize("by_hand", [False, True])
def test_no_stage_fuses_more_than_its_units_do_loosely(model: type[nn.Module], by_hand: bool) -> None:
    """Of every stage, and of every unit of one op in it; nor does any fuse an op that the whole leaves alone."""
    graph = capture(model().train(), (torch.zeros(ROWS, WIDTH),)).graph
    count, ends, fused = len(needed_ops(graph)), fused_ends(graph, by_hand), 0
    loosely = chains(graph, by_hand, loosely=True)
    parts, sent = {}, crossing(graph)
    computed = {op.name for op in graph.ops if not graph.dependent().isdisjoint(op.outputs)}
    for a, b in combinations([k for k in range(count + 1) if k in (0, count) or sent[k - 1]], 2):
        with suppress(InputError):
            parts[a, b] = cut_graph(graph, [k for k in (a, b) if 0 < k < count])[bool(a)].graph
    units = {a: chains(add_hubs(with_fused_ends(one, ends)), by_hand) for (a, b), one in parts.items() if b == a + 1}
    for (a, b), one in parts.items():
        exact = chains(add_hubs(one), by_hand)
        assert {*exact} & computed <= {*loosely}
        for unit in (units[k] for k in range(a, b) if k in units):
            for name in exact.keys() & unit.keys():
                assert unit[name].inside >= exact[name].inside and unit[name].joins >= exact[name].joins
        fused += len(exact)
    assert fused


@parametrize_or_slow("name", ["llama-1"], ["llama", "mixture"])
def test_compiled_plans_are_faster_and_no_slower_than_what_eager_chose(name: str) -> None:
    """The search sees the new prices: its plan is the best under them, and its bound holds."""
    model, sample = zoo.named(name)
    eager, compiled = plan(model, LAPTOP, sample), plan(model, as_compiled(load_cluster(LAPTOP)), sample)
    assert compiled.bound <= compiled.predicted.seconds < eager.predicted.seconds
    again, before = rebuild(compiled), rebuild(eager)
    assert again.problem.cost(again.choice) == pytest.approx(compiled.predicted.seconds)
    _, space, problem = problem_on(question_of(compiled), eager.mesh)
    assert [v.name for v in space] == [v.name for v in before.variables]
    assert problem.cost(before.choice) >= compiled.bound * (1 - 1e-9)


def test_the_file_says_so_and_the_machine_is_the_same(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert shell("plan", FACTORY, LAPTOP, "--compiled", "--set", "layers=1", "-o", str(out)).code == 0
    place, made = load_cluster(LAPTOP), load_plan(out)
    there = parse_cluster(made.source["cluster"], "the plan")
    assert there.device.compiled and there == as_compiled(place) and there.fingerprint == place.fingerprint
    assert parse_cluster(there.to_yaml(), "again") == there and "compiled" not in place.to_yaml()
    assert shell("explain", str(out)).code == 0
    asked = ("compare", FACTORY, LAPTOP, "--set", "layers=1", "--json", "--solvers")
    eager, compiled = (json.loads(shell(*asked, *more).out)[0]["seconds"] for more in ((), ("--compiled",)))
    assert compiled < eager
    wrong = place.to_yaml().replace("  kind: cpu\n", "  kind: cpu\n  compiled: often\n", 1)
    path = tmp_path / "wrong.yaml"
    path.write_text(wrong)
    said = shell("plan", FACTORY, str(path))
    assert said.code == 2 and "compiled" in said.err


@pytest.mark.slow
def test_what_runs_again_is_not_fused_and_every_choice_of_blocks_is_priced_alike() -> None:
    """The search over blocks adds up to what its plan is priced at, and is not above plans of named blocks."""
    place = as_compiled(load_cluster(LAPTOP))
    model, sample = zoo.named("bert", B=8)
    every = plan(model, place, sample, recompute=("full",), workers=1, max_axes=1)
    made = rebuild(every).pricing
    assert made.again and not made.again & made.chained.keys()
    limit = 0.8 * plan(model, place, sample, workers=1, max_axes=1).predicted.peak_bytes
    found = plan(model, place, sample, recompute=("search",), budget=limit, workers=1, max_axes=1)
    assert found.recompute
    for name in ("model.bert.encoder.layer.0", "model.bert.encoder.layer.1"):
        for level in ("", ":selective"):
            try:
                named = plan(model, place, sample, recompute=(f"{name}{level}",), budget=limit, workers=1, max_axes=1)
            except Infeasible:
                continue
            assert found.bound <= named.predicted.seconds * (1 + 1e-9)
