"""The budget of a rank with several stages: merged fronts against every choice, shares that add up, cuts that fit."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product
from math import inf

import numpy as np
import pytest
import torch
import zoo
from every_pipeline import Chain
from sampling import parametrize_or_slow

from autoddl.core.errors import Infeasible
from autoddl.core.pipeline import Flight
from autoddl.core.pipeline_schedules import generate
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models.timelines.pipeline_bounds import closed_paths
from autoddl.cost_models.timelines.pipelines import ONCE
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines import pipeline_candidate, rank_memory
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.cut_problems import beside
from autoddl.planner.pipelines.joint_stages import filled_bubbles
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.pipeline_search import plan_of_cut
from autoddl.planner.pipelines.rank_memory import fitting_plans, price_of_bytes, rank_peak, unit_prices
from autoddl.planner.pipelines.shared_budget import EVEN, least_together, moved, shares_of
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import TriedCut, simulated_cut
from autoddl.planner.pipelines.tried_cuts import lost_seconds, roomier
from autoddl.planner.task import task_of
from autoddl.schedule.stage_bytes import alone_bytes, rank_peak_bytes

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"

ONE_AXIS = PlanOptions(microbatches=(4,), max_axes=1, workers=1)


@pytest.mark.parametrize("seed", range(40))
def test_merged_fronts_have_the_least_of_every_choice(seed: int) -> None:
    rng = random.Random(seed)
    moments = rng.randint(1, 3)
    fronts = [[(rng.uniform(1, 9), np.array([rng.uniform(1, 9) for _ in range(moments)]))
               for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 4))]
    budget = rng.uniform(2, 5) * len(fronts)
    every = [choice for choice in product(*fronts) if np.all(sum(b for _, b in choice) <= budget)]
    wanted = min((sum(t for t, _ in choice) for choice in every), default=inf)
    found = least_together(fronts, budget)
    if found is None:
        assert wanted == inf
    else:
        chosen = [front[k] for front, k in zip(fronts, found, strict=True)]
        assert sum(t for t, _ in chosen) == pytest.approx(wanted) and np.all(sum(b for _, b in chosen) <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_whole_add_up_and_follow_the_sizes(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.uniform(0.1, 9) for _ in range(rng.randint(2, 5))]
    shares = shares_of(sizes)
    assert sum(shares) == EVEN and min(shares) >= 1
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    assert [shares[s] for s in order] == sorted(shares)


def test_a_share_goes_from_where_a_byte_is_worth_least_to_where_it_is_worth_most() -> None:
    assert moved((10, 10), (1.0, 3.0)) == (9, 11)
    assert moved((1, 19), (1.0, 3.0)) is None, "no stage is left without"
    assert moved((10, 10), (2.0, 2.0)) is None, "nothing is gained"
    assert moved((1, 9, 10), (0.0, 1.0, 2.0)) == (1, 8, 11)


def test_a_cut_beside_one_that_is_too_full_fits_its_ranks_without_a_budget() -> None:
    """Of an interleaved pipeline of four stages on two parts: of embedding, three blocks and head, one has two."""
    model, sample = zoo.named("gpt2", layers=3, B=8)
    task = task_of(model, TWO_BY_TWO, sample, ONE_AXIS, "gpt2", None)
    name, cut = "interleaved:2", (2, 3, 4)
    parts = StageParts(task, 4, 2, 4, places_of(task.variant(4).original, ()), generate(name, 2, 4).placement)
    flights = parts.staged(name, cut).flights

    def fullest(cut: tuple[int, ...]) -> float:
        staged = parts.staged(name, cut)
        graphs = cut_graph(parts.graph, staged.cuts)
        return rank_peak(parts, staged, [*map(parts.freely_planned, graphs, flights)])

    def within(budget: float) -> tuple[int, ...] | None:
        parts.task = replace(task, budget=budget)
        return roomier(parts, name, cut, flights, max)

    most = fullest(cut)
    other = within(0.999 * most)
    assert within(2 * most) == cut and other is not None and fullest(other) <= 0.999 * most
    assert within(1.0) is None


def test_a_plan_is_found_though_the_cuts_that_take_least_leave_no_room(monkeypatch: pytest.MonkeyPatch
                                                                                ) -> None:
    """The cut that is least under what is known does not fit: one near it does, with the budget divided."""
    monkeypatch.setattr(pipeline_candidate, "STALE", -1)  # nothing more is made known first
    task = task_of(Chain((64,) * 11), TWO_BY_TWO, torch.randn(64, 64), replace(ONE_AXIS, budget=2.5e5), "chain", None)
    name = "interleaved:2"
    part = StageParts(task, 4, 2, 4, places_of(task.variant(4).original, ()), generate(name, 2, 4).placement)
    search = CutSearch(part, name, lambda _: None)
    while not search.is_done:
        search.advance()
    assert search.cuts.fastest is not None and next(iter(search.cuts.tried.values())) is None
    plan = plan_of_cut(part, name, search.cuts.fastest)
    assert search.bound <= plan.predicted.seconds and plan.predicted.peak_bytes <= task.budget


@pytest.mark.slow
def test_plans_that_are_found_roughly_fit_and_spare_searches() -> None:
    """Four ranks of two stages: those with fewer microbatches in flight take what was found for the fullest."""
    model, sample = zoo.named("gpt2", layers=8, B=8)
    options = replace(ONE_AXIS, microbatches=(8,), recompute=("search",))
    task = task_of(model, "examples/clusters/rehearsal-4x1-200.yaml", sample, options, "gpt2", None)
    name, cut = "interleaved:2", (1, 2, 3, 4, 5, 6, 7)

    def parts(budget: float) -> StageParts:
        return StageParts(replace(task, budget=budget), 8, 4, 8, places_of(task.variant(8).original, ()),
                          generate(name, 4, 8).placement)

    free = parts(inf)
    staged = free.staged(name, cut)
    graphs, flights = cut_graph(free.graph, staged.cuts), staged.flights
    budget = 0.8 * rank_peak(free, staged, tuple(map(free.freely_planned, graphs, flights)))
    quick, slow = parts(budget), parts(budget)
    rough = fitting_plans(quick, staged, graphs, flights, roughly=True)
    exact = fitting_plans(slow, staged, graphs, flights)
    assert rank_peak(quick, staged, rough) <= budget and rank_peak(slow, staged, exact) <= budget

    def seconds(plans: tuple[Plan, ...]) -> float:
        return sum(plan.predicted.seconds for plan in plans)

    assert seconds(exact) * (1 - 1e-2) <= seconds(rough) <= 1.1 * seconds(exact)
    assert len(quick._prices._alone) < len(slow._prices._alone)


def _eight(budget: float) -> tuple[StageParts, Staged]:
    """GPT-2 of eight layers in an interleaved pipeline of four ranks with two stages each."""
    model, sample = zoo.named("gpt2", layers=8, B=8)
    options = replace(ONE_AXIS, recompute=("search",))
    task = task_of(model, "examples/clusters/rehearsal-4x1-200.yaml", sample, options, "gpt2", None)
    part = StageParts(replace(task, budget=budget), 8, 4, 4, places_of(task.variant(4).original, ()),
                      generate("interleaved:2", 4, 4).placement)
    return part, part.staged("interleaved:2", (2, 3, 4, 5, 6, 7, 8))


def test_a_stage_may_have_what_the_others_of_its_rank_leave() -> None:
    """Of plans with the least and the most bytes neither uses the rank: one between them does, and is faster."""
    free, staged = _eight(inf)
    graphs, flights = cut_graph(free.graph, staged.cuts), staged.flights
    stages = [(graphs[s], flights[s]) for s in (0, 4)]
    most = [free.freely_planned(*stage) for stage in stages]
    moments = staged.moments[0]
    part = _eight(0.95 * rank_peak_bytes(most, moments))[0]
    least = next(plan for share in range(1, EVEN) if (plan := _tried(part, share, stages[0])) is not None)
    fronts = [[most[0], least], [most[1]]]
    found = rank_memory._filled(part, moments, stages, fronts, [least, most[1]])
    assert rank_peak_bytes(found, moments) <= part.task.budget
    assert most[0].predicted.seconds <= found[0].predicted.seconds < 0.999 * least.predicted.seconds
    sizes = [plan.predicted.peak_bytes for plan in (least, found[0], most[0])]
    assert found[1] == most[1] and sizes[0] < sizes[1] < sizes[2]
    part.task = replace(part.task, budget=rank_peak_bytes([least, most[1]], moments))
    assert rank_memory._filled(part, moments, stages, fronts, [least, most[1]]) == [least, most[1]], "nothing is left"


def _pair(part_of_bytes: float) -> tuple[StageParts, Staged]:
    """GPT-2 of eight layers on two ranks, with two stages of two blocks each, and so much of what it takes freely."""
    model, sample = zoo.named("gpt2", layers=8, B=16)
    options = replace(ONE_AXIS, recompute=("search",))
    task = task_of(model, "examples/clusters/laptop.yaml", sample, options, "gpt2", None)
    places = places_of(task.variant(4).original, ())

    def made(budget: float) -> StageParts:
        return StageParts(replace(task, budget=budget), 4, 2, 4, places, generate("interleaved:2", 2, 4).placement)

    free, cut = made(inf), (3, 5, 7)
    staged = free.staged("interleaved:2", cut)
    plans = [free.freely_planned(*one) for one in zip(cut_graph(free.graph, staged.cuts), staged.flights, strict=True)]
    return made(part_of_bytes * rank_peak(free, staged, plans)), staged


@pytest.mark.slow
@pytest.mark.parametrize("part_of_bytes", [0.95, 0.85, 0.75])
def test_some_blocks_of_a_stage_run_again_where_a_rank_has_room_for_the_others(part_of_bytes: float) -> None:
    """As fast as the best of all levels of all blocks, with the layouts that stages have without a budget."""
    part, staged = _pair(part_of_bytes)
    graphs, flights = cut_graph(part.graph, staged.cuts), staged.flights
    found = fitting_plans(part, staged, graphs, flights)
    assert rank_peak(part, staged, found) <= part.task.budget
    for rank in range(2 if part_of_bytes != 0.85 else 1):
        every = list[list[Plan]]()
        for s in (rank, rank + 2):
            free = part._freely(graphs[s], part._key(graphs[s]), flights[s])[1]
            blocks = part._policies(graphs[s], free.candidate)
            assert blocks == 2
            every.append([part.plan_of_choice(graphs[s], flights[s], free.candidate, (
                *levels, *free.solution.choice[blocks:])) for levels in product(range(3), repeat=blocks)])
        best = min(sum(plan.predicted.seconds for plan in plans) for plans in product(*every)
                   if rank_peak_bytes(plans, staged.moments[rank]) <= part.task.budget)
        assert sum(found[s].predicted.seconds for s in (rank, rank + 2)) <= best * 1.002
    plans, seconds = filled_bubbles(part, staged, found)
    assert rank_peak(part, staged, plans) <= part.task.budget
    cut = (3, 5, 7)
    now, before = (simulated_cut(part.task.cluster, some, staged, part.graph, cut).seconds for some in (plans, found))
    assert now == seconds < before


@pytest.mark.parametrize("seed", range(20))
def test_the_price_that_says_most_is_found_without_every_price(seed: int) -> None:
    """What stages take at least is the least of lines in the price: each plan has its seconds, and bytes too many."""
    rng = random.Random(seed)
    lines = [(rng.uniform(1, 9), rng.uniform(-1, 3)) for _ in range(8)] + [(9.0, -1.0)]
    asked = list[float]()

    def told(price: float) -> float:
        asked.append(price)
        return min(seconds + over * price for seconds, over in lines)

    every = [rank_memory._power(k, rank_memory.FINE) for k in range(-24, 17)]
    for first in (every[0], every[20], every[-1]):
        found = rank_memory._dearest(cache(told), first, (every[0], every[-1]))
        assert told(found) == pytest.approx(max(map(told, every)))
        assert found in every
    assert rank_memory._dearest(lambda price: -price, every[20], (every[0], every[-1])) == every[0]


def test_a_rank_with_room_has_no_price_and_a_full_one_that_which_says_most() -> None:
    for part_of_bytes, has_price in ((1.3, False), (0.6, True)):
        part, staged = _pair(part_of_bytes)
        found = unit_prices(part, staged.flights, closed_paths(staged.schedule(), ONCE), 0.012)
        assert bool(found) == has_price
        even = list(pairwise(part.units * s // 4 for s in range(5)))
        for one in found:
            values = [rank_memory._taken(part, staged.flights, lambda flight: {flight}, even, one.stages, one.weights,
                                         one.price * times) for times in (0.5, 1.0, 2.0)]
            assert values[1] > max(values[0], values[2])


@parametrize_or_slow("part_of_bytes", [0.6], [1.3])
def test_the_blend_of_units_has_prices_where_ranks_are_full(part_of_bytes: float) -> None:
    """Under them stages so counted take more than with next to none, and no less than mixtures of all plans found."""
    part, staged = _pair(part_of_bytes)
    search = CutSearch(part, "interleaved:2", lambda _: None)
    search.advance()
    search.prices += unit_prices(part, search.flights, search.paths, search.bound)
    places = tuple(part.units * s // 4 for s in range(1, 4))
    found = search._blend_of_units(places, inf)
    assert found is not None and bool(found[1]) == (part_of_bytes < 1)
    ends = list(pairwise((0, *places, part.units)))
    for one in found[1]:
        told = [rank_memory._taken(part, staged.flights, lambda flight: {flight}, ends, one.stages, one.weights,
                                   one.price * times) for times in (1 / 64, 1.0)]
        assert told[1] > 1.01 * told[0] > 0.0
    assert search._learn_prices(found[1]) == bool(found[1]) and not search._learn_prices(found[1])


def _tried(part: StageParts, share: int, stage: tuple[StageGraph, Flight]) -> Plan | None:
    """The plan of a stage under a share of the budget, if there is one."""
    try:
        return part.under(share).planned(*stage)
    except Infeasible:
        return None


def test_what_the_bytes_that_a_rank_lacks_cost_is_told_of_its_fullest_stage() -> None:
    free, staged = _eight(inf)
    graphs, flights, cut = cut_graph(free.graph, staged.cuts), staged.flights, (2, 3, 4, 5, 6, 7, 8)
    plans = tuple(map(free.freely_planned, graphs, flights))
    ranks = [alone_bytes(plans[s], flights[s]) + alone_bytes(plans[s + 4], flights[s + 4]) for s in range(4)]
    part = _eight(0.85 * rank_peak(free, staged, plans))[0]
    price = price_of_bytes(part, staged, fitting_plans(part, staged, graphs, flights))
    assert price > 0 and price_of_bytes(free, staged, plans) == 0
    lost = lost_seconds(part, cut, flights, price, {})
    for s in range(4):
        assert lost[s] == pytest.approx(price * max(0.0, ranks[s] - part.task.budget)) and lost[s + 4] == 0
    assert max(lost) > 0 and lost_seconds(free, cut, flights, price, {}) == [0.0] * 8


def test_any_stage_gives_a_unit_to_any_other() -> None:
    sizes = {tuple(b - a for a, b in pairwise((0, *cut, 11))) for cut in beside((2, 5, 7))}
    assert sizes == {tuple(n + (s == more) - (s == less) for s, n in enumerate((2, 3, 2, 4)))
                     for more, less in permutations(range(4), 2)}


@pytest.mark.parametrize("left", [0.0, 3e4])
def test_buckets_of_stages_on_the_same_ranks_are_within_what_the_stages_leave(left: float) -> None:
    """Each of the buckets alone would fit the whole budget."""
    task = task_of(Chain((64,) * 13), TWO_BY_TWO, torch.randn(64, 64), ONE_AXIS, "chain", None)
    name, cut = "interleaved:2", (3, 6, 9)
    part = StageParts(task, 4, 2, 4, places_of(task.variant(4).original, ()), generate(name, 2, 4).placement)
    staged = part.staged(name, cut)
    plans = tuple(map(part.freely_planned, cut_graph(part.graph, staged.cuts), staged.flights))

    def planned(budget: float) -> Plan:
        part.task = replace(task, budget=budget)
        return plan_of_cut(part, name, TriedCut(cut, plans, 1.0, (), ()))

    budget = rank_peak(part, staged, plans) + left
    free, plan = planned(inf), planned(budget)
    assert plan.predicted.peak_bytes <= plan.budget == budget < free.predicted.peak_bytes
    assert plan.pipeline is not None and {stage.plan.budget for stage in plan.pipeline.stages} == {budget}
    assert left == 0 or any(stage.plan.bucket_bytes > 1 for stage in plan.pipeline.stages)
    with pytest.raises(Infeasible, match="do not fit it together"):
        planned(budget - left - 1)
