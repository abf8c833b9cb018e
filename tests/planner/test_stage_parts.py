"""What is known of a stage: a bound under a budget that binds is that of one number of microbatches in flight."""

from dataclasses import replace
from functools import lru_cache
from itertools import combinations, pairwise, product
from math import inf

import branching
import numpy as np
import pytest
import torch
import zoo
from every_pipeline import Chain
from sampling import parametrize_or_slow
from torch import Tensor, nn

import autoddl
from autoddl.capture.sample import Sample
from autoddl.core.errors import Infeasible
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Axis, B, Layout, Mesh
from autoddl.core.pipeline import Flight
from autoddl.core.stages import StageGraph
from autoddl.cost_models import load_cluster
from autoddl.explain.pipeline_proof import check_pipeline
from autoddl.operators.fusion import as_compiled
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.alike_units import structure
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.cut_problems import _by_stage
from autoddl.planner.pipelines.part_ranks import ranks_of_parts
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.solved_stages import ANY, ONE, SolvedStage
from autoddl.planner.pipelines.stage_parts import PASSES, SINGLES, StageParts
from autoddl.planner.pipelines.stage_plans import search_stage
from autoddl.planner.pipelines.stage_ports import PieceMessages, Port
from autoddl.planner.task import PlanTask, task_of
from autoddl.pricing.price import Counts
from autoddl.schedule.stage_seconds import stage_seconds

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"
ONE_PIPE = ((0, 1),)
WEIGHTS = (4.0, 4.0, 0.0, 1.0, 1.0, 1.0, 4.0, 4.0)


