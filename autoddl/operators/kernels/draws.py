"""Draws random numbers by position, so that every layout of a tensor draws the same.

An element has a 32-bit word w, by its position i in the whole tensor (row major). From the word come two numbers
between 0 and 1, of which the first may be 0:

    w = hash(i, key, seed)        u = floor(w / 2^(32 - d)) / 2^d        v = (w + 1/2) / 2^32

`key` numbers the draw in the graph, `seed` the step. d is the number of digits of the dtype's fraction, at most 24.
What a law makes of the word:

    uniform      a + (b - a) u              exponential    -log(1 - v) / rate
    kept         1 where w >= (1 - p) 2^32  cauchy         median + scale tan(pi (v - 1/2))
    normal       mean + deviation Q(v)      log_normal     exp(mean + deviation Q(v))
    whole        low + floor(w (high - low) / 2^32)        geometric      ceil(log(1 - v) / log(1 - p)), at least 1

Q is the quantile function of the normal distribution. A law computes in float64 and rounds to float32 before it rounds
to the dtype of the tensor. So a model that is widened to float64 draws the numbers that it draws in float32.

Each law is computed for each element apart, and rounding hides the last bits of a logarithm. So pieces are the slices
of the whole, bit by bit.
"""

import math
from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["LAWS", "Index", "drawn", "keep_mask"]

Index = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a piece lies: (its offset along each dim, the shape of the whole tensor)."""

LOW = 0xFFFFFFFF
DIGITS = {torch.float16: 11, torch.bfloat16: 8}
"""Binary digits of a uniform number; 24 in wider dtypes."""


def _seeds(key: int, seed: int) -> tuple[int, int]:
    """Two well mixed 32-bit words for one (key, seed): splitmix64."""
    z = (seed * 0x9E3779B97F4A7C15 + key * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    z ^= z >> 31
    return z & LOW, z >> 32


def _mix(x: Tensor) -> Tensor:
    """A 32-bit finaliser, in place, on int64: both factors are under 2**31, so no product overflows."""
    x ^= x >> 16
    x.mul_(0x21F0AAAD).bitwise_and_(LOW)
    x ^= x >> 15
    x.mul_(0x735A2D97).bitwise_and_(LOW)
    x ^= x >> 15
    return x


def _positions(sizes: tuple[int, ...], index: Index | None, device: torch.device) -> Tensor:
    """Position of every element of the piece in the whole tensor."""
    offsets, whole = index or ((0,) * len(sizes), sizes)
    position = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        along = torch.arange(offset, offset + size, dtype=torch.int64, device=device)
        position = position.unsqueeze(-1) + along * prod(whole[dim + 1 :])
    return position


def _words(sizes: tuple[int, ...], key: int, seed: int, index: Index | None, device: torch.device | str) -> Tensor:
    """The word of every element of the piece: int64, from 0 to 2^32 - 1."""
    first, second = _seeds(key, seed)
    position = _positions(sizes, index, torch.device(device))
    high = (position >> 32) if prod(index[1] if index else sizes) > LOW else None
    bits = _mix(position.bitwise_and_(LOW).bitwise_xor_(first)).bitwise_xor_(second)
    return _mix(bits if high is None else bits.bitwise_xor_(high))


@torch.no_grad()
def keep_mask(sizes: tuple[int, ...], p: float, key: int, seed: int = 0, index: Index | None = None,
              device: torch.device | str = "cpu") -> Tensor:
    """Which elements of the piece survive: bool, True with probability 1 - p."""
    return _words(sizes, key, seed, index, device) >= round(p * 2**32)


def _inside(words: Tensor) -> Tensor:
    """v: float64, in (0, 1)."""
    return words.double().add_(0.5).mul_(2.0**-32)


def _uniform(words: Tensor, a: float, b: float, dtype: torch.dtype) -> Tensor:
    digits = DIGITS.get(dtype, 24)
    return words.bitwise_right_shift_(32 - digits).double().mul_(2.0**-digits * (b - a)).add_(a)


def _normal(words: Tensor, mean: float, deviation: float, dtype: torch.dtype) -> Tensor:
    quantiles: Tensor = torch.special.ndtri(_inside(words))
    return quantiles.mul_(deviation).add_(mean)


def _log_normal(words: Tensor, mean: float, deviation: float, dtype: torch.dtype) -> Tensor:
    return _normal(words, mean, deviation, dtype).exp_()


def _exponential(words: Tensor, rate: float, _: float, dtype: torch.dtype) -> Tensor:
    return _inside(words).neg_().log1p_().mul_(-1 / rate)


def _cauchy(words: Tensor, median: float, scale: float, dtype: torch.dtype) -> Tensor:
    return _inside(words).sub_(0.5).mul_(math.pi).tan_().mul_(scale).add_(median)


def _geometric(words: Tensor, p: float, _: float, dtype: torch.dtype) -> Tensor:
    if p >= 1:
        return torch.ones_like(words)
    return _inside(words).neg_().log1p_().mul_(1 / math.log1p(-p)).ceil_().clamp_min_(1.0)


def _kept(words: Tensor, p: float, _: float, dtype: torch.dtype) -> Tensor:
    return words >= round((1 - p) * 2**32)


def _whole(words: Tensor, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """Whole numbers from `low` to `high` - 1, of which there are at most 2^31."""
    return (words.mul_(int(high) - int(low)) >> 32).add_(int(low))


LAWS: Mapping[str, Callable[[Tensor, float, float, torch.dtype], Tensor]] = MappingProxyType({
    "uniform": _uniform, "normal": _normal, "log_normal": _log_normal, "exponential": _exponential, "cauchy": _cauchy,
    "geometric": _geometric, "kept": _kept, "whole": _whole})
"""By name, what a law makes of words and its two numbers: the last is 0 where it has one."""


@torch.no_grad()
def drawn(sizes: tuple[int, ...], law: str, first: float, second: float, dtype: torch.dtype,
          device: torch.device | str = "cpu", key: int = 0, seed: int = 0, index: Index | None = None) -> Tensor:
    """The piece of the given `sizes` of a tensor that follows a law with these numbers."""
    found = LAWS[law](_words(sizes, key, seed, index, device), first, second, dtype)
    return (found.float() if found.is_floating_point() else found).to(dtype)
