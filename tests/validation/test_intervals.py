"""How sure predictions are: quantiles by hand, runs left out with their source, and what is printed of it."""

from dataclasses import replace
from math import exp
from pathlib import Path
from random import Random

import pytest
import yaml
from published import run

from autoddl.core.errors import InputError
from autoddl.cost_models.intervals import NODE, REGIMES, Interval, interval_of, known_intervals
from autoddl.validation.intervals import Winners, covered, find_intervals, intervals_text, regime_of, winners
from autoddl.validation.scores import PricedRun

ALONE = "whole" + NODE


def rows(folder: Path, source: str, ratios: tuple[float, ...]) -> list[PricedRun]:
    """Runs that took these times of what was predicted."""
    one = run(folder, source_id=source)
    return [PricedRun(replace(one, row=str(i), seconds=ratio), 1.0) for i, ratio in enumerate(ratios)]


def test_every_source_has_the_same_weight(tmp_path: Path) -> None:
    found = rows(tmp_path, "a", (0.9,) * 40) + rows(tmp_path, "b", (1.0,)) + rows(tmp_path, "c", (1.2,))
    known = find_intervals(found)[ALONE]
    assert known.median == pytest.approx(1.0) and (known.runs, known.sources) == (42, 3)
    assert known.common == 0.0  # runs of one source differ by nothing


def test_a_run_is_set_against_the_other_sources(tmp_path: Path) -> None:
    found = rows(tmp_path, "a", (0.9, 1.0, 1.1)) + rows(tmp_path, "b", (1.0, 1.5, 2.0))
    inside, every = covered(found)[ALONE]
    assert (inside, every) == (3, 6)  # of a 1.0 and 1.1 are within 1.0 to 2.0, of b 1.0 is within 0.9 to 1.1
    assert covered(found)["pipeline"] == (0, 0)


def test_intervals_are_wide_enough_for_a_source_that_they_have_not_seen(tmp_path: Path) -> None:
    """Sources differ more than their runs do: quantiles of the others alone hold too few."""
    draw = Random(1)
    sources = [draw.gauss(0, 0.1) for _ in range(10)]
    found = [one for i, shift in enumerate(sources)
             for one in rows(tmp_path, f"{i}", tuple(exp(shift + draw.gauss(0, 0.02)) for _ in range(8)))]
    inside, every = covered(found)[ALONE]
    assert every == 80 and 0.7 <= inside / every <= 0.9
    known = find_intervals(found)[ALONE]
    assert known.low < known.median < known.high
    low, _, high = (exp(sorted(sources)[at]) for at in (1, 5, 8))
    assert known.low < low and high < known.high


def test_runs_inside_a_node_and_on_several_have_widths_of_their_own(tmp_path: Path) -> None:
    """Sources scatter by .02 inside a node, and by .2 where a network is between: 8 of 10 of either lie inside."""
    draw, found = Random(2), list[PricedRun]()
    for i in range(12):
        for gpus, scatter in ((8, 0.02), (64, 0.2)):
            one = run(tmp_path, source_id=f"{i}", n_gpus=gpus, dp=gpus // 4, iter_time_s=1400.0)
            found += [PricedRun(replace(one, row=f"{gpus} {k}", seconds=exp(draw.gauss(0, scatter))), 1.0)
                      for k in range(4)]
    counts, known = covered(found), find_intervals(found)
    for name in (ALONE, "whole"):
        inside, every = counts[name]
        assert every == 48 and 0.7 <= inside / every <= 0.9
    widths = {name: known[name].high / known[name].low for name in (ALONE, "whole")}
    assert 1.02 < widths[ALONE] < 1.15 < 1.4 < widths["whole"] and known[ALONE].median == known["whole"].median


def test_the_called_winner_is_right_where_it_is_faster(tmp_path: Path) -> None:
    one = run(tmp_path)
    measured, predicted = (1.0, 1.2, 1.4, 1.1), (1.0, 1.3, 1.2, 1.0)
    found = [PricedRun(replace(one, source="mine", row=str(i), notes=f"as {i}", seconds=a), b)
             for i, (a, b) in enumerate(zip(measured, predicted, strict=True))]
    others = rows(tmp_path, "other", (1.0, exp(0.02), exp(0.05)))  # whose pairs lie 0.05 apart in 8 of 10 cases
    assert winners([*found, *others])["mine"] == Winners(pairs=6, called=5, right=4)
    again = [replace(one, run=replace(one.run, row=f"{one.run.row} again")) for one in found]
    assert winners([*found, *again, *others])["mine"] == Winners(pairs=6, called=5, right=4)


def test_runs_of_ones_own_make_an_interval_narrow_and_centred() -> None:
    known = Interval(0.9, 1.6, 0.05, 10, 2, 1.1)
    own = known.with_runs(0.02, 40)
    assert known.of(2.0) == (1.8, 2.2, 3.2) and known.with_runs(0.02, 0) is known
    assert own.low * own.high == pytest.approx(1.0) and own.median == 1.0 and own.common == known.common
    assert own.high < known.with_runs(0.02, 4).high < known.high / known.low


def test_a_tie_is_closer_than_what_is_shared() -> None:
    known = Interval(0.9, 1.1, 0.05, 10, 2)
    assert known.ties(1.0, 1.05) and known.ties(1.05, 1.0) and not known.ties(1.0, exp(0.06))


def test_the_file_reads_back_and_the_packages_own_has_every_regime(tmp_path: Path) -> None:
    found = rows(tmp_path, "a", (0.9, 1.0, 1.1))
    text = intervals_text(find_intervals(found), ["runs.csv"])
    assert text.startswith("#") and set(yaml.safe_load(text)["regimes"]) == set(REGIMES) == set(known_intervals())
    assert all(one.low < 1.2 and one.high > 0.8 and one.low < one.high for one in known_intervals().values())
    assert interval_of(4, False) == known_intervals()["pipeline"]
    assert regime_of(run(tmp_path, zero_stage=3)) == "sharded in one node"
    assert regime_of(run(tmp_path, n_gpus=16, dp=4, iter_time_s=1400.0)) == "whole"
    with pytest.raises(InputError, match="1 priced runs say nothing"):
        find_intervals(found[:1])
