"""The norm of the gradients is one process's, however parameters are split, copied or tied."""


import pytest
import torch
import zoo
from planmaker import random_plans
from ranks import on_ranks, shared
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize


def built() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A tied weight, and a parameter that is frozen."""
    module, sample = zoo.gpt(layers=1, dtype=torch.float64)
    module.get_parameter("norm.bias").requires_grad_(False)
    return module, tuple(sample.args)


@shared
def captured() -> Captured:
    return capture(*built())


def clipped(plan: Plan, largest: float) -> tuple[float, dict[str, Tensor]]:
    module, sample = built()
    parallel = parallelize(module, plan, captured=captured())
    assert parallel.clip_grad_norm_(largest) == 0, "there are no gradients yet"
    parallel.step(sample)
    norm = float(parallel.clip_grad_norm_(largest))
    return norm, {n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
                  for n, p in parallel.named_parameters() if p.grad is not None}


@pytest.mark.ranks
@pytest.mark.parametrize("largest", [0.05, 1e6])
def test_gradients_are_clipped_as_in_one_process(largest: float) -> None:
    module, sample = built()
    module(*sample).backward()
    expected = float(nn.utils.clip_grad_norm_(module.parameters(), largest))
    for mesh in ("a=2", "a=2,b=2"):
        (plan,) = random_plans(*built(), mesh, 1, seed=4, captured=captured())
        for norm, gradients in on_ranks(plan.mesh.size, clipped, plan, largest):
            assert norm == pytest.approx(expected, rel=1e-12)
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
