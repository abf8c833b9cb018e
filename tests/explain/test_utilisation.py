"""Model-FLOP utilisation is that of a plain count."""

from dataclasses import replace

import pytest
import torch
from planmaker import cluster_of
from torch import Tensor, nn

import autoddl
from autoddl.cli.tables import plan_tables
from autoddl.cost_models import parse_cluster
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


TF32 = """name: one
device: {name: gpu, kind: gpu, memory: 1 GB, bandwidth: 1 TB/s,
         peak: {float32: 1 GFLOP/s, tf32: 8 GFLOP/s, bfloat16: 16 GFLOP/s}}
levels: [{name: a, size: 1, bandwidth: 1 GB/s, latency: 1 us}]
"""


class Image(nn.Module):
    """One convolution that keeps the size of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.conv(x).square().mean()
        return loss


def test_float32_convolutions_are_counted_at_the_peak_at_which_they_are_priced() -> None:
    plan = autoddl.plan(Image(), parse_cluster(TF32, "one"), (torch.zeros(4, 8, 32, 32),))
    flops = 2 * 2 * 4 * 16 * 32 * 32 * 8 * 9
    assert model_flops_utilisation(plan) == pytest.approx(flops / 8e9 / plan.predicted.seconds)
    said = plan_tables.text(plan_tables.plan_table(plan))
    assert "at most 0.001 TFLOP/s a device, convolutions 0.008 as TF32" in said


class Series(nn.Module):
    """A recurrent layer, or a cell of one for a step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x)[0].square().mean()
        return loss


def test_float32_recurrent_layers_are_counted_at_the_peak_of_tf32_and_cells_are_not() -> None:
    for layer, x, peak, words in ((nn.GRU(8, 16, bias=False), torch.zeros(4, 8, 8), 8e9, "recurrent layers 0.008 as"),
                                  (nn.GRUCell(8, 16, bias=False), torch.zeros(32, 8), 1e9, "device; with")):
        plan = autoddl.plan(Series(layer), parse_cluster(TF32, "one"), (x,), workers=1)
        flops = 3 * 2 * 32 * 3 * 16 * (8 + 16)
        assert model_flops_utilisation(plan) == pytest.approx(flops / peak / plan.predicted.seconds)
        assert words in plan_tables.text(plan_tables.plan_table(plan))
