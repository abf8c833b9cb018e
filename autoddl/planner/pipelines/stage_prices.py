"""Remembers stages whose bytes have a price: their least seconds + price * bytes, and the plans that come close.

A stage that shares the memory of its ranks pays for its bytes (`joint_stages`, `shared_budget`). What was found under
one price is true for every stage that is alike. Where the peaks of a stage were is the first guess of where they are
under another price (`planner.priced_bytes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Flight
from autoddl.core.stages import StageGraph
from autoddl.cost_models import Cluster
from autoddl.planner.candidates import Candidate
from autoddl.planner.pipelines.stage_plans import prices_of_stage
from autoddl.planner.priced_bytes import PricedFound, PricedSearch
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import Row

__all__ = ["Asking", "StagePrices", "named_moment"]

KEPT = 3
"""Searches that are kept: those of the stages of a rank."""

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

        _counted   least seconds counted somehow + price * bytes
        _alone     stages whose seconds count as alone, by structure, flight and price
        _searches  the last searches of stages alone, by structure and flight
        _rows      where the peaks of a stage were, by structure and flight
    """

    _counted: dict[Key, PricedFound] = field(default_factory=dict)
    _alone: dict[tuple[str, Flight, float], tuple[StageGraph, PricedFound]] = field(default_factory=dict)
    _searches: dict[tuple[str, Flight], tuple[StageGraph, PricedSearch]] = field(default_factory=dict)
    _rows: dict[tuple[str, Flight], tuple[StageGraph, Row]] = field(default_factory=dict)

    def known(self, flight: Flight, weights: tuple[float, ...], price: float) -> dict[tuple[str, Any], float]:
        """By structure and ports, the least seconds counted so + price * bytes."""
        return {(key, sides): found.bound for (key, sides, *rest), found in self._counted.items()
                if rest == [weights, flight, price]}

    def counted(self, task: Callable[[], PlanTask], asking: Asking, key: Key) -> PricedFound:
        """Searches a stage whose seconds count as `task` and `key` say; its least is known then."""
        if key not in self._counted:
            self._counted[key] = self._least(asking.search(task()), asking.graph, (key[0], asking.flight), key[-1])
        return self._counted[key]

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


def named_moment(source: StageGraph, graph: StageGraph, moment: str) -> str:
    """The moment of a row of one stage, with the names of another that is like it."""
    kind, _, name = moment.partition(" ")
    names = {a.name: b.name for a, b in zip(add_hubs(source.graph).ops, add_hubs(graph.graph).ops, strict=True)}
    return f"{kind} {names[name]}" if name else moment
