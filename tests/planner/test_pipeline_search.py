"""Pipelines: what the search promises of cuts, stages and bounds, against enumeration."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, combinations, product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from every_pipeline import CLUSTER, Chain
from sampling import parametrize_or_slow
from torch import nn

import autoddl
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import RECEIVE, graph_from_text, graph_to_text
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Layout, Mesh
from autoddl.core.pipeline import Schedule, sizes_of
from autoddl.core.pipeline_schedules import chunks_of
from autoddl.core.plan import Plan, load_plan
from autoddl.core.split_backward import waiting_inputs, weights_of
from autoddl.core.stages import SEND, crossing, cut_graph, shared_parameters, transfers_of
from autoddl.cost_models import Cluster, load_cluster, parse_cluster
from autoddl.explain.explain import proved
from autoddl.explain.pipeline_proof import check_pipeline
from autoddl.explain.staged_run import foreseen_stages, memory_of_ranks
from autoddl.planner.mesh_search import Progress
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines import candidate_runs, tried_cuts
from autoddl.planner.pipelines.candidate_runs import Clock, run_candidates
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.part_ranks import part_clusters, ranks_of_parts, size_vectors
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.pipeline_search import WithoutStages, staged_plan
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.stage_plans import pipeline_plan, search_stage
from autoddl.planner.pipelines.staged import Staged, stage_cluster
from autoddl.planner.pipelines.staged_steps import TriedCut, staged_step, transfer_passes, transfer_seconds
from autoddl.planner.process_pool import SharedLeast, beside
from autoddl.planner.task import PlanTask, task_of
from autoddl.pricing.floors import floor_passes, state_bytes
from autoddl.schedule.memory_line import predict_memory
from autoddl.schedule.stage_seconds import stage_seconds

FOUR, TWO_BY_TWO = "examples/clusters/rehearsal-4x1-200.yaml", "examples/clusters/rehearsal-2x2-200.yaml"

SLOW = CLUSTER.format(flops=1, fast=20, slow=10, latency=1)


@lru_cache(maxsize=4)
def task(name: str = "gpt2", cluster: str = FOUR, layers: int = 3, compress: tuple[str, ...] = ()
         ) -> PlanTask:
    model, sample = zoo.named(name, layers=layers, B=8)
    options = PlanOptions(microbatches=(4,), max_axes=2, workers=1, compress=compress)
    return task_of(model, cluster, sample, options, name, None)


def cuts_of(one: PlanTask, stages: int) -> list[tuple[int, ...]]:
    return list(combinations(places_of(one.variant(4).original, ()), stages - 1))


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "llama"))])
def test_stages_have_every_op_and_parameter(name: str) -> None:
    graph = task(name, layers=2).variant(4).original
    places = places_of(graph, ())
    stages = cut_graph(graph, places)
    known = {op.name for op in needed_ops(graph)}
    made = [{op.name for op in stage.graph.ops if op.target not in (SEND, RECEIVE)} for stage in stages]
    assert set().union(*made) == known
    depends = {op.name for op in graph.ops if not graph.dependent().isdisjoint(op.outputs)}
    assert sum(len(one & depends) for one in made) == len(known & depends), "every op that learns is in one stage"
    for one in transfers_of(graph, places):
        assert one.sender in {op.name for op in stages[one.source].graph.ops}
        assert one.receiver in {op.name for op in stages[one.target].graph.ops}
    shared = shared_parameters(stages)
    assert ("model.transformer.wte.weight" in shared) == (name == "gpt2")


def test_every_gradient_of_a_parameter_waits_for_w() -> None:
    """Weights are read with something else by ops that wait, or by ops that make weights again."""
    graph = add_hubs(task(layers=2).variant(4).original)
    weights, waiting, flows = weights_of(graph), waiting_inputs(graph), graph.differentiable()
    for i, op in enumerate(graph.ops):
        late = tuple(k for k, t in enumerate(op.inputs) if t in weights & flows)
        makes = weights.issuperset(op.outputs)
        assert waiting.get(i, ()) == (() if makes or flows.isdisjoint(op.outputs) else late), op.name


def test_what_crosses_a_cut_is_what_is_sent() -> None:
    graph = task(layers=2).variant(4).original
    for at, tensors in enumerate(crossing(graph), start=1):
        sent = {one.tensor for one in transfers_of(graph, (at,))}
        assert sent == {graph.tensors[t].name for t in tensors}


def test_seconds_of_a_stage_add_up_to_those_that_were_searched() -> None:
    one = task(cluster=TWO_BY_TWO)
    plan = pipeline_plan(one, Staged(cuts_of(one, 2)[1], "1f1b", 4))
    assert plan.pipeline is not None
    graph, part = one.variant(4).original, stage_cluster(one.cluster, 2)
    step = staged_step(plan, graph, one.cluster)
    for stage, made, counted in zip(plan.pipeline.stages, cut_graph(graph, plan.pipeline.cuts), step.stages,
                                    strict=True):
        each = stage_seconds(stage.plan, add_hubs(made.graph), part)
        assert counted._replace(reduce=each.reduce) == each and counted.reduce > each.reduce, "tied weights are sent"
        total = 4 * (each.forward + each.backward + each.weight) + each.gather + each.reduce + each.update
        assert total == pytest.approx(stage.plan.predicted.seconds, rel=1e-9)
    assert plan.predicted.seconds == step.timeline.makespan


@parametrize_or_slow("schedule,layers,compress", [("1f1b", 1, ())], [
    ("1f1b", 1, ("pipeline=int8",)), ("1f1b", 2, ()), ("gpipe", 2, ())])
def test_no_cut_is_below_the_bound_and_none_better_than_the_best(schedule: str, layers: int,
                                                                     compress: tuple[str, ...]) -> None:
    one, (model, sample) = task(layers=layers, compress=compress), zoo.named("gpt2", layers=layers, B=8)
    found = autoddl.plan(model, FOUR, sample, stages=(2,), compress=compress,
                         schedule=(schedule,), microbatches=(4,), max_axes=2, workers=1)
    every = [pipeline_plan(one, Staged(cut, schedule, 4)).predicted.seconds for cut in cuts_of(one, 2)]
    assert found.bound <= min(every) * (1 + 1e-9)
    assert found.predicted.seconds <= min(every) * (1 + 1e-9)
    assert found.predicted.peak_bytes <= found.budget
    assert bool(compress) == bool(found.codecs)
    assert check_pipeline(found).bound == pytest.approx(found.bound)
    rows = found.source["alternatives"]
    raised = [row | {"bound": row["bound"] * 1.01} for row in rows]
    for wrong in (replace(found, bound=found.bound * 1.01), replace(found, source=found.source | {
            "alternatives": raised})):
        with pytest.raises(AssertionError):
            check_pipeline(wrong)
    sent = [row | {"proof": row["proof"] | {"transfers": [1.01 * x for x in row["proof"]["transfers"]]}}
            for row in rows]
    with pytest.raises(AssertionError, match="what crosses takes"):
        check_pipeline(replace(found, source=found.source | {"alternatives": sent}))
    lower = [row | {"proof": row["proof"] | {"rows": [
        [[2 * x for x in pair] if isinstance(pair, list) else pair for pair in one] for one in row["proof"]["rows"]]}}
        for row in rows]
    with pytest.raises(AssertionError, match="its ops take"):
        check_pipeline(replace(found, source=found.source | {"alternatives": lower}))


def test_a_proof_has_every_candidate_that_was_asked_for_and_says_what_is_only_stated() -> None:
    """Messages are checked for every number of microbatches."""
    model, sample = zoo.named("gpt2", layers=2, B=8)
    found = autoddl.plan(model, FOUR, sample, stages=(1, 2, 4), schedule=("1f1b", "interleaved:2"),
                         microbatches=(1, 2, 4), max_axes=1, workers=1)
    rows, known = found.source["alternatives"], check_pipeline(found)
    assert len(rows) == 12 and known.candidates < 12, "one microbatch, or eight stages of this model, cannot be"
    assert len(known.stated) == 13 - known.candidates and "plans without stages take" in known.stated[0]
    assert all("no plan (" in said for said in known.stated[1:])
    for k, row in enumerate(rows):
        with pytest.raises(AssertionError, match=f"{row['microbatches']} microbatches, and has no row of them"):
            check_pipeline(replace(found, source=found.source | {"alternatives": [*rows[:k], *rows[k + 1:]]}))
    proved = [k for k, row in enumerate(rows) if row["proof"] is not None and max(row["proof"]["transfers"]) > 0]
    assert {rows[k]["microbatches"] for k in proved} == {1, 2, 4}
    for k in proved:
        sent = rows[k] | {"proof": rows[k]["proof"] | {"transfers": [1.01 * x for x in rows[k]["proof"]["transfers"]]}}
        with pytest.raises(AssertionError, match="what crosses takes"):
            check_pipeline(replace(found, source=found.source | {"alternatives": [*rows[:k], sent, *rows[k + 1:]]}))


def test_what_waits_for_w_is_taken_from_backward() -> None:
    one = task(cluster=TWO_BY_TWO, layers=2)
    plan = pipeline_plan(one, Staged(cuts_of(one, 2)[1], "1f1b", 4))
    assert plan.pipeline is not None
    part = stage_cluster(one.cluster, 2)
    for stage, made in zip(plan.pipeline.stages, cut_graph(one.variant(4).original, plan.pipeline.cuts), strict=True):
        graph = add_hubs(made.graph)
        both, apart = (stage_seconds(stage.plan, graph, part, splits) for splits in (False, True))
        assert both.weight == 0 < apart.weight and apart.backward + apart.weight == pytest.approx(both.backward)
        assert apart._replace(backward=both.backward, weight=0.0) == both
        floors = [floor_passes(graph, part, graph.differentiable(), weights) for weights in (
            frozenset[int](), weights_of(graph))]
        assert sum(floors[0]) == pytest.approx(sum(floors[1])) and floors[1][2] > floors[0][2] == 0
        assert floors[1][1] <= apart.backward and floors[1][2] <= apart.weight


def test_blocks_that_run_again_do_so_before_b_and_w_takes_as_long() -> None:
    one = task(layers=2)
    graph, part, cut = one.variant(4).original, stage_cluster(one.cluster, 4), cuts_of(one, 4)[0]
    again = replace(one, options=replace(one.options, recompute=("full",)))
    plans = [pipeline_plan(each, Staged(cut, "zb-h1", 4)) for each in (one, again)]
    raised = 0
    for s, made in enumerate(cut_graph(graph, cut)):
        every = [plan.pipeline.stages[s].plan for plan in plans if plan.pipeline is not None]
        less, more = (stage_seconds(each, add_hubs(made.graph), part, True) for each in every)
        assert (less.forward, less.weight) == pytest.approx((more.forward, more.weight))
        assert (more.backward > less.backward * 1.05) == bool(every[1].recompute)
        if every[1].recompute:
            kept, waiting = (predict_memory(replace(every[1], waiting=n), add_hubs(made.graph), "adamw", part).peak
                             for n in (0, 1))
            raised += waiting > kept
    assert raised and plans[1].predicted.peak_bytes < plans[0].predicted.peak_bytes


def test_stages_are_proved_like_any_plan_and_hold_their_budget() -> None:
    one = task(cluster=TWO_BY_TWO, layers=2)
    free = pipeline_plan(one, Staged(cuts_of(one, 2)[1], "1f1b", 4))
    tight = replace(one, budget=0.97 * free.predicted.peak_bytes)
    plan = pipeline_plan(tight, Staged(cuts_of(one, 2)[1], "1f1b", 4))
    assert plan.pipeline is not None and plan.predicted.peak_bytes <= tight.budget
    assert plan.predicted.peak_bytes >= state_bytes(one.graph, "adamw") / 4, "some rank has its part of all states"
    for stage in plan.pipeline.stages:
        assert proved(stage.plan).bound == pytest.approx(stage.plan.bound, rel=1e-6)
        assert stage.plan.in_flight == 2 - plan.pipeline.stages.index(stage)


def test_a_plan_with_stages_is_read_as_it_was_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = task()
    plan = pipeline_plan(one, Staged(cuts_of(one, 4)[0], "gpipe", 4))
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert _stage_graphs(plan, one)


def _stage_graphs(plan: Plan, one: PlanTask) -> bool:
    assert plan.pipeline is not None
    graphs = cut_graph(one.variant(4).original, plan.pipeline.cuts)
    return all(graph_from_text(stage.plan.source["graph"]) == graph.graph and add_hubs(graph.graph).ops
               for stage, graph in zip(plan.pipeline.stages, graphs, strict=True))


def test_a_message_counts_as_in_the_pipe_where_it_takes_longest() -> None:
    """Racks of three ranks: the second pair of pipes begins on the last rank of a rack, and leaves it at once."""
    cluster = parse_cluster(SLOW.replace("size: 2", "size: 3", 1), "six")
    graph = task_of(Chain((8,) * 7), cluster, torch.randn(12, 8), PlanOptions(workers=1), "chain", None).graph
    cuts, layout = places_of(graph, ())[:5], (Layout.parse("B"), Mesh.parse("one=1"))
    first = next(one for one in transfers_of(graph, cuts) if (one.source, one.target) == (0, 1))
    for name, level in (("chimera:1", (0, 1)), ("chimera:3", (2, 3))):
        sent, _ = transfer_passes(cluster, Staged(cuts, name, 6), graph, first, layout, layout)
        assert sent.seconds == transfer_seconds(cluster, ranks_of_parts(cluster, 6), *level, 12 * 8 * 4) > 0


def test_a_message_takes_as_long_between_two_of_three_as_between_two_of_four() -> None:
    three, four = (parse_cluster(SLOW.replace("size: 2", f"size: {n}", 1), "some") for n in (3, 4))
    assert _seconds(three, 6) == _seconds(four, 8) > 1e6 / 20e6


def _seconds(cluster: Cluster, parts: int) -> float:
    return transfer_seconds(cluster, ranks_of_parts(cluster, parts), 0, 1, 1e6)


def test_parts_of_a_cluster_take_its_outer_levels_first() -> None:
    cluster = load_cluster("examples/clusters/h100-8x16x8.yaml")
    assert [level.size for level in stage_cluster(cluster, 16).levels] == [8, 8, 1]
    assert stage_cluster(cluster, 1).size == cluster.size
    assert parse_cluster(stage_cluster(cluster, 8).to_yaml(), "text") == stage_cluster(cluster, 8)
    with pytest.raises(InputError, match="whole factors"):
        stage_cluster(cluster, 3)
    mesh = parse_cluster(cluster.to_yaml().replace("topology: switch", "topology: hybrid-cube-mesh"), "cubes")
    assert mesh.levels[0].topology == "hybrid-cube-mesh" and stage_cluster(mesh, 256).levels[0].size == 4


def test_parts_of_different_sizes_tile_a_cluster_and_each_is_a_cluster() -> None:
    """Every division by the rule is found, none other; parts of equal sizes are the equal parts of a cluster."""
    cluster = parse_cluster(SLOW.replace("size: 2", "size: 4", 1).replace("out, size: 2", "out, size: 3"), "twelve")
    for parts in range(2, 7):
        found = set(size_vectors(cluster, parts, 10_000))
        for sizes in product((1, 2, 3, 4, 6, 8), repeat=parts):
            begins = [*accumulate(sizes, initial=0)]
            fits = all(n in (1, 2, 4, 8) and begin % min(n, 4) == 0 for n, begin in zip(sizes, begins, strict=False))
            assert (sizes in found) == (fits and begins[-1] == 12 and len(set(sizes)) > 1), sizes
        assert all(tuple(part.size for part in part_clusters(cluster, parts, sizes)) == sizes for sizes in found)
    assert part_clusters(cluster, 3, (4, 4, 4))[0].levels == stage_cluster(cluster, 3).levels
    with pytest.raises(InputError, match="ranks 2 to 5 of cluster random"):
        part_clusters(cluster, 3, (2, 4, 6))
    assert sizes_of("4+8") == (4, 8) and sizes_of("even") == ()


def test_divisions_are_weighed_from_those_nearest_to_equal_parts_on() -> None:
    """Also where none can be, as on a network of which no part is a cluster: that is told at once."""
    cluster = load_cluster("examples/clusters/h100-16x8.yaml")
    every = size_vectors(cluster, 3, 100_000)
    far = [max(max(3 * n, 128) / min(3 * n, 128) for n in sizes) for sizes in every]
    assert set(product(range(8, 128, 8), repeat=3)) & set(every) == {
        sizes for sizes in product(range(8, 128, 8), repeat=3) if sum(sizes) == 128}
    assert far == sorted(far) and every[0] == (40, 40, 48)
    assert size_vectors(cluster, 3, 20) == every[:20]
    assert size_vectors(load_cluster("examples/clusters/frontier.yaml"), 16, 64) == ()
    with pytest.raises(InputError, match="at most 128 are asked for, these are 400"):
        size_vectors(load_cluster("examples/clusters/h100-32x8.yaml"), 400, 64)


@pytest.mark.parametrize(("options", "words"), [
    ({"stages": (2,), "stage_ranks": ("1+1+2",)}, "give as many numbers as stages"),
    ({"stages": (2, 3), "stage_ranks": ("1+1+2",)}, "for each number of stages, or add even"),
    ({"stages": (1, 2), "stage_ranks": ("4",)}, "are of 1 stages, and stages asks for 1, 2"),
    ({"stage_ranks": ("1+1",)}, "2 ranks, and there are 2 stages on the 4 ranks"),
    ({"stage_ranks": ("1+2",)}, "3 ranks, and there are 2 stages on the 4 ranks"),
    ({"stage_ranks": ("1+x",)}, "says no ranks of stages"),
    ({"stage_ranks": ("1+3",), "schedule": ("chimera:1",)}, "several stages on each part"),
    ({"stages": (8,)}, "whole factors"), ({"stages": (4,), "cut": ("h.1",)}, "make 2 stages"),
    ({"stages": (2,), "schedule": ("2f2b",)}, "no schedule"), ({"cut": ("nowhere",)}, "no cut at 'nowhere'"),
    ({"stages": (0,)}, "at least 1"), ({"stages": (2,), "overlap": True}, "leave overlap out"),
    ({"stages": (2,), "schedule": ("chimera:2",), "microbatches": (4,)}, "both have to be multiples of 4"),
    ({"stages": (2,), "microbatches": (3,)}, "3")])
def test_wrong_options_say_what_is_wrong(options: dict[str, object], words: str) -> None:
    model, sample = zoo.named("gpt2", layers=2, B=8)
    with pytest.raises(InputError, match=words):
        autoddl.plan(model, FOUR, sample, **{"microbatches": (4,), **options})  # type: ignore[arg-type]


def test_a_stage_without_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Softmax(-1), Chain((8, 8)))
    with pytest.raises(InputError, match="stage 1 of 4 would have no parameter"):
        autoddl.plan(model, FOUR, torch.randn(8, 8), stages=(4,), microbatches=(4,), cut=("1", "2", "3"), workers=1)


class Narrowing(nn.Sequential):
    """Layers in a row, and the mean of the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x.mean()


