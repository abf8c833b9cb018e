"""Small middles that once were planned or run wrongly: two random plans each on four ranks against one process."""

import pytest
import torch
from oddities import ODD, middle
from random_plans import random_plan
from ranks import on_ranks
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import capture
from autoddl.runtime.parallelize import parallelize

CLOSE = 1e-9


def _errors(name: str, seeds: tuple[int, ...]) -> list[float]:
    """One rank: the largest error of loss and gradients under each plan, relatively."""
    torch.manual_seed(0)
    module = middle(name)
    sample = module.example_inputs()
    truth = module(*sample)
    wanted = torch.autograd.grad(truth, list(module.parameters()), allow_unused=True)
    captured, found = capture(module, sample), []
    for seed in seeds:
        parallel = parallelize(module, random_plan(captured, seed), captured=captured)
        errors = [abs(float(parallel.step(sample)) - float(truth)) / max(1e-3, abs(float(truth)))]
        for got, want in zip(module.parameters(), wanted, strict=True):
            if want is not None and got.grad is not None:
                whole = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
                errors.append(float((whole - want).abs().max() / want.abs().max().clamp(min=1e-3)))
        found.append(max(errors))
        torch.manual_seed(0)
        module = middle(name)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", sorted(ODD))
def test_an_odd_middle_does_what_one_process_does(name: str) -> None:
    for errors in on_ranks(4, _errors, name, (0, 1)):
        assert max(errors) < (1e-5 if name == "cast_down_and_up" else CLOSE), (name, errors)
