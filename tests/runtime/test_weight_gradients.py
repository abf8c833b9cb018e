"""B gives the gradients of activations and leaves those of weights; W brings the same as a whole backward."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoddl.runtime.weight_gradients import WaitingGradients

Weights = dict[str, Tensor]


def _weights() -> Weights:
    torch.manual_seed(0)
    shapes = {"table": (5, 4), "tied": (4, 4), "gamma": (4,), "beta": (4,)}
    return {name: torch.randn(shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()}


def _loss(w: Weights, waiting: WaitingGradients | None) -> tuple[Tensor, Tensor]:
    """A table, two products with one weight, one of them a view of it, and a norm; the loss and a tensor between."""
    def call(function: object, late: tuple[int, ...], is_product: bool) -> object:
        return function if waiting is None else waiting.call(function, late, is_product)  # type: ignore[arg-type]

    tied = w["tied"] * 1.0
    ids = torch.tensor([0, 3, 1])
    x = call(F.embedding, (1,), False)(ids, w["table"])  # type: ignore[operator]
    y = call(torch.matmul, (1,), True)(x, tied.t())  # type: ignore[operator]
    z = call(F.layer_norm, (2, 3), False)(y, [4], w["gamma"], w["beta"])  # type: ignore[operator]
    return call(F.linear, (1,), True)(z.tanh(), tied).square().sum(), y  # type: ignore[operator]


def test_both_parts_make_what_a_whole_backward_makes() -> None:
    whole, apart, waiting = _weights(), _weights(), WaitingGradients()
    loss, between = _loss(whole, None)
    between.retain_grad()
    loss.backward()
    split, mine = _loss(apart, waiting)
    mine.retain_grad()
    split.backward()
    assert torch.equal(mine.grad, between.grad)  # type: ignore[arg-type]
    assert all(x.grad is None for x in apart.values()), "B comes to no parameter"
    waiting.backward()
    for name, x in whole.items():
        assert x.grad is not None
        torch.testing.assert_close(apart[name].grad, x.grad, rtol=1e-12, atol=1e-12)


def test_evaluation_and_what_backward_never_came_to_leave_nothing() -> None:
    weights, waiting = _weights(), WaitingGradients()
    with torch.no_grad():
        _loss(weights, waiting)
    waiting.backward()
    _loss(weights, waiting)
    waiting.backward()
    assert all(x.grad is None for x in weights.values())


@pytest.mark.parametrize("name", ["tied", "gamma"])
def test_frozen_weights_do_not_wait(name: str) -> None:
    whole, apart, waiting = _weights(), _weights(), WaitingGradients()
    for weights in (whole, apart):
        weights[name].requires_grad_(False)
    _loss(whole, None)[0].backward()
    _loss(apart, waiting)[0].backward()
    waiting.backward()
    for key, x in whole.items():
        assert (x.grad is None) == (apart[key].grad is None) == (key == name)
        if x.grad is not None:
            torch.testing.assert_close(apart[key].grad, x.grad, rtol=1e-12, atol=1e-12)
