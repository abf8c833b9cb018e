"""The search over rings of attention: the best of all plans by trying all, taken where it pays, offered where asked."""

import re
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from shell import LAPTOP
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl
from autoddl.capture.capture import capture
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh, Split
from autoddl.cost_models import load_cluster
from autoddl.explain.compare_run import graph_of_plan
from autoddl.explain.rings import ring_text
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.kernels.halves import Ranks
from autoddl.operators.ring import ATTENTION, LONG, with_rings
from autoddl.planner.question import rebuild
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, variables
from autoddl.schedule.traffic import traffic
from autoddl.schedule.uplink_bytes import _leaving
from autoddl.search import solve


class Attends(nn.Module):
    """Attention of one batch and one head, whose queries and keys are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * self.q, y * self.k, y, is_causal=True).mean()


def graph_of(length: int) -> Graph:
    x = torch.zeros(1, 1, length, 8, device="meta")
    return add_hubs(capture(Attends(), (x, x)).graph)


def attention(graph: Graph, mesh: str = "all=4") -> list[Choice]:
    """The choices of attention."""
    return list(next(v.choices for v in variables(graph, Mesh.parse(mesh)) if "scaled_dot_product" in v.name))


@pytest.mark.parametrize(("mesh", "length"), [("all=4", 64), ("all=4", 4096), ("machine=2,pair=2", 4096)])
def test_the_search_finds_the_best_of_all_plans_with_rings(mesh: str, length: int) -> None:
    pricing = Pricing(with_rings(graph_of(length)), Mesh.parse(mesh), load_cluster(LAPTOP))
    space = variables(pricing.graph, pricing.mesh)
    problem = problem_of(pricing, space, None)
    exact = solve(problem)
    if mesh == "all=4" and length == 4096:
        assert exact.seconds == pytest.approx(solve(problem, "exhaustive").seconds, rel=1e-12)
    chosen = next(v.choices[k] for v, k in zip(space, exact.choice, strict=True) if "scaled_dot" in v.name)
    assert bool(chosen.inner) == (length == 4096), "a causal ring computes half of what other splits of queries do"


def test_rings_are_offered_where_sequences_are_long_or_it_is_asked_for() -> None:
    assert not any(one.inner for one in attention(graph_of(64)))
    assert any(one.inner for one in attention(with_rings(graph_of(64))))
    assert any(one.inner for one in attention(graph_of(LONG)))


def test_a_ring_of_more_ranks_takes_longer_though_its_shards_are_alike() -> None:
    """Each of 4 ranks meets the keys of twice as many as each of 2, in one process and whichever is priced first."""
    def seconds(ranks: int) -> float:
        graph, mesh = with_rings(graph_of(32_768 * ranks)), Mesh.parse(f"all={ranks}")
        pricing = Pricing(graph, mesh, load_cluster("examples/clusters/h100-8x16x8.yaml"))
        op = next(op for op in graph.ops if "scaled_dot_product" in op.name)
        ring = next(one for one in attention(graph, f"all={ranks}") if one.inner and str(one.inputs[1]) == "S(2)")
        return sum(map(sum, pass_seconds(pricing, op, ring, graph.differentiable())))

    two, four, again = seconds(2), seconds(4), seconds(2)
    assert two == again and four / two == pytest.approx(2, rel=0.1)


def test_choices_of_equal_layouts_are_told_apart_in_words() -> None:
    texts = [str(one) for one in attention(with_rings(graph_of(64)))]
    assert len(set(texts)) == len(texts) and texts.count("S(2), B, B -> S(2), with messages inside") == 1


def test_that_rings_are_tried_is_no_part_of_the_model() -> None:
    graph = graph_of(64)
    assert with_rings(graph) != graph and with_rings(graph).fingerprint() == graph.fingerprint()


class Model(nn.Module):
    """Tokens, causal attention of two heads, and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.qkv, self.head, self.p = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16), dropout

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.tokens(ids)).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.zeros(2, 16, dtype=torch.int64)


@pytest.mark.parametrize("asked", [{"mine": "cp=2,tp=2,ring"}, {"mesh": "machine=2,pair=2",
                                                                "pins": ("machine=ring data", "pair=tensor")}])
def test_a_ring_has_a_name_and_is_said_in_words(asked: dict[str, object]) -> None:
    plan = autoddl.plan(Model(), LAPTOP, (IDS,), **asked)  # type: ignore[arg-type]
    (one,) = [d for d in plan.decisions if d.target == ATTENTION]
    assert all(layout[0] == Split(2) for layout in one.inputs)
    assert ring_text(plan).startswith("of 1 operator keys and values go round a ring of 2 ranks over")
    assert ring_text(autoddl.plan(Model(), LAPTOP, (IDS,))) == ""


HALVES = ("machine=halves data", "pair=halves data")


def test_traded_halves_have_a_name_and_leave_a_unit_as_the_kernel_sends_them() -> None:
    plan = autoddl.plan(Model(), LAPTOP, (IDS,), mesh="machine=2,pair=2", pins=HALVES)
    assert ring_text(plan) == ("of 1 operator halves of the queries are traded, so that work is even, among 4 ranks "
                               "over machine+pair")
    assert rebuild(plan).problem.cost(rebuild(plan).choice) == pytest.approx(plan.predicted.seconds, rel=1e-12)
    graph, parts = graph_of_plan(plan), dict[tuple[int, bool], tuple[int, ...]]()
    for rank, there in product(range(4), (True, False)):
        def noting(rows: Tensor, sent: tuple[int, ...], *_: object, at: tuple[int, bool] = (rank, there), **__: object
                   ) -> Tensor:
            parts[at] = sent
            return rows
        Ranks(cast(Any, SimpleNamespace(exchanged=noting)), rank, 4).trade((torch.zeros(1, 1, 4, 8),), there)
    every = [[one for one in traffic(plan, graph, plan.mesh.coordinate(rank)) if one.kind == EXCHANGE]
             for rank in range(4)]
    assert [len(one) for one in every] == [4] * 4
    for unit, there in product((range(1), range(1, 2), range(2), range(1, 4)), (True, False)):
        left = sum(n for rank in unit for to, n in enumerate(parts[rank, there]) if to not in unit)
        assert left > 0
        for number in range(4):
            counted = sum(_leaving(plan, graph, every[rank][number], (0, 1, 2, 3), rank)(unit) for rank in unit)
            assert counted == left * every[0][number].nbytes / 2


def test_a_ring_that_cannot_go_round_says_why() -> None:
    with pytest.raises(InputError, match=re.escape("of dropout or of a length")):
        autoddl.plan(Model(0.1), LAPTOP, (IDS,), mine="cp=4,ring")
    with pytest.raises(InputError, match=re.escape("of dropout or of a length")):
        autoddl.plan(Model(), LAPTOP, (IDS[:, :12],), mine="cp=4,ring")
    with pytest.raises(InputError, match=r"round a ring or trades halves of its queries, and not both"):
        autoddl.plan(Model(), LAPTOP, (IDS,), mesh="machine=2,pair=2", pins=("machine=halves data", "pair=ring data"))
    with pytest.raises(InputError, match=r"ranks cannot trade halves of the queries of .* take 'context' in place"):
        autoddl.plan(Model(0.1), LAPTOP, (IDS,), mesh="machine=2,pair=2", pins=HALVES)
