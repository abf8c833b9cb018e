"""Hubs that say whether their tensor is kept: the same seconds, and rows that see what several readers share."""

import random

import pytest
import torch
from random_plans import LAPTOP, random_choice
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import B, Layout, Mesh, Split
from autoddl.cost_models import load_cluster
from autoddl.explain.rows.memory_rows import line_at_moments, numbers_of
from autoddl.planner.peaks import draft_of
from autoddl.pricing.build_problem import CostNetwork, network_of
from autoddl.pricing.kept_tensors import keepers_of, with_kept_tensors
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables

WIDTH = 64


class Gated(nn.Module):
    """Two products of one tensor, of which backward needs both factors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        loss: Tensor = (self.gate(x).sigmoid() * self.up(x)).mean()
        return loss


def network() -> CostNetwork:
    graph = add_hubs(capture(Gated(), (torch.zeros(32, WIDTH),)).graph)
    pricing = Pricing(graph, Mesh.parse("all=4"), load_cluster(LAPTOP))
    return network_of(pricing, variables(graph, pricing.mesh))


def test_choices_of_both_networks_cost_the_same() -> None:
    plain = network()
    made = with_kept_tensors(plain)
    assert len(made.counts) == 1 and sum(made.network.sizes) > sum(plain.sizes)
    for seed in range(20):
        choice = random_choice(plain.problem(None), random.Random(seed))
        settled = made.settled(choice)
        assert made.plain(settled) == choice
        assert made.network.problem(None).cost(settled) == pytest.approx(plain.seconds(choice), rel=1e-12)


def test_a_tensor_that_is_not_kept_is_not_read_as_it_is() -> None:
    plain = network()
    made = with_kept_tensors(plain)
    ((hub, count),) = made.counts.items()
    for seed in range(20):
        settled = list(made.settled(random_choice(plain.problem(None), random.Random(seed))))
        if settled[hub] < count:
            settled[hub] += count
            assert made.network.problem(None).cost(tuple(settled)) == float("inf")


def test_a_row_sees_the_tensor_that_the_second_reader_keeps() -> None:
    """The first reader takes a slice, the second keeps the whole tensor: plain rows count the slice alone."""
    plain = network()
    graph, made = plain.pricing.graph, with_kept_tensors(plain)
    (reads,) = keepers_of(graph, True).values()
    (first, k), (last, slot) = reads
    whole, cut = Layout((B,)), Layout((Split(1),))
    names = {v.name: n for n, v in enumerate(plain.variables)}
    found = 0
    for seed in range(400):
        choice = random_choice(plain.problem(None), random.Random(seed))
        (hub,) = made.counts
        at = [plain.variables[v].choices[choice[v]] for v in (hub, names[graph.ops[first].name],
                                                              names[graph.ops[last].name])]
        if at[0].outputs[0] == whole and at[1].inputs[k] == cut and at[2].inputs[slot] == whole:
            moment = f"backward {graph.ops[last].name}"
            line = line_at_moments(draft_of(plain, choice), graph, plain.pricing.optimizer, plain.pricing.cluster)
            row, less = (one.row_bytes(options, {moment: 1.0})
                         for one, options in ((made.network, made.settled(choice)), (plain, choice)))
            assert less + 32 * WIDTH * 4 <= row * (1 + 1e-12) <= line[numbers_of(graph, moment)[0]] * (1 + 1e-9)
            found += 1
    assert found
