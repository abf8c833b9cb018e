"""Plans of mixed recipes do on ranks what one process does under the same recipe, and send what they say.

With every dtype at twice its width (bfloat16 as float32, float32 as float64) rounding is small enough to compare: 1e-6.
"""

import os
from collections import Counter
from dataclasses import replace

import pytest
import torch
import zoo
from random_plans import random_plan
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.float64 import TWICE, cast, widened
from autoddl.capture.sample import Sample, as_sample, parted
from autoddl.core.plan import Plan
from autoddl.core.precision import Precision
from autoddl.launch.check import mismatches
from autoddl.launch.verify import _pass
from autoddl.runtime.parallelize import parallelize

MODELS = ("gpt", "gpt2", "llama", "bert", "t5", "vit", "vgg_bn", "resnet", "mixture", "regression")
USUAL = ("llama-1",)
"""That of `make test`, of one layer."""
STEPS = 3


def _made(name: str) -> tuple[nn.Module, Sample]:
    module, sample = zoo.named(name, **({} if name == "regression" else {"B": 8}))
    return module, as_sample(sample)


@shared
def _captured(name: str, recipe: str, microbatches: int) -> Captured:
    module, sample = _made(name)
    return capture(module, parted(sample, microbatches), Precision.parse(recipe))


def _train(step: object, module: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of every step of plain gradient descent, and the parameters after the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(step()))  # type: ignore[operator]
        optimizer.step()
    return losses, {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in module.named_parameters()}


@shared
def _truth(name: str, recipe: str, parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """One process that runs the captured program at twice its width."""
    module, sample = _made(name)
    module, wide, batch = module.double(), widened(_captured(name, recipe, parts), TWICE), cast(sample)
    return _train(lambda: sum(_pass(wide, module, parted(batch, parts, k), k, parts) for k in range(parts)), module)


def _case(name: str, recipe: str, plan: Plan, parts: int) -> dict[str, object]:
    """On a rank: collectives of a step in the recipe's own dtypes, errors of three steps at twice the width."""
    captured = _captured(name, recipe, parts)
    module, sample = _made(name)
    parallel = parallelize(module, plan, captured=captured)
    parallel.step(sample.kwargs or sample.args)
    dtypes = Counter(str(p.dtype) for p in module.parameters())
    wrong = mismatches(parallel)
    module, _ = _made(name)
    wide = widened(captured, TWICE)
    exact = parallel.like(module.double(), wide)
    batch = cast(sample)
    losses, state = _train(lambda: exact.step(batch.kwargs or batch.args), module)
    truth = _truth(name, recipe, parts)
    return {"wrong": wrong, "dtypes": dtypes, "mesh": str(plan.mesh),
            "loss": max(abs(a - b) / abs(b) for a, b in zip(losses, truth[0], strict=True)),
            "state": max(float((state[n] - truth[1][n]).abs().max()) for n in truth[1])}


def _check(name: str, recipe: str, seed: int, parts: int) -> None:
    """Half of the plans compute random blocks again: those of seeds 2, 3, 6, 7 and so on."""
    captured = _captured(name, recipe, parts)
    plan = replace(random_plan(captured, seed, microbatches=parts, recompute=seed // 2 % 2 == 1), precision=recipe)
    _truth(name, recipe, parts)
    for rank, found in enumerate(on_ranks(4, _case, name, recipe, plan, parts)):
        at = f"{name} {recipe} seed {seed} rank {rank}: {found}"
        assert not found["wrong"] and set(found["dtypes"]) == {"torch.float32"}, at
        assert found["loss"] <= 1e-6 and found["state"] <= 1e-5, at


@pytest.mark.ranks
@parametrize_or_slow("name", USUAL, sorted({*MODELS} - {*USUAL}))
def test_a_mixed_plan_does_what_one_process_does(name: str) -> None:
    seed = MODELS.index(name.partition("-")[0])
    _check(name, "bf16-mixed", seed, 1 if name == "regression" else 1 + seed % 2)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_mixed_plans_do(name: str) -> None:
    """As many plans as AUTODDL_CASES says, of the seeds from AUTODDL_SEED on."""
    first = int(os.environ.get("AUTODDL_SEED", "20"))
    for seed in range(first, first + int(os.environ.get("AUTODDL_CASES", "5"))):
        recipe = "bf16-mixed" if seed % 2 else "bf16-mixed,reduce=bfloat16"
        _check(name, recipe, seed, 1 if name == "regression" else (1, 2, 4)[seed % 5 % 3])


class Pixels(nn.Module):
    """Divides whole numbers, of which a default dtype follows, before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer((x * 255).byte() / 255).square().mean()
        return loss


def test_what_is_made_of_whole_numbers_is_as_wide_as_the_program() -> None:
    model, batch = Pixels(), as_sample(torch.rand(2, 4))
    captured, loss = capture(model, batch), model(*batch.args).item()
    found = _pass(widened(captured), model.double(), cast(batch), 0, 1)
    assert found == pytest.approx(loss, rel=1e-5) and torch.get_default_dtype() is torch.float32
