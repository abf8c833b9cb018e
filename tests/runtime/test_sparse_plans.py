"""Plans whose gradients add up sparse run on ranks: what they send and keep is the whole gradient, and ranks agree."""

import pytest
import torch
import zoo
from random_plans import random_plan
from ranks import on_ranks, shared
from torch import nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, as_sample, parted
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.launch.check import mismatches
from autoddl.runtime.parallelize import ParallelModel, parallelize

SLOW = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 100 GB/s, peak: {float32: 1 TFLOP/s, bfloat16: 1 TFLOP/s}}
levels: [{name: all, size: 4, bandwidth: 1 MB/s, latency: 1 us}]
"""
STEPS = 3


def model() -> tuple[nn.Module, Sample]:
    return zoo.gpt(B=8, layers=1)


@shared
def _captured(parts: int) -> Captured:
    module, sample = model()
    return capture(module, parted(as_sample(sample), parts))


def plan_of(seed: int, parts: int, mesh: str | None = None) -> Plan:
    return random_plan(_captured(parts), seed, mesh, parse_cluster(SLOW, "slow"), parts, sparse=0.05)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's piece of the gradient."""
    assert parameter.grad is not None
    piece: torch.Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return piece


def _on_a_rank(plan: Plan, parts: int) -> dict[str, object]:
    """Of some steps whose gradients add up: mismatches, what was lost, and the gradients of parameters kept whole."""
    captured, batch = _captured(parts), as_sample(model()[1])
    sparse, whole = (parallelize(model()[0], one, captured=captured)
                     for one in (plan, plan.without_codecs()))
    wrong, fits = list[str](), True
    for _ in range(STEPS):
        sparse.step(batch)
        whole.step(batch)
        wrong += mismatches(sparse)
        fits &= all(one.fits for one in sparse.recorder.sparse)
    sums, lost, most, gradients = len(sparse.recorder.sparse), 0.0, 0.0, dict(whole.named_parameters())
    left = {name: sum(one.summed() for one in many) for name, many in sparse.residuals().items()}
    for name, parameter in sparse.named_parameters():
        if parameter.grad is not None:
            piece = local(gradients[name])
            found = local(parameter) + left.get(name, 0.0)
            lost, most = max(lost, float((found - piece).abs().max())), max(most, float(piece.abs().max()))
    alike = {name: local(parameter) for name, parameter in sparse.named_parameters() if name in left
             and not hasattr(parameter.grad, "_local_tensor")}
    return {"wrong": wrong, "sums": sums, "lost": lost / most, "fits": fits, "alike": alike}


@pytest.mark.ranks
@pytest.mark.parametrize(("seed", "parts", "mesh"), [(0, 1, None), (1, 2, "machine=2,pair=2"), (2, 1, "b=2,a=2")])
def test_a_sparse_plan_sends_and_keeps_the_whole_gradient(seed: int, parts: int, mesh: str | None) -> None:
    """Whatever else is split: in parts of the mesh sums may be whole, and pieces of a gradient may be sparse."""
    plan = plan_of(seed, parts, mesh)
    assert plan.sparse_sums and not plan.codecs and not plan.without_codecs().sparse_sums
    found = on_ranks(4, _on_a_rank, plan, parts)
    for one in found:
        assert one["wrong"] == [] and one["fits"] and one["sums"]
        assert isinstance(one["lost"], float) and one["lost"] < 1e-6
    if mesh is None:
        for one in found[1:]:
            assert one["alike"].keys() == found[0]["alike"].keys()
            assert all(torch.equal(g, found[0]["alike"][name]) for name, g in one["alike"].items())


def test_a_model_alone_has_no_residual() -> None:
    captured = _captured(1)
    plan = random_plan(captured, 0, "all=1", parse_cluster(SLOW.replace("size: 4", "size: 1"), "one"), sparse=0.05)
    alone: ParallelModel = parallelize(model()[0], plan, captured=captured)
    alone.step(as_sample(model()[1]))
    assert alone.residuals() == {}
