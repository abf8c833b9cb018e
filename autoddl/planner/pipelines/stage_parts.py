"""Knows the stages of the pipelines of one candidate: least seconds of each, sharper where a stage was solved.

A stage is some units in a row, from place a to place b (`stage_units`). Of every stage are known

    floor       its forward, its backward and its W of a microbatch: the work of its ops split evenly over its devices
    whole       T, no less than m (f + b) + gather + reduce + update of any plan that fits with so many in flight
    behind      T', no less than m (f + b) + reduce + update of such a plan
    repeated    M, no less than m (f + b) of any plan
    single      of the first stage, no less than (f + b) + gather + reduce + update of any plan, and that less gather
    passes      no less than f, and no less than b, of any plan
    exchange    no less than the reduce of any plan, where stages have copies that exchange gradients
    counted     no less than these seconds, and those of its messages, counted otherwise, of such a plan
    directions  no less than these seconds, counted about as a blend of paths does, of any plan: searched of one unit

T, T' and M follow from the floor, until a stage is solved (`bound`, `sharpen`): then they are what the search of its
layouts proved. A stage that is made of two has all that they have, and conversions between them:

    T(a, c) >= T(a, b) + T(b, c) - apart

`apart` are the ops before all parameters, which each stage computes for itself. So what is proved of some stages is
known of all longer ones (`joined_stages`). Where both have units that share a parameter, which the longer one gathers
and updates once, units of one of them count by their floors. For this a stage is searched as it is in longer ones.
Kernels may be fused over cuts: it takes what it saves in any (`operators.fusion`). And what several units read may come
and go as partial sums, which a longer stage reduces once (`core.stages`). Nothing is known of longer ones where
policies of recomputation count the blocks of a stage (every-2, first-4), and none lets all of them be.

What is proved without a budget is true for all numbers of microbatches in flight. What is proved under one that binds
is true for that number alone. With more in flight the peak may be lower, since weights are let go
earlier, and a sum of gradients may never be needed.

Where a schedule splits backward, b is what its B and its W take together, and blends count each by itself. Stages that
are alike in all but names are solved once (`solved_stages`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import ceil, floor, inf
from typing import Any

import numpy as np

from autoddl.core.cost_table import Array
from autoddl.core.errors import Infeasible
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.pipeline import Flight
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan, StageBytes
from autoddl.core.problem import Solution
from autoddl.core.stages import StageGraph
from autoddl.planner.candidates import Candidate
from autoddl.planner.mesh_search import Found
from autoddl.planner.pins import also_pinned
from autoddl.planner.pipelines.joined_stages import joined
from autoddl.planner.pipelines.shared_budget import EVEN
from autoddl.planner.pipelines.solved_stages import ANY, ONE, SEVERAL, SolvedStage, SolvedStages, policy_in
from autoddl.planner.pipelines.stage_ports import PieceMessages
from autoddl.planner.pipelines.stage_prices import StagePrices
from autoddl.planner.priced_bytes import PricedFound
from autoddl.planner.task import PlanTask
from autoddl.pricing.price import Counts
from autoddl.schedule.stage_bytes import bytes_in_parts, level_bytes
from autoddl.schedule.stage_seconds import stage_seconds
from autoddl.search.path_tables import FoundPlans, least_implied

__all__ = ["EXCHANGE", "PASSES", "SINGLES", "StageParts"]

DIRECTIONS = 64
"""Steps in which counts of a blend are told apart, of the greatest of a stage."""

ROUGHLY = 8
"""Such steps where plans of units are sought, and nothing is proved."""

MOST_DIRECTIONS = 160
"""Counts of blends of which the least is known, at most."""

FEWER = 2
"""Units that the first or the last stage of a cut has more than what is searched for the counts of its blend."""

KEPT = 24
"""Searches of stages under other counts that are kept: about those of a cut."""

Weights = tuple[float, ...]
"""How often each of the `StageSeconds` of a stage counts."""

PASSES: tuple[Weights, ...] = ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 0.0, 0.0, 0.0))
"""The counts of a forward, and of a backward."""

EXCHANGE: Weights = (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""The counts of a reduction: with copies, a rank reduces several stages one after another behind few of its actions."""

