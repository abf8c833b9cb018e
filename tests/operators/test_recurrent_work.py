"""Recurrent layers multiply every row with every matrix, and their steps run one after another."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from shell import LAPTOP
from torch import nn

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph, Op
from autoddl.cost_models import load_cluster, load_device
from autoddl.cost_models.kernel import kernel_seconds, least_seconds
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
        loss: torch.Tensor = (found[0] if isinstance(found, tuple) else found).square().mean()
        return loss


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


@pytest.mark.parametrize("layer", [nn.GRU(8, 6), nn.GRUCell(8, 6)], ids=["layer", "cell"])
def test_layers_run_as_tf32_where_a_device_has_it_and_cells_do_not(layer: nn.Module) -> None:
    op, graph = recurrent(layer, *(STEPS, ROWS, 8)[isinstance(layer, nn.GRUCell):])
    plain = replace(load_device("H100-80GB"), peaks=(("float32", 1e9),), bandwidth=1e30, launch=0.0)
    slower, faster = (replace(plain, peaks=(("float32", 1e9), ("tf32", rate))) for rate in (1e9, 8e9))
    for one in (one for kernels_ in kernels(op, graph) for one in kernels_ if one.flops):
        asked = kernel_of(one, "float32")
        as_linear = replace(asked, name=asked.name.removesuffix(" recurrent"))
        gain = 8 if isinstance(layer, nn.GRU) else 1
        for seconds in (kernel_seconds, partial(least_seconds, ranks=1)):
            assert seconds(plain, asked) == seconds(plain, as_linear)
            assert seconds(slower, asked) == pytest.approx(gain * seconds(faster, asked))
        assert all(least_seconds(device, asked, 1) <= kernel_seconds(device, asked)
                   for device in (plain, slower, faster))


def test_steps_start_one_after_another() -> None:
    op, graph = recurrent(nn.GRU(8, 6, batch_first=True), ROWS, STEPS, 8)
    device = replace(load_cluster(LAPTOP).device, launch=1.0)
    forward, _ = kernels(op, graph)
    assert sum(kernel_seconds(device, kernel_of(one, "float32")) * one.times for one in forward) > 2 * STEPS


def test_no_gradient_needs_no_kernel_backward() -> None:
    op, graph = recurrent(nn.GRU(8, 6, batch_first=True), ROWS, STEPS, 8)
    assert recurrent_work(op, graph, tuple(graph.tensors[t].shape for t in op.inputs), False)[1] == ()
