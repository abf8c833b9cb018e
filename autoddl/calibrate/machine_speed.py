"""How fast this machine is just now: the seconds of a fixed mixture of work.

A processor that is shared is faster in one minute than in the next, for all kinds of kernels nearly alike. So every
kernel's time is taken beside a pulse, and a sequence of times, each of its own pulse, is steadied by

    seconds = taken * (median of all pulses) / (median of the AROUND pulses before and after)

The mixture runs twice, and the second counts: what ran before has the caches, and a pulse after a training step was a
fifth slower than one after another pulse, the next still a tenth. So how fast the machine was when a file was measured
(`measured: pulse`) is what a row of them settles to (`settled`), taken by all ranks together; another such row over
that is by how much it is slower later.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.nn import functional as F

__all__ = ["pulse", "settled", "steadied"]

SIDE, ROWS, WIDTH, AROUND = 256, 512, 512, 4
"""Of the product, and of what is added and bent."""
ROW = 8
"""Pulses that are taken in a row."""


def pulse(clock: Callable[[], float]) -> Callable[[], float]:
    """A function that takes the pulse: two milliseconds of a CPU, after two to warm up."""
    square, rows = torch.randn(SIDE, SIDE), torch.randn(ROWS, WIDTH)

    def mixture() -> None:
        for _ in range(3):
            square @ square
        F.gelu(rows)
        F.layer_norm(rows, (WIDTH,))
        rows + rows

    def beat() -> float:
        mixture()
        start = clock()
        mixture()
        return max(clock() - start, 1e-9)

    beat()
    return beat


def settled(beat: Callable[[], float], meet: Callable[[], object]) -> float:
    """The median of a row of pulses, each of which begins where all ranks `meet`."""
    def together() -> float:
        meet()
        return beat()

    return median([together() for _ in range(ROW)])


def steadied(taken: Sequence[tuple[int, float]], beats: Sequence[float]) -> list[float]:
    """(which pulse stood beside it, seconds) of one kernel, as if all pulses were the same."""
    usual = median(beats)
    return [seconds * usual / median(beats[max(0, at - AROUND) : at + AROUND + 1]) for at, seconds in taken]
