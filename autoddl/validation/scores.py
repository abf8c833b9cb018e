"""Scores of predictions, per source of published runs.

    error         e = predicted / measured - 1;  mape = mean |e|, max_ape = max |e|, bias = mean e
    constant      the trivial predictor: every run reaches the same FLOP/s per device, the mean of the source's other
                  runs; its own mape, leaving one out
    group         runs of one source with the same model, devices and kind of device: different ways to do one thing;
                  runs that are described alike, which no model can tell apart, count as one, by their means
    tau           Kendall's rank correlation of seconds per token over the pairs of all groups: pairs that are predicted
                  in the order in which they were measured minus the others, over both
    regret        mean over groups of  measured of the run predicted fastest / measured of the fastest - 1

A figure that has nothing to be computed from (one run, no group of two) is null.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import log
from statistics import fmean

from autoddl.validation.runs import Run

__all__ = ["PricedRun", "Score", "groups", "score_sources", "step_flops"]

ALIKE = 1e-9
"""Part of the seconds by which predictions differ that are the same but for rounding."""


@dataclass(frozen=True, slots=True)
class PricedRun:
    """A run and its predicted seconds and peak bytes; or, without them, the reason."""

    run: Run
    seconds: float | None = None
    nbytes: float | None = None
    """Predicted peak bytes."""
    reason: str = ""
    remark: str = ""
    """Why a run with a price cannot have run as it is described; empty where it can."""

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        assert self.seconds is not None
        return self.seconds / self.run.seconds - 1


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of one source; fractions, not per cent, and None where there is nothing to compute them from."""

    n: int
    """Runs of the source."""
    priced: int
    """Runs that have a price."""
    mape: float | None
    """Mean absolute error of seconds."""
    max_ape: float | None
    """Greatest absolute error of seconds."""
    bias: float | None
    """Mean error of seconds."""
    constant_mape: float | None
    """Mean absolute error of the trivial predictor."""
    tau: float | None
    """Kendall's rank correlation of configurations."""
    regret: float | None
    """Mean regret over groups."""
    memory_mape: float | None
    """Mean absolute error of peak bytes."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Reason for which a run has no price -> how many runs."""


def score_sources(found: Iterable[PricedRun]) -> dict[str, Score]:
    """Returns the figures of every source, in the order of the rows."""
    sources: dict[str, list[PricedRun]] = {}
    for one in found:
        sources.setdefault(one.run.source, []).append(one)
    return {source: _score(rows) for source, rows in sources.items()}


def _score(rows: Sequence[PricedRun]) -> Score:
    priced = [row for row in rows if row.seconds is not None]
    errors = [row.error for row in priced]
    memory = [abs(row.nbytes / row.run.peak_bytes - 1) for row in priced if row.nbytes and row.run.peak_bytes]
    reasons: dict[str, int] = {}
    for row in rows:
        if row.reason:
            reasons[row.reason] = reasons.get(row.reason, 0) + 1
    varied = [group for group in groups(priced) if len(group) > 1]
    return Score(len(rows), len(priced), _mean([abs(e) for e in errors]), max(map(abs, errors), default=None),
                 _mean(errors), _constant([row.run for row in priced]), _tau(varied),
                 _mean([_regret(group) for group in varied]), _mean(memory), reasons)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def step_flops(run: Run, seen: float = 1.0) -> float:
    """Returns the multiplications and additions of a step of the whole model (Narayanan et al. 2021).

    A query sees the share `seen` of the keys; by default attention counts whole, as published rates have it.
    """
    mlp = run.hidden * (run.ffn * (2 + (run.gated or run.experts > 0)) * max(1, run.top_k) + 3 * run.shared_ffn)
    weights, scores = _latent(run) if run.kv_rank else (2 * run.hidden**2 * (1 + run.kv_heads / run.heads),
                                                        4 * run.hidden)
    layer = 2 * (weights + mlp) + run.seq * scores * seen
    return 3.0 * run.batch * run.seq * (run.layers * layer + 2 * run.hidden * run.vocab)


def _latent(run: Run) -> tuple[int, int]:
    """Weights of a latent attention, and flops of a query with a key, of all heads."""
    own, rows = run.head_width + run.rope_dim, run.q_rank or run.hidden
    q = run.hidden * run.q_rank + rows * run.heads * own
    kv = run.hidden * (run.kv_rank + run.rope_dim) + run.kv_rank * run.heads * (run.head_width + run.v_dim)
    return q + kv + run.heads * run.v_dim * run.hidden, 2 * run.heads * (own + run.v_dim)


def _constant(runs: Sequence[Run]) -> float | None:
    """Mean error of one rate per source, each run predicted by the mean rate of the others."""
    rates = [step_flops(run) / (run.seconds * run.gpus) for run in runs]
    if len(rates) < 2:
        return None
    total = sum(rates)
    return fmean(abs(rate / ((total - rate) / (len(rates) - 1)) - 1) for rate in rates)


def groups(rows: Sequence[PricedRun]) -> list[list[PricedRun]]:
    """Runs of one model on as many devices; those that are described alike are one."""
    found: dict[object, list[PricedRun]] = {}
    for row in rows:
        run = row.run
        found.setdefault((run.model, run.gpus, run.device), []).append(row)
    return [_merge(group) for group in found.values()]


def _merge(group: Sequence[PricedRun]) -> list[PricedRun]:
    """Repeated measurements of one configuration as one, by their means."""
    alike: dict[Run, list[PricedRun]] = {}
    for row in group:
        configuration = replace(row.run, row="", seconds=1.0, peak_bytes=0.0, source="", schedule=row.run.schedule[:6])
        alike.setdefault(configuration, []).append(row)
    return [PricedRun(replace(rows[0].run, seconds=fmean(row.run.seconds for row in rows)),
                   fmean(row.seconds or 0.0 for row in rows)) for rows in alike.values()]


def _per_token(row: PricedRun, seconds: float) -> float:
    return seconds / (row.run.batch * row.run.seq)


def _tau(varied: Sequence[Sequence[PricedRun]]) -> float | None:
    """Kendall's tau; None where no pair is told apart by what is predicted and by what was measured."""
    pairs = [[log(_per_token(a, of(a)) / _per_token(b, of(b))) for of in (_predicted, _measured)]
             for group in varied for a, b in combinations(group, 2)]
    return _mean([1.0 if predicted * measured > 0 else -1.0 for predicted, measured in pairs
                  if abs(predicted) > ALIKE and measured])


def _measured(row: PricedRun) -> float:
    return row.run.seconds


def _predicted(row: PricedRun) -> float:
    assert row.seconds is not None
    return row.seconds


def _regret(group: Sequence[PricedRun]) -> float:
    chosen = min(group, key=lambda row: _per_token(row, row.seconds or 0.0))
    return _per_token(chosen, chosen.run.seconds) / min(_per_token(row, row.run.seconds) for row in group) - 1
