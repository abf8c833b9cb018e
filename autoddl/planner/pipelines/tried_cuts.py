"""Tries cuts of one candidate: plans their stages, simulates the pipeline, and tells which others are likely better.

What stages take in a cut that was not tried is expected from what bounds know of them and from the cuts that were
(`cut_problems.PlacedStages`). Where stages share ranks, a byte that a rank lacks costs there what it costs in the
fastest (`rank_memory.price_of_bytes`). The likely best of the cuts beside the fastest is tried next. Cuts are compared
with stages each planned by itself; of the best one other layouts are tried too (`joint_stages.filled_bubbles`). Where
stages do not fit their ranks, cuts beside it leave them more room (`roomier`, `roomier_cuts`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import islice, pairwise
from math import inf

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.pipeline import Flight, Schedule
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph
from autoddl.planner.pipelines.cut_problems import PlacedStages, other_cuts
from autoddl.planner.pipelines.joint_stages import filled_bubbles
from autoddl.planner.pipelines.rank_memory import fitting_plans, price_of_bytes
from autoddl.planner.pipelines.solved_stages import OutOfTime
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import TriedCut, simulated_cut
from autoddl.planner.pipelines.stored_once import together_bytes
from autoddl.schedule.stage_bytes import alone_bytes

MOVES = 6
"""Blocks that are moved at most, to find a cut whose stages fit without a budget."""

ATTEMPTS = 12
"""Cuts of a candidate that are tried at most, where no plan of any is known."""

OFF = 0.01
"""The part by which a cut may take less than is expected of it."""

__all__ = ["TriedCuts", "lost_seconds", "roomier", "try_cut"]


def try_cut(part: StageParts, name: str, cut: tuple[int, ...], roughly: bool = False) -> TriedCut:
    """Solves the stages of a cut, or finds some plans `roughly`, and simulates the pipeline.

    Raises why a stage has no plan.
    """
    staged = part.staged(name, cut)
    plans = fitting_plans(part, staged, cut_graph(part.graph, staged.cuts), staged.flights, roughly)
    return simulated_cut(part.task.cluster, plans, staged, part.graph, cut)


@dataclass(eq=False)
class TriedCuts:
    """The cuts of a candidate that were tried.

        part       the stages, and what is known of them
        name       name of the schedule
        tried      what was found of each cut; None where a stage has no plan
        rough      those whose plans were found roughly
        plain      by cut, seconds with stages each planned by itself
        filled     cuts of which layouts that fill bubbles were tried too
        elsewhere  cuts that another process tried
        paid       by cut, seconds that a byte costs there
        sizes      bytes of a stage without a budget, by its number and places
        problem    why a cut cannot be, other than for its bytes
        is_full    whether a cut cannot be for its bytes
    """

    part: StageParts
    name: str
    tried: dict[tuple[int, ...], TriedCut | None] = field(default_factory=dict)
    rough: set[tuple[int, ...]] = field(default_factory=set)
    plain: dict[tuple[int, ...], float] = field(default_factory=dict)
    filled: set[tuple[int, ...]] = field(default_factory=set)
    elsewhere: set[tuple[int, ...]] = field(default_factory=set)
    paid: dict[tuple[int, ...], float] = field(default_factory=dict)
    sizes: dict[tuple[int, int, int], float] = field(default_factory=dict)
    problem: InputError | None = None
    is_full: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule. Raises InputError where there is none so."""
        cuts = tuple(range(1, self.part.stages))
        return Staged(cuts, self.name, self.part.microbatches, sizes=self.part.sizes).schedule()

    @cached_property
    def flights(self) -> tuple[Flight, ...]:
        """By stage, the microbatches that count as its own."""
        return self.staged(tuple(range(1, self.part.stages))).flights

    def staged(self, cut: tuple[int, ...]) -> Staged:
        """How the model is cut there, and on which ranks each stage is."""
        return self.part.staged(self.name, cut)

    @property
    def found(self) -> list[TriedCut]:
        """The pipelines that were found, the fastest first."""
        return sorted((one for one in self.tried.values() if one is not None), key=lambda one: one.seconds)

    @property
    def fastest(self) -> TriedCut | None:
        """The fastest pipeline; None where there is none."""
        return next(iter(self.found), None)

    @property
    def is_rough(self) -> bool:
        """Whether the fastest pipeline was found roughly."""
        return self.fastest is not None and self.fastest.cut in self.rough

    def add(self, made: TriedCut) -> None:
        """Adds a pipeline, unless a faster one of the same cut is known."""
        before = self.tried.get(made.cut)
        self.tried[made.cut] = made if before is None or made.seconds < before.seconds else before

    def add_plans(self, cut: tuple[int, ...], plans: Sequence[Plan]) -> None:
        """Adds the pipeline of these plans of the stages of a cut."""
        self.add(simulated_cut(self.part.task.cluster, plans, self.staged(cut), self.part.graph, cut))

    def find(self, cut: tuple[int, ...], roughly: bool = False) -> TriedCut | None:
        """The pipeline of a cut, None where a stage has no plan; one found roughly is looked for again."""
        if cut not in self.tried or (cut in self.rough and not roughly):
            self.tried.setdefault(cut, None)
            self.rough = self.rough | {cut} if roughly else self.rough - {cut}
            try:
                made = try_cut(self.part, self.name, cut, roughly)
                self.add(made)
                self.plain |= {} if roughly else {cut: made.seconds}
            except Infeasible:
                self.is_full = True
            except InputError as error:
                self.problem = error
        return self.tried[cut]

    def fill_bubbles(self) -> None:
        """Fills bubbles of the cut that is best where each stage is planned by itself, unless that was done."""
        cut = min(self.plain, key=self.plain.__getitem__, default=())
        made = self.tried.get(cut)
        if made is not None and cut not in self.filled and not self.part.late():
            self.filled.add(cut)
            self.add_plans(cut, filled_bubbles(self.part, self.staged(cut), made.plans)[0])

    def find_any(self, cut: tuple[int, ...], tell: Callable[[str], None]) -> None:
        """Tries a cut and others near it, those first that leave most room, until the stages of one have plans."""
        with suppress(OutOfTime):
            for other in islice(roomier_cuts(self.part, self.name, cut, self.flights), ATTEMPTS):
                tell("cuts that leave more room")
                if self.find(other) is not None:
                    break

    def step(self, best: float, met: Sequence[tuple[int, ...]]) -> bool:
        """Tries the likely best of the cuts beside the fastest, or that were `met`; whether one was tried.

        Where the fastest was found roughly so is that one, and where none is faster the fastest is looked for again.
        `best` are the seconds of the best plan that is known of any candidate.
        """
        before, is_rough = self.fastest, self.is_rough
        with suppress(OutOfTime):
            others = [] if self.part.late() else self.likely_better(best, met)[:1]
            for cut in others:
                self.find(cut, roughly=is_rough)
            again = before if is_rough and self.fastest is before and not self.part.late() else None
            if again is not None:
                self.find(again.cut)
            return bool(others) or again is not None
        return False

    def likely_better(self, best: float, met: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Cuts that are likely faster than the fastest and near the `best` seconds, those first that take least.

        Without any they are beside the first that was `met`.
        """
        placed, fastest = self.placed, self.fastest
        start = fastest.cut if fastest else met[0] if met else ()
        done = {cut for cut in self.tried if self.is_rough or cut not in self.rough} | self.elsewhere
        most = max(fastest.seconds, placed.seconds(start)) if fastest else inf
        also = [*met, placed.near(start, 0.0)] if start else met
        return other_cuts(placed, done, start, min(most, best * (1 + OFF)), also)

    @property
    def placed(self) -> PlacedStages:
        """What stages likely take where they lie, under what is known now, with what their bytes cost."""
        price, lost = self._byte_price, None
        if price > 0:
            lost = partial(lost_seconds, self.part, flights=self.flights, price=price, known=self.sizes)
        return PlacedStages(self.part, self.schedule, self.flights, lost, {} if lost else self._taken, self.fastest)

    @property
    def _taken(self) -> dict[tuple[int, int, int], StageSeconds]:
        """By stage and the places where it begins and ends, the seconds that it was found to take."""
        return {(s, *at): seconds for one in reversed(self.found) if one.cut not in self.rough
                for s, (seconds, at) in enumerate(
                    zip(one.stages, pairwise((0, *one.cut, self.part.units)), strict=True))}

    @property
    def _byte_price(self) -> float:
        """The seconds that a byte costs in the fastest pipeline; 0 where no stages share ranks, or none is known."""
        fastest = self.fastest
        if fastest is None or not self.part.shares:
            return 0.0
        if fastest.cut not in self.paid:
            with suppress(OutOfTime, Infeasible, InputError):
                self.paid[fastest.cut] = price_of_bytes(self.part, self.staged(fastest.cut), fastest.plans)
        return self.paid.get(fastest.cut, 0.0)


def lost_seconds(part: StageParts, cut: tuple[int, ...], flights: Sequence[Flight], price: float,
                 known: dict[tuple[int, int, int], float]) -> list[float]:
    """By stage, seconds of a step that bytes cost about, by which those of its rank do not fit it freely.

    They are of the stage of a rank with most in flight. A byte costs its `price`. None are told where a stage has no
    plan, or the time is over. What stages need freely is added to what is `known`, by their numbers and places.
    """
    stages, found = [(s, *at) for s, at in enumerate(pairwise((0, *cut, part.units)))], [0.0] * len(flights)
    try:
        for s, a, b in (one for one in stages if one not in known):
            on = part.on(s)
            known[s, a, b] = alone_bytes(on.freely_planned(on.alone(a, b)[0], flights[s]), flights[s])
    except (Infeasible, InputError, OutOfTime):
        return found
    for place in set(part.together):
        mine = [s for s, at in enumerate(part.together) if at == place]
        most = max(mine, key=lambda s: flights[s][:2])
        found[most] = price * max(0.0, sum(known[stages[s]] for s in mine) - part.task.budget)
    return found


def roomier(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight],
            seconds: Callable[[tuple[int, ...]], float]) -> tuple[int, ...] | None:
    """A cut whose stages fit their ranks together without a budget: this, or one found by moves; None where none was.

    A move takes a unit from a stage of the fullest rank, so that the cut takes the least `seconds`.
    """
    seen = {cut}
    for _ in range(MOVES):
        full = _freely_full(part, name, cut, flights)
        most = max(full, key=full.__getitem__)
        if full[most] <= part.task.budget:
            return cut
        near = [one for one in _smaller(part.staged(name, cut), cut, most)
                if one not in seen and all(a < b for a, b in pairwise((0, *one, part.units)))]
        if not near:
            return None
        cut = min(near, key=seconds)
        seen.add(cut)
    return None


def roomier_cuts(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight]
                 ) -> Iterator[tuple[int, ...]]:
    """Yields cuts, first this, then of those beside all before the one whose fullest rank has the fewest bytes.

    The bytes are those without a budget, as long as stages have plans so.
    """
    heap, seen = [(0.0, cut)], {cut}
    while heap:
        _, cut = heappop(heap)
        yield cut
        for i, at in ((i, k + step) for i, k in enumerate(cut) for step in (-1, 1)):
            other = (*cut[:i], at, *cut[i + 1:])
            if other not in seen and all(a < b for a, b in pairwise((0, *other, part.units))):
                seen.add(other)
                with suppress(Infeasible, InputError):
                    heappush(heap, (max(_freely_full(part, name, other, flights).values()), other))


def _freely_full(part: StageParts, name: str, cut: tuple[int, ...], flights: Sequence[Flight]) -> dict[int, float]:
    """By part of the cluster, the bytes of a rank with the stages of a cut that are planned without a budget."""
    staged = part.staged(name, cut)
    graphs = cut_graph(part.graph, staged.cuts)
    plans = [part.on(s).freely_planned(*one) for s, one in enumerate(zip(graphs, flights, strict=True))]
    return together_bytes(plans, graphs, staged.placement, staged.moments)


def _smaller(staged: Staged, cut: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """Yields cuts in which a stage of a part gives a unit to the stage before it, or behind it, of another part."""
    for s, place in enumerate(staged.placement):
        for at, other, step in ((s - 1, s - 1, 1), (s, s + 1, -1)):
            if place == most and 0 <= other < staged.stages and staged.placement[other] != most:
                yield (*cut[:at], cut[at] + step, *cut[at + 1:])