def test_a_parameter_is_read_between_any_two_places() -> None:
    """Around a nonlinearity and a narrowing it is the place where least is sent; none is before the loss alone."""
    model = Narrowing(nn.Linear(8, 16), nn.Tanh(), nn.AvgPool1d(2), nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8),
                      nn.Tanh())
    graph = task_of(model, FOUR, torch.randn(4, 8), PlanOptions(workers=1), "narrow", None).graph
    ops = [op.module for op in needed_ops(graph)]
    assert [ops[at] for at in places_of(graph, ())] == ["3", "4"]


def test_a_search_whose_time_is_over_has_a_plan_and_a_bound_that_is_true() -> None:
    one, (model, sample) = task(layers=1), zoo.named("gpt2", layers=1, B=8)
    found = autoddl.plan(model, FOUR, sample, stages=(2,), schedule=("1f1b", "gpipe"), microbatches=(4,), max_axes=1,
                         workers=1, stages_limit=0.0)
    assert found.pipeline is not None and check_pipeline(found).bound == pytest.approx(found.bound)
    assert any(row["detail"] == "the time was over" for row in found.source["alternatives"])
    every = [pipeline_plan(one, Staged(cut, "1f1b", 4)).predicted.seconds for cut in cuts_of(one, 2)]
    assert 0 < found.bound <= min(every) and found.bound < found.predicted.seconds


