"""Rotations of real tensors by complex numbers are written with real ones, and planned and priced so."""

import pytest
import torch
import zoo
from shell import LAPTOP
from torch import Tensor, nn

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.materialize import arguments
from autoddl.capture.sample import as_sample


class Rotated(nn.Module):
    """Pairs of a product, turned by angles that grow with the position: `first` or second factor of the product."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(8, 8)), first

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[0]).float(), torch.tensor([1.0, 0.5, 0.25, 0.125]))
        turn = torch.polar(torch.ones_like(angles), angles)
        pairs = torch.view_as_complex((x @ self.weight).reshape(-1, 4, 2))
        y = torch.view_as_real(pairs * turn if self.first else turn * pairs).flatten(1)
        return (y * torch.linspace(-1, 1, 8)).square().mean()


@pytest.mark.parametrize("first", [True, False])
def test_rotations_are_real(first: bool) -> None:
    torch.manual_seed(0)
    module, x = Rotated(first), torch.randn(6, 8)
    captured = capture(module, (x,))
    found = captured.program(*arguments(module, as_sample((x,)), captured))[0]
    made = torch.autograd.grad(found, module.weight)
    torch.testing.assert_close((found, *made), (module(x), *torch.autograd.grad(module(x), module.weight)))
    dependent = captured.graph.dependent()
    assert not any(captured.graph.tensors[t].dtype.startswith("complex") for t in dependent)


def test_complex_numbers_that_depend_on_no_parameter_have_a_price() -> None:
    plan = autoddl.plan(Rotated(True), LAPTOP, (torch.randn(6, 8),))
    assert plan.predicted.seconds > 0


def test_deepseek_v2_is_captured() -> None:
    graph = capture(*zoo.routed("DeepseekV2", layers=1, B=2, T=8)).graph
    assert any(op.target == "autoddl.experts" for op in graph.ops)
