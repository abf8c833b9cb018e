"""Quantiles of laws whose numbers are tensors are those of the definition, and gamma's gradient is their slope."""

import math

import pytest
import torch
from torch import Tensor

from autoddl.operators.kernels.quantiles import HALF, variates

N = 2000


def uniform() -> Tensor:
    """Numbers of 24 digits, with both ends."""
    chosen = torch.randint(0, 2**24, (N,), generator=torch.Generator().manual_seed(0))
    return torch.cat([chosen, torch.tensor([0, 2**24 - 1])]).float() / 2**24


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.3, 1.0, 4.5, 30.0, 1e3, 1e6])
def test_a_poisson_number_is_the_first_whose_probabilities_reach_u(rate: float) -> None:
    u = uniform()
    v, rates = u.double() + HALF, torch.full((N + 2,), rate).double()
    k = variates(u, "poisson", rates)
    assert (torch.special.gammaincc(k + 1, rates) >= v).all()
    assert ((k == 0) | (torch.special.gammaincc(k.clamp_min(1), rates) < v)).all()


@pytest.mark.parametrize(("count", "chance"), [(1, 0.3), (10, 0.5), (40, 0.02), (60, 0.97), (6, 0.0), (6, 1.0),
                                               (0, 0.5), (500, 0.4)])
def test_a_binomial_number_is_the_first_whose_probabilities_reach_u(count: int, chance: float) -> None:
    u = uniform()
    found = variates(u, "binomial", torch.full((N + 2,), float(count)), torch.full((N + 2,), chance).double())
    shares = [math.comb(count, k) * chance**k * (1 - chance)**(count - k) for k in range(count + 1)]
    sums = torch.tensor(shares, dtype=torch.float64).cumsum(0)
    assert torch.equal(found.long(), torch.searchsorted(sums[:-1], u.double() + HALF))


@pytest.mark.parametrize("chance", [1e-6, 0.3, 0.9999])
def test_a_number_of_a_million_trials_is_the_first_whose_probabilities_reach_u(chance: float) -> None:
    u, count = uniform(), 10**6
    found = variates(u, "binomial", torch.full((N + 2,), float(count)), torch.tensor(chance, dtype=torch.float64))
    k = torch.arange(count + 1).double()
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    sums = (ways + k * math.log(chance) + (count - k) * math.log1p(-chance)).exp().cumsum(0)
    least, most = (torch.searchsorted(sums[:-1] / sums[-1], u.double() + HALF + off) for off in (-2e-9, 2e-9))
    assert ((found >= least) & (found <= most)).all()


def test_a_million_trials_take_the_steps_of_one_trial() -> None:
    steps = []
    for count in (1.0, 1e6):
        with torch.autograd.profiler.profile() as seen:
            variates(uniform()[:1], "binomial", torch.tensor([count]), torch.tensor([0.5]))
        steps.append(len(seen.function_events))
    assert steps[0] == steps[1] < 10_000


@pytest.mark.parametrize("shape", [0.05, 0.3, 0.9, 1.0, 2.5, 40.0, 1e4])
def test_a_gamma_number_has_the_probability_of_u_below_it(shape: float) -> None:
    u = uniform()
    found = variates(u, "gamma", torch.full((N + 2,), shape, dtype=torch.float64))
    seen = found > torch.finfo(torch.float32).tiny * 2
    below = torch.special.gammainc(torch.full_like(found, shape), found)
    off = (below - (u.double() + HALF)).abs()[seen]
    assert (off < 1e-7 * max(1.0, shape**0.5)).all()  # a number is rounded to float32


def test_the_gradient_of_a_gamma_number_is_the_slope_of_its_quantile() -> None:
    u, step = uniform()[:200].clamp(0.01, 0.99), 1e-2
    shape = torch.linspace(0.3, 9.0, 200, dtype=torch.float64, requires_grad=True)
    variates(u, "gamma", shape).sum().backward()
    near = [variates(u, "gamma", shape.detach() + sign * step) for sign in (1, -1)]
    assert torch.allclose(shape.grad, (near[0] - near[1]) / (2 * step), rtol=2e-2, atol=1e-3)  # type: ignore[arg-type]
