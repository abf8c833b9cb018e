"""Cuts that are tried: what is expected of others once one was, and moves from one to a better one."""

from functools import cache
from itertools import combinations, pairwise
from math import inf

import pytest
import torch
from every_pipeline import Chain

from autoddl.core.pipeline import flights_of
from autoddl.core.pipeline_schedules import generate
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines import pipeline_candidate
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.cut_problems import PlacedStages, beside
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged_steps import TriedCut
from autoddl.planner.pipelines.tried_cuts import TriedCuts, try_cut
from autoddl.planner.task import task_of

WIDTHS = (64, 256, 64, 64, 512, 64, 64, 128, 64, 64)


@cache
def _part(name: str, parts: int, stages: int, limit: float | None = None) -> StageParts:
    """A chain of unequal blocks, cut at every place, on two nodes of two ranks or on four of one."""
    cluster = f"examples/clusters/rehearsal-{'2x2' if parts == 2 else '4x1'}-200.yaml"
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, stages_limit=limit)
    task = task_of(Chain(WIDTHS), cluster, torch.randn(64, 64), options, "chain", None)
    where = generate(name, parts, 4).placement
    made = StageParts(task, stages, parts, 4, places_of(task.variant(4).original, ()), where)
    for stage in made.every:
        stage.begin(closer=True)
    return made


@cache
def _every(name: str, parts: int, stages: int) -> dict[tuple[int, ...], TriedCut]:
    part = _part(name, parts, stages)
    return {cut: try_cut(part, name, cut) for cut in combinations(range(1, part.units), stages - 1)}


CASES = [("1f1b", 2, 2), ("1f1b", 4, 4), ("interleaved:2", 2, 4)]


@pytest.mark.parametrize(("name", "parts", "stages"), CASES)
def test_one_cut_that_was_tried_tells_what_others_take(name: str, parts: int, stages: int) -> None:
    """Its seconds are those of the pipeline, and others are told no worse by the worst, and by half where much is sent.
    """
    part, every, schedule = _part(name, parts, stages), _every(name, parts, stages), generate(name, parts, 4)
    one = every[min(every)]
    known = {(s, *at): seconds for s, (seconds, at) in enumerate(
        zip(one.stages, pairwise((0, *one.cut, part.units)), strict=True))}
    flights = tuple(flights_of(schedule))
    blind, seen = PlacedStages(part, schedule, flights), PlacedStages(part, schedule, flights, None, known, one)
    assert seen.seconds(one.cut) == pytest.approx(one.seconds, rel=1e-9)
    before, now = (max(abs(placed.seconds(cut) / tried.seconds - 1) for cut, tried in every.items())
                   for placed in (blind, seen))
    assert now < before / 2 if parts == 2 else now <= before + 1e-9


@pytest.mark.parametrize(("name", "parts", "stages"), CASES[1:])
def test_moves_go_on_behind_a_cut_that_takes_less_than_all_beside_it(name: str, parts: int, stages: int) -> None:
    part, schedule = _part(name, parts, stages), generate(name, parts, 4)
    placed = PlacedStages(part, schedule, tuple(flights_of(schedule)))
    every = {cut: placed.seconds(cut) for cut in combinations(range(1, part.units), stages - 1)}
    ends, least = {cut: every[placed.near(cut, 0.0)] for cut in every}, min(every.values())
    stuck = [cut for cut in every if least < every[cut] <= min(every.get(one, inf) for one in beside(cut))]
    assert stuck and sum(ends[cut] < every[cut] for cut in stuck) >= len(stuck) / 2
    assert all(ends[cut] <= every[cut] for cut in every)


def test_what_another_process_tried_is_not_tried_again() -> None:
    cuts = TriedCuts(_part("1f1b", 4, 4), "1f1b")
    for cut in ((2, 4, 6), (1, 4, 6)):
        cuts.find(cut)
    first = cuts.likely_better(inf, ())[0]
    cuts.elsewhere.add(first)
    assert cuts.likely_better(inf, ()) and first not in cuts.likely_better(inf, ())


def test_steps_end_where_no_cut_beside_is_likely_better_and_find_nearly_the_best() -> None:
    every = _every("1f1b", 4, 4)
    cuts = TriedCuts(_part("1f1b", 4, 4), "1f1b")
    cuts.find(max(every, key=lambda cut: every[cut].seconds))
    while cuts.step(inf, ()):
        pass
    assert cuts.fastest is not None and cuts.fastest.seconds <= 1.01 * min(one.seconds for one in every.values())
    assert len(cuts.tried) < len(every) / 2


def _begun(limit: float | None) -> CutSearch:
    """A search that has solved some cuts, with a first pipeline that is far from the best."""
    every = _every("1f1b", 4, 4)
    search = CutSearch(_part("1f1b", 4, 4, limit), "1f1b", lambda _: None)
    search.cuts.find(max(every, key=lambda cut: every[cut].seconds))
    search.rounds = 1
    return search


@pytest.mark.parametrize(("limit", "climbed", "tried"), [(60.0, 9.0, 1), (60.0, 0.0, 2), (None, 9.0, 2)])
def test_under_a_limit_better_cuts_take_no_more_than_bounds(limit: float | None, climbed: float, tried: int,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one always the same is found, whatever it took."""
    monkeypatch.setattr(pipeline_candidate, "CLIMBS", 1)
    search = _begun(limit)
    search.took |= {"climb": climbed, "solve": 5.0}
    search._climb()
    assert len(search.cuts.tried) == tried


def test_no_better_cut_is_sought_where_the_gap_is_closed() -> None:
    search = _begun(None)
    search.bound = search.seconds
    search.find_better()
    assert len(search.cuts.tried) == 1
    search.bound = 0.0
    search.find_better()
    assert len(search.cuts.tried) > 1