class Elementwise(nn.Module):
    """Products with much elementwise work between them, of which cuts leave some on either side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.sigmoid(torch.tanh(layer(torch.exp(-x * x)))) * x
        return x.sum()


@lru_cache(maxsize=1)
def _task() -> PlanTask:
    model, sample = zoo.named("gpt2", layers=1, B=8)
    return task_of(model, TWO_BY_TWO, sample, PlanOptions(microbatches=(4,), max_axes=2, workers=1), "gpt2", None)


def _parts(budget: float) -> StageParts:
    task = replace(_task(), budget=budget)
    return StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ONE_PIPE)


def _peak(parts: StageParts, in_flight: int) -> float:
    return parts.planned(parts.alone(0, 2)[0], Flight(in_flight)).predicted.peak_bytes


@pytest.fixture(scope="module")
def peaks() -> tuple[float, float]:
    """The peak bytes of the first stage without a budget, with one and with three microbatches in flight."""
    parts = _parts(_task().cluster.device.memory)
    return _peak(parts, 1), _peak(parts, 3)


def test_a_bound_under_a_budget_says_nothing_of_other_microbatches_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(0.9 * peaks[1])
    parts.bound(0, 2, Flight(3))
    free = _parts(_task().cluster.device.memory)
    free.bound(0, 2, Flight(3))
    under = [parts.wholes([Flight(k)])[Flight(k)][0, 2] for k in (2, 3, 4)]
    without = [free.wholes([Flight(k)])[Flight(k)][0, 2] for k in (2, 3, 4)]
    assert under[0] == without[0] and under[2] == without[2] and under[1] > without[1]
    parts.sharpen(0, 2, Flight(3))
    parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0])
    others = [parts.counted(Flight(k), WEIGHTS)[0, 2] for k in (2, 4)]
    assert parts.counted(Flight(3), WEIGHTS)[0, 2] > 0.0 and others == [0.0, 0.0]


def test_a_stage_that_fits_no_rank_so_may_fit_with_others_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(0.2 * peaks[0])
    parts.bound(0, 2, Flight(3))
    wholes = parts.wholes([Flight(3), Flight(4)])
    assert wholes[Flight(3)][0, 2] == float("inf") > wholes[Flight(4)][0, 2]
    with pytest.raises(Infeasible):
        parts.planned(parts.alone(0, 2)[0], Flight(3))


def test_a_stage_whose_time_is_over_has_the_layouts_of_one_with_more_in_flight(peaks: tuple[float, float],
                                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object) -> object:
        raise Infeasible(0.0, parts.task.budget)

    parts, alone = _parts(0.9 * peaks[1]), _parts(0.9 * peaks[1])
    graph, key = parts.alone(0, 2)
    more = parts.planned(graph, Flight(4))
    monkeypatch.setattr("autoddl.planner.pipelines.solved_stages.search_stage", searched)
    plan, solved = parts.planned(graph, Flight(3)), parts.solve(graph, key, Flight(3))
    assert plan.decisions == more.decisions and plan.predicted.peak_bytes <= parts.task.budget and solved.bound == 0.0
    with pytest.raises(Infeasible):
        alone.planned(graph, Flight(3))


def test_a_bound_without_a_budget_is_true_for_all_microbatches_in_flight(peaks: tuple[float, float]) -> None:
    parts = _parts(2 * peaks[1])
    parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0])
    known = [parts.counted(Flight(k), WEIGHTS)[0, 2] for k in range(1, 5)]
    assert known[0] > 0.0 and all(a == b for a, b in pairwise(known))


def test_schedules_with_more_stages_on_a_rank_know_what_was_searched(peaks: tuple[float, float]) -> None:
    parts = _parts(2 * peaks[1])
    assert parts.bound(0, 2, Flight(3)) and not parts.scheduled(4, True, ((0, 1, 1, 0),)).bound(0, 2, Flight(3))


def test_no_plan_under_other_counts_is_none(peaks: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(task: PlanTask, *args: object) -> object:
        if task.counts not in (None, Counts(4, 4, 0.0, 0.0, 0.0)):
            raise Infeasible(1.0, 1.0)
        return search_stage(task, *args)  # type: ignore[arg-type]

    parts = _parts(2 * peaks[1])
    parts.bound(0, 2, Flight(3))
    monkeypatch.setattr("autoddl.planner.pipelines.solved_stages.search_stage", searched)
    assert parts.count(0, 2, Flight(3), WEIGHTS, parts.alone(0, 2)[0]) is None
    assert parts.counted(Flight(3), WEIGHTS)[0, 2] == 0.0


@parametrize_or_slow("name,layers", [("chain", 3)], [("gpt2", 1), ("gpt2", 2), ("llama", 3), ("t5", 2), ("neox", 3)])
def test_a_stage_takes_no_less_than_what_is_known_of_its_parts(name: str, layers: int) -> None:
    """Every stage that is searched by itself is above what shorter ones say of it; some of that is more than its floor.
    """
    model, sample = (Chain((16,) * (layers + 1)), torch.randn(64, 16)) if name == "chain" else zoo.named(
        name, layers=layers, B=8)
    task = task_of(model, TWO_BY_TWO, sample, PlanOptions(microbatches=(4,), max_axes=1, workers=1), name, None)
    places = places_of(task.variant(4).original, ())
    every = [pair for pair in combinations(range(len(places) + 2), 2) if pair != (0, len(places) + 1)]
    searched = StageParts(task, 2, 2, 4, places, ONE_PIPE)
    for a, b in every:
        searched.bound(a, b, ONE)
        searched.sharpen(a, b, ONE)
    raised = 0
    for length in (1, 2):
        known = StageParts(task, 2, 2, 4, places, ONE_PIPE)
        for a, b in every:
            if b - a <= length:
                known.bound(a, b, ONE)
                known.sharpen(a, b, ONE)
        for weights in (None, known.repeated, known.behind, *PASSES, *SINGLES):
            less, more, floor = (one.wholes([ONE])[ONE] if weights is None else one.least(weights)
                                 for one in (known, searched, StageParts(task, 2, 2, 4, places, ONE_PIPE)))
            at = tuple(np.array(every).T)
            assert (less[at] <= more[at] * (1 + 1e-9)).all(), (length, weights)
            raised += int((less[at] > floor[at] * 1.01).sum())
    assert raised > len(every)


@parametrize_or_slow("name,layers,by_hand", [("elementwise", 3, False)],
                     [("llama", 3, True), ("elementwise", 3, True), ("gpt2", 2, False), ("llama", 3, False),
                      ("neox", 3, True)])
def test_kernels_that_are_fused_over_cuts_count_as_in_the_longest_stage(name: str, layers: int, by_hand: bool) -> None:
    """Stages of several units are above the sum of their units as longer stages have them, and below that of units
    alone, which cannot fuse over their ends."""
    model, sample = (Elementwise(), torch.randn(64, 16)) if name == "elementwise" else zoo.named(
        name, layers=layers, B=8)
    cluster = as_compiled(load_cluster(TWO_BY_TWO))
    cluster = replace(cluster, device=replace(cluster.device, by_hand=by_hand))
    task = task_of(model, cluster, sample, PlanOptions(microbatches=(4,), max_axes=1, workers=1), name, None)
    places = places_of(task.variant(4).original, ())
    parts, exact = (StageParts(task, 2, 2, 4, places, ONE_PIPE) for _ in range(2))
    every = [pair for pair in combinations(range(len(places) + 2), 2) if pair != (0, len(places) + 1)]
    for weights in (parts.whole, parts.repeated, parts.behind, *PASSES, *SINGLES):
        for k in range(parts.units):
            parts._search_least(*parts.joining(k, k + 1), weights)
        for a, b in every:
            exact._search_least(*exact.alone(a, b), weights)
        found, known = ({pair: exact._least[exact.alone(*pair)[1], weights, ANY] for pair in every},
                        parts.least(weights))
        assert all(known[pair] <= found[pair] * (1 + 1e-9) for pair in every), weights
        longer = [pair for pair in every if pair[1] - pair[0] > 1]
        assert any(sum(found[k, k + 1] for k in range(*pair)) > found[pair] * (1 + 1e-6) for pair in longer), weights
        floors = StageParts(task, 2, 2, 4, places, ONE_PIPE).least(weights)
        assert sum(known[pair] for pair in longer) > 1.01 * sum(floors[pair] for pair in longer), weights


class ReadingBlock(nn.Module):
    """A product of what the block before gave and what all blocks read."""

    def __init__(self, width: int, adds: bool) -> None:
        super().__init__()
        self.own, self.adds = nn.Linear(width, width, bias=False), adds

    def forward(self, x: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.own(torch.tanh(x + read if self.adds else x @ read))
        return found


class Reading(nn.Module):
    """Blocks that all read one tensor, which is made of the input, or of parameters alone."""

    def __init__(self, of_input: bool, blocks: int = 4, width: int = 128) -> None:
        super().__init__()
        self.of_input, self.made = of_input, nn.Parameter(torch.randn(width, width))
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(ReadingBlock(width, of_input) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = torch.tanh(x @ self.made) if self.of_input else self.made.t().exp()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, read)
        loss: torch.Tensor = self.last(x).square().mean()
        return loss


@pytest.mark.parametrize("of_input", [True, False])
@pytest.mark.parametrize("splits", [True, False])
def test_what_several_units_read_is_reduced_once_by_a_stage_that_has_them(of_input: bool, splits: bool) -> None:
    """So it may take less than its units together. And kernels of what depends on parameters alone are in W of a stage
    that has it from their beginning, in B of one that receives it: B and W of its units say nothing apart."""
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1)
    task = replace(task_of(Reading(of_input), TWO_BY_TWO, torch.randn(64, 128), options, "reading", None),
                   budget=float("inf"))
    places = places_of(task.variant(4).original, ())
    parts = StageParts(task, 2, 2, 4, places, ONE_PIPE, splits=splits)
    assert parts._read_by_several and parts.split_depends_on_cut == (splits and not of_input)
    apart = ((0.0, 1.0, 0.0, 0.0, 0.0, 0.0), (4.0, 4.0, 1.0, 0.0, 0.0, 0.0), (4.0, 1.0, 4.0, 0.0, 0.0, 0.0))
    for weights in (parts.repeated, *PASSES, *apart * splits):
        for k in range(parts.units):
            parts._search_least(*parts.joining(k, k + 1), weights)
        least = parts.least(weights)
        for a, b in ((0, 3), (1, 3), (1, parts.units - 1)):
            graph, _ = parts.alone(a, b)
            found = search_stage(replace(task, counts=parts._counts(weights)), graph, parts.cluster, parts.each, ONE)
            plan = parts._plan_alone(SolvedStage(*parts._freely(*parts.alone(a, b), ONE)), graph, found.candidate,
                                     found.solution, ONE)
            taken = stage_seconds(plan, add_hubs(graph.graph), parts.cluster, splits)
            assert 0 < least[a, b] <= np.dot(weights, taken) * (1 + 1e-9), (weights, a, b)
            assert all(floor[a, b] <= one * (1 + 1e-9) for floor, one in zip(parts.floor_passes(), taken, strict=False))


@parametrize_or_slow("name,layers,recompute,prices,waits", [("gpt2", 1, "none", (5,), (1, 3))], [
    ("gpt2", 2, "search", (0.3, 5), (0, 0)), ("llama", 3, "none", (0.3, 5), (0, 0)), ("llama", 2, "full", (0.3, 5),
    (1, 4)), ("neox", 2, "none", (0.3, 5), (0, 2)), ("gpt2", 2, "search", (0.3, 5), (1, 3))])
def test_a_stage_has_no_less_than_the_seconds_and_the_bytes_of_its_units_together(name: str, layers: int,
                                                                                  recompute: str,
                                                                                  prices: tuple[float, ...],
                                                                                  waits: tuple[int, int]) -> None:
    """Under every price of a byte, and also between two numbers of microbatches in flight, and of those that wait, of
    which units were searched."""
    model, sample = zoo.named(name, layers=layers, B=8)
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, recompute=(recompute,))
    task = task_of(model, TWO_BY_TWO, sample, options, name, None)
    parts = StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ((0, 0),))
    ends = [pair for pair in combinations(range(parts.units + 1), 2) if 1 < pair[1] - pair[0] < parts.units]
    free = parts.planned(parts.alone(*ends[0])[0], Flight(4)).predicted
    parts.task = replace(task, budget=free.peak_bytes)
    weights, below = (4.0, 4.0, 4.0, 1.0, 1.0, 1.0, 0.0, 0.0), list[float]()
    for price in (times * free.seconds / free.peak_bytes for times in prices):
        for s, flight in product((0, 1), (Flight(2, waits[0]), Flight(4, waits[1]))):
            parts.learn_turns(s, flight, weights, price)
        between = Flight(3, sum(waits) // 2)
        for (a, b), flight in product(ends, (between, Flight(4, waits[1]))[:len(prices)]):
            plan, _ = parts.planned_for(parts.alone(a, b)[0], flight, price)
            assert plan is not None
            takes = plan.predicted.seconds + price * plan.predicted.peak_bytes
            least = parts.priced(flight, weights, price)[a, b]
            assert 0 < least <= takes * (1 + 1e-9), (a, b, flight, price)
            below.append(least / takes)
    assert np.mean(below) > 0.5, below


def test_bytes_of_units_are_not_added_up_where_two_of_them_keep_one_tensor() -> None:
    """The output of a tanh is kept by its own backward, and by that of the next layer."""
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1)
    task = task_of(Chain((8, 8, 8, 8)), TWO_BY_TWO, torch.randn(16, 8), options, "chain", None)
    parts = StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ((0, 0),))
    assert parts.apart_bytes == inf > _parts(1e9).apart_bytes and parts.apart < inf
    parts.learn_turns(0, Flight(2), WEIGHTS, 1e-9)
    assert not parts.priced(Flight(2), WEIGHTS, 1e-9).any()


@parametrize_or_slow("name,recompute,splits,each", [("gpt2", "none", True, 4), ("gpt2", "none", True, 1)], [
    ("gpt2", "none", False, 4), ("gpt2", "search", False, 4), ("llama", "none", False, 4), ("llama", "none", False, 1),
    ("t5", "none", True, 4), ("mixtral", "search", True, 4), ("mixtral", "none", False, 1)])
def test_least_seconds_counted_so_are_those_of_a_plan_and_no_plan_has_less(name: str, recompute: str, splits: bool,
                                                                          each: int) -> None:
    """Whatever counts: messages of every microbatch for weights and their gradients are in them. B and W may differ.

    One microbatch is the first and the last, also where weights are gathered for each use."""
    model, sample = zoo.named(name, layers=1, B=8)
    options = PlanOptions(microbatches=(each,), max_axes=1, workers=1, recompute=(recompute,),
                          pins=("node=zero-3",) * (each == 1))
    task = replace(task_of(model, TWO_BY_TWO, sample, options, name, None), budget=float("inf"))
    parts = StageParts(task, 2, 2, each, places_of(task.variant(each).original, ()), ONE_PIPE, splits=splits)
    graph, key = parts.alone(1, 2)
    apart = ((1.0, 1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.5, 2.0, 0.0, 0.0, 0.0), (3.0, 2.0, 4.0, 1.0, 0.5, 1.0))
    every, seconds, free = (parts.repeated, parts.behind, *PASSES, *SINGLES, *apart * splits), [], SolvedStage(
        *parts._freely(graph, key, ONE))
    for weights in every:
        found = search_stage(replace(task, counts=parts._counts(weights)), graph, parts.cluster, parts.each, ONE)
        plan = parts._plan_alone(free, graph, found.candidate, found.solution, ONE)
        seconds.append(stage_seconds(plan, add_hubs(graph.graph), parts.cluster, splits))
    for k, weights in enumerate(every):
        parts._search_least(graph, key, weights)
        least, taken = parts._least[key, weights, ANY], [np.dot(weights, one) for one in seconds]
        assert least <= min(taken) * (1 + 1e-9) and least >= taken[k] * (1 - 1e-6), (weights, least, taken)


def test_a_first_bound_takes_one_search_of_one_unit_and_a_closer_one_is_no_lower(monkeypatch: pytest.MonkeyPatch
                                                                                ) -> None:
    searches = list[str]()

    def searched(task: PlanTask, stage: StageGraph, *args: object) -> object:
        searches.append(structure(stage.graph))
        return search_stage(task, stage, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("autoddl.planner.pipelines.solved_stages.search_stage", searched)
    model, sample = zoo.named("gpt2", layers=2, B=8)
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1)
    task = task_of(model, TWO_BY_TWO, sample, options, "gpt2", None)
    places = places_of(task.variant(4).original, ())
    candidate = CutSearch(StageParts(task, 2, 2, 4, places, ONE_PIPE), "1f1b", lambda _: None)
    candidate.advance()
    assert len(searches) == 1 and candidate.bound > 0.0
    first = candidate.bound
    candidate.advance()
    assert len(searches) > 1 and set(searches) == {searches[0]}
    assert first <= candidate.bound and candidate.proof is not None
    while candidate.answer is None:
        candidate.advance()
    candidate.advance()
    assert candidate.bound <= candidate.seconds < float("inf")


@parametrize_or_slow("policies", [("every-2",), ("full", "every-2")], [("first-1",), ("full",), ("none", "every-2")])
def test_a_policy_that_counts_blocks_says_nothing_of_longer_stages(policies: tuple[str, ...]) -> None:
    """Of two blocks every-2 runs one again, of one block that one."""
    model, sample = zoo.named("gpt2", layers=3, B=8)
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, recompute=policies)
    task = task_of(model, TWO_BY_TWO, sample, options, "gpt2", None)
    places = places_of(task.variant(4).original, ())
    known, searched = StageParts(task, 2, 2, 4, places, ONE_PIPE), StageParts(task, 2, 2, 4, places, ONE_PIPE)
    known.bound(1, 2, ONE)
    searched.bound(1, 3, ONE)
    assert known.wholes([ONE])[ONE][1, 3] <= searched.wholes([ONE])[ONE][1, 3] * (1 + 1e-9)
    assert (known.apart < float("inf")) == (policies in (("full",), ("none", "every-2")))


def test_a_pin_of_one_block_says_nothing_of_the_others() -> None:
    model, sample = zoo.named("gpt2", layers=2, B=8)
    found = []
    for pins in ((), ("*h.0.mlp*weight: node=B",)):
        options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, pins=pins)
        task = task_of(model, TWO_BY_TWO, sample, options, "gpt2", None)
        parts = StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ONE_PIPE)
        parts.bound(1, 2, ONE)
        parts.bound(2, 3, ONE)
        found.append(parts.wholes([ONE])[ONE])
    assert found[0][1, 2] == found[0][2, 3] == found[1][2, 3] < found[1][1, 2]


def test_a_policy_of_named_blocks_says_of_a_stage_what_it_asks_of_its_blocks() -> None:
    """What is known of blocks joins to longer stages, each with its own policy; stages that are alike are renamed."""
    model, sample = zoo.named("gpt2", layers=3, B=8)
    names = [f"model.transformer.h.{k}" for k in range(3)]
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, recompute=(f"{names[0]}+{names[1]}",))
    task = task_of(model, TWO_BY_TWO, sample, options, "gpt2", None)
    places = places_of(task.variant(4).original, ())
    known, searched = StageParts(task, 2, 2, 4, places, ONE_PIPE), StageParts(task, 2, 2, 4, places, ONE_PIPE)
    for a in (1, 2, 3):
        known.bound(a, a + 1, ONE)
    for a, b in ((1, 3), (2, 4)):
        searched.bound(a, b, ONE)
    least, most = known.wholes([ONE])[ONE], searched.wholes([ONE])[ONE]
    assert least[1, 2] == least[2, 3] > 1.1 * least[3, 4], "forward runs once more"
    assert all(0.9 * most[at] <= least[at] <= most[at] * (1 + 1e-9) for at in ((1, 3), (2, 4)))
    assert known.planned(known._cut(2, 3), ONE).recompute == (names[1],)
    assert known.planned(known._cut(1, 2), ONE).recompute == (names[0],)
    assert known.planned(known._cut(3, 4), ONE).recompute == ()


class Hourglass(nn.Module):
    """Equal blocks, of which the middle one is in no list of modules: no policy runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.ModuleList(branching.Block() for _ in range(2)) for _ in range(2))
        self.middle, self.out = branching.Block(), nn.Linear(branching.WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.down, self.middle, *self.up):
            x = block(x)
        loss: Tensor = self.out(x).square().mean()
        return loss