def test_two_processes_find_a_plan_and_a_bound_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has a candidate: its pipeline, bound and proof come back, and the better one is the plan."""
    model, given = Chain((16, 64, 16, 64, 16)), list[object]()

    def counted(function: object, argument: object) -> object:
        given.append(function)
        return beside(function, argument)  # type: ignore[arg-type]

    monkeypatch.setattr("autoddl.planner.pipelines.candidate_runs.beside", counted)
    one, two = (autoddl.plan(model, TWO_BY_TWO, torch.randn(32, 16), stages=(2,), microbatches=(2,),
                             schedule=("zb-h1", "1f1b"), max_axes=1, workers=n, stages_limit=1e6) for n in (1, 2))
    assert given and two.pipeline is not None and check_pipeline(two).bound == pytest.approx(two.bound)
    assert two.bound <= one.predicted.seconds and two.gap <= one.gap + 1e-3
    assert all(row["proof"] is not None for row in two.source["alternatives"])


def test_an_interrupt_ends_the_search_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound is true and told in the proof. Where there is no plan yet, the interrupt goes on."""
    first, plans = CutSearch.advance, 1

    def advance(self: CutSearch, climbs: bool = True) -> None:
        if len(self.cuts.found) >= plans:
            raise KeyboardInterrupt
        first(self, climbs)

    monkeypatch.setattr(CutSearch, "advance", advance)
    model, sample = zoo.named("gpt2", layers=1, B=8)
    asked = PlanOptions(stages=(2,), schedule=("1f1b",), microbatches=(4,), max_axes=1, workers=1)
    found = staged_plan(task_of(model, FOUR, sample, asked, "gpt2", None), None, None)
    assert found.proof.endswith("interrupted") and found.source["alternatives"][0]["detail"] == "interrupted"
    assert found.pipeline is not None and check_pipeline(found).bound == pytest.approx(found.bound)
    plans = 0
    with pytest.raises(KeyboardInterrupt):
        staged_plan(task_of(model, FOUR, sample, asked, "gpt2", None), None, None)


