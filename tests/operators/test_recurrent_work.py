"""Recurrent layers multiply every row with every matrix, and their steps run one after another."""

from dataclasses import replace

import pytest
import torch
from shell import LAPTOP
from torch import nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph, Op
from autoddl.cost_models import load_cluster
from autoddl.cost_models.kernel import kernel_seconds
from autoddl.operators.kernel_work import KernelWork
from autoddl.operators.recurrent_work import is_recurrent, recurrent_work
from autoddl.operators.work import base, work
from autoddl.pricing.kernel_prices import kernel_of

ROWS, STEPS = 4, 5


class _Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        out: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out.square().mean()


def recurrent(layer: nn.Module, *shape: int) -> tuple[Op, Graph]:
    graph = capture(_Layer(layer), torch.randn(*shape)).graph
    return next(op for op in graph.ops if is_recurrent(base(op))), graph


def kernels(op: Op, graph: Graph) -> tuple[tuple[KernelWork, ...], tuple[KernelWork, ...]]:
    inputs, outputs = (tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs))
    return work(op, graph, inputs, outputs, graph.differentiable())


@pytest.mark.parametrize("layer", [
    nn.LSTM(8, 6, 2, bidirectional=True, batch_first=True, proj_size=3), nn.GRU(8, 6, batch_first=True),
    nn.RNN(8, 6, bias=False, batch_first=True)], ids=["lstm", "gru", "rnn"])
def test_every_row_of_every_step_meets_every_matrix(layer: nn.Module) -> None:
    forward, backward = kernels(*recurrent(layer, ROWS, STEPS, 8))
    met = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
    assert sum(one.all_flops for one in forward) == 2 * ROWS * STEPS * met
    assert sum(one.all_flops for one in backward) == 4 * ROWS * STEPS * met  # gradients of rows, and of weights
    assert {one.times for one in (*forward, *backward)} == {1, STEPS}


def test_a_cell_is_a_layer_of_one_step() -> None:
    forward, backward = kernels(*recurrent(nn.LSTMCell(8, 6), ROWS, 8))
    assert {one.times for one in (*forward, *backward)} == {1}
    assert sum(one.all_flops for one in forward) == 2 * ROWS * (8 + 6) * 4 * 6


def test_steps_start_one_after_another() -> None:
    op, graph = recurrent(nn.GRU(8, 6, batch_first=True), ROWS, STEPS, 8)
    device = replace(load_cluster(LAPTOP).device, launch=1.0)
    forward, _ = kernels(op, graph)
    assert sum(kernel_seconds(device, kernel_of(one, "float32")) * one.times for one in forward) > 2 * STEPS


def test_no_gradient_needs_no_kernel_backward() -> None:
    op, graph = recurrent(nn.GRU(8, 6, batch_first=True), ROWS, STEPS, 8)
    assert recurrent_work(op, graph, tuple(graph.tensors[t].shape for t in op.inputs), False)[1] == ()
