"""What a graph has to know is computed at capture where buffers and constants alone decide it, and refused elsewhere.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from planmaker import random_plans
from torch import Tensor, nn
from verified import verified

from autoddl.capture.capture import Captured, capture
from autoddl.capture.factory import Factory
from autoddl.capture.materialize import arguments
from autoddl.capture.sample import as_sample
from autoddl.core.errors import CaptureError

NODES = 6


class Layer(nn.Module):
    """A layer on one graph, some edges of which are loops; `reads` says what is read of the graph's values."""

    edges: Tensor
    ready: Tensor

    def __init__(self, reads: "Callable[[Layer, Tensor], Tensor]") -> None:
        super().__init__()
        self.reads, self.linear, self.weights = reads, nn.Linear(4, 4), torch.arange(5.0)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 2, 5], [1, 1, 0, 2, 3]]))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        return self.reads(self, self.linear(x)).square().sum()


def without_loops(layer: Layer, h: Tensor) -> Tensor:
    """Self-loops are taken away, and one is added at every node, as layers of torch_geometric do."""
    mask = layer.edges[0] != layer.edges[1]
    weights, loops = layer.weights.clone(), torch.arange(NODES)
    weights[~mask] = 7.0  # in place, before it is read
    edges = torch.cat([layer.edges[:, mask], loops.expand(2, -1)], 1)
    number = int(edges.max()) + 1
    weights = torch.cat([weights[mask], h.new_full((number,), weights.max().item())])
    return h.new_zeros(number, 4).index_add(0, edges[1], h[edges[0]] * weights[:, None])


def degrees(layer: Layer, h: Tensor) -> Tensor:
    """Each node is taken as often as it has edges, in the order of the values that there are."""
    counts = torch.bincount(layer.edges[0], minlength=NODES)
    taken = h.repeat_interleave(counts, 0)[torch.nonzero(layer.edges[0] > 0)[:, 0]]
    taken = taken + h[torch.arange(NODES) % 2 > 0].sum(0)
    taken[counts[0]:counts.sum()] = h[0]
    return taken if layer.ready or len(torch.unique(counts)) < 2 else taken * 2


def named(layer: Layer, h: Tensor) -> Tensor:
    """Arguments by name, one number for all, elements in a row, and a mask that is smaller than what it selects."""
    counts, first = torch.bincount(layer.edges[0], minlength=NODES), layer.edges[0] > 0
    every = [h.repeat_interleave(counts, dim=0), torch.repeat_interleave(repeats=counts, input=h, dim=0),
             h.repeat_interleave(counts[2], dim=-1), h[:, 0].repeat_interleave(counts),
             torch.masked_select(h[:5], mask=first[:, None]), h[0].masked_select(first[:4]), h[first.nonzero()[:, 0]]]
    return torch.cat([one.flatten() * (1 + k) for k, one in enumerate(every)])


def outside(layer: Layer, h: Tensor) -> Tensor:
    """What NumPy makes of the edges is a constant."""
    return h[torch.from_numpy(np.unique(layer.edges.numpy()))]


def padded(layer: Layer, h: Tensor) -> Tensor:
    """Widths that tensors hold, as convolutions of codecs of sound pad by them."""
    width: Any = layer.edges[0, 2]
    h = nn.functional.pad(h, (width - 1, width), mode="reflect")
    more = nn.functional.pad(h[:, :4], pad=(0, width // 2)) + torch.arange(width + 3)
    more = more + torch.ones(width, 2).sum() + torch.arange(width).sum()
    return torch.cat([more, h.narrow(1, 0, width).reshape(NODES, width)], 1)


@pytest.mark.parametrize("reads", [without_loops, degrees, named, outside, padded])
def test_values_of_a_fixed_graph_are_computed_once(reads: Callable[[Layer, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = Layer(reads), torch.randn(NODES, 4)
    captured = capture(layer, x)
    torch.testing.assert_close(run(layer, captured, x), layer(x))
    assert not {"aten.nonzero.default", "aten.bincount.default"} & {op.target for op in captured.graph.ops}


def on_a_graph() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Layer(without_loops), torch.randn(NODES, 4)


@pytest.mark.slow
@pytest.mark.ranks
def test_random_plans_of_a_layer_on_a_graph_do_what_one_process_does() -> None:
    for plan in random_plans(*on_a_graph(), "one=2,two=2", 3, seed=1):
        assert verified(plan, Factory(__file__, "on_a_graph")).passed


def run(layer: nn.Module, captured: Captured, x: Tensor) -> Tensor:
    found: Tensor = captured.program(*arguments(layer, as_sample(x), captured))[0]
    return found


def once(layer: Layer, h: Tensor) -> Tensor:
    if not layer.ready:
        h = h - h.mean(0)
        layer.ready.copy_(torch.tensor(True))
    return h


def test_a_buffer_that_the_first_call_sets_for_good_decides_afterwards() -> None:
    layer, x = Layer(once), torch.randn(NODES, 4)
    with pytest.raises(CaptureError, match=r"ready, and writes it.* call the model once before planning"):
        capture(layer, x)
    layer(x)
    torch.testing.assert_close(run(layer, capture(layer, x), x), layer(x))


def chunks(layer: Layer, h: Tensor) -> Tensor:
    return torch.cat([h[h[:, 0] > 0], h])


def often(layer: Layer, h: Tensor) -> Tensor:
    return h.repeat_interleave((h[:, 0] > 0).long(), dim=0)


def drawn(layer: Layer, h: Tensor) -> Tensor:
    return h[torch.rand(NODES) > 0.5]


@pytest.mark.parametrize(("reads", "says"), [
    (once, "decides by the values of its buffer ready, and writes it"),
    (lambda layer, h: nn.functional.pad(h, (0, (h[0, 0] > 0).long())), r"test_constant_values.py:\d+"),
    (chunks, r"aten.index.Tensor at .*test_constant_values.py:\d+ makes a shape.*hold in a buffer"),
    (often, r"aten.repeat_interleave.* makes a shape.*hold in a buffer"),
    (drawn, r"test_constant_values.py:\d+")])
def test_values_of_inputs_and_of_what_changes_are_refused(reads: Callable[[Layer, Tensor], Tensor], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        capture(Layer(reads), torch.randn(NODES, 4))
