"""The communication of published strategies, counted: the closed forms of studies of transformer communication."""

import pytest
import torch
from torch import nn

import autoddl
from autoddl.cost_models import parse_cluster
from autoddl.explain.message_sizes import SIZES, level_bytes, message_rows

FOUR = parse_cluster("name: four\ndevice: A100-80GB\nlevels:\n"
                     "  - {name: node, size: 4, bandwidth: 100 GB/s, latency: 1 us}\n", "four")


class Two(nn.Module):
    """Two matrices and a loss that is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.down(torch.relu(self.up(x))), torch.zeros_like(x))


WEIGHTS = 4 * 2 * 64 * 128
"""Bytes of its parameters."""


def sent(mine: str) -> list[tuple[str, str, float]]:
    """(pass, kind, bytes that a rank sends) of what is larger than a loss."""
    plan = autoddl.plan(Two(), FOUR, (torch.zeros(16, 64),), mine=mine, workers=1)
    return [(row.direction, row.kind, row.moved[0]) for row in message_rows(plan) if row.sizes[2] > 4]


@pytest.mark.parametrize(("mine", "times"), [("dp=4", 2), ("dp=4,zero=1", 2), ("dp=4,zero=3", 2.5)])
def test_the_volume_of_data_parallel_training_is_its_closed_form(mine: str, times: float) -> None:
    """Three times the weights under ZeRO-3, but for the first matrix: nothing asks for the gradient of its input."""
    moved = sum(one for _, _, one in sent(mine))
    assert moved == times * 3 / 4 * WEIGHTS


def test_tensor_parallel_matrices_reduce_what_they_add_up_once_each_way() -> None:
    found = sent("tp=4")
    assert found == [("forward", "all-reduce", 2 * 3 / 4 * 4 * 16 * 64)]  # the input needs no gradient


def test_every_buffer_is_of_one_class_of_sizes_and_of_one_level() -> None:
    plan = autoddl.plan(Two(), FOUR, (torch.zeros(16, 64),), mine="dp=4,zero=3", workers=1)
    rows = message_rows(plan)
    assert all(sum(row.classes) == row.count[0] and row.count[1] is None for row in rows)
    assert all(len(row.classes) == len(SIZES) + 1 and row.ranks == 4 for row in rows)
    (level,) = level_bytes(rows)
    assert level.level == "node" and level.moved == (sum(row.moved[0] for row in rows), None)


class Encoder(nn.Module):
    """A layer of torch's own, whose attention merges sequence and batch in front of its last product."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(x), torch.zeros_like(x))


@pytest.mark.parametrize("mine", ["dp=4", "dp=4,zero=1"])
def test_data_parallel_attention_of_torch_sends_no_activations(mine: str) -> None:
    plan = autoddl.plan(Encoder(), FOUR, (torch.zeros(16, 32, 64),), mine=mine, workers=1)
    weights = sum(4 * one.numel() for one in Encoder().parameters())
    moved = sum(row.moved[0] for row in message_rows(plan) if row.sizes[2] > 4)
    assert moved == pytest.approx(2 * 3 / 4 * weights, rel=1e-6)
