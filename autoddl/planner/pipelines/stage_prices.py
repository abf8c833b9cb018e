"""Remembers stages whose bytes have a price: their least seconds + price * bytes, and the plans that come close.

A stage that shares the memory of its ranks pays for its bytes (`joint_stages`, `shared_budget`). Bounds count those at
one moment of the rank, while no action of the stage runs: `BETWEEN`, or `TURN` before its first backward. Plans are
found by the peak that the stage has then. What was found under one price is true for every stage that is alike. Where
the peaks of a stage were is the first guess of where they are under another price (`planner.priced_bytes`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Flight
from autoddl.core.problem import Solution
from autoddl.core.stages import StageGraph
from autoddl.cost_models import Cluster
from autoddl.planner.candidates import Candidate
from autoddl.planner.pipelines.stage_plans import prices_of_stage
from autoddl.planner.priced_bytes import PricedFound, PricedSearch
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import Row
from autoddl.pricing.lifetimes import BETWEEN, TURN, Moment

__all__ = ["Asking", "StagePrices", "named_moment"]

KEPT = 3
"""Searches that are kept: those of the stages of a rank."""

KEPT_TURNS = 12
"""Searches of units that are kept."""

Key = tuple[str, Any, tuple[float, ...], Flight, float]
"""(structure of a stage, its ports, how often its seconds count, flight, price)."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A stage on its part of the cluster, its microbatches, those in flight, and the candidates of its plans."""

    graph: StageGraph
    cluster: Cluster
    microbatches: int
    flight: Flight
    within: Sequence[Candidate]

    def search(self, task: PlanTask) -> PricedSearch:
        """The search under prices of its bytes, with the counts of a task."""
        return prices_of_stage(task, self.graph, self.cluster, self.microbatches, self.flight, self.within)


