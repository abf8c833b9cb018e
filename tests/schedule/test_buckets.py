"""Buckets of deep models: no bucket reaches over the whole depth, none waits for one that is complete later."""

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

from random_plans import random_plan
from sampling import parametrize_or_slow
from tiny import tiny

from autoddl.capture.capture import Captured, capture
from autoddl.core.hubs import add_hubs
from autoddl.cost_models import load_cluster
from autoddl.schedule.buckets import SPAN, gather_buckets, gradient_buckets, parameter_edges

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
