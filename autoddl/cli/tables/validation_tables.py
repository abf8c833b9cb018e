"""Tables of published runs beside their predictions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from autoddl.cli.tables.table_style import columns
from autoddl.cost_models import show_seconds
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.validation.intervals import FEWEST, interval_of_run
from autoddl.validation.scores import PricedRun, Score, score_sources
from autoddl.validation.software import unknown_programs

__all__ = ["coverage_table", "run_rows", "run_table", "score_rows", "score_table"]


SOME = 4
"""Runs of a source by which one rate for all of them is judged."""
KEYS = ("n", "priced", "mape", "max_ape", "bias", "constant_mape", "tau", "regret", "reasons")


def run_rows(found: Sequence[PricedRun], known: Profile = SHIPPED) -> list[dict[str, Any]]:
    """One object per run, seconds and bytes; null and the reason where there is no price.

    Eight of ten steps would lie in the interval, on a machine with the constants of `known`."""
    return [{"row": one.run.row, "source": one.run.source, "model": one.run.model, "n_gpus": one.run.gpus,
             "measured_seconds": one.run.seconds, "predicted_seconds": one.seconds,
             "predicted_interval": _between(one, known),
             "error": None if one.seconds is None else one.error, "measured_bytes": one.run.peak_bytes or None,
             "predicted_bytes": one.nbytes, "reason": one.reason, "remark": one.remark} for one in found]


def run_table(found: Sequence[PricedRun], known: Profile = SHIPPED) -> RenderableType:
    """One row per run; `low` and `high` are the seconds between which 8 of 10 such steps would lie."""
    table = columns("row", "source", "model", "ranks", "measured", "predicted", "low", "high", "error", "")
    for one in found:
        run, between = one.run, _between(one, known)
        shown = ("-",) * 4 if one.seconds is None or between is None else (
            show_seconds(one.seconds), *map(show_seconds, between), _percent(one.error))
        table.add_row(run.row, run.source, run.model, f"{run.gpus}: dp {run.dp} tp {run.tp} pp {run.pp} cp {run.cp}",
                      show_seconds(run.seconds), *shown, one.reason or one.remark)
    return table


def _between(one: PricedRun, known: Profile) -> list[float] | None:
    """The seconds between which 8 of 10 such steps would lie; None without a price."""
    if one.seconds is None:
        return None
    low, _, high = interval_of_run(one.run, known).of(one.seconds)
    return [low, high]


def score_rows(found: Sequence[PricedRun]) -> dict[str, dict[str, Any]]:
    """Source -> figures under stable names; fractions, null where there is nothing to compute."""
    return {source: {key: asdict(score)[key] for key in KEYS} for source, score in score_sources(found).items()}


def score_table(found: Sequence[PricedRun]) -> RenderableType:
    """One row per source, then the reasons of what has no price, and what cannot have run as it is described."""
    table = columns("source", "runs", "priced", "error", "worst", "bias", "constant", "tau", "regret", "memory")
    by_source = score_sources(found)
    for source, one in by_source.items():
        table.add_row(source, str(one.n), str(one.priced), *map(_percent, (one.mape, one.max_ape, one.bias,
                      one.constant_mape)), "-" if one.tau is None else f"{one.tau:.2f}",
                      _percent(one.regret), _percent(one.memory_mape))
    reasons = [f"{_named(source)}{count} not priced: {reason}" for source, one in by_source.items()
               for reason, count in one.reasons.items()]
    unknown = unknown_programs(one.run for one in found if one.seconds is not None and one.run.framework)
    lines = [*_summary(by_source), *reasons, *_remarks(found), *unknown]
    return Group(table, *(["", *lines] if lines else []))


def _summary(by_source: Mapping[str, Score]) -> Iterator[str]:
    """Two lines about all sources, where two or more have a price."""
    means = {source: one.mape for source, one in by_source.items() if one.mape is not None}
    told = [one for one in by_source.values() if one.priced >= SOME and one.constant_mape is not None]
    better = sum((one.mape or 0.0) < (one.constant_mape or 0.0) for one in told)
    if len(means) > 1:
        worst = max(means, key=lambda source: means[source])
        yield f"mean of {len(means)} sources {_percent(fmean(means.values()))}, worst {worst}"
        yield f"{better} of {len(told)} sources with {SOME} runs or more are predicted better than by one rate for each"


def _remarks(found: Sequence[PricedRun]) -> Iterator[str]:
    """A line for every source with rows that cannot have run as they are described: which, and why the first."""
    for source in dict.fromkeys(one.run.source for one in found if one.remark):
        rows = [one for one in found if one.remark and one.run.source == source]
        more = f" (and {len(rows) - 1} more, --by run has all)" if len(rows) > 1 else ""
        yield f"{_named(source)}row {rows[0].run.row} {rows[0].remark}{more}"


def _named(source: str) -> str:
    """The beginning of a line about a source; nothing where rows name none."""
    return f"{source}: " if source else ""


def coverage_table(covered: Mapping[str, tuple[int, int]]) -> RenderableType:
    """One row per regime: the runs inside the interval of all other sources; where there are too few, that alone."""
    if not any(every for _, every in covered.values()):
        return Text("how sure predictions are is not told: it is counted in intervals of other sources (source_id), "
                    f"of at least {FEWEST} runs with a price, and there are none")
    table = columns("regime", "runs", "inside the 80 % interval of the other sources")
    for name, (inside, every) in covered.items():
        table.add_row(name, str(every), _percent(inside / every if every else None))
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
