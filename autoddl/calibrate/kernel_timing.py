"""Times a device's kernels: every case in turn, in many rounds, and takes the low end of each.

    seconds of a point = the 20th percentile over the rounds        spread = (80th - 20th percentile) / 20th

Where ranks share a core, the work of the others is no disturbance but the usual state, so the median is taken. Every
rank starts its rounds at another case (`first`), because ranks of a run are seldom at the same kernel. Two threads of
one core get less done when they are.

A round goes once through all cases, so that a disturbance of some seconds spoils one round and not one curve. Longer
disturbances are removed on a CPU by a pulse next to each case (`machine_speed`).

    instances   as many of the operator as fill half of a large cache, one after the other
    forward     on an input that was just read, as in a model; the other inputs are new
    backward    one call of autograd, on tensors that were saved long ago
    clock       CPU seconds of the process where it has one thread, which other processes hardly change; where there are
                more ranks than cores, times the ranks per core
                wall-clock seconds with more threads

On a GPU the seconds of a call are those between two events of the device. Work that was handed over before keeps the
device busy until the host has handed over all of the call (`device_stopwatch`). So no point has the host's time in it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from math import ceil, prod
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autoddl.calibrate.kernel_cases import USUAL, Case, Known, Scale, cases, kernels
from autoddl.calibrate.machine_speed import correct_for_pulses, median_pulse, pulse
from autoddl.cost_models import Kernel

__all__ = ["FEWEST", "Stopwatch", "Timed", "clock_of", "curve_rows", "device_stopwatch", "host_stopwatch", "low",
           "measure_kernels", "spread"]

WORKING_SET = 8 * 2**20
"""Bytes of all instances together."""
MOST, FEWEST = 16, 3
"""The most instances, and the fewest rounds."""
MEETINGS = 4
"""Times per round at which all ranks measure the pulse together."""

BUSY, CHUNKS = 2**29, 64
"""Bytes that a GPU clears at a time to be busy, and the most times before a call."""

Clock = Callable[[], float]
Stopwatch = Callable[[Callable[[], object]], float]
"""The seconds of a call."""
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Timed:
    """A kernel and the seconds of each round."""

    kernel: Kernel
    seconds: list[float] = field(default_factory=list)
    beside: list[int] = field(default_factory=list)
    """The index of the pulse before each of them."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A case with its kernels: forward, then those of backward, each with the inputs whose gradients it yields."""

    case: Case
    dtype: torch.dtype
    forward: Timed
    backward: tuple[tuple[Timed, tuple[int, ...]], ...]

    def instances(self) -> int:
        one = sum(prod(shape) for shape in self.case.shapes) * 2 * self.dtype.itemsize
        return max(1 if self.forward.kernel.flops > 5e8 else 2, min(MOST, WORKING_SET // one))


def low(values: Sequence[float], part: float = 0.2) -> float:
    """Returns the 20th percentile of the values, or the one at the fraction `part`."""
    return sorted(values)[int(part * (len(values) - 1) + 0.5)]


def spread(values: Sequence[float]) -> float:
    """Returns (80th - 20th percentile) / 20th percentile of the values."""
    ordered = sorted(values)
    return (ordered[int(0.8 * (len(values) - 1) + 0.5)] - low(values)) / low(values)


def clock_of(device: torch.device, threads: int, slowdown: float) -> Clock:
    """Returns a clock, in seconds, of which only differences count; `slowdown` is the number of ranks per core."""
    if device.type == "cuda":
        def synchronised() -> float:
            torch.cuda.synchronize(device)
            return time.perf_counter()
        return synchronised
    if threads > 1:
        return time.perf_counter
    return lambda: time.process_time() * slowdown


def host_stopwatch(clock: Clock) -> Stopwatch:
    """Returns a stopwatch of the host; what a call returns is freed after it."""
    def seconds(run: Callable[[], object]) -> float:
        start = clock()
        kept = run()
        end = clock()
        del kept
        return max(end - start, 1e-9)

    return seconds


def device_stopwatch(device: torch.device) -> Stopwatch:
    """Returns a stopwatch of a GPU: the seconds of a call's kernels, however long the host takes to start them.

    The device clears memory meanwhile, which also empties its caches. Where that was not enough, it clears twice as
    much and the call runs again, up to CHUNKS times BUSY bytes.
    """
    memory = torch.empty(BUSY, dtype=torch.uint8, device=device)
    chunks = [4]

    def seconds(run: Callable[[], object]) -> float:
        for number in chain((chunks[0],), (2**i for i in range(CHUNKS.bit_length()) if 2**i > chunks[0])):
            chunks[0] = number
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(number):
                memory.zero_()
            start.record()
            kept = run()
            late = start.query()
            end.record()
            end.synchronize()
            del kept
            if not late:
                break
        return max(float(start.elapsed_time(end)) / 1e3, 1e-9)

    return seconds


def measure_kernels(device: torch.device, dtypes: Sequence[torch.dtype], clock: Clock, seconds: float,
                    scale: Scale = USUAL, progress: Progress | None = None, first: float = 0.0,
                    meet: Callable[[], object] = lambda: None) -> tuple[list[Timed], float]:
    """Times all kernels of all cases, and returns them with the usual pulse meanwhile (0 on a GPU, which has none).

    Timing takes `seconds`, but at least FEWEST rounds, of which the first warms up. For the pulse all ranks `meet`
    MEETINGS times in each of the first FEWEST rounds. A round starts at the fraction `first` of the cases."""
    began, tell = time.monotonic(), progress or (lambda what, done, total: None)
    known: Known = {}
    points = [_point(case, dtype, known) for dtype in dtypes for case in cases(scale)]
    watch = device_stopwatch(device) if device.type == "cuda" else host_stopwatch(clock)
    largest = max(prod(shape) for point in points for shape in point.case.shapes)
    noise = {dtype: torch.randn(largest, device=device).to(dtype) for dtype in dtypes}
    beat, beats, met = pulse(clock) if device.type == "cpu" else lambda: 0.0, list[float](), list[tuple[int, float]]()
    start = int(first * len(points))
    for rounds in count():
        for i, point in enumerate((*points[start:], *points[:start])):
            if rounds >= FEWEST and time.monotonic() - began > seconds:
                break
            beats.append(beat())
            if rounds < FEWEST and i % ceil(len(points) / MEETINGS) == 0:
                met.append((len(beats) - 1, median_pulse(beat, meet)))
            _time(point, noise[point.dtype], watch, len(beats) - 1, warm=not rounds)
            tell("timing kernels", min(int(time.monotonic() - began), int(seconds)), int(seconds))
        else:
            continue
        break
    found = [timed for point in points for timed in (point.forward, *(timed for timed, _ in point.backward))]
    if device.type != "cpu":
        return found, 0.0
    for timed in found:
        timed.seconds = correct_for_pulses([*zip(timed.beside, timed.seconds, strict=True)], beats)
    return found, median(correct_for_pulses(met, beats))


def _point(case: Case, dtype: torch.dtype, known: Known) -> _Point:
    forward, backward = kernels(case, dtype, known)
    every = tuple(range(len(case.shapes)))
    wanted = [every] if len(backward) == 1 else [(i,) for i in every]
    found = tuple((Timed(k), which) for k, which in zip(backward, wanted, strict=True) if k.name != forward.name)
    return _Point(case, dtype, Timed(forward), found)


def _time(point: _Point, noise: Tensor, watch: Stopwatch, beat: int, warm: bool) -> None:
    """Times a case once, after pulse number `beat`; a first time only warms up."""
    case, many, again = point.case, point.instances(), noise.is_cuda
    made = [case.tensors(noise) for _ in range(many)]
    gradients: list[Tensor] = []
    for timed, wanted in point.backward:
        outputs, leaves = [case.op(*tensors) for tensors in made], [tensors[i] for tensors in made for i in wanted]
        gradients = gradients or [torch.ones_like(outputs[0])] * many
        took = watch(partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=again))
        if not warm:
            timed.seconds.append(took / many)
            timed.beside.append(beat)
        del outputs
    took = watch(lambda: [case.op(made[0][0], *tensors[1:]) for tensors in made])
    if not warm:
        point.forward.seconds.append(took / many)
        point.forward.beside.append(beat)


def curve_rows(timed: Sequence[Timed], shared: bool = False) -> list[dict[str, Any]]:
    """Returns the curves as the file has them: one per name and dtype, with points row-major on their grid.

    `shared` says that ranks share cores."""
    found: dict[tuple[str, str], dict[tuple[float, ...], Timed]] = {}
    for one in timed:
        found.setdefault((one.kernel.name, one.kernel.dtype), {})[one.kernel.sizes] = one
    rows = []
    for (name, dtype), points in found.items():
        ordered = [points[at] for at in sorted(points)]
        grid = [sorted({at[i] for at in points}) for i in range(len(next(iter(points))))]
        assert prod(map(len, grid)) == len(points), f"{name} has no whole grid"
        rows.append({"name": name, "dtype": dtype, "grid": grid,
                     "work": [t.kernel.work for t in ordered],
                     "seconds": [float(f"{low(t.seconds, 0.5 if shared else 0.2):.4g}") for t in ordered],
                     "spread": [float(f"{spread(t.seconds):.2g}") for t in ordered]})
    return rows
