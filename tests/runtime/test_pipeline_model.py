"""A plan with stages computes what one process does, sends what was predicted, and does so to the bit in every run."""

from functools import lru_cache
from typing import Any

import pytest
import torch
import zoo
from precise import Precise
from ranks import on_ranks
from staged_plans import cuts_before, staged_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.plan import Plan
from autoddl.launch.check import mismatches
from autoddl.runtime.parallelize import parallelize

ROWS = 8
STEPS = 2


def built(name: str, dropout: float = 0.0) -> tuple[nn.Module, Sample]:
    module, sample = zoo.named(name, B=ROWS, dtype=torch.float64, **({"dropout": dropout} if dropout else {}))
    return Precise(module), sample


@lru_cache(maxsize=8)
def captured(name: str, microbatches: int, dropout: float = 0.0) -> Captured:
    module, sample = built(name, dropout)
    return capture(module, parted(sample, microbatches))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(step: Any, module: nn.Module) -> dict[str, Any]:
    """Losses of every step, gradients of the first, parameters and buffers after the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses, gradients = [], dict[str, Tensor]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))
        gradients = gradients or {n: whole(p.grad) for n, p in module.named_parameters(remove_duplicate=False)
                                  if p.grad is not None}
        optimizer.step()
    return {"losses": losses, "gradients": gradients,
            "state": {n: whole(p) for n, p in module.named_parameters(remove_duplicate=False)}}


@lru_cache(maxsize=8)
def truth(name: str) -> dict[str, Any]:
    """The user's own module in one process, on the whole batch at once."""
    module, sample = built(name)

    def step() -> Tensor:
        loss: Tensor = module(*sample.args, **sample.kwargs)
        loss.backward()
        return loss.detach()

    return trained(step, module)


def case(name: str, plan: Plan, dropout: float = 0.0) -> dict[str, Any]:
    module, sample = built(name, dropout)
    parallel = parallelize(module, plan, captured=captured(name, plan.microbatches, dropout))
    found = trained(lambda: parallel.step(sample), module)
    return {**found, "mismatches": mismatches(parallel)}


def compare(name: str, plan: Plan, expected: dict[str, Any] | None = None) -> None:
    expected = truth(name) if expected is None else expected
    results = on_ranks(plan.mesh.size, case, name, plan)
    for rank, found in enumerate(results):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9), f"rank {rank}"
        for kind, limit in (("gradients", 1e-9), ("state", 1e-7)):
            for key, value in found[kind].items():
                largest = max(float(one.abs().max()) for one in expected[kind].values())
                error = float((value - expected[kind][key]).abs().max())
                assert error <= limit * largest, f"rank {rank}: {kind} of {key} is wrong by {error}"
        assert not found["mismatches"], f"rank {rank}"
    for kind in ("gradients", "state"):
        assert set().union(*(found[kind] for found in results)) == set(expected[kind])


@pytest.mark.ranks
def test_two_stages_of_one_rank() -> None:
    of = captured("llama", 4)
    compare("llama", staged_plan(of, cuts_before(of.graph, ["layers.1"]), "1f1b", "one=1", 4))
