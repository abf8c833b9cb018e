"""Distributions whose numbers are tried, or whose matrices are checked, are drawn by their law, or refused."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, VonMises

from autoddl.capture.capture import capture
from autoddl.capture.patches.torch_distributions_patch import von_mises_of_tries
from autoddl.core.errors import InputError


@pytest.mark.parametrize("concentration", [1e-3, 1.0, 30.0])
def test_angles_of_a_fixed_number_of_tries_have_the_law_of_von_mises(concentration: float) -> None:
    torch.manual_seed(0)
    law = VonMises(torch.tensor(0.5), torch.tensor(concentration))
    with von_mises_of_tries():
        drawn = law.sample(torch.Size((4000,))).double().sort().values
    grid = torch.linspace(-math.pi, math.pi, 20001, dtype=torch.float64)
    below = torch.cumulative_trapezoid(law.log_prob(grid).exp(), grid)
    expected = below[torch.searchsorted(grid[1:], drawn).clamp_max(len(below) - 1)]
    distance = (expected - torch.arange(4000) / 4000).abs().max()
    assert float(distance) * 4000**0.5 < 1.95  # Kolmogorov: once in a thousand seeds
    assert drawn.abs().max() <= math.pi


class Correlated(nn.Module):
    """The mean of numbers with a covariance, which is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(5000, 2))

    def forward(self, covariance: Tensor) -> Tensor:
        law = MultivariateNormal(self.mean, covariance_matrix=covariance, validate_args=True)  # compiling turns it off
        drawn = law.rsample()
        return (drawn.T @ drawn / 5000 - covariance).abs().max() + 0 * drawn.mean()


def test_normal_numbers_have_their_covariance_and_what_is_none_ends_the_step() -> None:
    model, covariance = Correlated(), torch.tensor([[2.0, 1.2], [1.2, 1.0]])
    program = capture(model, covariance).program
    assert float(program(*model.parameters(), covariance)[0].detach()) < 0.15
    with pytest.raises(RuntimeError, match=r"not positive-definite"):
        program(*model.parameters(), torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(InputError, match=r"constraints.py:\d+: not sym_check.all\(\) is False"):
        program(*model.parameters(), torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
