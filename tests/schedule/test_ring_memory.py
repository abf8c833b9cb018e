"""The memory of a rank whose attention is part of a ring: the planned peak is the tracked one, and falls with ranks."""

import pytest
import torch
import zoo
from ranks import on_ranks
from shell import LAPTOP
from torch.distributed._tools.mem_tracker import MemTracker

import autoddl
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, load_cluster
from autoddl.runtime.parallelize import parallelize

NEAR = 0.05
"""Relative, of the peak."""
LENGTH = 2048


def tracked(plan: Plan, family: str) -> int:
    """On a rank: bytes at the peak of a step, beside the optimizer's state."""
    model, sample = getattr(zoo, family)(B=1, T=LENGTH, layers=1)
    parallel = parallelize(model, plan, sample)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        parallel.step(sample)
    return max(int(found["Total"]) for found in tracker.get_tracker_snapshot("peak").values())


def of_ranks(ranks: int) -> Cluster:
    """The laptop, or one of its pairs."""
    place = load_cluster(LAPTOP)
    return place if ranks == 4 else Cluster(**{**{name: getattr(place, name) for name in place.__slots__},
                                               "levels": place.levels[:1]})


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_peak_of_a_rank_of_a_ring_is_the_tracked_one(family: str) -> None:
    """Of 4 ranks, a rank holds half of what it holds of 2, but for its parameters."""
    peaks = []
    for ranks in (2, 4):
        torch.manual_seed(0)
        model, sample = getattr(zoo, family)(B=1, T=LENGTH, layers=1)
        plan = autoddl.plan(model, of_ranks(ranks), sample, mine=f"cp={ranks},ring", optimizer="sgd")
        found = max(on_ranks(ranks, tracked, plan, family))
        assert plan.predicted.peak_bytes == pytest.approx(found, rel=NEAR)
        peaks.append(found)
    assert peaks[1] < 0.57 * peaks[0]
