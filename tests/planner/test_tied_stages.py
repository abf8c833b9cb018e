"""Stages on the same ranks that share a parameter store it in the same pieces, and hold their budget so."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
import zoo
from every_pipeline import CLUSTER, Chain

from autoddl.core.errors import InputError
from autoddl.core.layout import local_shape
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph, shared_here
from autoddl.cost_models import parse_cluster
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.cut_problems import cut_problem
from autoddl.planner.pipelines.joint_stages import SharedPrice
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.rank_memory import rank_peak
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.stage_plans import pipeline_plan
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import stage_times, staged_step
from autoddl.planner.pipelines.tied_stages import agreed
from autoddl.planner.pipelines.tried_cuts import try_cut
from autoddl.planner.task import task_of
from autoddl.schedule.stage_bytes import rank_peak_bytes
from autoddl.schedule.stage_lanes import stored_apart

TIED = "model.transformer.wte.weight"


def layout(plan: Plan) -> str:
    return next(str(one.layout) for one in plan.stored if one.fqn == TIED)


def test_tied_stages_take_the_layout_of_the_one_that_leads_best() -> None:
    """Both are pinned to other layouts first: each may lead, and whatever wins, ranks store the table once."""
    model, sample = zoo.named("gpt2", layers=2, B=8)
    options = PlanOptions(microbatches=(2,), max_axes=1, workers=1)
    task = task_of(model, "examples/clusters/rehearsal-2x2-200.yaml", sample, options, "gpt2", None)
    part = StageParts(task, 4, 2, 2, places_of(task.variant(2).original, ()), ((0, 1, 1, 0),), splits=True)
    staged = part.staged("zb-v", (1, 2, 3))
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    assert shared_here(graphs, staged.placement) == {TIED: ((0, 3),)}
    plans = [part.planned(*stage) for stage in zip(graphs, flights, strict=True)]
    mesh = plans[0].mesh
    for s, state in ((0, "S(0)"), (3, "B")):
        own = part.pinned_to(mesh, (f"{TIED}: {mesh.names[0]}={state}",))
        plans[s] = own.planned(graphs[s], flights[s])
    apart = stored_apart(plans, graphs, staged.placement)
    assert apart is not None and (apart.fqn, apart.first, apart.second) == (TIED, 0, 3)
    with pytest.raises(InputError, match="stages 0 and 3 run on the same ranks and share the parameter"):
        pipeline_plan(task, staged, plans)
    found = agreed(part, staged, plans, graphs, flights)
    assert layout(found[0]) == layout(found[3]) and found[1:3] == tuple(plans[1:3])
    assert (found[0] == plans[0]) != (found[3] == plans[3]), "one led"
    assert sum(plan.predicted.seconds for plan in found) >= sum(
        part.planned(*stage).predicted.seconds for stage in zip(graphs, flights, strict=True)) * (1 - 1e-9)
    most = rank_peak(part, staged, found)
    tight = replace(part, task=replace(task, budget=most))
    assert rank_peak(tight, staged, agreed(tight, staged, plans, graphs, flights)) <= most
    whole = pipeline_plan(task, staged, found)
    assert whole.pipeline is not None
    _check_counted_once(whole, found, part)


def _check_counted_once(whole: Plan, found: Sequence[Plan], part: StageParts) -> None:
    """Ranks of the first part store and update the table once; bounds know that they may."""
    graph = next(one for one in part.task.variant(2).graph.tensors if one.fqn == TIED)
    piece = prod(local_shape(graph.shape, found[0].index().stored[TIED].layout, found[0].mesh)) * 4
    moments = part.staged("zb-v", (1, 2, 3)).moments
    own, beside = (rank_peak_bytes([found[s] for s in moments[at].stages], moments[at]) for at in (0, 1))
    assert whole.predicted.peak_bytes == pytest.approx(max(own - 3 * piece, beside)), "a weight, and two of AdamW"
    search = CutSearch(part, "zb-v", lambda _: None)
    search.cuts.add_plans((1, 2, 3), found)
    told = search.row.nbytes
    assert told == pytest.approx(whole.predicted.peak_bytes), "of a rank, as the plan itself says"
    step = staged_step(whole, part.graph, part.task.cluster)
    alone = [plan.predicted.update for plan in found]
    assert [one.update for one in step.stages[:3]] == alone[:3] and step.stages[3].update < alone[3]
    twice = part.twice[3]
    assert part.twice[:3] == ((0.0,) * 3,) * 3 and twice.nbytes >= 3 * piece and not twice.exchange
    assert alone[3] - step.stages[3].update <= twice.update * (1 + 1e-9)


def test_what_is_known_of_tied_stages_counts_the_exchange_of_copies_once() -> None:
    """The first and the last block share a weight, and under chimera:1 a rank has both stages: one exchange is due."""
    torch.manual_seed(0)
    model = Chain((64, 64, 64, 64))
    model.blocks[-1].get_submodule("linear").weight = model.blocks[0].get_submodule("linear").weight
    cluster = parse_cluster(CLUSTER.format(flops=100, fast=100, slow=1, latency=1), "slow")
    options = PlanOptions(microbatches=(2,), max_axes=1, workers=1)
    task = task_of(model, cluster, torch.randn(16, 64), options, "chain", None)
    places = places_of(task.variant(2).original, ())
    part = StageParts(task, 2, 2, 2, places, Staged(places[:1], "chimera:1", 2).pipes)
    staged = part.staged("chimera:1", (1,))
    flights, tried = staged.flights, try_cut(part, "chimera:1", (1,))
    price = SharedPrice((1,), ((2.0, 2.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0),), 1e-12)
    part.sharpen(1, part.units, flights[1])
    part.learn_priced(1, part.units, flights[1], price.weights[0], price.price)
    problem = cut_problem(part, staged.schedule(), flights, [price])
    (_, last), _ = stage_times(cluster, tried.plans, staged, part.graph)
    for weights, values in problem.known:
        assert values[1, part.units - 2] <= np.dot(weights, last) * (1 + 1e-9), weights
    most = np.dot(price.weights[0][:6], last) + price.price * tried.plans[1].predicted.peak_bytes
    assert problem.priced[0].values[0, part.units - 2] <= most * (1 + 1e-9)
    assert problem.known[1][1][1, part.units - 2] > 0 and part.twice[1].exchange > last.reduce / 2 > 0