@dataclass(frozen=True, slots=True)
class StagePrices:
    """Keeps what is known of stages under prices so far.

        _counted   least seconds counted somehow + price * bytes between actions
        _alone     stages whose seconds count as alone, by structure, flight and price
        _searches  the last searches of stages alone, by structure and flight
        _rows      where the peaks of a stage were, by structure and flight
        _turns     the same of units, by structure, weights, flight and price
        _turning   the last searches of those
    """

    _counted: dict[Key, PricedFound] = field(default_factory=dict)
    _alone: dict[tuple[str, Flight, float], tuple[StageGraph, PricedFound]] = field(default_factory=dict)
    _searches: dict[tuple[str, Flight], tuple[StageGraph, PricedSearch]] = field(default_factory=dict)
    _rows: dict[tuple[str, Flight], tuple[StageGraph, Row]] = field(default_factory=dict)
    _turns: dict[tuple[str, tuple[float, ...], Flight, float], PricedFound] = field(default_factory=dict)
    _turning: dict[tuple[str, tuple[float, ...], Flight], PricedSearch] = field(default_factory=dict)

    def turn(self, key: str, flight: Flight, weights: tuple[float, ...], price: float) -> float:
        """Seconds counted so + price * bytes between actions that no plan is below; 0 where nothing is known.

        Bytes are linear in the microbatches in flight and in those that wait, so the least is concave in these.
        Between two flights that were searched it is above the line through both. That is not so from one to several:
        gathered weights stay then.
        """
        known = {at: self._turns[key, weights, at, price].bound for at in (flight, *self._searched_turns(key, weights))
                 if (key, weights, at, price) in self._turns}
        if flight in known or not flight.is_several:
            return known.get(flight, 0.0)
        several = {at: value for at, value in known.items() if (at.is_several, at.begun) == (True, flight.begun)}
        return max((value + max(0.0, _part(low, flight, high)) * (several[high] - value)
                    for low, value in several.items() for high in several if _part(low, flight, low) >= 0), default=0.0)

    def _searched_turns(self, key: str, weights: tuple[float, ...]) -> list[Flight]:
        """The flights at which a stage was searched so."""
        return [at for name, counts, at, _ in self._turns if (name, counts) == (key, weights)]

    def has_turn(self, key: str, flight: Flight, weights: tuple[float, ...], price: float) -> bool:
        """Whether a stage was searched for that."""
        return (key, weights, flight, price) in self._turns

    def learn_turn(self, task: PlanTask, asking: Asking, key: str, weights: tuple[float, ...], price: float) -> None:
        """Searches a stage for its least between actions with the counts of `task`, which is known then."""
        at = key, weights, asking.flight
        if at not in self._turning:
            while len(self._turning) >= KEPT_TURNS:
                del self._turning[next(iter(self._turning))]
            self._turning[at] = asking.search(task)
        self._turns[*at, price] = self._turning[at].least_between(price, counted_moment(asking.flight))

    def turned(self, key: str) -> Iterator[tuple[Flight, Candidate, Solution]]:
        """Yields the plans of a unit that were found under prices, and the microbatches with which it was searched."""
        for (name, _, at, _), found in self._turns.items():
            if name == key and found.candidate is not None and found.solution is not None:
                yield at, found.candidate, found.solution

    def known(self, flight: Flight, weights: tuple[float, ...], price: float) -> dict[tuple[str, Any], float]:
        """By structure and ports, the least seconds counted so + price * bytes."""
        return {(key, sides): found.bound for (key, sides, *rest), found in self._counted.items()
                if rest == [weights, flight, price]}

    def counted(self, task: Callable[[], PlanTask], asking: Asking, key: Key) -> PricedFound:
        """Searches a stage whose seconds count as `task` and `key` say; its least is known then."""
        if key not in self._counted:
            self._counted[key] = asking.search(task()).least_between(key[-1], counted_moment(asking.flight))
        return self._counted[key]

    def fuller(self, key: str, flight: Flight, price: float) -> Flight:
        """The flight, or the least with more that was searched at this price: what was found there fits here too."""
        return min((at for at, known in self._fuller(key, flight) if known == price), default=flight)

    def prices(self, key: str, flight: Flight) -> tuple[float, ...]:
        """The prices at which one with as many or more was searched, the highest first."""
        return tuple(sorted({price for _, price in self._fuller(key, flight)}, reverse=True))

    def _fuller(self, key: str, flight: Flight) -> list[tuple[Flight, float]]:
        """The flights with as many or more, and prices, at which a stage was searched."""
        return [(at, price) for name, at, price in self._alone if name == key and at.is_several == flight.is_several
                and all(a >= b for a, b in zip(at[:3], flight[:3], strict=True))]

    def alone(self, task: PlanTask, asking: Asking, key: str, price: float) -> tuple[StageGraph, PricedFound]:
        """(a stage that is like this one, its least seconds + price * bytes), whose seconds count as alone."""
        at = key, asking.flight
        if (*at, price) not in self._alone:
            if at not in self._searches:
                while len(self._searches) >= KEPT:
                    del self._searches[next(iter(self._searches))]
                self._searches[at] = asking.graph, asking.search(task)
            graph, search = self._searches[at]
            self._alone[*at, price] = graph, self._least(search, graph, at, price)
        return self._alone[*at, price]

    def _least(self, search: PricedSearch, graph: StageGraph, at: tuple[str, Flight], price: float) -> PricedFound:
        """The least of a search; where peaks of the stage were is the guess, and where they are now is the next."""
        source, row = self._rows.get(at, (graph, {}))
        found = search.least(price, {named_moment(source, graph, moment): weight for moment, weight in row.items()})
        self._rows[at] = graph, found.row
        return found


def _part(low: Flight, flight: Flight, high: Flight) -> float:
    """The part of the way from one flight to a higher one at which no more is there than in `flight`.

    It is below 0 where `low` has more than `flight`, or `high` less than `low`.
    """
    ends = list(zip(low[:2], flight[:2], high[:2], strict=True))
    if any(a > b or a > c for a, b, c in ends):
        return -1.0
    return min((1.0, *((b - a) / (c - a) for a, b, c in ends if c > a)))


def counted_moment(flight: Flight) -> Moment:
    """The moment at which bytes of a stage count that has so many microbatches while another runs."""
    return BETWEEN if flight.begun else TURN


def named_moment(source: StageGraph, graph: StageGraph, moment: str) -> str:
    """The moment of a row of one stage, with the names of another that is like it."""
    kind, _, name = moment.partition(" ")
    names = {a.name: b.name for a, b in zip(add_hubs(source.graph).ops, add_hubs(graph.graph).ops, strict=True)}
    return f"{kind} {names[name]}" if name else moment
