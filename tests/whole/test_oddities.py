"""Small middles that once were planned or run wrongly: two random plans each on four ranks against one process."""

from collections.abc import Callable

import pytest
import torch
from oddities import ODD, middle
from random_plans import random_plan
from ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import CaptureError
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize

CLOSE = 1e-9
SEEDS = {"infinite_product": (10, 12), "infinite_mask_scaled": (2, 5)}
"""Seeds of the plans that once went wrong; of the others (0, 1)."""


def _errors(name: str, captured: Captured, plans: list[Plan]) -> list[float]:
    """One rank: the largest error of loss and gradients under each plan, relatively."""
    torch.manual_seed(0)
    module = middle(name)
    sample = module.example_inputs()
    truth = module(*sample)
    wanted = torch.autograd.grad(truth, list(module.parameters()), allow_unused=True)
    found = []
    for plan in plans:
        parallel = parallelize(module, plan, captured=captured)
        errors = [_distance(parallel.step(sample), truth)]
        for got, want in zip(module.parameters(), wanted, strict=True):
            if want is not None and got.grad is not None:
                whole = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
                errors.append(_distance(whole, want))
        found.append(max(errors))
        torch.manual_seed(0)
        module = middle(name)
    return found


def _distance(found: Tensor, truth: Tensor) -> float:
    """The largest difference relative to the largest finite value; infinite where infinities are not the same."""
    same, finite = found.isclose(truth, equal_nan=True), truth.isfinite() & found.isfinite()
    if not same[~finite].all():
        return torch.inf
    largest = truth[finite].abs().max() if finite.any() else torch.ones(())
    return float((found - truth)[finite].abs().max() / largest.clamp(min=1e-3)) if finite.any() else 0.0


@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(ODD))
def test_an_odd_middle_does_what_one_process_does(name: str) -> None:
    module = middle(name)
    captured = capture(module, module.example_inputs())
    plans = [random_plan(captured, seed) for seed in SEEDS.get(name, (0, 1))]
    for errors in on_ranks(4, _errors, name, captured, plans):
        assert max(errors) < (1e-5 if name == "cast_down_and_up" else CLOSE), (name, errors)


def _written(h: Tensor) -> Tensor:
    found = h * 1
    found.as_strided((4, 4), (4, 1)).mul_(2.0)
    return found


@pytest.mark.parametrize("view", [lambda h: h[:, ::2], lambda h: h[:1].expand(8, 16)])
def test_strides_of_values_that_are_in_no_row_of_memory_are_refused(view: Callable[[Tensor], Tensor],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    module = middle("where")
    monkeypatch.setitem(ODD, "where", lambda h: view(h).as_strided((4, 4), (4, 1)))
    with pytest.raises(CaptureError, match=r"as_strided.default at .* call x.contiguous\(\) first"):
        capture(module, module.example_inputs())
    monkeypatch.setitem(ODD, "where", _written)
    with pytest.raises(CaptureError, match=r"as_strided_scatter.default at .* writes places of memory"):
        capture(module, module.example_inputs())
    monkeypatch.setitem(ODD, "where", lambda h: view(h).contiguous().as_strided((4, 4), (4, 1)))
    capture(module, module.example_inputs())
