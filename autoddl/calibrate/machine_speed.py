"""Measures how fast this machine is at the moment, by the seconds of a fixed mixture of work: a *pulse*.

A shared CPU is faster in one minute than in the next, for all kinds of kernels nearly alike. So a pulse is measured
next to every kernel, and a sequence of times, each with its own pulse, is corrected by

    seconds = measured * (median of all pulses) / (median of the AROUND pulses before and after)

The mixture runs twice and the second run counts, because the first finds the caches full of earlier work. A pulse after
a training step was still a fifth slower than one after another pulse, and the next one a tenth. So a file records the
median of a row of pulses, which all ranks take together (`measured: pulse`, `median_pulse`). The ratio of a later row
to it is the slowdown since then.
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.nn import functional as F

__all__ = ["correct_for_pulses", "median_pulse", "pulse"]

SIDE, ROWS, WIDTH, AROUND = 256, 512, 512, 4
"""The side of the product, rows and columns of the other operands, and pulses on each side of a median."""
ROW = 8
"""Pulses of a row."""


def pulse(clock: Callable[[], float]) -> Callable[[], float]:
    """Returns a function that measures a pulse by `clock`: two milliseconds of a CPU, after two to warm up."""
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


def median_pulse(beat: Callable[[], float], meet: Callable[[], object]) -> float:
    """Returns the median of a row of pulses; all ranks `meet` before each of them."""
    def together() -> float:
        meet()
        return beat()

    return median([together() for _ in range(ROW)])


def correct_for_pulses(taken: Sequence[tuple[int, float]], beats: Sequence[float]) -> list[float]:
    """Returns the seconds of one kernel as if all pulses had been the same; `taken` is (index of pulse, seconds)."""
    usual = median(beats)
    return [seconds * usual / median(beats[max(0, at - AROUND) : at + AROUND + 1]) for at, seconds in taken]
