"""Published runs priced as described and compared with what was measured: the performance model's report card.

    row -> cluster, software, parts     what it ran on, with, and of    `validate_places`, `validate_software`, `_parts`
        -> seconds and peak bytes       by the graph and the prices that plans use   `validate_layer`, `validate_memory`
        -> errors per source            beside the trivial predictor's               `validate_scores`

Constants belong to devices, links and programs, never to a source. A row that cannot be priced is counted with its
reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from autoddl.core.errors import InputError
from autoddl.cost_models import show_seconds
from autoddl.tabular import columns
from autoddl.validate_memory import peak_bytes
from autoddl.validate_places import cluster_of
from autoddl.validate_runs import Run, read_runs
from autoddl.validate_scores import Priced, scores
from autoddl.validate_software import recomputed
from autoddl.validate_step import Unpriced, step

__all__ = ["priced", "run_rows", "run_table", "score_rows", "score_table", "validate"]

Progress = Callable[[str, int, int], None]
SURE = 1.25
"""Predicted over available bytes from which a run that does not tell is taken to recompute: beyond the memory model's
own error."""
KEYS = ("n", "priced", "mape", "max_ape", "bias", "constant_mape", "rank_correlation", "regret")


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


def run_rows(found: Sequence[Priced]) -> list[dict[str, Any]]:
    """One object per run, seconds and bytes; null and the reason where there is no price."""
    return [{"row": one.run.row, "source": one.run.source, "model": one.run.model, "n_gpus": one.run.gpus,
             "measured_seconds": one.run.seconds, "predicted_seconds": one.seconds,
             "error": None if one.seconds is None else one.error, "measured_bytes": one.run.peak_bytes or None,
             "predicted_bytes": one.nbytes, "reason": one.reason} for one in found]


def run_table(found: Sequence[Priced]) -> RenderableType:
    """One row per run."""
    table = columns("row", "source", "model", "ranks", "measured", "predicted", "error", "")
    for one in found:
        run = one.run
        shown = ("-", "-") if one.seconds is None else (show_seconds(one.seconds), _percent(one.error))
        table.add_row(run.row, run.source, run.model, f"{run.gpus}: dp {run.dp} tp {run.tp} pp {run.pp} cp {run.cp}",
                      show_seconds(run.seconds), *shown, one.reason)
    return table


def score_rows(found: Sequence[Priced]) -> dict[str, dict[str, Any]]:
    """Source -> figures under stable names; fractions, null where there is nothing to compute."""
    return {source: {key: asdict(score)[key] for key in KEYS} for source, score in scores(found).items()}


def score_table(found: Sequence[Priced]) -> RenderableType:
    """One row per source, then the reasons of what has no price."""
    table = columns("source", "runs", "priced", "error", "worst", "bias", "constant", "ranks", "regret", "memory")
    by_source = scores(found)
    for source, one in by_source.items():
        table.add_row(source, str(one.n), str(one.priced), *map(_percent, (one.mape, one.max_ape, one.bias,
                      one.constant_mape)), "-" if one.rank_correlation is None else f"{one.rank_correlation:.2f}",
                      _percent(one.regret), _percent(one.memory_mape))
    for source, one in by_source.items():
        for reason, count in one.reasons.items():
            table.add_row(f"{source}: {count} not priced: {reason}")
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"

