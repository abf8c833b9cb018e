"""Published runs priced as described and compared with what was measured: the performance model's report card.

    row -> cluster, software, parts     what it ran on, with, and of    `validate_places`, `validate_software`, `_parts`
        -> seconds and peak bytes       by the graph and the prices that plans use   `validate_layer`, `validate_memory`
        -> errors per source            beside the trivial predictor's               `validate_scores`

Constants belong to devices, links and programs, never to a source. A row that cannot be priced is counted with its
reason.
"""

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path

from autoddl.core.errors import InputError
from autoddl.validation.clusters import cluster_of
from autoddl.validation.memory import peak_bytes
from autoddl.validation.runs import Run, read_runs
from autoddl.validation.scores import Priced
from autoddl.validation.software import recomputed
from autoddl.validation.step import Unpriced, step

__all__ = ["priced", "validate"]

Progress = Callable[[str, int, int], None]
SURE = 1.25
"""Predicted over available bytes from which a run that does not tell is taken to recompute: beyond the memory model's
own error."""


def validate(path: str | Path, progress: Progress = lambda *_: None) -> tuple[Priced, ...]:
    """Every run of a CSV file, priced."""
    runs, found = read_runs(path), []
    for i, run in enumerate(runs):
        progress("pricing", i, len(runs))
        found.append(priced(run))
    return tuple(found)


def priced(run: Run) -> Priced:
    """Seconds and peak bytes of a run, or the reason why there are none."""
    try:
        run = _recomputing(run)
        microbatch = run.microbatch or _fastest(run)
        memory = peak_bytes(run, microbatch) if run.peak_bytes else None
        return Priced(run, step(run, microbatch).seconds, memory)
    except (Unpriced, InputError) as error:
        return Priced(run, reason=str(error))


def _recomputing(run: Run) -> Run:
    """A run that does not say whether it recomputes does so only where it would not fit otherwise, and in as few layers
    of a stage as then fit."""
    if recomputed(run):
        return run
    plain, full = replace(run, recompute="none"), replace(run, recompute="full")
    if not run.microbatch:
        return plain
    most, least = (peak_bytes(one, run.microbatch) for one in (plain, full))
    beyond, layers = most - SURE * cluster_of(run).device.memory, -(-run.layers // run.pp)
    if beyond <= 0:
        return plain
    return replace(full, again=min(1.0, ceil(layers * beyond / (most - least)) / layers) if most > least else 1.0)


def _fastest(run: Run) -> int:
    """The microbatch that a tuned run would have: the fastest power of two that divides the batch and fits."""
    memory = cluster_of(run).device.memory
    found, reasons = dict[int, float](), []
    for b in (b for b in (1, 2, 4, 8, 16) if run.batch // run.dp % b == 0):
        try:
            if peak_bytes(run, b) <= memory:
                found[b] = step(run, b).seconds
        except Unpriced as error:
            reasons.append(error)
    if not found:
        raise reasons[0] if reasons else Unpriced("no microbatch is stated, and none fits the device")
    return min(found, key=lambda b: found[b])






