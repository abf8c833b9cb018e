"""Patches torch 2.13 so that von Mises numbers are drawn in a number of tries that no value decides.

    _rejection_sample    tries until every element has its number. The patched one tries `TRIES` times for each, and
                         takes the first that is accepted

A try takes three uniform numbers u, v, w. The concentration is k, and that of the envelope is r (Best and Fisher,
Applied Statistics 28, 1979). The angle is that of a wrapped Cauchy number, and is kept in proportion to the law:

    z = cos(pi u),  f = (1 + r z) / (r + z),  c = k (r - f)
    kept if c (2 - c) > v or log(c / v) + 1 >= c         angle = +- arccos(f), as w says

More than 65 in 100 tries are kept, whatever k is. So an element is without a number once in 10^14, and then gets its
mode. Each u, v and w is drawn by position (`rewrites.randomness`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributions import von_mises

__all__ = ["MADE_FOR", "PATCHED", "von_mises_of_tries"]

MADE_FOR = "torch 2.13"
PATCHED = {"torch.distributions.von_mises:_rejection_sample": "loc, concentration, proposal_r, x"}
"""The patched function with the names of its parameters; a test compares both with the installed torch."""

TRIES = 32


def _first_kept(loc: Tensor, concentration: Tensor, proposal_r: Tensor, x: Tensor) -> Tensor:
    """Von Mises numbers in the shape of x, each the first that is kept of `TRIES`."""
    u, v, w = torch.rand((TRIES, 3, *x.shape), dtype=loc.dtype, device=loc.device).unbind(1)
    z = torch.cos(math.pi * u)
    f = (1 + proposal_r * z) / (proposal_r + z)
    c = concentration * (proposal_r - f)
    kept = (c * (2 - c) > v) | ((c / v).log() + 1 >= c)
    first = kept & (kept.cumsum(0) == 1)
    angle = torch.where(first, (w - 0.5).sign() * f.clamp(-1, 1).acos(), 0.0).sum(0)
    return torch.remainder(angle + loc + math.pi, 2 * math.pi) - math.pi


@contextmanager
def von_mises_of_tries() -> Iterator[None]:
    """While open, `VonMises.sample` takes the first number that is kept of a fixed number of tries."""
    original = von_mises._rejection_sample
    von_mises._rejection_sample = _first_kept
    try:
        yield
    finally:
        von_mises._rejection_sample = original
