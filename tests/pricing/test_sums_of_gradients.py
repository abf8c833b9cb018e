"""Gradients of microbatches add up, which takes equal seconds in the tables, in a plan's parts and on its time line."""

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from planmaker import cluster_of, random_plans
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import gpt

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample, parted
from autoddl.core import graph as graphs
from autoddl.core.graph import Graph, Op
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh
from autoddl.core.precision import Precision
from autoddl.cost_models import elementwise_seconds, parse_cluster
from autoddl.explain.explain import explain, proved
from autoddl.planner.assemble import assemble_choice
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.choices import Choice
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable, everything, variables
from autoddl.schedule.actions import ADDED
from autoddl.schedule.timeline import predict_timeline
from autoddl.search import solve
from autoddl.search.exhaustive import choice_at, score_every_choice

WIDE = 64
MESH = "a=2,b=2"
ONE = """name: one
device: {name: cpu, kind: cpu, memory: 16 GB, bandwidth: 10 GB/s, peak: {float32: 10 GFLOP/s}}
levels: [{name: node, size: 1, bandwidth: 1 GB/s, latency: 1 us}]
"""


class Layer(nn.Module):
    """A layer whose weight backward does not read, and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x).sum()
        return found


@cache
def layer(parts: int) -> Graph:
    return add_hubs(capture(Layer(), parted(Sample((torch.zeros(48, WIDE),)), parts)).graph)


def space_of(parts: int, mesh: str = MESH) -> tuple[Pricing, tuple[Variable, ...]]:
    pricing = Pricing(layer(parts), Mesh.parse(mesh), cluster_of(mesh), microbatches=parts)
    return pricing, variables(pricing.graph, pricing.mesh, everything, parts)


@pytest.mark.parametrize("parts", [2, 3])
def test_every_choice_costs_what_its_steps_add_up_to_and_the_search_finds_the_least(parts: int) -> None:
    pricing, space = space_of(parts)
    problem = problem_of(pricing, space, None)
    seconds, _ = score_every_choice(problem)
    assert solve(problem).seconds == pytest.approx(seconds.min(), rel=1e-12)
    known = np.flatnonzero(np.isfinite(seconds))
    for place in random.Random(0).sample(known.tolist(), 60):
        made = assemble_choice(pricing, choice_at(problem, place), space)
        assert made.predicted.seconds == pytest.approx(seconds[place], rel=1e-12)


@pytest.mark.parametrize(("stored", "depths", "share"), [("B", (0,), 1), ("S(0)", (0,), 1), ("S(0)", (1,), 4),
                                                         ("S(0)", (2,), 4)])
def test_whole_gradients_add_up_unless_each_is_reduced(stored: str, depths: tuple[int, ...], share: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallel and ZeRO-1 add whole gradients up, ZeRO-2 and ZeRO-3 a rank's piece."""
    pricing, _ = space_of(3, "a=4")
    rows, whole, wanted = (Layout.parse(text) for text in ("S(0)", "B", stored))

    def region(_: Graph, item: Op | graphs.Tensor, choice: Choice) -> bool:
        if isinstance(item, graphs.Tensor):
            return choice.outputs[0] == wanted and choice.depths == depths
        return choice.inputs in ((rows, whole), (rows,))

    space = variables(pricing.graph, pricing.mesh, region, 3)
    chosen = solve(problem_of(pricing, space, None)).choice
    compute = assemble_choice(pricing, chosen, space).predicted.compute
    monkeypatch.setattr("autoddl.planner.assemble.add_seconds", lambda *_: 0.0)
    added = compute - assemble_choice(pricing, chosen, space).predicted.compute
    moved = 3 * 4 * WIDE * WIDE / share
    assert added == pytest.approx(2 * elementwise_seconds(pricing.cluster.device, moved), rel=1e-9)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_additions_are_priced_as_the_time_line_has_them(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    captured = capture(*gpt(), Precision("bf16-mixed"))
    graph = add_hubs(captured.graph)
    drawn = []
    for _ in range(2):
        drawn.append(random_plans(*gpt(), MESH, 3, 3, microbatches=parts, captured=captured))
        monkeypatch.setattr("autoddl.planner.assemble.add_seconds", lambda *_: 0.0)
        monkeypatch.setattr("planmaker.assemble", lambda pricing, solution, space: assemble_choice(
            pricing, solution.choice, space))  # whose parts do not add up to the solution's seconds then
    for plan, without in zip(*drawn, strict=True):
        spans = predict_timeline(plan, graph, cluster_of(MESH)).computes
        added = sum(span.end - span.start for span in spans if span.name.startswith(ADDED))
        assert added == pytest.approx(plan.predicted.compute - without.predicted.compute, rel=1e-9)
        assert (added > 0) == (parts > 1)


class Added(TorchDispatchMode):
    """Counts the elements of tensors that others are added to in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_step_adds_as_many_gradients_as_are_priced() -> None:
    module = Layer()
    plan = autoddl.plan(module, parse_cluster(ONE, "one"), (torch.zeros(48, WIDE),), microbatches=(3,), workers=1)
    model = autoddl.parallelize(module, plan)
    with Added() as counted:
        model.step((torch.ones(48, WIDE),))
    assert counted.sizes.count(WIDE * WIDE) == 2
    spans = predict_timeline(plan, layer(3), parse_cluster(ONE, "one")).computes
    assert sum(span.name.startswith(ADDED) for span in spans) == 2
    assert explain(plan).added == pytest.approx(2 * elementwise_seconds(parse_cluster(ONE, "one").device,
                                                                        3 * 4 * WIDE * WIDE))
    assert proved(plan).bound == pytest.approx(plan.predicted.seconds, rel=1e-12)
