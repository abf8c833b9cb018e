"""How fast this machine is just now: the seconds of a fixed mixture of work.

A processor that is shared is faster in one minute than in the next, for all kinds of kernels nearly alike. So every
kernel's time is taken beside a pulse, and a sequence of times, each of its own pulse, is steadied by

    seconds = taken * (median of all pulses) / (median of the AROUND pulses before and after)

The median of all says how fast the machine was when a file was measured (`measured: pulse`); later, another pulse over
that is by how much it is slower then.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.nn import functional as F

__all__ = ["pulse", "steadied"]

SIDE, ROWS, WIDTH, AROUND = 256, 1024, 512, 4
"""Of the product, and of what is added and bent."""


def pulse(clock: Callable[[], float]) -> Callable[[], float]:
    """A function that takes the pulse: some milliseconds of a CPU."""
    square, rows = torch.randn(SIDE, SIDE), torch.randn(ROWS, WIDTH)

    def beat() -> float:
        start = clock()
        for _ in range(6):
            square @ square
        F.gelu(rows)
        F.layer_norm(rows, (WIDTH,))
        rows + rows
        return max(clock() - start, 1e-9)

    beat()
    return beat


def steadied(taken: Sequence[tuple[int, float]], beats: Sequence[float]) -> list[float]:
    """(which pulse stood beside it, seconds) of one kernel, as if all pulses were the same."""
    usual = median(beats)
    return [seconds * usual / median(beats[max(0, at - AROUND) : at + AROUND + 1]) for at, seconds in taken]
