"""Bounds plans whose memory has a price: the least of seconds + price * bytes at the peak, over all candidates.

Where several stages share the memory of a rank, each pays a price for its bytes, in seconds (`core.pipeline_cuts`).
Sums of bytes over moments w are below the peak (`budget_search`). So for every w, of weights w_t >= 0 of sum 1,

    seconds(x) + price * peak(x) >= min over x of  seconds(x) + price * sum over t of w_t bytes_t(x)

The right side is what elimination finds. Cutting planes raise it: a plan x is drawn, and the moment of its peak is
added. The weights are then those with the highest bound over the plans drawn so far. It ends where that reaches the
plan's own seconds + price * peak. The candidate of the least bound comes first, and the others wait. So most of them
are bounded once.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.problem import Solution
from autoddl.planner.budget_search import BudgetSearch
from autoddl.planner.candidates import Candidate
from autoddl.planner.row_problems import best_weights, plane_of
from autoddl.planner.search_jobs import Jobs
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import Row
from autoddl.pricing.lifetimes import UPDATE, Moment
from autoddl.search import lower_bound

__all__ = ["PricedFound", "PricedSearch"]

CLOSE = 1e-4
"""The gap between a bound and a plan that is good enough."""

ROUNDS = 8
"""Rows of a candidate that are tried at most."""


@dataclass(frozen=True, slots=True)
class PricedFound:
    """The least of some candidates under a price.

        bound       that seconds + price * bytes at the peak are not below, whatever the plan
        candidate   of the best plan that was drawn; None without one
        solution    that plan: its seconds as they count, and its bytes at the peak
        row         the row under which it was found
    """

    bound: float
    candidate: Candidate | None
    solution: Solution | None
    row: Row


@dataclass(slots=True)
class _Bounded:
    """A candidate under a price, and what is known of it: its bound, its best plan, and the plans drawn.

        search     its networks and memory lines
        price      seconds of a byte
        row        the row that is next
        bound      seconds + price * bytes that none of its plans is below
        value      seconds + price * bytes of its best plan, infinite without one
        solution   that plan
        rounds     rows tried
        moments    at which plans had their peaks
        choices    plans drawn
    """

    search: BudgetSearch
    price: float
    row: Row
    bound: float = 0.0
    value: float = inf
    solution: Solution | None = None
    rounds: int = 0
    moments: list[Moment] = field(default_factory=list)
    choices: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the bound cannot rise much."""
        return self.bound >= self.value * (1 - CLOSE) or self.rounds >= ROUNDS

    def tighten(self) -> None:
        """Bounds the candidate under its row, and finds the next row."""
        search, paid = self.search, self.price * self.search.budget
        self.rounds += 1
        problem, space = search.ready(self.row)
        if space is None:
            self.bound, self.rounds = max(self.bound, lower_bound(problem, self.price) + paid), ROUNDS
            return
        found = search.relaxed(problem, self.price, space)
        self.bound = max(self.bound, found.bound + paid)
        if found.seconds == inf:
            self.rounds = ROUNDS
            return
        peak = search.peaks.of(found.choice).nbytes
        if found.seconds + self.price * peak < self.value:
            self.value, self.solution = found.seconds + self.price * peak, replace(found, nbytes=peak)
        self.choices += [found.choice] * (found.choice not in self.choices)
        self.moments += [m for m in (*self.row, search.moment_of(found.choice)) if m not in self.moments]
        if not self.done:
            planes = [plane_of(search, choice, self.moments) for choice in self.choices]
            weights = best_weights(planes, len(self.moments), paid)
            self.row = {m: float(w) for m, w in zip(self.moments, weights, strict=True) if w > 0}


class PricedSearch:
    """The search over some candidates, at one price after the other; networks that were built are kept."""

    def __init__(self, task: PlanTask, candidates: Sequence[Candidate]) -> None:
        self.candidates, self.jobs = candidates, Jobs(task, candidates)

    def least(self, price: float, row: Row) -> PricedFound:
        """The least seconds + price * bytes at the peak over all candidates, as a bound, and a plan that comes close.

        `price` is in seconds of a byte and above 0, `row` a guess of where plans have their peak. Raises what a
        candidate lacks where none can be.
        """
        known, problem = dict[int, _Bounded](), None
        for i in range(len(self.candidates)):
            try:
                search = self.jobs.ready(i)
                made = _Bounded(search, price, row if row and search.network.lifetimes.has(row) else {UPDATE: 1.0})
                made.tighten()
                known[i] = made
            except (Infeasible, InputError) as error:
                problem = error
        if not known:
            assert problem is not None
            raise problem
        heap = [(one.bound, i) for i, one in known.items()]
        heapq.heapify(heap)
        while not known[heap[0][1]].done:
            i = heap[0][1]
            known[i].tighten()
            heapq.heapreplace(heap, (known[i].bound, i))
        best = min(known, key=lambda i: known[i].value)
        return PricedFound(heap[0][0], self.candidates[best] if known[best].solution else None, known[best].solution,
                           known[best].row)

    def least_between(self, price: float, moment: Moment) -> PricedFound:
        """The least seconds + price * bytes at one moment over all candidates, as a bound, and a plan of the best.

        Raises what a candidate lacks where none can be.
        """
        bound, best, problem = inf, PricedFound(inf, None, None, {moment: 1.0}), None
        for i, candidate in enumerate(self.candidates):
            try:
                search = self.jobs.ready(i)
                posed, space = search.ready({moment: 1.0})
                found = None if space is None else search.relaxed(posed, price, space)
                least = (lower_bound(posed, price) if found is None else found.bound) + price * search.budget
            except (Infeasible, InputError) as error:
                problem = error
                continue
            bound = min(bound, least)
            if found is not None and found.seconds < inf and least < best.bound:
                best = replace(best, bound=least, candidate=candidate, solution=found)
        if bound == inf and problem is not None:
            raise problem
        return replace(best, bound=bound)
