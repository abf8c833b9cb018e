"""`verify` of models whose parameters make complex numbers: losses, gradients and messages are those of real ones."""

import pytest
import spectral
import torch
from planmaker import random_plans
from sampling import parametrize_or_slow
from verified import planned, verified

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.materialize import arguments
from autoddl.capture.sample import as_sample
from autoddl.core.plan import Plan
from autoddl.operators.work import work


def right(plan: Plan, made: Factory) -> bool:
    checked = verified(plan, made)
    return checked.passed and not checked.collective_mismatches and not plan.predicted.fallback


@pytest.mark.ranks
@parametrize_or_slow("name,plans", [("operator", 1)],
                     [("masking", 1)] + [(name, 4) for name in spectral.MODELS])
def test_random_plans_compute_what_one_process_does(name: str, plans: int) -> None:
    made = Factory(spectral.__file__, "named", {"name": name})
    assert all(right(plan, made) for plan in random_plans(*made.build(), "a=2,b=2", plans, seed=3))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", spectral.MODELS)
def test_found_plans_do_so_too(name: str) -> None:
    made = Factory(spectral.__file__, "named", {"name": name, "rows": 64})
    plan = planned(made, mesh="machine=2,pair=2")
    assert right(plan, made)


@pytest.mark.parametrize("name", spectral.MODELS)
def test_captured_programs_have_losses_and_gradients_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    module, batch = spectral.named(name)
    captured = capture(module, batch)
    found = captured.program(*arguments(module, as_sample(batch), captured))[0]
    weights = [*module.parameters()]
    torch.testing.assert_close((found, *torch.autograd.grad(found, weights)),
                               (module(*batch), *torch.autograd.grad(module(*batch), weights)))


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    graph = capture(*spectral.named("complex", rows=2)).graph
    shapes = [one.shape for one in graph.tensors]
    found = [work(op, graph, tuple(shapes[t] for t in op.inputs), tuple(shapes[t] for t in op.outputs), frozenset())
             for op in graph.ops if op.target == "aten.linear.default"]
    assert [forward.flops for (forward,), _ in found] == [4 * 2 * 2 * 8 * 8, 2 * 2 * 8 * 8, 2 * 2 * 8 * 8]
