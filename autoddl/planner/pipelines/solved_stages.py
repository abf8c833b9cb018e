"""Searches the layouts of stages by themselves, each once, and draws the plans that were found.

Stages that are alike in all but names are searched once (`stage_units.structure`), at first without a budget. Where the
plan does not fit, they are searched under the budget. What is found without one is true for all numbers of microbatches
in flight. What is found under one that binds is true for that number alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Flight
from autoddl.core.plan import Plan
from autoddl.core.problem import Solution
from autoddl.core.recompute import NO_RECOMPUTE, SEARCH, blocks_of, renamed_policy
from autoddl.core.stages import RECEIVE, SEND, StageGraph
from autoddl.planner.assemble import assemble, assemble_choice
from autoddl.planner.candidates import Candidate, chosen, space_of
from autoddl.planner.mesh_search import Found
from autoddl.planner.pipelines.stage_plans import finish_stage, search_stage, stage_task
from autoddl.planner.pipelines.stage_prices import Asking, StagePrices, named_moment
from autoddl.planner.pipelines.stage_units import StageUnits
from autoddl.planner.task import PlanTask
from autoddl.pricing.price import Counts, Ports
from autoddl.schedule.stage_bytes import alone_bytes

__all__ = ["ANY", "ONE", "SEVERAL", "Made", "OutOfTime", "PlansBetween", "SolvedStage", "SolvedStages",
           "policy_in"]

Made = tuple[Candidate, tuple[int, ...]]
"""What makes a plan of a stage: a candidate, and the option of each of its variables."""

ANY, ONE, SEVERAL = Flight(0), Flight(1), Flight(2)
"""In place of a number of microbatches in flight: what was found without a budget, true for any number."""

KEPT = 128
"""Plans of choices that are kept."""


class PlansBetween(NamedTuple):
    """Tells the plans between two of a stage, of which one computes more of its blocks again.

        more    the one; the others have all else from it
        less    the other
        made    what makes each between, in order: ever fewer blocks run again
    """

    more: Plan
    less: Plan
    made: tuple[Made, ...]

    def ways(self) -> Iterator[tuple[float, Made]]:
        """Yields the part of the way from the one plan to the other at which each is, and what makes it."""
        for k, one in enumerate(self.made, start=1):
            yield k / (len(self.made) + 1), one


class OutOfTime(Exception):
    """Tells that the time is over that the search over stages may take: no stage is searched any more."""


@dataclass(frozen=True, slots=True)
class SolvedStage:
    """A stage that was searched with so many microbatches in flight: what was found, or the problem if there is none.

    `binds` says whether the budget changed the answer.
    """

    graph: StageGraph
    found: Found | None
    binds: bool = True
    problem: Infeasible | InputError | None = None

    @property
    def seconds(self) -> float:
        """Seconds of the layouts that were found; infinite without any."""
        return self.found.solution.seconds if self.found is not None else inf

    @property
    def bound(self) -> float:
        """Seconds that no plan of the stage is below; infinite where it is proved that it has none."""
        if self.found is None:
            return inf if isinstance(self.problem, Infeasible) and self.problem.is_proved else 0.0
        return self.found.bound


@dataclass(eq=False)
class SolvedStages(StageUnits):
    """The stages of pipelines whose layouts were searched so far.

        _solved    stages that were solved, by structure and microbatches in flight
        _free      plans of stages without a budget, by structure and whether gathered weights stay
        _drawn     their plans, by structure, flight, and the names of the first op and of those that send or receive
        _made      the last plans of choices, by the same and what makes them
        _counted_freely  stages without a budget whose seconds count otherwise, by structure, as in `_free`, and counts
        _prices    what is known of stages whose bytes have a price
    """

    _solved: dict[tuple[str, Flight], SolvedStage] = field(default_factory=dict)
    _free: dict[tuple[str, bool], tuple[StageGraph, Found]] = field(default_factory=dict)
    _drawn: dict[tuple[str, Flight, tuple[str, ...]], Plan] = field(default_factory=dict)
    _made: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    _counted_freely: dict[tuple[str, bool, Counts], tuple[StageGraph, Found]] = field(default_factory=dict)
    _prices: StagePrices = field(default_factory=StagePrices)

    def solve(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts of a stage that is like this graph."""
        at = flight.counted
        if (key, at) not in self._solved:
            try:
                found = self._searched(graph, key, flight)
            except (Infeasible, InputError) as error:
                found = SolvedStage(graph, None, problem=error)
            self._solved[key, at] = self._with_fuller(found, key, at)
        return self._solved[key, at]

    def _with_fuller(self, solved: SolvedStage, key: str, flight: Flight) -> SolvedStage:
        """The stage with the layouts of one that has more microbatches in flight, where the time ended before as fast
        ones were found.

        They fit it too, and what was proved of it stays.
        """
        best, bound = solved, solved.bound
        for (name, other), one in self._solved.items():
            fits = name == key and other.is_several == flight.is_several and all(
                a >= b for a, b in zip(other[:3], flight[:3], strict=True))
            if one.found is not None and fits and bound <= one.found.solution.seconds < best.seconds:
                best = replace(one, found=replace(one.found, bound=bound))
        return best

    def _alone_solved(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts of a stage if nothing else were on its ranks; without a budget where more is."""
        return self.solve(graph, key, flight) if not self.shares else SolvedStage(
            *self._freely(graph, key, flight), binds=False)

    def _searched(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts without a budget, if they fit; else under it. Raises why there are none."""
        source, found = self._freely(graph, key, flight)
        if alone_bytes(self._plan(source, source, found, flight), flight) <= self.task.budget:
            return SolvedStage(source, found, binds=False)
        return SolvedStage(graph, self.search(self.task, graph, flight, self.within))

    def search(self, task: PlanTask, graph: StageGraph, flight: Flight, within: Sequence[Candidate] = ()) -> Found:
        """Searches the layouts of a stage for a task like this one. Raises OutOfTime, or why there are none."""
        self.check_time()
        found = search_stage(replace(task, late=self.start_clock()), graph, self.cluster, self.each, flight, within)
        if found.interrupted:
            raise KeyboardInterrupt
        return found

    def check_time(self) -> None:
        """Raises OutOfTime where no stage may be searched any more."""
        if self.late():
            raise OutOfTime

    def _freely(self, graph: StageGraph, key: str, flight: Flight) -> tuple[StageGraph, Found]:
        """The best layouts without a budget of a stage or one like it, and that stage."""
        at = key, flight.is_several
        if at not in self._free:
            free, some = replace(self.task, budget=inf), SEVERAL if at[1] else ONE
            self._free[at] = graph, self.search(free, graph, some, self.within)
        return self._free[at]

    @property
    def needed(self) -> float:
        """The least bytes of a rank that a stage needs of those that are proved not to fit; infinite without any."""
        return min((one.problem.needed for one in self._solved.values() if isinstance(one.problem, Infeasible)),
                   default=inf)

    def planned(self, graph: StageGraph, flight: Flight) -> Plan:
        """The plan of a stage, found for it or for one that is like it. Raises why there is none."""
        solved = self.solve(graph, self._key(graph), flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        return self._plan(solved.graph, graph, solved.found, flight)

    def freely_planned(self, graph: StageGraph, flight: Flight) -> Plan:
        """The plan of a stage without a budget."""
        at = self._named(graph, flight)
        if at not in self._drawn:
            source, found = self._freely(graph, at[0], flight)
            self._drawn[at] = self._plan(source, graph, found, flight)
        return self._drawn[at]

    def _named(self, graph: StageGraph, flight: Flight) -> tuple[str, Flight, tuple[str, ...]]:
        """The key of the plans of a stage: stages that are alike in all but names have plans of other names."""
        ops = graph.graph.ops
        return self._key(graph), flight, (ops[0].name, *(op.name for op in ops if op.target in (SEND, RECEIVE)))

    def _once(self, graph: StageGraph, flight: Flight, made: Made, draw: Callable[[], Plan]) -> Plan:
        """The plan of a stage with a choice, drawn once while it is among the last."""
        at = *self._named(graph, flight), *made
        if at not in self._made:
            while len(self._made) >= KEPT:
                del self._made[next(iter(self._made))]
            self._made[at] = draw()
        return self._made[at]

    def price(self, graph: StageGraph, flight: Flight) -> float:
        """Seconds that a byte more of the budget saves a stage that was solved, about."""
        solved = self.solve(graph, self._key(graph), flight)
        return solved.found.solution.price if solved.binds and solved.found is not None else 0.0

    def searched_for(self, graph: StageGraph, flight: Flight, counts: Counts, ports: Ports | None,
                     room: float | None = None) -> Plan | None:
        """The plan of a stage whose seconds count otherwise, on meshes known to be good; None if too full.

        It fits `room` bytes, by default the budget. Its bound stays that of the stage alone. Raises why there is none.
        """
        room = self.task.budget if room is None else room
        solved = self._alone_solved(graph, self._key(graph), flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        every = [one.found for one in self._solved.values()] + [found for _, found in self._free.values()]
        within = tuple({str(one.candidate.mesh): one.candidate for one in every if one is not None}.values())
        tasks = [replace(self.task, counts=counts, ports=ports, budget=budget, copies=self.copies)
                 for budget in (inf, room)]
        for task in tasks:
            made = self.search(task, graph, flight, within)
            plan = self._planned_alone(solved, graph, made, flight, room)
            if plan is not None:
                break
        return plan

    def freely_counted(self, graph: StageGraph, flight: Flight, counts: Counts) -> Plan | None:
        """The plan of a stage whose seconds count otherwise, without a budget; None if too full alone.

        It is found for it or for one that is like it. Raises why there is none.
        """
        key = self._key(graph)
        at = key, flight.is_several, counts
        if at not in self._counted_freely:
            task = replace(self.task, counts=counts, copies=self.copies, budget=inf)
            self._counted_freely[at] = graph, self.search(task, graph, SEVERAL if at[1] else ONE, self.within)
        source, made = self._counted_freely[at]
        policy = policy_in(graph, source, made.candidate.recompute)
        made = replace(made, candidate=replace(made.candidate, recompute=policy))
        return self._planned_alone(self._alone_solved(graph, key, flight), graph, made, flight, self.task.budget)

    def planned_for(self, graph: StageGraph, flight: Flight, price: float, *, roughly: bool = False
                    ) -> tuple[Plan | None, float]:
        """(the plan of a stage a byte of which has a price, seconds + price * bytes that none is below).

        The plan is None where none was drawn, and may be above the budget. `roughly`, it has the layouts of a stage
        with more in flight, where one was searched, and the second is of that.
        """
        key = self._key(graph)
        self.check_time()
        at = self._prices.fuller(key, flight, price) if roughly else flight
        source, made = self._prices.alone(self.task, self._asking(graph, at), key, price)
        if made.candidate is None or made.solution is None:
            return None, made.bound
        found = replace(self._freely(graph, key, flight)[1], candidate=made.candidate, solution=made.solution)
        plan = self._once(graph, flight, (made.candidate, made.solution.choice),
                          lambda: self._plan(source, graph, found, flight))
        return plan, made.bound

    def between(self, graph: StageGraph, flight: Flight, prices: Sequence[float], *, roughly: bool = False
                ) -> list[PlansBetween]:
        """The plans between those of a stage under two prices of bytes, which fall, and at last without a budget.

        There are some where both are on one mesh and differ in blocks of which the search chose the levels.
        `roughly` is that of `planned_for`.
        """
        key = self._key(graph)
        flights = [self._prices.fuller(key, flight, price) if roughly else flight for price in prices]
        priced = [self._prices.alone(self.task, self._asking(graph, at), key, price)[1]
                  for at, price in zip(flights, prices, strict=True)]
        found, free = list[PlansBetween](), self._freely(graph, key, flight)[1]
        known = [(one.candidate, one.solution.choice) for one in priced if one.candidate and one.solution]
        known.append((free.candidate, free.solution.choice))
        for (one, more), (other, less) in pairwise(known):
            if one.mesh == other.mesh and one.recompute == other.recompute == SEARCH:
                line = [(one, choice) for choice in _between(more, less, self._policies(graph, one))]
                ends = [self.plan_of_choice(graph, flight, *line[at]) for at in (0, -1)] if len(line) > 1 else []
                found += [PlansBetween(ends[0], ends[1], tuple(line[1:-1]))] if ends else []
        return found

    def known_prices(self, graph: StageGraph, flight: Flight) -> tuple[float, ...]:
        """The prices of bytes under which a stage was searched, with so many microbatches or more, the highest first.
        """
        return self._prices.prices(self._key(graph), flight)

    def _policies(self, graph: StageGraph, candidate: Candidate) -> int:
        """The blocks of a stage whose level is searched: a choice begins with their levels."""
        return len(space_of(stage_task(self.task, graph, self.cluster, self.each), candidate).policies.blocks)

    def _asking(self, graph: StageGraph, flight: Flight) -> Asking:
        return Asking(graph, self.cluster, self.each, flight.counted, self.within)

    def _planned_alone(self, solved: SolvedStage, graph: StageGraph, made: Found, flight: Flight, room: float
                       ) -> Plan | None:
        """The plan of a stage of what was made under other counts; None where it does not fit these bytes."""
        assert solved.found is not None
        plan = self._plan_alone(solved, graph, made.candidate, made.solution, flight)
        return plan if alone_bytes(plan, flight) <= room else None

    def plan_of_choice(self, graph: StageGraph, flight: Flight, candidate: Candidate, choice: tuple[int, ...]) -> Plan:
        """The plan of a stage with a choice of a candidate. Raises why a stage so has no plan."""
        solved = self._alone_solved(graph, self._key(graph), flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        solution = replace(solved.found.solution, choice=choice)
        return self._once(graph, flight, (candidate, choice),
                          lambda: self._plan_alone(solved, graph, candidate, solution, flight))

    def _plan_alone(self, solved: SolvedStage, graph: StageGraph, candidate: Candidate, solution: Solution,
                    flight: Flight) -> Plan:
        """The plan of a stage with a choice that was made under other counts, and its seconds alone."""
        assert solved.found is not None
        task = stage_task(self.task, graph, self.cluster, self.each)
        one = chosen(task, candidate, solution, {})
        seconds = assemble_choice(one.pricing, one.solution.choice, one.variables).predicted.seconds
        alone = replace(solved.found.solution, choice=solution.choice, seconds=seconds)
        candidate = replace(candidate, recompute=policy_in(solved.graph, graph, candidate.recompute))
        return self._plan(solved.graph, graph, replace(solved.found, candidate=candidate, solution=alone), flight)

    def _plan(self, source: StageGraph, graph: StageGraph, found: Found, flight: Flight) -> Plan:
        """The plan of a stage that takes the layouts that were found for `source`, which is like it.

        It has as many microbatches as the stage has at any time.
        """
        task, flight = stage_task(self.task, graph, self.cluster, self.each), flight.own
        candidate = replace(found.candidate, in_flight=flight.in_flight, waiting=flight.waiting, later=flight.later,
                            stays=False, recompute=policy_in(graph, source, found.candidate.recompute))
        row = {named_moment(source, graph, moment): weight for moment, weight in found.best.row.items()}
        one = chosen(task, candidate, found.solution, row)
        made = assemble(one.pricing, one.solution, one.variables)
        return finish_stage(task, graph, replace(found, best=one), made)


def _between(more: Sequence[int], less: Sequence[int], blocks: int) -> Iterator[tuple[int, ...]]:
    """Yields the choice `more`, and it with the levels of `less` in ever more of the blocks that differ, from the last.
    """
    apart = [k for k in range(blocks) if more[k] != less[k]]
    for n in range(len(apart) + 1):
        yield tuple(less[k] if k in apart[len(apart) - n:] else more[k] for k in range(len(more)))


def policy_in(graph: StageGraph, source: StageGraph, policy: str) -> str:
    """The recomputation of stage `source` in the names of the blocks of `graph`, which is like it."""
    if policy == NO_RECOMPUTE:
        return policy
    theirs, own = ([block.name for block in blocks_of(add_hubs(one.graph))] for one in (source, graph))
    return renamed_policy(policy, dict(zip(theirs, own, strict=True)))
