"""The performance model on sources that its constants have not seen: python examples/benchmarks/validate.py RUNS.csv

For every source of published runs, the seconds of products on each kind of device are fitted again to the other sources
alone (the factor at which the mean of their biases is nought), and the source is priced with it:

    ln T(f) is nearly linear in ln f:   slope of each run from two prices of one plan, at f = 1 and f = 1 + STEP
    f(device, left out) solves          mean over other sources of mean ln(T(f) / measured) = 0

Plans are chosen once and priced twice. A kind of device that has no other source keeps its figure.

    RUNS.csv --priced FILE      prices are kept in FILE, a JSON object a line, and those that it has are not made again
             --every N          every N-th run of a source with more than 12
             --workers N        processes
             --pairs            the pairs of configurations that are predicted in the wrong order, left out
"""

import argparse
import json
from collections.abc import Sequence
from itertools import combinations
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from autoddl.core.errors import InputError
from autoddl.cost_models.profile import SHIPPED
from autoddl.planner.process_pool import mapper
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_parts import Unpriced
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs
from autoddl.validation.scores import PricedRun, groups, score_sources
from autoddl.validation.validate import settled

STEP = 0.05
FEW = 12
"""Runs of a source that are all taken."""


class Priced(NamedTuple):
    """A run, its predicted seconds and d ln T / d ln f; without them, the reason."""

    run: Run
    seconds: float | None
    slope: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float:
        """ln(T / measured)."""
        assert self.seconds is not None
        return log(self.seconds / self.run.seconds)


def price(run: Run) -> Priced:
    """The plan of a run, priced with the shipped constants and with slower products."""
    try:
        chosen, microbatch = settled(run)
        here = price_as_plan(chosen, microbatch)
        there = price_as_plan(chosen, microbatch, SHIPPED.times("matmul", 1 + STEP), SHIPPED)
        return Priced(run, here, log(there / here) / log(1 + STEP))
    except (Unpriced, InputError) as error:
        return Priced(run, None, reason=str(error))


def taken(runs: Sequence[Run], every: int) -> list[Run]:
    """Every N-th run of each source, all of one with few."""
    found = []
    for source in dict.fromkeys(run.source for run in runs):
        mine = [run for run in runs if run.source == source]
        found += mine if len(mine) <= FEW else mine[::every]
    return found


def priced_runs(runs: Sequence[Run], file: Path | None, workers: int) -> list[Priced]:
    """Prices runs, but for those that the file has."""
    lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
    known = {row["row"]: row for row in map(json.loads, lines)}
    found = [Priced(run, *(known[run.row][key] for key in ("predicted_seconds", "slope", "reason")))
             for run in runs if run.row in known]
    with mapper(price, workers) as map_price:
        for one in map_price([run for run in runs if run.row not in known]):
            found.append(one)
            if file is not None:
                row = {"row": one.run.row, "predicted_seconds": one.seconds, "slope": one.slope, "reason": one.reason}
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
    return found


def factor(others: Sequence[Priced]) -> float:
    """ln f at which the mean of the sources' mean logarithms is nought."""
    groups = [[one for one in others if one.run.source == source]
              for source in dict.fromkeys(one.run.source for one in others)]
    if not groups:
        return 0.0
    error = fmean(fmean(one.error for one in rows) for rows in groups)
    return -error / fmean(fmean(one.slope for one in rows) for rows in groups)


def left_out(rows: Sequence[Priced]) -> tuple[list[PricedRun], dict[str, dict[str, float]]]:
    """Every run, priced by the constants of the other sources, and by source the factors on kinds of devices."""
    kinds = {run.device: cluster_of(run).device.name.split("-")[0] for run in (one.run for one in rows)}
    factors = {source: {kind: factor([one for one in rows if one.run.source != source
                                      and kinds[one.run.device] == kind])
                        for kind in sorted({kinds[one.run.device] for one in rows if one.run.source == source})}
               for source in dict.fromkeys(one.run.source for one in rows)}
    found = [PricedRun(one.run, one.run.seconds * exp(one.error + one.slope * factors[one.run.source][
        kinds[one.run.device]])) for one in rows]
    return found, factors


def reversed_pairs(rows: Sequence[PricedRun]) -> list[str]:
    """A line for every pair of configurations whose order is predicted the other way round than it was measured."""
    def ratio(a: PricedRun, b: PricedRun) -> tuple[float, float]:
        tokens = b.run.batch * b.run.seq / (a.run.batch * a.run.seq)
        return (a.seconds or 0.0) / (b.seconds or 1.0) * tokens, a.run.seconds / b.run.seconds * tokens

    def words(run: Run) -> str:
        return (f"{run.row}: {run.precision} dp={run.dp},tp={run.tp},pp={run.pp},cp={run.cp},ep={run.ep},"
                f"vp={run.chunks},zero={run.zero_stage} microbatch {run.microbatch} of {run.batch} x {run.seq}")

    found = []
    for a, b in (pair for group in groups(rows) for pair in combinations(group, 2)):
        predicted, measured = ratio(a, b)
        if (predicted - 1) * (measured - 1) < 0:
            found.append(f"{a.run.model}, {a.run.gpus} devices, {words(a.run)} against {words(b.run)}: "
                         f"{100 * (predicted - 1):+.1f} % predicted, {100 * (measured - 1):+.1f} % measured")
    return found


def main() -> None:
    """Prints errors by source, as shipped and left out, and what the left-out prices are good for."""
    asked = argparse.ArgumentParser()
    asked.add_argument("runs", type=Path)
    asked.add_argument("--priced", type=Path)
    asked.add_argument("--every", type=int, default=1)
    asked.add_argument("--workers", type=int, default=2)
    asked.add_argument("--pairs", action="store_true")
    words = asked.parse_args()
    every = priced_runs(taken(read_runs(words.runs), words.every), words.priced, words.workers)
    rows = [one for one in every if one.seconds is not None]
    found, factors = left_out(rows)
    scores, means = score_sources(found), []
    print(f"{'source left out':26}{'runs':>5}{'shipped':>9}{'left out':>9}{'constant':>9}{'tau':>7}{'regret':>8}")
    for source, score in scores.items():
        plain = fmean(abs(exp(one.error) - 1) for one in rows if one.run.source == source)
        means.append((plain, score.mape or 0.0))
        numbers = (plain, score.mape, score.constant_mape)
        texts = ["-" if value is None else f"{100 * value:.1f} %" for value in (*numbers, score.regret)]
        texts.insert(3, "-" if score.tau is None else f"{score.tau:.2f}")
        moved = ", ".join(f"{kind} x {exp(value):.3f}" for kind, value in factors[source].items())
        print(f"{source:26}{score.n:5}" + "".join(f"{text:>9}" for text in texts), f"  {moved}")
        if words.pairs:
            mine = [one for one in found if one.run.source == source]
            print("".join(f"    {line}\n" for line in reversed_pairs(mine)), end="")
    better = [score for score in scores.values() if score.n >= 4 and (score.mape or 0) < (score.constant_mape or 0)]
    print(f"mean of sources {100 * fmean(a for a, _ in means):.1f} % shipped, {100 * fmean(b for _, b in means):.1f} % "
          f"left out; better than one constant in {len(better)} of {sum(s.n >= 4 for s in scores.values())} with 4 "
          f"runs or more; {len(rows)} of {len(every)} runs have a price")


if __name__ == "__main__":
    main()
