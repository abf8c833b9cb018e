"""Models that draw random numbers draw the same under every layout, compiled or run again, bit by bit."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing import DRAWS, dropped, made
from planmaker import cluster_of, random_plans
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn
from verified import verified

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.capture.factory import Factory
from autoddl.capture.float64 import seeded
from autoddl.capture.sample import as_sample, parted
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.recompute import FULL, blocks_of, recompute_entry
from autoddl.runtime.parallelize import parallelize


@shared
def captured(name: str) -> Captured:
    return capture(*made(name))


def whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


def drawn(plans: dict[str, list[Plan]], seed: int = 5, compile: bool | str = False) -> list[list[Tensor]]:
    """By plan, what is drawn in each of two steps: the gradients of the weight."""
    found = []
    for name, several in plans.items():
        for plan in several:
            module, sample = made(name)
            parallel, steps = parallelize(module, plan, seed=seed, captured=captured(name), compile=compile), []
            for _ in range(2):
                (weight,) = parallel.parameters()
                weight.grad = None
                parallel.step(sample)
                steps.append(whole(weight.grad).clone())
            found.append(steps)
    return found


def plans_of(mesh: str, count: int, names: Iterable[str] = DRAWS) -> dict[str, list[Plan]]:
    return {name: random_plans(*made(name), mesh, count, seed=4, captured=captured(name)) for name in names}


@pytest.mark.ranks
@parametrize_or_slow("mesh, names", [("a=2,b=2", ("normal", "kept", "chosen", "others"))],
                     [(mesh, tuple(DRAWS)) for mesh in ("a=4", "a=2,b=2")])
def test_modules_draw_the_same_bits_on_every_mesh(mesh: str, names: tuple[str, ...]) -> None:
    count = 1 + (mesh == "a=4")
    alone = drawn(plans_of("one=1", 1, names))
    for ranks in on_ranks(4, drawn, plans_of(mesh, count, names)):
        for k, steps in enumerate(ranks):
            same = [torch.equal(a, b) for a, b in zip(steps, alone[k // count], strict=True)]
            assert same == [True, True], names[k // count]
    assert all(not torch.equal(first, second) for first, second in alone)


@pytest.mark.parametrize("name", DRAWS)
def test_one_process_draws_what_the_captured_program_does(name: str) -> None:
    (plan,) = random_plans(*made(name), "one=1", 1, captured=captured(name))
    (steps,) = drawn({name: [plan]}, seed=0)
    for step, found in enumerate(steps):
        module, sample = made(name)
        values = (*module.parameters(), *captured(name).constants.values(), *sample)
        seeded(captured(name).program, step)(*values)[0].backward()
        (weight,) = module.parameters()
        assert weight.grad is not None and torch.equal(weight.grad, found)


@pytest.mark.ranks
@parametrize_or_slow("names", [("shaped", "recurrent")], [tuple(DRAWS)])
def test_compiled_plans_draw_the_same_bits(names: tuple[str, ...]) -> None:
    plans, alone = (plans_of(mesh, 1, names) for mesh in ("a=2", "one=1"))
    for ranks in on_ranks(2, drawn, plans, 5, "aot_eager"):
        for name, steps, expected in zip(names, ranks, drawn(alone), strict=True):
            assert all(map(torch.equal, steps, expected)), name


def built(noise: float) -> tuple[nn.Module, tuple[Tensor]]:
    module = dropped(noise).double()
    return module, (module.example_inputs().double(),)  # type: ignore[operator]


def trained(plan: Plan) -> list[Tensor]:
    """Losses of two steps, and the gradients after them."""
    module, sample = built(0.5)
    parallel = parallelize(module, plan, sample, seed=3)
    losses = [parallel.step(sample) for _ in range(2)]
    return [*losses, *(whole(p.grad).clone() for p in parallel.parameters())]


def test_blocks_that_run_again_draw_the_same_bits() -> None:
    module, sample = built(0.5)
    (plan,) = random_plans(module, sample, "one=1", 1)
    names = [block.name for block in blocks_of(add_hubs(capture(module, sample).graph))]
    again = replace(plan, recompute=tuple(recompute_entry(name, FULL) for name in names))
    assert len(names) == 3 and all(map(torch.equal, trained(plan), trained(again)))


@pytest.mark.ranks
def test_microbatches_draw_apart_and_alike_on_every_mesh() -> None:
    module, sample = built(0.5)
    one, split = (random_plans(module, parted(as_sample(sample), 2), mesh, 1, seed=2, microbatches=2)[0]
                  for mesh in ("one=1", "a=2"))
    expected = trained(one)
    for found in on_ranks(2, trained, split):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


def test_evaluation_keeps_every_sample_and_the_mean_slope() -> None:
    module, sample = built(0.0)
    (plan,) = random_plans(module, sample, "one=1", 1)
    expected = built(0.0)[0].eval()(*sample)
    assert torch.allclose(parallelize(module, plan, sample)(sample), expected, rtol=1e-14)


@pytest.mark.ranks
@pytest.mark.slow
def test_stochastic_depth_is_verified() -> None:
    factory = Factory(str(Path(__file__).parent.parent / "support" / "drawing.py"), "dropped")
    module, sample = factory.build()
    found = autoddl.plan(module, cluster_of("core=2"), sample, workers=1, microbatches=(2,), factory=factory.to_json())
    assert verified(found, factory).passed
