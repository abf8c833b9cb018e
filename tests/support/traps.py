"""Functions that look as if they could be split along their first dim, and cannot; some only rarely."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["ROWWISE", "TRAPS"]

_calls = [0]


def normalised_over_the_batch(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt()


def sorted_along_the_batch(x: Tensor) -> Tensor:
    return x.sort(0).values


def summed_along_the_batch(x: Tensor) -> Tensor:
    return x.cumsum(0)


def softmax_over_the_batch(x: Tensor) -> Tensor:
    return x.softmax(0)


def with_hidden_state(x: Tensor) -> Tensor:
    _calls[0] += 1
    return x * _calls[0]


def wrong_from_32_rows_on(x: Tensor) -> Tensor:
    return x - x.mean(0) if x.shape[0] >= 32 else x - 1


def wrong_in_odd_sizes(x: Tensor) -> Tensor:
    return x * x.shape[0] if x.shape[0] in (5, 9, 7) else x * 2


class _MeanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return 2 * upstream / upstream.shape[0]


def wrong_in_its_gradient(x: Tensor) -> Tensor:
    found: Tensor = _MeanGradient.apply(x)  # type: ignore[no-untyped-call]
    return found


def with_positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0]).unsqueeze(1)


def wrong_for_negative_values(x: Tensor) -> Tensor:
    return x - x.mean() if bool((x < 0).any()) else x * 2


def scaled_by_the_largest(x: Tensor) -> Tensor:
    return x / x.abs().max()


def drawn_in_secret(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, dtype=x.dtype)


def mixed_with_the_neighbour(x: Tensor) -> Tensor:
    return x + x.roll(1, 0)


def written_in_place(x: Tensor) -> Tensor:
    x.detach().add_(1)
    return x * 2


def of_one_number(x: Tensor) -> Tensor:
    return x * 0


def too_slow(x: Tensor) -> Tensor:
    time.sleep(0.25)
    return x * 2


def failing_on_odd_rows(x: Tensor) -> Tensor:
    if x.shape[0] % 2:
        raise AssertionError("an odd number of rows")
    return x * 2


TRAPS: Mapping[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (
    normalised_over_the_batch, sorted_along_the_batch, summed_along_the_batch, softmax_over_the_batch,
    with_hidden_state, wrong_from_32_rows_on, wrong_in_odd_sizes, wrong_in_its_gradient, with_positions,
    wrong_for_negative_values, scaled_by_the_largest, drawn_in_secret, mixed_with_the_neighbour, written_in_place,
    of_one_number, too_slow, failing_on_odd_rows)}


def doubled(x: Tensor) -> Tensor:
    return x.sin() * 2


def turned(x: Tensor) -> Tensor:
    return x.t() * 2


def scaled_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = x.norm(dim=1)
    return x / norm.unsqueeze(1), norm


ROWWISE: Mapping[str, tuple[Callable[[Tensor], Any], str]] = {
    "doubled": (doubled, "n0 n1 -> n0 n1"), "turned": (turned, "n0 n1 -> n1 n0"),
    "scaled_rows": (scaled_rows, "n0 . -> n0 ., n0")}
"""Functions that can be split, with their dims."""
