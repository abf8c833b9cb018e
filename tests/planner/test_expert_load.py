"""A load of experts: seconds and bytes are planned for the busiest rank, and the plan still fits the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import zoo
from planmaker import cluster_of
from shell import shell

import autoddl
from autoddl.capture.capture import capture
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Op, graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.operators.expert_sizes import expert_sizes
from autoddl.operators.rules.table import options
from autoddl.planner.question import rebuild
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice


def mixture() -> Any:
    return zoo.mixture(layers=1, experts="grouped_mm")


def experts(graph: Graph) -> Op:
    return next(op for op in graph.ops if op.target == "autoddl.experts")


def planned(**options: Any) -> Plan:
    model, sample = mixture()
    return autoddl.plan(model, cluster_of("a=4"), sample, workers=1, **options)


def test_a_load_multiplies_the_rows_of_a_rank_that_has_some_experts() -> None:
    plain, loaded = (graph_from_text(planned(expert_load=load).source["graph"]) for load in (1.0, 1.5))
    for sent in (True, False):
        rows = []
        for graph in (plain, loaded):
            op = experts(graph)
            shapes = [graph.tensors[t].shape for t in op.inputs]
            half = [*shapes[:3], *((shape[0] // 2, *shape[1:]) for shape in shapes[3:])]
            rows.append(expert_sizes(op, half, sent).rows)
        assert rows[1] == pytest.approx(1.5 * rows[0])


def test_experts_that_lie_apart_take_longer_under_a_load() -> None:
    seconds = []
    for load in (1.0, 3.0):
        graph = add_hubs(graph_from_text(planned(expert_load=load).source["graph"]))
        op, mesh = experts(graph), Mesh.parse("a=4")
        sent = next(one for one in options(op, graph, mesh) if one.inner)
        choice = Choice(sent.inputs, sent.outputs, (), (), sent.inner)
        forward, backward = pass_seconds(Pricing(graph, mesh, cluster_of("a=4")), op, choice, graph.differentiable())
        seconds.append(sum(forward) + sum(backward))
    assert 2.5 * seconds[0] < seconds[1] < 3.5 * seconds[0]


def test_a_loaded_plan_is_of_the_same_model() -> None:
    plain, loaded = (planned(expert_load=load) for load in (1.0, 3.0))
    model, sample = mixture()
    assert loaded.fingerprints["model"] == plain.fingerprints["model"] == capture(model, sample).graph.fingerprint()
    assert rebuild(loaded).problem.cost(rebuild(loaded).choice) == pytest.approx(loaded.predicted.seconds)


def test_several_microbatches_have_the_load_too() -> None:
    made = planned(expert_load=2.0, microbatches=(2,))
    assert dict(experts(graph_from_text(made.source["graph"])).args)["autoddl.load"] == 2.0


def test_the_plan_says_it_and_a_load_below_the_mean_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="rows of the busiest rank over the mean"):
        planned(expert_load=0.5)
    out = tmp_path / "plan.json"
    planned(expert_load=1.3).save(out)
    assert "1.3 times the mean rows for the busiest experts" in " ".join(shell("show", str(out)).out.split())
    assert json.loads(out.read_text())
