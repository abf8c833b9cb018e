"""Concatenations of growing lists are chains, and compute the same bits, gradients too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import arguments
from autoddl.capture.sample import as_sample


class Dense(nn.Module):
    """Every layer reads all features before it: newest last, or newest first, or along another dim now and then."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList([nn.Linear(4 * (i + 1), 4) for i in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            new = torch.tanh(layer(torch.cat(found, -1)))
            found = [new, *found] if self.form == "first" else [*found, new]
        dim = 0 if self.form == "other dim" else -1
        loss: Tensor = torch.cat(found, dim).square().mean()
        return loss


def joined(captured: Captured) -> list[int]:
    """The number of parts of every concatenation."""
    return [len(op.inputs) for op in captured.graph.ops if op.target == "aten.cat.default"]


@pytest.mark.parametrize(("form", "last"), [("last", 2), ("first", 2), ("other dim", 6)])
def test_a_growing_list_is_a_chain_with_the_same_bits(form: str, last: int) -> None:
    """Where something else reads the parts, gradients add up in another order, and round differently."""
    torch.manual_seed(0)
    model, x = Dense(form), torch.randn(3, 4)
    captured, parameters = capture(model, x), list(model.parameters())
    ours = captured.program(*arguments(model, as_sample(x), captured))[0]
    theirs = model(x)
    assert torch.equal(ours, theirs)
    gradients = torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters)
    torch.testing.assert_close(*gradients)
    assert form == "other dim" or all(map(torch.equal, *gradients))
    assert joined(captured)[-1] == last
    assert max(joined(captured)[:-1]) == 2


class Apart(nn.Module):
    """Lists that share parts, but not next to each other, or in another order, or in wider numbers."""

    def __init__(self, dtype: Any = None) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.randn(4)), dtype

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = x * self.weight, x + self.weight, x - self.weight
        if self.dtype is not None:
            b = b.to(self.dtype)
            return torch.cat([a, b]).sum() + torch.cat([a, b, c]).sum()
        return torch.cat([a, b]).sum() + torch.cat([b, a, c]).sum() + torch.cat([a, c, b]).sum()


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_other_lists_stay_as_they_are(dtype: Any) -> None:
    assert joined(capture(Apart(dtype), torch.randn(2, 4)))[1:] == [3] * (2 if dtype is None else 1)
