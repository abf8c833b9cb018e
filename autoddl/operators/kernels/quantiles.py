"""Quantile functions of laws whose numbers are tensors: what an element draws follows from a uniform number of its own.

    variates(u, law, a, b)      the smallest x with P(X <= x) >= v,      v = u + 2^-25, inside of (0, 1)

    poisson     rate a          P(X <= k) = Q(k + 1, a)                 halved between integers about its normal form
    binomial    of a trials with probability b                          probabilities added up from 0
    gamma       shape a, rate 1 P(X <= x) = P(a, x)                     Newton steps in log x, kept inside of a bracket

P and Q are the regularized incomplete gamma functions. Every element is computed apart, in float64, and rounded to
float32 before it gets the dtype of `a`. So pieces are slices of the whole. u has 24 binary digits, so nothing is drawn
whose probability is below 2^-25 on its side.

The gradient of gamma is that of the quantile at a fixed v (Figurnov et al. 2018), and torch's own draws have the same:

    dx/da = -(dP/da) / (dP/dx)

Draws of whole numbers have none.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["QUANTILES", "variates"]

HALF = 2.0**-25
"""Half the distance of two uniform numbers."""
NEWTON = 24
"""Steps of Newton's method; most elements need four."""
AROUND = 16
"""How far from its normal form a quantile of Poisson's law is looked for."""


def _poisson(v: Tensor, rate: Tensor, _: Tensor | None) -> Tensor:
    """Cornish and Fisher's form, and halvings of the integers around it."""
    z: Tensor = torch.special.ndtri(v)
    middle: Tensor = (rate + z * rate.sqrt() + (z * z - 1) / 6).floor()
    high: Tensor = (middle + AROUND).clamp_min(0.0)
    low = (middle - AROUND).clamp_min(-1.0)
    for _step in range((2 * AROUND + 1).bit_length()):
        half = ((low + high) / 2).floor()
        reached = torch.special.gammaincc(half.clamp_min(0.0) + 1, rate) >= v
        reached = reached & (half >= 0)
        low, high = torch.where(reached, low, half), torch.where(reached, half, high)
    return high


def _binomial(v: Tensor, count: Tensor, chance: Tensor | None) -> Tensor:
    """The number of k below `count` with P(X <= k) < v."""
    assert chance is not None
    most = 0 if count.is_meta or not count.numel() else int(count.max())
    below, drawn = torch.zeros_like(v * chance), torch.zeros_like(v * chance)
    whole = torch.lgamma(count + 1)
    for k in range(most):
        ways = whole - torch.lgamma(torch.full_like(count, k + 1.0)) - torch.lgamma((count - k + 1).clamp_min(1.0))
        logs = ways + torch.special.xlogy(torch.full_like(chance, float(k)), chance)
        logs = logs + torch.special.xlog1py((count - k).clamp_min(0.0), -chance)
        below = below + torch.where(count >= k, logs.exp(), 0.0)
        drawn = drawn + ((below < v) & (count > k))
    return drawn


def _gamma(v: Tensor, shape: Tensor, _: Tensor | None) -> Tensor:
    """Newton's steps in y = log x, whose bracket holds the quantile."""
    z, constant = torch.special.ndtri(v), torch.lgamma(shape)
    small = (v.log() + torch.lgamma(shape + 1)) / shape
    large = shape.log() + 3 * (1 - 1 / (9 * shape) + z / (3 * shape.sqrt())).clamp_min(1e-3).log()
    y = torch.where(shape < 1, small.clamp_max(4.0), large)
    low, high = torch.full_like(y, -1e4).minimum(small - 1), (shape + 10 * shape.sqrt() + 50).log()
    for _step in range(NEWTON):
        x = y.exp()
        over = torch.special.gammainc(shape, x) - v
        low, high = torch.where(over < 0, y, low), torch.where(over < 0, high, y)
        step = y - over * (x + constant - shape * y).exp()
        y = torch.where((step >= low) & (step <= high), step, (low.clamp_min(-700.0) + high) / 2)
    return y.exp()


QUANTILES: Mapping[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = MappingProxyType({
    "poisson": _poisson, "binomial": _binomial, "gamma": _gamma})
"""By name, the quantile function of a law: of v and its numbers, all float64."""


def variates(u: Tensor, law: str, first: Tensor, second: Tensor | None = None) -> Tensor:
    """Computes what follows a law with these numbers, of uniform numbers in [0, 1) with 24 digits; shapes broadcast.

    The result has the dtype of `first`. A gamma number is at least the smallest normal one of its dtype, as torch's.
    """
    a = first.detach()
    with torch.no_grad():
        other = None if second is None else second.double()
        found = QUANTILES[law](u.double() + HALF, a.double(), other).float().to(first.dtype)
    if law != "gamma":
        return found
    found = found.clamp_min(torch.finfo(first.dtype).tiny)
    if not first.requires_grad:
        return found
    slope = torch._standard_gamma_grad(a.expand_as(found), found)
    return found + (first - a) * slope
