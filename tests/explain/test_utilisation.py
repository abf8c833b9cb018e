"""Model-FLOP utilisation is that of a plain count."""

from dataclasses import replace

import pytest
import torch
from planmaker import cluster_of
from torch import Tensor, nn

import autoddl
from autoddl.explain.utilisation import model_flops_utilisation


class Two(nn.Module):
    """Two products of 64 x 64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(self.first(x)).square().mean()
        return loss


@pytest.mark.parametrize("parts", [1, 2])
def test_a_plain_count_gives_the_utilisation(parts: int) -> None:
    """Forward of both, the gradients of both weights, and that of the second layer's input."""
    plan = autoddl.plan(Two(), cluster_of("a=4"), (torch.zeros(32, 64),), microbatches=(parts,))
    flops = 5 * 2 * 32 * 64 * 64
    assert model_flops_utilisation(plan) == pytest.approx(flops / 1e6 / (4 * plan.predicted.seconds))
    assert 0 < (model_flops_utilisation(plan) or 0) < 1
    assert model_flops_utilisation(replace(plan, source={})) is None