@pytest.mark.parametrize("recompute", ["full", "down.1+up.0"])
def test_what_is_known_of_a_block_says_nothing_of_an_equal_one_outside_the_lists(recompute: str) -> None:
    model, sample = Hourglass(), Sample((torch.randn(8, 8, branching.WIDTH),))
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1, recompute=(recompute,), stages=(2, 4))
    task = task_of(model, TWO_BY_TWO, sample, options, "hourglass", None)
    parts = StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ONE_PIPE)
    middle = next(k for k in range(parts.units) if "middle.up" in {op.module for op in parts._cut(k, k + 1).graph.ops})
    for unit in (middle - 1, middle, middle + 1):
        parts.bound(unit, unit + 1, ONE)
    least = parts.wholes([ONE])[ONE]
    assert least[middle - 1, middle] > 1.1 * least[middle, middle + 1], "forward runs once more"
    assert [parts.planned(parts._cut(k, k + 1), ONE).recompute for k in (middle, middle + 1)] == [(), ("up.0",)]
    check_pipeline(autoddl.plan(model, "examples/clusters/rehearsal-4x1-400.yaml", sample.args, stages=(4,),
                                microbatches=(4,), max_axes=1, workers=1, recompute=recompute))


class Masked(nn.Module):
    """Three equal layers, of which the last adds another number that no parameter makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        near, far = torch.softmax(x @ x.T, -1) @ x, torch.softmax(x @ x.T, -2) @ x
        for k, layer in enumerate(self.layers):
            x = torch.relu(layer(x)) + (far if k == 2 else near)
        return x.sum()


def test_units_that_compute_other_things_again_are_not_alike() -> None:
    """All of a softmax but its dim is equal: -1 and -2, of which Python has one hash."""
    task = task_of(Masked(), TWO_BY_TWO, torch.randn(16, 16), PlanOptions(microbatches=(1,), max_axes=1, workers=1),
                   "masked", None)
    graph = task.variant(1).original
    places = tuple(i + 1 for i, op in enumerate(needed_ops(graph)) if "add" in op.target)[:-1]
    parts = StageParts(task, 2, 2, 1, places, ONE_PIPE)
    assert len(parts._kinds) == 4 and parts._kinds[1] != parts._kinds[2]


def test_a_chain_of_unlike_units_is_measured_in_blocks_of_equal_work() -> None:
    """Layers of 64 x 64 and 64 x 512 numbers: a stage of so many blocks takes as long wherever it begins."""
    widths = (64, 64, 512, 64, 64, 512, 64, 64)
    options = PlanOptions(microbatches=(4,), max_axes=1, workers=1)
    task = task_of(Chain(widths), TWO_BY_TWO, torch.randn(64, 64), options, "chain", None)
    parts = StageParts(task, 4, 2, 4, places_of(task.variant(4).original, ()), ((0, 1, 0, 1),))
    works = np.array([parts._known_alone(unit) for unit in range(parts.units)])[1:-1]
    blocks = np.array(parts.lengths)[1:-1]
    assert np.abs(blocks / blocks.sum() - works / works.sum()).sum() <= 0.01
    assert max(parts.lengths) > 2 and sum(parts.lengths) == parts.ends[-1] <= 150
    assert [place for place in parts.marks if place is not None] == list(parts.places)
    assert [n for n, place in enumerate(parts.marks, start=1) if place is not None] == list(parts.ends[1:-1])
    known = np.random.default_rng(0).random((parts.units + 1, parts.units + 1))
    table, least = _by_stage(parts, parts.stretches(), [known] * 4), np.full((4, parts.ends[-1]), inf)
    for cut in combinations(range(1, parts.units), 3):
        stages = list(pairwise((0, *cut, parts.units)))
        sizes = [parts.ends[b] - parts.ends[a] for a, b in stages]
        assert parts.cut_of(sizes) == cut
        for s, (n, at) in enumerate(zip(sizes, stages, strict=True)):
            least[s, n - 1] = min(least[s, n - 1], known[at])
    assert (table == least).all()
    alike = StageParts(_task(), 2, 2, 4, places_of(_task().variant(4).original, ()), ONE_PIPE)
    assert set(alike.lengths) == {1} and alike.marks == alike.places


class _Again(nn.Module):
    """Five layers, of which the second and the fourth have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(5))
        self.layers[3].weight = self.layers[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_units_that_share_a_parameter_join_and_count_it_once() -> None:
    task = task_of(_Again(), TWO_BY_TWO, torch.randn(64, 256), PlanOptions(microbatches=(4,), max_axes=1, workers=1),
                   "again", None)
    places = places_of(task.variant(4).original, ())
    known, searched = StageParts(task, 2, 2, 4, places, ONE_PIPE), StageParts(task, 2, 2, 4, places, ONE_PIPE)
    assert known.units == 5 and known.shared == {frozenset((1, 3))} and known.apart_bytes == float("inf")
    for a in range(5):
        known.bound(a, a + 1, ONE)
        known.sharpen(a, a + 1, ONE)
    for a, b in combinations(range(6), 2):
        searched.bound(a, b, ONE)
        searched.sharpen(a, b, ONE)
    weights = (known.repeated, known.behind, *known.pieces)
    least, most = ([one.wholes([ONE])[ONE], *map(one.least, weights)] for one in (known, searched))
    for few, all_of_them in zip(least, most, strict=True):
        assert (few <= all_of_them * (1 + 1e-9) + 1e-15).all()
    inner = [pair for pair in combinations(range(6), 2) if pair[1] - pair[0] > 1]
    floors = 4 * known.floors()
    assert all(least[0][at] > 1.05 * floors[at] for at in inner), "longer stages have more than their floors"


def test_messages_count_where_a_rank_has_two_stages_in_a_row() -> None:
    """At the turn of a V nothing is sent, and no path counts a transfer there: over other boundaries messages cost."""
    task, mesh = _task(), Mesh((Axis("net", 1),))
    ranks = ranks_of_parts(task.cluster, 2)
    port = Port("send", 0, True, (8, 16), 4.0)
    straight, turned, alone = (PieceMessages((port,), task.cluster, ranks, where, (0.0, 2.0)).seconds(
        "send", Layout((B,)), mesh) for where in ((0, 1), (0, 1, 1, 0), (0, 0)))
    assert straight == turned > 0 == alone


def test_plans_of_units_are_the_fastest_where_seconds_count_as_they_were_searched() -> None:
    """No plan that was found is below what is known, and that of each search is as fast as is proved."""
    model, sample = zoo.named("gpt2", layers=4, B=8)
    task = task_of(model, TWO_BY_TWO, sample, PlanOptions(microbatches=(4,), max_axes=2, workers=1), "gpt2", None)
    parts = StageParts(task, 2, 2, 4, places_of(task.variant(4).original, ()), ONE_PIPE)
    every = [(4.0, 4.0, 4.0, 1.0, 1.0, 1.0), (4.0, 0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 4.0, 4.0, 0.5, 0.0, 0.0)]
    for counts in every:
        parts.find_units(0.0, 3.0, counts)
        assert not parts.find_units(0.0, 3.0, counts)
    for one, unit in zip(parts.found_units(0.0, 3.0), (0, *parts.common_units), strict=True):
        assert one.times == (2.0 if unit else 1.0)
        for counts in every:
            taken = float((one.terms[:, :6] @ np.array(counts)).min())
            assert taken == pytest.approx(parts.least(parts.rounded(counts, 4.0))[unit, unit + 1])