SINGLES: tuple[Weights, ...] = ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.0, 1.0, 1.0))
"""The counts of one microbatch and of what comes once, of a first stage, with its gather and without."""


@dataclass(eq=False)
class StageParts(SolvedStages):
    """The stages of pipelines of so many stages and microbatches: what is known of them so far.

        _directions counts of blends, rounded, of which the least of single units is known
        _joined     by counts and `apart`, what was known of stages and what that says of longer ones
        _taken      seconds and bytes of the plans of some units that are the least where seconds count so, by structure
        _turned     seconds and bytes of the plans of units that were found under prices, by structure and choice
        _least      least seconds of stages, by structure, counts, and microbatches in flight (ANY without a budget)
        _counted    least seconds of stages under other counts
        _lately     what was found of the last of these, and the stages that were searched
        _under      stages like these under shares of the budget, by these
        _pinned     stages like these on one mesh with more pins, by these
        _sized      stages like these on parts of so many ranks, by that number, where parts differ
    """

    _directions: dict[Weights, None] = field(default_factory=dict)
    _joined: dict[tuple[Weights, float], tuple[Array, Array]] = field(default_factory=dict)
    _taken: dict[str, dict[Weights, tuple[StageSeconds, StageBytes]]] = field(default_factory=dict)
    _turned: dict[tuple[Any, ...], tuple[StageSeconds, StageBytes]] = field(default_factory=dict)
    _least: dict[tuple[str, Weights, Flight], float] = field(default_factory=dict)
    _counted: dict[tuple[str, Any, tuple[float, ...], Flight], float] = field(default_factory=dict)
    _lately: dict[tuple[Any, ...], tuple[StageGraph, Found]] = field(default_factory=dict)
    _under: dict[float, "StageParts"] = field(default_factory=dict)
    _pinned: dict[tuple[str, ...], "StageParts"] = field(default_factory=dict)
    _sized: dict[int, "StageParts"] = field(default_factory=dict)

    def on(self, stage: int) -> "StageParts":
        """Stages on as many ranks as a stage has: where parts differ, each number of ranks knows its own."""
        return self._sized[self.sizes[self.where[stage]]] if self.sizes else self

    @property
    def every(self) -> tuple["StageParts", ...]:
        """Stages on every number of ranks that there is."""
        return tuple(self._sized.values()) if self.sizes else (self,)

    def divided(self, sizes: tuple[int, ...], known: dict[int, "StageParts"]) -> "StageParts":
        """Stages like these on parts of so many ranks each; `known` are those of other divisions, which learn too."""
        found = replace(self, sizes=sizes, _sized={})
        for size in dict.fromkeys(sizes):
            alike = known.setdefault(size, replace(
                self, sizes=sizes, size=size, _ports={}, _alone={}, _within_longer={}, _solved={}, _free={}, _drawn={},
                _counted_freely={}, _least={}, _taken={}, _turned={}))
            found._sized[size] = replace(alike, stages=self.stages, parts=self.parts, placement=self.placement,
                                         splits=self.splits, sizes=sizes, _counted={}, _lately={},
                                         _prices=StagePrices(), _under={}, _pinned={})
        return found

    def under(self, share: float) -> "StageParts":
        """Stages like these under some of the `EVEN` shares of the budget, with what is known without a budget."""
        if share not in self._under:
            task = replace(self.task, budget=self.task.budget * share / EVEN)
            least = {key: value for key, value in self._least.items() if key[2] == ANY}
            self._under[share] = replace(self, task=task, _solved={}, _counted={}, _lately={}, _prices=StagePrices(),
                                         _under={}, _pinned={}, _least=least)
        return self._under[share]

    def scheduled(self, stages: int, splits: bool, placement: tuple[tuple[int, ...], ...]) -> "StageParts":
        """Stages like these under a schedule of another kind, more or fewer on every part of the cluster.

        What is found of plans of one is known of the other.
        """
        return replace(self, stages=stages, splits=splits, placement=placement, _counted_freely={}, _counted={},
                       _lately={}, _prices=StagePrices(), _under={}, _pinned={})

    def pinned_to(self, mesh: Mesh, pins: tuple[str, ...]) -> "StageParts":
        """Stages like these on one mesh, with more pins; nothing is known of them yet."""
        key = (str(mesh), *pins)
        if key not in self._pinned:
            options = replace(self.task.options, mesh=str(mesh), pins=(*self.task.options.pins, *pins))
            within = tuple(replace(one, region=also_pinned(one.region, pins)) for one in self.within
                           if one.mesh == mesh)
            self._pinned[key] = replace(self, task=replace(self.task, options=options), within=within, _solved={},
                                        _free={}, _drawn={}, _counted_freely={}, _taken={}, _turned={}, _least={},
                                        _counted={}, _lately={}, _prices=StagePrices(), _alone={}, _within_longer={},
                                        _under={}, _pinned={})
        return self._pinned[key]

    def _every(self, known: Callable[[str], float], *, joining: bool = False) -> Array:
        """[a, b]: what is known of the stage from place a to place b by its structure, else 0.

        It is that of stages as longer ones have them where it is said of `joining`.
        """
        found = np.zeros((self.units + 1, self.units + 1))
        for like, (_, key) in (self._joining if joining else self._alone).items():
            if value := known(key):
                for at in self._alike[like]:
                    found[at] = value
        return found

    def wholes(self, flights: Iterable[Flight]) -> dict[Flight, Array]:
        """By flight T of every stage, [a, b], as far as it is known."""
        floors, apart, every = self.each * self.floors(), self._joins(self.whole), list(flights)
        free = {kept: self._every(partial(self._free_bound, kept)) for kept in (False, True)}
        joins = {kept: np.maximum(self._every(lambda key: self._least.get((key, self.whole, ANY), 0.0), joining=True),
                                  free[kept] if self._fused_ends is None else 0.0) for kept in free}
        longer = {kept: joined(np.maximum(joins[kept], floors), apart, self.shared, floors) for kept in free}
        return {flight: np.maximum.reduce([free[flight.is_several], longer[flight.is_several],
                                           self._every(partial(self._solved_bound, flight))]) for flight in every}

    def _free_bound(self, kept: bool, key: str) -> float:
        """T of a stage of some structure without a budget, whether gathered weights stay or not; else 0."""
        return max((self._free[key, at][1].bound for at in {False, kept} if (key, at) in self._free), default=0.0)

    def _solved_bound(self, flight: Flight, key: str) -> float:
        return self._solved[key, flight].bound if (key, flight) in self._solved and not self.shares else 0.0

    def least(self, weights: Weights) -> Array:
        """[a, b]: least seconds of every stage counted so, whatever its budget, as far as they are known."""
        known = self._every(lambda key: self._least.get((key, weights, ANY), 0.0), joining=True)
        late = min(weights[1:3]) if self.split_depends_on_cut else weights[2]
        sums = np.array(self._works) @ np.array((*weights[:2], late))
        floors = np.maximum(sums[None, :] - sums[:, None], 0.0)
        most = np.maximum(known, floors)
        if weights == self.behind:
            most = np.maximum(most, self.least(self.repeated))
        if weights in SINGLES:
            most = np.maximum(most, sum(self.least(one) for one in self.pieces))
        apart = self._joins(weights)
        if (weights, apart) not in self._joined or not np.array_equal(self._joined[weights, apart][0], most):
            self._joined[weights, apart] = most, joined(most, apart, self.shared, floors)
        return self._joined[weights, apart][1]

    def _joins(self, weights: Weights) -> float:
        """Seconds counted so by which a stage may take less than two that it is made of; infinite if not known."""
        return inf if self.apart == inf else weights[0] * self.apart

    def behinds(self, flights: Iterable[Flight]) -> dict[Flight, Array]:
        """By flight T' of every stage, [a, b], as far as it is known."""
        free = self.least(self.behind)
        return {flight: np.maximum(free, self._every(partial(self._behind_bound, flight))) for flight in flights}

    def _behind_bound(self, flight: Flight, key: str) -> float:
        return self._least.get((key, self.behind, flight), 0.0)

    @property
    def pieces(self) -> tuple[Weights, ...]:
        """The counts of pieces of a step of which something is known."""
        return (*PASSES, EXCHANGE) if self.copies else PASSES

    @property
    def repeated(self) -> Weights:
        """The counts of M."""
        return (float(self.each),) * 3 + (0.0, 0.0, 0.0)

    @property
    def whole(self) -> Weights:
        """The counts of T."""
        return (float(self.each),) * 3 + (1.0, 1.0, 1.0)

    @property
    def behind(self) -> Weights:
        """The counts of T'."""
        return (float(self.each),) * 3 + (0.0, 1.0, 1.0)

    @property
    def weights(self) -> tuple[tuple[float, ...], ...]:
        """The counts of seconds and messages of which something is known."""
        return tuple(dict.fromkeys(weights for one in self.every for _, _, weights, _ in one._counted))

    @property
    def directions(self) -> tuple[Weights, ...]:
        """The counts of blends, rounded, of which the least of single units is known.

        Those that count B and W apart say nothing of a backward that is not split.
        """
        return tuple(dict.fromkeys(weights for one in self.every for weights in one._directions
                                   if self.splits or weights[1] == weights[2]))

    def counted(self, flight: Flight, weights: tuple[float, ...]) -> Array:
        """[a, b]: the least seconds counted so of a stage with its messages, as far as it is known; else 0."""
        known = {(key, sides): max(self._counted.get((key, sides, weights, at), 0.0) for at in (ANY, flight))
                 for key, sides, counts, _ in self._counted if counts == weights}
        return self._every_side(known)

    def priced(self, flight: Flight, weights: tuple[float, ...], price: float) -> Array:
        """[a, b]: the least seconds counted so + price * bytes of a stage, as far as it is known; else 0."""
        flight = flight.counted
        known = self._every_side(self._prices.known(flight, weights, price))
        if self.apart_bytes == inf:
            return known
        units = np.array([self._prices.turn(self.joining(k, k + 1)[1], flight, weights, price)
                          for k in range(self.units)])
        apart = weights[0] * self.apart + price * self.apart_bytes
        sums = np.array([0.0, *np.cumsum(units - apart)])
        found: Array = np.maximum(known, sums[None, :] - sums[:, None] + apart)
        return found

    def learn_turns(self, s: int, flight: Flight, weights: tuple[float, ...], price: float) -> None:
        """Searches all units that stage s may have for their least seconds counted so + price * bytes."""
        for unit in {self.joining(k, k + 1)[1]: k for k in self._within(s)}.values():
            self._learn_turn(unit, flight.counted, weights, price)

    def _learn_turn(self, unit: int, flight: Flight, weights: Weights, price: float) -> bool:
        """The same of one unit; whether that was to be searched."""
        graph, key = self.joining(unit, unit + 1)
        if self._prices.has_turn(key, flight, weights, price):
            return False
        self.check_time()
        task = replace(self.task, counts=self._counts(weights), copies=self.copies)
        self._prices.learn_turn(task, self._asking(graph, flight), key, weights, price)
        return True

    def _every_side(self, known: Mapping[tuple[str, Any], float]) -> Array:
        """[a, b]: what is known of the stage from place a to place b by its structure and its ports, else 0."""
        keys, found = {key for key, _ in known}, np.zeros((self.units + 1, self.units + 1))
        for like, (_, key) in self._alone.items():
            for a, b in self._alike[like] if key in keys else ():
                found[a, b] = known.get((key, self._sides(a, b)), 0.0)
        return found

    def _counted_so(self, a: int, b: int, weights: tuple[float, ...]) -> PlanTask:
        """The task in which the seconds and messages of a stage count so."""
        ports = PieceMessages(self.ports(a, b), self.task.cluster, self.ranks, self.where, (weights[6], weights[7]))
        return replace(self.task, counts=self._counts(weights), ports=ports, copies=self.copies)

    def count_priced(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], stage: StageGraph, price: float
                     ) -> Plan | None:
        """Searches a stage whose seconds count so, as in `count`, and of which a byte has a price in seconds.

        The plan of `stage` that it returns may be above the budget.
        """
        made = self.learn_priced(a, b, flight, weights, price)
        if made is None or made.candidate is None or made.solution is None:
            return None
        if self._sends_more(a, b, stage):
            return self.planned_for(stage, flight, price)[0]
        free = SolvedStage(*self._freely(*self.alone(a, b), flight))
        return self._plan_alone(free, stage, made.candidate, made.solution, flight)

    def learn_priced(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], price: float
                     ) -> PricedFound | None:
        """Searches a stage for its least seconds counted so + price * bytes, which are known then; None if none count.
        """
        if not any(weights[:6]):
            return None
        self.check_time()
        flight = flight.counted
        return self._prices.counted(partial(self._counted_so, a, b, weights), self._asking(self._cut(a, b), flight),
                                    (self.alone(a, b)[1], self._sides(a, b), weights, flight, price))

    def count(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], stage: StageGraph) -> Plan | None:
        """Searches a stage whose seconds and messages count so: its bound is known then.

        Returns the plan of `stage`, which is it with the names of a pipeline; None where none was found that fits.
        """
        solved = self._alone_solved(*self.alone(a, b), flight)
        if solved.found is None or not any(weights[:6]):
            return None
        at = flight if solved.binds else ANY
        try:
            made = self._counted_once(a, b, weights, at, at if solved.binds else ONE)
            self._counted[self.alone(a, b)[1], self._sides(a, b), weights, at] = made.bound
            if self._sends_more(a, b, stage):
                return self.searched_for(stage, flight, self._counts(weights), None)
            if at.is_several != flight.is_several:
                made = self._counted_once(a, b, weights, at, SEVERAL, (made.candidate,))
        except Infeasible:
            return None
        return self._planned_alone(solved, stage, made, flight, self.task.budget)

    def _counted_once(self, a: int, b: int, weights: tuple[float, ...], at: Flight, flight: Flight,
                      within: Sequence[Candidate] = ()) -> Found:
        """What is found of a stage, or of one like it, whose seconds and messages count so; the last are remembered."""
        graph, key = self._cut(a, b), (self.alone(a, b)[1], self._sides(a, b), weights, at, flight)
        if key not in self._lately:
            while len(self._lately) >= KEPT:
                del self._lately[next(iter(self._lately))]
            task = replace(self._counted_so(a, b, weights), budget=inf if at == ANY else self.task.budget)
            self._lately[key] = graph, self.search(task, graph, flight, within or self.within)
        source, made = self._lately[key]
        policy = policy_in(graph, source, made.candidate.recompute)
        return replace(made, candidate=replace(made.candidate, recompute=policy))

    def _sends_more(self, a: int, b: int, stage: StageGraph) -> bool:
        """Whether a stage of a pipeline sends to several others what it sends once where these are one stage.

        The layouts that are found for the stage alone then say too little of it.
        """
        return len(stage.graph.ops) != len(self._cut(a, b).graph.ops)

    def bound(self, a: int, b: int, flight: Flight) -> bool:
        """Makes T and M of a stage as sharp as searches over its layouts do; returns whether they were not.

        Where a rank has several stages the budget is theirs together: first T is that without one.
        """
        graph, key = self.alone(a, b)
        if self.shares:
            new = (key, flight.is_several) not in self._free
            self._freely(graph, key, flight)
        else:
            new = self.fit(a, b, flight)
        return self._search_least(*self.joining(a, b), self.repeated) or new

    def sharpen(self, a: int, b: int, flight: Flight) -> bool:
        """Makes all else of a stage as sharp as T and M; returns whether it was not."""
        graph, key = self.alone(a, b)
        news = [self._search_least(*self.joining(a, b), weights)
                for weights in (*self.pieces, *(SINGLES if a == 0 else ()))]
        if not self.shares:
            news.append(self.fit(a, b, flight))
        solved = self._alone_solved(graph, key, flight)
        if a == 0 or solved.found is None:
            return any(news)
        if not solved.binds:
            return self._search_least(*self.joining(a, b), self.behind) or any(news)
        return self._search_least(graph, key, self.behind, flight) or any(news)

    def fit(self, a: int, b: int, flight: Flight) -> bool:
        """Finds out whether a stage fits the whole budget, and what it takes then; returns whether that was not known.
        """
        graph, key = self.alone(a, b)
        new = (key, flight) not in self._solved
        self.solve(graph, key, flight)
        return new

    def begin(self, closer: bool) -> None:
        """Makes known what a unit of every common kind takes alone, so that stages join to it.

        First that is M, by one search of each. All else is `closer`, and takes several.
        """
        for at in self.common_units if self.apart < inf else ():
            self._search_least(*self.joining(at, at + 1), self.repeated)
            if len(self.common_units) > 1:
                self._search_least(*self.joining(at, at + 1), self.whole)
            if closer:
                self.bound(at, at + 1, ONE)
                if self._fused_ends is not None:
                    self._search_least(*self.joining(at, at + 1), self.whole)
                self.sharpen(at, at + 1, ONE)

    def _known_alone(self, unit: int) -> float:
        """About the seconds of a unit alone in a step: what is known of it, or of one like it."""
        key = self.joining(self._first_alike[unit], self._first_alike[unit] + 1)[1]
        return max(self._least.get((key, self.whole, ANY), 0.0), super()._known_alone(unit))

    def rounded(self, counts: Sequence[float], most: float, parts: int = DIRECTIONS) -> Weights:
        """The counts of seconds, of which some are `most`, as they are told apart: those count in every microbatch.

        What comes once a step takes as long as many microbatches, and is told apart by as much smaller steps.
        """
        steps = (parts,) * 3 + (parts * self.each,) * 3
        return tuple(floor(x / most * step + 1e-6) / step * self.each for x, step in zip(counts, steps, strict=False))

    def learn_direction(self, s: int, counts: Sequence[float], cut: Sequence[int], close: float = 0.0) -> bool:
        """Makes known what stages like stage s of a cut take where seconds count nearly as in a blend.

        The units of the common kinds are searched, and some in a row within the stage, by which longer stages are
        known. Of the first and the last stage so are the units at the end. What other counts imply but for a part so
        `close` is not searched. Returns whether any was.
        """
        most = max(counts[:6])
        if most <= 0 or self.apart == inf or not self.common_units:
            return False
        weights = self.rounded(counts, most)
        if weights not in self._directions and len(self.directions) >= MOST_DIRECTIONS:
            return False
        made = [self._search_plan(at, weights, close) for at in self._rows(s, cut)]
        if any(made):
            self._directions[weights] = None
        return any(made)

    def _rows(self, s: int, cut: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields the rows of units that tell of stages like stage s of a cut: from one place to another."""
        yield from ((at, at + 1) for at in self.common_units)
        ends = list(pairwise((0, *cut, self.units)))
        if len(self.common_units) == 1:
            yield self._common_row(min((b - a for a, b in ends[1:-1]), default=2) - 1)
        elif 0 < s < self.stages - 1:
            yield ends[s][0], max(ends[s][0] + 1, ends[s][1] - 1)
        (_, first), (last, end) = ends[0], ends[-1]
        if s == 0:
            yield from ((0, 1), (0, max(1, first - FEWER)))
        if s == self.stages - 1:
            yield from ((end - 1, end), (min(end - 1, last + FEWER), end))

    def _common_row(self, units: int) -> tuple[int, int]:
        """The first of some units in a row of the only common kind, or of as many as there are; at least one."""
        at, end = self.common_units[0], self.common_units[0] + 1
        while end - at < units and end < self.units - 1 and self._first_alike[end] == at:
            end += 1
        return at, end

    def _search_least(self, graph: StageGraph, key: str, weights: Weights, at: Flight = ANY) -> bool:
        """Searches a stage for its least seconds counted so, without a budget or at a flight; False if it was."""
        if (key, weights, at) in self._least:
            return False
        try:
            self._least[key, weights, at] = self._searched_least(graph, weights, at).bound
        except Infeasible:
            self._least[key, weights, at] = 0.0
        return True

    def found_units(self, begin: float, end: float, flight: Flight | None = None) -> tuple[FoundPlans, ...]:
        """The plans that were found of the units from one place to another, which may lie within units.

        Where a unit's kind is not common, that is the least which it may take. There are none where units do not tell.
        With a `flight` so are those found under prices of bytes, and all have their bytes.
        """
        times = self._units_within(begin, end)
        if not self.common_units or self.apart == inf:
            return ()
        rows = [(often, *self._plans_of(unit, flight)) for unit, often in times.items()]
        return tuple(FoundPlans(*one) for one in rows) if all(len(terms) for _, terms, _ in rows) else ()

    def find_units(self, begin: float, end: float, counts: Sequence[float], close: float = 0.0) -> bool:
        """Searches units between two places where seconds count so, unless others imply them nearly; whether it did.
        """
        most = max(counts[:6])
        if most <= 0:
            return False
        weights = self.rounded(counts, most, ROUGHLY)
        return bool(sum([self._search_plan((unit, unit + 1), weights, close) for unit in self._units_within(begin, end)
                         if unit in self._searched_units]))

    def find_turns(self, begin: float, end: float, flight: Flight, weights: Weights, price: float) -> bool:
        """Searches units between two places for their least seconds counted so + price * bytes; whether one was new."""
        at = [unit for unit in self._units_within(begin, end) if unit in self._searched_units]
        return any(weights) and bool(sum([self._learn_turn(unit, flight.counted, weights, price) for unit in at]))

    def _units_within(self, begin: float, end: float) -> Mapping[int, float]:
        """How many units there are between two places like each of those that tell of them."""
        found = dict[int, float]()
        for unit in range(floor(begin), min(ceil(end), self.units)):
            if (part := min(end, unit + 1) - max(begin, unit)) > 0:
                found[self._first_alike[unit]] = found.get(self._first_alike[unit], 0.0) + part
        return found

    @property
    def _searched_units(self) -> tuple[int, ...]:
        """The units that are searched alone: the first of each common kind, and those at the ends."""
        return (0, *self.common_units, self.units - 1)

    def _plans_of(self, unit: int, flight: Flight | None) -> tuple[Array, Array]:
        """([plan, term]: seconds of the plans found of a unit, [plan]: bytes, in parts of the budget, with a flight).

        Plans that were found without a price were made for one microbatch. With several in flight they may have more.
        """
        if unit not in self._searched_units:
            return self._floor_of(unit), np.zeros(1 if flight else 0)
        graph, key = self.joining(unit, unit + 1)
        if not self._taken.get(key):
            for counts in (self.repeated, self.whole):
                self._search_plan((unit, unit + 1), counts)
        plans = [*self._taken[key].values()]
        if flight is None:
            return self._terms(dict.fromkeys(seconds for seconds, _ in plans)), np.zeros(0)
        plans += [self._turned_plan(graph, key, *one) for one in self._prices.turned(key)]
        found = dict.fromkeys((seconds, level_bytes([parts], [flight]) / self.task.budget) for seconds, parts in plans)
        return self._terms(seconds for seconds, _ in found), np.array([nbytes for _, nbytes in found])

    def _floor_of(self, unit: int) -> Array:
        return np.array([[*(float(one[unit, unit + 1]) for one in self.floor_passes()), *(0.0,) * 5]])

    def _terms(self, plans: Iterable[StageSeconds]) -> Array:
        """[plan, term]: seconds, none of messages; B and W together where backward is not split."""
        rows = np.array([(*one, 0.0, 0.0) for one in plans]).reshape(-1, 8)
        if not self.splits:
            rows[:, 1], rows[:, 2] = rows[:, 1] + rows[:, 2], 0.0
        return rows

    def _turned_plan(self, graph: StageGraph, key: str, flight: Flight, candidate: Candidate, solution: Solution
                     ) -> tuple[StageSeconds, StageBytes]:
        """The seconds and the bytes of a plan of a unit that was found under a price."""
        at = key, flight.is_several, candidate, solution.choice
        if at not in self._turned:
            free = SolvedStage(*self._freely(graph, key, flight))
            plan = self._plan_alone(free, graph, candidate, solution, SEVERAL if flight.is_several else ONE)
            self._turned[at] = self._taken_by(graph, plan), bytes_in_parts(plan)
        return self._turned[at]

    def _taken_by(self, graph: StageGraph, plan: Plan) -> StageSeconds:
        """The seconds of a plan of units alone, rounded."""
        seconds = stage_seconds(plan, add_hubs(graph.graph), self.cluster, splits=True)
        return StageSeconds(*(float(f"{x:.9g}") for x in seconds))

    def _search_plan(self, at: tuple[int, int], weights: Weights, close: float = 0.0) -> bool:
        """Searches some units in a row for their least seconds counted so, and the plan; whether it was to be searched.

        It is not where other counts imply these seconds but for a part so `close`.
        """
        graph, key = self.joining(*at)
        known = self._taken.setdefault(key, {})
        if weights in known or self._is_implied(key, weights, close):
            return False
        try:
            found = self._searched_least(graph, weights)
        except Infeasible:
            return False
        plan = self._plan_alone(SolvedStage(graph, found), graph, found.candidate, found.solution, ONE)
        known[weights] = self._taken_by(graph, plan), bytes_in_parts(plan)
        self._least[key, weights, ANY] = found.bound
        return True

    def _is_implied(self, key: str, weights: Weights, close: float) -> bool:
        """Whether what is known of other counts reaches the plans that were found of a stage but for a part."""
        if not self._taken[key]:
            return False
        counts = self._as_counted(weights)
        taken = float((np.array([seconds for seconds, _ in self._taken[key].values()]) @ np.array(counts)).min())
        known = [(self._as_counted(one), seconds) for (like, one, at), seconds in self._least.items()
                 if like == key and at == ANY and seconds > 0]
        return least_implied(known, counts) >= taken * (1 - close)

    def _searched_least(self, graph: StageGraph, weights: Weights, at: Flight = ANY) -> Found:
        """What is found of a stage whose seconds count so, without a budget or at a flight."""
        task = replace(self.task, counts=self._counts(weights), copies=self.copies,
                       budget=inf if at == ANY else self.task.budget)
        return self.search(task, graph, ONE if at == ANY else at)

    def _as_counted(self, weights: Weights) -> Weights:
        """The counts of a search; B and W count alike, as the fewer of them, where kernels may be in either."""
        both = (min(weights[1:3]),) * 2 if self.split_depends_on_cut else weights[1:3]
        return (weights[0], *both, *weights[3:6])

    def _counts(self, weights: Weights) -> Counts:
        """The same, named."""
        forward, backward, late, gather, reduce, update = self._as_counted(weights)
        return Counts(forward, backward, gather, reduce, update, None if late == backward else late)
