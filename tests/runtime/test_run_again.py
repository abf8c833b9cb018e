"""Ops that run again in backward change no gradient, not by a bit, and no buffer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from planmaker import cluster_of, random_plans
from precise import Precise
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.api import plan
from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, as_sample, parted
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import FULL, LIGHT, SELECTIVE, blocks_of, recompute_entry
from autoddl.runtime.parallelize import MeshModel, parallelize

DROPPED = ("gpt", "gpt2", "bert", "t5")
"""Models with dropout."""


def made(name: str) -> tuple[Precise, Sample]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.1} if name in DROPPED else {}
    module, sample = getattr(zoo, name)(dtype=torch.float64, **options)
    return Precise(module), sample


@shared
def captured(name: str, microbatches: int) -> Captured:
    module, sample = made(name)
    return capture(module, parted(as_sample(sample), microbatches))


def policies(found: Captured) -> list[tuple[str, ...]]:
    """Nothing, all at one level, and levels mixed."""
    names = [block.name for block in blocks_of(add_hubs(found.graph))]
    mixed = [recompute_entry(name, (SELECTIVE, FULL, LIGHT)[k % 3]) for k, name in enumerate(names)]
    return [(), *(tuple(recompute_entry(name, level) for name in names) for level in (FULL, SELECTIVE, LIGHT)),
            tuple(mixed)]


def trained(name: str, plan: Plan) -> list[Tensor]:
    """Losses of two steps, and gradients and buffers after them."""
    module, sample = made(name)
    parallel = parallelize(module, plan, captured=captured(name, plan.microbatches))
    losses = [parallel.step(sample.kwargs or sample.args) for _ in range(2)]
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return [*losses, *own, *(b.clone() for b in module.buffers())]


def all_equal(name: str, plans: list[Plan]) -> list[bool]:
    """Of each plan, whether all is as under the first, to the bit."""
    truth, *others = (trained(name, one) for one in plans)
    return [len(truth) == len(found) and all(map(torch.equal, truth, found)) for found in others]


@parametrize_or_slow("name, microbatches", [("gpt", 1)], [
    (name, m) for name in ("gpt", "gpt2", "llama", "bert", "t5", "vit", "vgg_bn", "resnet", "mixture") for m in (1, 2)
    if (name, m) != ("gpt", 1)])
def test_gradients_on_one_rank_are_equal_to_the_bit(name: str, microbatches: int) -> None:
    module, sample = made(name)
    one = plan(module, cluster_of("core=1"), sample, microbatches=(microbatches,))
    found = all_equal(name, [replace(one, recompute=again) for again in policies(captured(name, microbatches))])
    assert found == [True] * 4


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["a=2", "a=2,b=2"])
@pytest.mark.parametrize("name", ["gpt", "llama", "t5", "resnet", "mixture"])
def test_gradients_on_several_ranks_are_equal_to_the_bit(name: str, mesh: str) -> None:
    """Of random plans, with parameters gathered once and again, of one microbatch and of two."""
    for microbatches, regather in ((1, True), (2, None)):
        found = captured(name, microbatches)
        (one,) = random_plans(*made(name), mesh, 1, seed=microbatches, regather=regather, microbatches=microbatches,
                              captured=found)
        again = [replace(one, recompute=names) for names in policies(found)]
        for equal in on_ranks(2 if mesh == "a=2" else 4, all_equal, name, again):
            assert equal == [True] * 4


def test_evaluation_runs_nothing_again() -> None:
    module, sample = made("gpt")
    one = plan(module, cluster_of("core=1"), sample, recompute=("full",))
    parallel = parallelize(module, one)
    assert one.recompute and torch.isfinite(parallel(sample.args))
    assert isinstance(parallel, MeshModel)
    (evaluation,) = parallel.runner.evaluations.values()
    code = [one.program.code for one in (parallel.runner.free[0].lowered, evaluation.lowered)]
    assert ["keep_0" in text for text in code] == [True, False]
