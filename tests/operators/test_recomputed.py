"""Which ops of a block run again: what they bring back, what they read, and what is kept instead."""

from functools import cache

import torch
import zoo
from sampling import parametrize_or_slow
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB, add_hubs
from autoddl.core.recompute import FULL, LIGHT, SELECTIVE, Block, blocks_of, recompute_entry
from autoddl.operators.recomputed import RecomputedPart, levels, recomputed_ops, recomputed_parts


def parts_at(graph: Graph, level: str) -> tuple[RecomputedPart, ...]:
    return recomputed_parts(graph, [recompute_entry(block.name, level) for block in blocks_of(graph)])


@cache
def graph_of(name: str) -> Graph:
    """A model's graph, with dropout where it has some."""
    return add_hubs(capture(*getattr(zoo, name)(**({"dropout": 0.1} if name in ("gpt2", "t5") else {}))).graph)


def names_of(graph: Graph, tensors: tuple[int, ...]) -> list[str]:
    return [graph.tensors[t].name for t in tensors]


@parametrize_or_slow("name", ["gpt2", "resnet"], ["t5", "llama", "bert", "vit", "mixture"])
def test_parts_read_what_they_do_not_write_and_bring_back_what_stays_inside(name: str) -> None:
    graph = graph_of(name)
    dependent, readers = graph.dependent(), graph.consumers()
    for level in (LIGHT, SELECTIVE, FULL):
        for part in parts_at(graph, level):
            inside = range(part.block.start, part.block.end)
            assert set(part.ops) <= set(inside) and part.trigger in inside and part.level == level
            assert all(not dependent.isdisjoint(graph.ops[i].inputs) for i in part.ops), "the cone runs once"
            written = {t for i in part.ops for t in graph.ops[i].outputs}
            read = {t for i in part.ops for t in graph.ops[i].inputs}
            read |= {graph.ops[i].inputs[k] for i, k in part.copies}
            assert {i for i, _ in part.copies} <= set(inside) - set(part.ops)
            assert set(part.reads) == read - written and written.issuperset(part.noted)
            assert all(i in inside for t in part.noted for i, _ in readers[t])


@parametrize_or_slow("name", ["gpt2", "resnet"], ["t5", "llama", "mixture"])
def test_selective_runs_no_op_again_that_full_does_not(name: str) -> None:
    """So whatever a plan takes at none, it takes no less at selective, and no less at full. Hubs are no work."""
    graph = graph_of(name)
    light, selective, full = ({i for part in parts_at(graph, level) for i in part.ops if graph.ops[i].target != HUB}
                              for level in (LIGHT, SELECTIVE, FULL))
    assert light <= selective <= full


def test_blocks_are_decided_one_by_one() -> None:
    graph = graph_of("t5")
    blocks = blocks_of(graph)
    mixed = recomputed_parts(graph, [recompute_entry(block.name, (SELECTIVE, FULL)[k % 2])
                                     for k, block in enumerate(blocks)])
    alone = {(part.block, level): part for level in (SELECTIVE, FULL) for part in parts_at(graph, level)}
    assert mixed == tuple(alone[block, (SELECTIVE, FULL)[k % 2]] for k, block in enumerate(blocks))


class Gated(nn.Module):
    """A block with a norm, a product that is added up, and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(32), nn.LayerNorm(32)
        self.mix, self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in (
            (32, 32), (32, 64), (32, 64), (64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        y = self.other(x)
        out: Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.body = nn.Linear(32, 32), nn.ModuleList([Gated()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.body:
            x = block(x)
        return x.square().mean()


def gated() -> Graph:
    return add_hubs(capture(Stack(), torch.randn(8, 16, 32)).graph)


def test_selective_keeps_products_and_what_only_they_would_bring_back() -> None:
    graph = gated()
    (part,) = parts_at(graph, SELECTIVE)
    again = {graph.ops[i].target for i in part.ops}
    assert "aten.linear.default" not in again and {"aten.layer_norm.default", "aten.silu.default"} <= again
    kept = [op for op in graph.ops if op.target == "aten.linear.default" and op.outputs[0] in part.reads]
    assert [op.module for op in kept] == ["start", "body.0.gate", "body.0.up"]
    sums = [op for op in graph.ops if op.target == "aten.add.Tensor"]
    assert sums[0].outputs[0] in part.reads, "the sum is kept: of it and the product, one is enough"
    assert not {op.name for op in sums} & recomputed_ops(graph, ["body.0:selective"])


def test_full_keeps_what_comes_from_outside() -> None:
    graph = gated()
    (part,) = parts_at(graph, FULL)
    weights = [name for name in names_of(graph, part.reads) if name.startswith("p_")]
    assert [name for name in names_of(graph, part.reads) if name not in weights] == ["linear"]
    last = [op.name for op in graph.ops if op.module.startswith("body.0")][-2:]
    assert not {*last} & recomputed_ops(graph, ["body.0"]), "no one saved the last product"
    assert part.block == Block("body.0", part.ops[0], part.block.end)


def test_levels_are_those_at_which_something_runs_again() -> None:
    assert levels(gated()) == (SELECTIVE, FULL)
    assert levels(add_hubs(capture(*zoo.resnet()).graph)) == (FULL,)
    assert levels(add_hubs(capture(*zoo.regression()).graph)) == ()
