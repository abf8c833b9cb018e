"""Optimizers of torch train a plan's pieces as they train whole parameters, or are refused before their first step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from planmaker import random_plans
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize

STEPS = 3
Case = tuple[str, tuple[tuple[str, Any], ...]]

NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
EVERY: tuple[Case, ...] = (
    *((name, (("foreach", value),)) for name in (*NAMES, "Adafactor") for value in (False, True)),
    *((name, (("fused", True),)) for name in FUSED),
    ("Adam", (("amsgrad", True),)), ("SGD", (("momentum", 0.9), ("nesterov", True))), ("Muon", ()), ("LBFGS", ()),
    ("RMSprop", (("momentum", 0.5), ("centered", True))))
USUAL: tuple[Case, ...] = (("AdamW", (("fused", True),)), ("Muon", ()), ("Adafactor", ()), ("SGD", (("fused", True),)))
REFUSED = {("Rprop", False), ("Adafactor", False), ("LBFGS", False), ("SGD", True), ("Adagrad", True)}
"""Those that update no pieces, by name and whether they are fused."""


class Small(nn.Module):
    """Sizes that do not divide, and a weight whose gradient comes with the strides of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(10, 13) * 0.3)
        self.second, self.norm, self.third = nn.Linear(10, 12), nn.LayerNorm(12), nn.Linear(12, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.third(self.norm(self.second(x @ self.first.t()).tanh())).square().mean()
        return loss


def made() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Small(), torch.randn(8, 13)


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def trained(step: Callable[[], object], module: nn.Module, case: Case) -> dict[str, Tensor]:
    """The parameters after a few steps."""
    name, options = case
    parameters = [p for p in module.parameters() if p.dim() == 2 or name != "Muon"]
    optimizer = getattr(torch.optim, name)(parameters, lr=0.05, **dict(options))

    def closure() -> object:
        optimizer.zero_grad()
        return step()

    for _ in range(STEPS):
        optimizer.step(closure)
    return {n: whole(p) for n, p in module.named_parameters()}


def _alone(case: Case) -> dict[str, Tensor]:
    module, x = made()

    def step() -> Tensor:
        loss: Tensor = module(x)
        loss.backward()
        return loss

    return trained(step, module, case)


def _cases(cases: tuple[Case, ...], captured: Captured, plan: Plan) -> list[float | str]:
    """On a rank: of every case the largest difference from one process, relative to it, or what was refused."""
    found = list[float | str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.clone)  # Muon's iteration turns rounding in bfloat16 into much more
        for case in cases:
            module, x = made()
            parallel, before = parallelize(module, plan, captured=captured), [p.clone() for p in module.parameters()]
            assert any(isinstance(p, DTensor) for p in before)
            try:
                state, truth = trained(partial(parallel.step, x), module, case), _alone(case)
                found.append(max(float((state[n] - truth[n]).abs().max() / truth[n].abs().max()) for n in truth))
            except InputError as error:
                assert all(torch.equal(whole(p), whole(q)) for p, q in zip(before, module.parameters(), strict=True))
                found.append(str(error))
    return found


def _check(cases: tuple[Case, ...], seed: int) -> None:
    module, x = made()
    captured = capture(module, (x,))
    (plan,) = random_plans(module, (x,), "net=2", 1, seed, captured=captured)
    answers = on_ranks(2, _cases, cases, captured, plan)
    for case, *found in zip(cases, *answers, strict=True):
        if (case[0], dict(case[1]).get("fused", False)) in REFUSED:
            assert all(isinstance(one, str) and one.startswith(f"torch.optim.{case[0]} ") for one in found), case
        else:
            limit = 1e-3 if case[0] == "RMSprop" else 1e-5  # it divides the smallest gradients by their own size
            assert all(isinstance(one, float) and one < limit for one in found), (case, found)


@pytest.mark.ranks
def test_optimizers_update_pieces_as_they_update_wholes() -> None:
    _check(USUAL, 3)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 5, 6])
def test_every_optimizer_does_or_is_refused(seed: int) -> None:
    _check(EVERY, seed)


def test_all_optimizers_of_torch_are_looked_at() -> None:
    """SparseAdam refuses dense gradients itself."""
    known = {name for name in vars(torch.optim) if isinstance(getattr(torch.optim, name), type)}
    assert known - {"Optimizer", "SparseAdam"} == {name for name, _ in EVERY}
