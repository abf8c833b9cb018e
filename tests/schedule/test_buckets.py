"""Buckets of deep models: no bucket reaches over the whole depth, none waits for one that is complete later."""

from collections import Counter
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from random_plans import random_plan
from ranks import on_ranks
from sampling import parametrize_or_slow
from tiny import tiny
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import B
from autoddl.core.plan import Plan
from autoddl.cost_models import load_cluster
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.buckets import SPAN, gather_buckets, gradient_buckets, parameter_edges
from autoddl.schedule.traffic import traffic

FLAT = Path(__file__).parent.parent.parent / "examples" / "clusters" / "rehearsal-4x1-200.yaml"


@cache
def captured() -> Captured:
    return capture(tiny(layers=12))


@parametrize_or_slow("seed,limit", [(0, 256), (1, 4096), (2, 1 << 20)], [
    (seed, limit) for seed, own in enumerate((256, 4096, 1 << 20)) for limit in (256, 4096, 1 << 20) if limit != own])
def test_small_parameters_of_all_layers_share_no_bucket(seed: int, limit: int) -> None:
    graph = add_hubs(captured().graph)
    plan = replace(random_plan(captured(), seed, "net=4", load_cluster(FLAT)), bucket_bytes=limit)
    edges = parameter_edges(plan, graph)
    size = {edge.tensor.fqn: prod(edge.tensor.shape) * edge.tensor.itemsize for edge in edges}
    for buckets, order in ((gather_buckets(plan, graph), [e.tensor.fqn for e in edges]),
                           (gradient_buckets(plan, graph), [e.tensor.fqn for e in reversed(edges)])):
        sent = {fqn for bucket in buckets for fqn in bucket.members}
        order = [fqn for fqn in order if fqn in sent]
        place = {fqn: i for i, fqn in enumerate(order)}
        for bucket in buckets:
            first, last = place[bucket.members[0]], place[bucket.members[-1]]
            assert sum(size[fqn] for fqn in order[first:last]) <= SPAN * limit + max(size.values())
    complete = [place[bucket.members[-1]] for bucket in gradient_buckets(plan, graph)]
    assert complete and complete == sorted(complete)


@pytest.mark.parametrize("words", [{"sparse": "0.1"}, {"codecs": ("gradients=int8", "weights=zfp8")}])
def test_members_whose_values_are_sent_together_are_repeated_on_the_same_axes(words: dict[str, Any]) -> None:
    """Otherwise copies of one come to differ, by the pieces of another beside which they were chosen or scaled."""
    graph, joined, kinds = add_hubs(captured().graph), 0, set[bool]()
    for seed in range(2):
        plan = random_plan(captured(), seed, "a=2,b=2", load_cluster(FLAT), **words)
        edges = {edge.tensor.fqn: edge for edge in parameter_edges(plan, graph)}
        for bucket in (*gather_buckets(plan, graph), *gradient_buckets(plan, graph)):
            every = [edges[fqn] for fqn in bucket.members if any(s.codec for s in (*bucket.steps, *bucket.once))]
            gathered = any(step in edge.forward for edge in every for step in bucket.steps)
            starts = [edge.conversion.source if gathered else edge.conversion.gradient for edge in every]
            repeated = {tuple(state == B for state in start) for start in starts if start is not None}
            assert len(repeated) <= 1
            joined, kinds = joined + (len(every) > 1), kinds | {any(one) for one in repeated}
    assert joined and kinds == {False, True}


class Squeezed(nn.Module):
    """Reads a weight behind a view, as Mamba does the weight of its convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 1, 4))
        self.gain = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.gain, self.weight.squeeze(1)).square().mean()


SAMPLE = (torch.linspace(-1.0, 1.0, 32, dtype=torch.float64).view(8, 4),)


def steps_of(plans: list[Plan]) -> list[tuple[Counter[tuple[object, ...]], Counter[tuple[object, ...]]]]:
    """On one rank: what is planned and what is sent, by plan."""
    found = []
    for plan in plans:
        parallel = parallelize(Squeezed(), plan, sample=SAMPLE)
        parallel.step(SAMPLE)
        coordinate = plan.mesh.coordinate(torch.distributed.get_rank())
        planned, sent = traffic(plan, parallel.graph, coordinate), parallel.recorder.executed
        found.append((Counter[tuple[object, ...]]((s.direction, s.kind, s.axes, s.nbytes) for s in planned),
                      Counter[tuple[object, ...]]((e.direction, e.kind, e.axes, e.nbytes) for e in sent)))
    return found


@pytest.mark.ranks
def test_a_weight_is_not_gathered_again_where_backward_reads_what_a_message_made_of_its_view() -> None:
    made = capture(Squeezed(), SAMPLE)
    plans = [random_plan(made, seed, "all=4") for seed in range(12)]
    saved = {edge.saved for plan in plans for edge in parameter_edges(plan, add_hubs(made.graph))
             if edge.tensor.fqn == "weight" and edge.forward}
    assert saved == {True, False}
    for results in on_ranks(4, steps_of, plans):
        assert [planned - sent for planned, sent in results] == [sent - planned for planned, sent in results]
