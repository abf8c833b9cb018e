"""Pipelines as Megatron makes them: equal numbers of blocks, one grid in all stages, and never better than the best."""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from torch import nn

import autoddl
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import HUB, add_hubs, needed_ops
from autoddl.core.layout import B, Layout, Mesh, Split
from autoddl.core.recompute import blocks_of
from autoddl.core.stages import cut_graph
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.pipeline_search import search_pipelines
from autoddl.planner.pipelines.uniform_pipelines import Uniform, blocks_of_stages, uniform_cuts, uniform_pipeline
from autoddl.planner.strategies import grids_of_stages
from autoddl.planner.task import PlanTask, task_of
from autoddl.pricing.space import variables

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"


@lru_cache(maxsize=1)
def task() -> PlanTask:
    options = PlanOptions(microbatches=(4,), stages=(2,), max_axes=2, workers=1)
    return task_of(tiny.tiny(4, dropout=0.0), TWO_BY_TWO, None, options, "tiny", None)


@lru_cache(maxsize=2)
def uniform(schedule: str = "1f1b") -> Uniform:
    return uniform_pipeline(task(), schedule)


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_have_equally_many_blocks(stages: int) -> None:
    graph = task().variant(4).original
    ends = [0, *uniform_cuts(graph, stages), len(needed_ops(graph))]
    starts = [block.start for block in blocks_of(graph)]
    assert [sum(a <= at < b for at in starts) for a, b in pairwise(ends)] == [4 // stages] * stages


def test_what_cannot_be_uniform_says_so() -> None:
    with pytest.raises(InputError, match=re.escape("5 stages cannot have equally many of the model's 4 blocks")):
        uniform_cuts(task().variant(4).original, 5)


@pytest.mark.parametrize(("blocks", "stages", "each"), [(4, 2, (2, 2)), (4, 3, (1, 2, 1)), (4, 6, (0, 1, 1, 1, 1, 0)),
                                                       (126, 8, (15, *(16,) * 6, 15)), (4, 5, ())])
def test_both_ends_count_as_a_block_where_blocks_do_not_divide(blocks: int, stages: int, each: tuple[int, ...]) -> None:
    assert blocks_of_stages(blocks, stages) == each
    if blocks == 4 and each:
        graph = task().variant(4).original
        ends = [0, *uniform_cuts(graph, stages), len(needed_ops(graph))]
        starts = [block.start for block in blocks_of(graph)]
        assert tuple(sum(a <= at < b for at in starts) for a, b in pairwise(ends)) == each


class Normed(nn.Module):
    """Blocks of a product and a batch norm, which updates its statistics in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("how", [{"mine": "pp=2"}, {"stages": (2,)}])
def test_a_buffer_that_every_pipe_would_update_is_refused_before_any_search(how: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"buffer blocks\.0\.1\..* 2 pipes would update a copy each: take 1f1b"):
        autoddl.plan(Normed(), TWO_BY_TWO, torch.randn(8, 8), schedule=("chimera:1",), microbatches=(2,), workers=1,
                     **how)


@pytest.mark.slow
def test_the_found_pipeline_is_no_slower_than_a_uniform_one() -> None:
    best = search_pipelines(task(), float("inf")).plan
    assert best is not None
    assert best.predicted.seconds <= uniform().plan.predicted.seconds * (1 + task().options.tolerance)


def _layouts(graph: Graph, op: Op, inputs: Iterable[Layout]) -> Iterator[tuple[bool, bool, Layout]]:
    """Yields (whether it is a parameter, whether it is a batch, its layout) of what an op reads; a hub is neither."""
    behind = {one.outputs[0]: one.inputs[0] for one in graph.ops if one.target == HUB}
    for t, layout in zip(op.inputs, inputs, strict=True):
        parameter = graph.tensors[behind.get(t, t)].kind is Kind.PARAMETER
        yield parameter, not parameter and graph.tensors[t].shape[:1] == (2,), layout


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
def test_all_stages_have_one_grid(schedule: str) -> None:
    found = uniform(schedule)
    assert found.plan.pipeline is not None
    assert found.data * found.tensor == 2 and sum(found.blocks) == 4
    graphs = cut_graph(task().variant(4).original, found.plan.pipeline.cuts)
    for stage, part in zip(found.plan.pipeline.stages, graphs, strict=True):
        graph, chosen = add_hubs(part.graph), {one.name: one for one in stage.plan.decisions}
        for op in (op for op in graph.ops if op.name in chosen):
            for parameter, batch, layout in _layouts(graph, op, chosen[op.name].inputs):
                assert not (found.data == 2 and parameter and layout[0] != B), op.name
                assert not (found.tensor == 2 and batch and layout[0] == Split(0)), op.name


def test_a_stage_splits_the_batch_that_it_receives() -> None:
    """Behind the first stage no input of the model says what a batch is: the whole graph does."""
    whole, mesh = task().variant(4).original, Mesh.parse("node=2")
    graph = add_hubs(cut_graph(whole, uniform_cuts(whole, 4))[1].graph)
    assert not any(t.kind is Kind.INPUT for t in graph.tensors)
    grids, seen = grids_of_stages([mesh], whole), {}
    for grid, one in grids.items():
        rows = [row for v in variables(graph, mesh, one.region(graph, mesh)) if isinstance(v.item, Op)
                and v.item.target == "aten.linear.default" for choice in v.choices
                for row in _layouts(graph, v.item, choice.inputs)]
        seen[grid] = {layout[0] for _, batch, layout in rows if batch}
    assert seen[2, 1] == {Split(0)} and seen[1, 2] and Split(0) not in seen[1, 2]