def test_what_a_process_told_that_ended_early_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its pipeline with it: this process goes on alone, from the best that it has itself."""
    def killed(*args: object) -> None:
        next(one for one in args if isinstance(one, Clock)).best.tell(1e-9)
        os._exit(1)

    monkeypatch.setattr("autoddl.planner.pipelines.candidate_runs._alone", killed)
    monkeypatch.setattr("autoddl.planner.pipelines.candidate_runs._better", killed)
    model = Chain((16, 64, 16, 64, 16))
    one, two = (autoddl.plan(model, TWO_BY_TWO, torch.randn(32, 16), stages=(2,), microbatches=(2,),
                             schedule=("zb-h1", "1f1b"), max_axes=1, workers=n, stages_limit=1e6) for n in (1, 2))
    assert two.predicted.seconds <= one.predicted.seconds * 1.01 and two.bound <= one.predicted.seconds
    assert two.gap <= one.gap + 0.01


def test_the_least_of_numbers_is_told_between_processes() -> None:
    least = SharedLeast(3.0)
    with beside(least.tell, 2.0) as answer:
        answer()
        assert answer.worker.process.is_alive() and least.value == 2.0
        answer.end()
        assert not answer.worker.process.is_alive()
    least.tell(2.5)
    assert least.value == 2.0


def test_no_stage_is_searched_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a search of a stage moves a second: the limit holds but for the search that is under way."""
    clock = [0.0]

    def searched(*args: object) -> object:
        clock[0] += 1.0
        return search_stage(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("autoddl.planner.pipelines.solved_stages.search_stage", searched)
    for where in ("candidate_runs", "pipeline_search"):
        monkeypatch.setattr(f"autoddl.planner.pipelines.{where}.processor_seconds", lambda: clock[0])
    found = autoddl.plan(Chain((16, 64, 16, 64, 16)), TWO_BY_TWO, torch.randn(32, 16), stages=(2,), microbatches=(2,),
                         schedule=("1f1b",), max_axes=1, workers=1, stages_limit=14.5)
    assert found.pipeline is not None and check_pipeline(found).bound <= found.predicted.seconds
    assert clock[0] == 15.0 and found.source["alternatives"][0]["detail"] == "the time was over"


@pytest.mark.slow
def test_a_budget_that_no_stage_meets_is_infeasible() -> None:
    model, sample = zoo.named("gpt2", layers=2, B=8)
    budget = 1.01 * state_bytes(task(layers=2).graph, "adamw") / 4
    with pytest.raises(Infeasible):
        autoddl.plan(model, FOUR, sample, stages=(2,), microbatches=(4,), budget=budget, max_axes=2)


def test_a_budget_below_the_states_of_a_rank_is_refused_before_a_search() -> None:
    one = task(layers=2)
    least = state_bytes(one.graph, "adamw") / 4

    def never(task: PlanTask, progress: Progress | None) -> WithoutStages:
        raise AssertionError("something was searched")

    with pytest.raises(Infeasible, match="split over all devices") as error:
        staged_plan(replace(one, budget=0.99 * least), never, None)
    assert error.value.is_proved and error.value.needed == least


@pytest.mark.parametrize(("full", "error"), [((), InputError), ((2,), Infeasible)])
def test_another_problem_than_bytes_is_raised_only_where_no_cut_is_too_full(
        full: tuple[int, ...], error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a rank that fit it alone may be too full together."""
    def never(part: StageParts, name: str, cut: tuple[int, ...], roughly: bool) -> TriedCut:
        if cut == full:
            raise Infeasible(2.0, 1.0)
        raise InputError("they store other pieces")

    monkeypatch.setattr(tried_cuts, "try_cut", never)
    options = PlanOptions(stages=(2,), schedule=("1f1b",), microbatches=(2,), max_axes=1, workers=1)
    with pytest.raises(error):
        staged_plan(task_of(Chain((8,) * 5), TWO_BY_TWO, torch.randn(8, 8), options, "chain", None), None, None)


def test_a_pipeline_is_looked_for_early_where_a_plan_without_stages_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """First where no stages share ranks, of candidates that may be faster; then the least bounds are raised."""
    done = list[str]()

    class Candidate:
        answer, seconds, rounds, is_hurried, is_done, cuts = None, inf, 0, False, False, SimpleNamespace(fastest=None)

        def __init__(self, name: str, bound: float, shares: bool) -> None:
            task = SimpleNamespace(options=SimpleNamespace(tolerance=0.0))
            self.name, self.bound, self.part = name, bound, SimpleNamespace(shares=shares, task=task)

        def hurry(self) -> None:
            self.is_hurried = True
            done.append(f"hurry {self.name}")

        def advance(self, climbs: bool) -> None:
            self.is_done = True
            done.append(f"advance {self.name}")

        def look_around(self, bound: float) -> None: ...

    every = [Candidate("shared", 1.0, True), Candidate("apart", 2.0, False), Candidate("slow", 9.0, False)]
    for best, over, expected in ((5.0, 0.3, ["hurry apart", "hurry shared"]), (5.0, 0.2, []), (inf, 0.3, []),
                                 (inf, 0.6, ["hurry shared"])):
        for one in every:
            one.is_hurried = one.is_done = False
        done.clear()
        monkeypatch.setattr("autoddl.planner.pipelines.candidate_runs.processor_seconds", lambda over=over: over)
        run_candidates(Clock(1.0, 0.0, best, every, True))  # type: ignore[arg-type]
        assert done[:len(expected)] == expected and done[len(expected)].startswith("advance"), (best, over, done)


def test_the_candidate_of_the_least_bound_stays_and_waiting_for_another_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next best goes to another process. While this one waits for it, time goes by as fast as there.

    Before two are bounded closely, of the two least it is the one with fewer stages, or the one that is not.
    """
    sent = list[str]()

    class Candidate:
        seconds, rounds, is_hurried, is_done, ended, needed = 3.0, 0, False, False, "", inf
        proof, cuts = None, SimpleNamespace(fastest=None, problem=None, is_full=False)

        def __init__(self, name: str, bound: float, rounds: int = 0, stages: int = 0, answer: object = None) -> None:
            self.name, self.bound, self.rounds, self.answer, self.is_closer = name, bound, rounds, answer, stages > 0
            self.part = SimpleNamespace(shares=False, task=SimpleNamespace(options=SimpleNamespace(tolerance=0.0)),
                                        every=(), stages=stages)

        def advance(self, climbs: bool) -> None:
            self.is_done = True

        def look_around(self, bound: float) -> None: ...

    class Elsewhere:
        is_ready = False

        def __call__(self) -> object:
            return candidate_runs._Answered(candidate_runs._Outcome(2.0, (), None, "done", None, False, inf), 7.0)

        def end(self) -> None: ...

    @contextmanager
    def send(function: Any, argument: object) -> Iterator[Elsewhere]:
        sent.append(function.args[0].name)
        yield Elsewhere()

    monkeypatch.setattr(candidate_runs, "processor_seconds", lambda: 2.0)
    monkeypatch.setattr(candidate_runs, "beside", send)
    known = [Candidate("solved often", 1.0, 8, answer=1), Candidate("first", 1.1, answer=1),
             Candidate("next", 1.2, answer=1)]
    unknown = [Candidate("few", 1.0, stages=4), Candidate("many", 1.1, stages=8), Candidate("more", 1.2, stages=2)]
    alike = [Candidate("not closely", 1.0, stages=4), Candidate("closely", 1.1, stages=4, answer=1)]
    for every in (known, unknown, alike):
        clock = Clock(100.0, 0.0, 5.0, every, True)  # type: ignore[arg-type]
        run_candidates(clock, 2)
        assert clock.spent == 7.0
    assert sent == ["next", "few", "not closely"]


VEE = """microbatches 2, stages on ranks 0 1 1 0
rank 0: 0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1
rank 1: 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
"""


def test_a_written_schedule_is_planned_beside_one_whose_stages_lie_elsewhere(tmp_path: Path) -> None:
    """As many stages on a rank, in the shape of a V and round the ranks: each plan is the one that is found alone."""
    (tmp_path / "vee.txt").write_text(VEE)
    model, sample = Chain((8,) * 6), torch.randn(8, 8)
    options: dict[str, Any] = {"stages": (2,), "microbatches": (2,), "max_axes": 1, "workers": 1}
    both = autoddl.plan(model, FOUR, sample, schedule=f"{tmp_path / 'vee.txt'},interleaved:2", **options)
    alone = [autoddl.plan(model, FOUR, sample, schedule=name, **options)
             for name in (str(tmp_path / "vee.txt"), "interleaved:2")]
    best = min(alone, key=lambda plan: plan.predicted.seconds)
    assert both.pipeline is not None and best.pipeline is not None and both.pipeline.name == best.pipeline.name
    assert both.predicted.seconds == pytest.approx(best.predicted.seconds, rel=2e-3)
    assert check_pipeline(both) and all(check_pipeline(plan) for plan in alone)
    places = [Schedule.parse(plan.pipeline.schedule).placement for plan in alone if plan.pipeline is not None]
    assert places == [((0, 1, 1, 0),), ((0, 1, 0, 1),)]


@pytest.mark.parametrize("schedule,parts", [("1f1b", 4), ("interleaved:2", 2), ("zb-v", 2), ("chimera:1", 2),
                                            ("zb-h1", 2), ("zb-h2", 2)])
def test_the_memory_of_ranks_over_the_step_has_the_peak_of_the_plan(schedule: str, parts: int) -> None:
    """It begins with what is stored, and of the fullest rank it is at most what the plan predicts."""
    one = task("llama", layers=2)
    stages = parts * chunks_of(schedule)
    plan = pipeline_plan(one, Staged(cuts_of(one, stages)[0], schedule, 4))
    plan = replace(plan, source=plan.source | {"graph": graph_to_text(one.variant(4).original),
                                               "cluster": one.cluster.to_yaml()})
    every = memory_of_ranks(plan, foreseen_stages(plan))
    assert len(every) == parts and max(rank.peak for rank in every) == pytest.approx(plan.predicted.peak_bytes)
    for rank in every:
        assert list(rank.times) == sorted(rank.times) and rank.nbytes[0] < rank.peak and rank.when
