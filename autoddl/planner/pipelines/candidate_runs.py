"""Searches the candidates of pipelines, best first, until nothing more is gained or the time is over.

The candidate of the least bound is advanced, again and again (`pipeline_candidate`). Others of nearly as low a bound
come before one in which cuts were solved already, so that a good plan is found early. A limit is one of the processor's
time. So other programs on the machine change little of what is found, and nothing where one process searches. Once it
is over, no stage is searched any more, and no other box of cuts is looked into. One search of a stage may take a part
of it. It looks until all candidates are bounded and there is some plan.

Where there is a limit and several processors, candidates are searched at once. The next best of those that are bounded
closely goes to a process beside this one, until it is done. That of the least bound of those stays here, for it takes
longest. Before two are bounded so, one of the two best of those bounded closer goes there. Where no other is left, a
better pipeline is sought there near the fastest, and then of its cut. The limit is that of each process, and of one
that waits for another. All of them know the best seconds of any. What one learns of stages the others do not.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import inf
from os import cpu_count
from typing import Any, NamedTuple

from autoddl.core.errors import InputError, MachineError
from autoddl.core.pipeline_proofs import WindowProof
from autoddl.core.processes import forks
from autoddl.planner.pipelines.pipeline_candidate import CutSearch
from autoddl.planner.pipelines.staged_steps import TriedCut
from autoddl.planner.process_pool import Answer, SharedLeast, beside, processor_seconds
from autoddl.search.limits import Late

LOOKED = 2
"""Candidates in which cuts beside the best are solved, those that found best."""

PATIENCE = 0.02
"""The part of its bound by which a candidate comes later for every time that cuts of it were solved."""

ONE_STAGE = 1 / 16
"""The part of the limit that one search of a stage may take."""

FIRST_PLAN = 1 / 2
"""The part of the limit after which cuts are solved before other candidates are bounded closer, for a first plan."""

FIRST_PIPELINE = 1 / 4
"""The same where a plan without stages is known, and no pipeline."""

LAST = 1 / 10
"""The part of the limit that is left for cuts beside the best."""

HURRIED = 3.0
"""Seconds that it may take where no plan is known behind the limit."""

PROCESSES = 2
"""Processes that search at once unless another number is asked for: each has tables of its own."""

__all__ = ["Clock", "processes_of", "run_candidates"]


class _Outcome(NamedTuple):
    """What a process found of a candidate, as in CutSearch; of its pipelines the fastest."""

    bound: float
    proof: tuple[WindowProof, ...]
    found: TriedCut | None
    ended: str
    problem: InputError | None
    is_full: bool
    needed: float


class _Answered(NamedTuple):
    """What another process found, and the seconds that its search took by its clock."""

    found: Any
    spent: float


@dataclass(eq=False)
class Clock:
    """The time of a search over stages, and the best seconds that are known.

        limit       seconds of the processor, of each process
        began       the processor's seconds when the search began
        unstaged    seconds of the best plan without stages; infinite without one
        searches    the candidates
        is_bounded  whether all candidates are bounded
        is_alone    whether no other process is started any more
        best        the best seconds of all processes
    """

    limit: float
    began: float
    unstaged: float
    searches: list[CutSearch] = field(default_factory=list)
    is_bounded: bool = False
    is_alone: bool = False
    best: SharedLeast = field(init=False)

    def __post_init__(self) -> None:
        self.best = SharedLeast(self.unstaged)

    @property
    def spent(self) -> float:
        """Seconds that the search took so far."""
        return processor_seconds() - self.began

    def is_over(self, share: float = 1.0) -> bool:
        """Whether so much of the limit is over."""
        return self.spent > self.limit * share

    @property
    def is_known(self) -> bool:
        """Whether all candidates are bounded and some plan is known."""
        return self.is_bounded and min(self.best.value, *(one.seconds for one in self.searches)) < inf

    def late(self) -> bool:
        """Whether the limit is over, and need not be waited for."""
        return self.is_over() and self.is_known

    def is_last(self) -> bool:
        """Whether the time has come to look around in the candidates that found best."""
        return (self.is_over(1 - LAST) and self.best.value < inf) or self.late()

    def go_on_alone(self) -> None:
        """Starts no other process any more, and forgets the pipelines that one told which ended early."""
        self.is_alone = True
        self.best = SharedLeast(min(self.unstaged, *(one.seconds for one in self.searches)))

    def of_stage(self) -> Late:
        """Ends one search of a stage by its part of the limit; where no plan is known behind the limit, soon."""
        ends = min(self.spent + self.limit * ONE_STAGE, self.limit)
        if not self.is_known:
            ends = max(ends, self.spent + HURRIED)
        return lambda: self.spent > ends


def processes_of(workers: int | None, limit: float) -> int:
    """The number of processes: one without a limit, so that always the same is found; else as asked for."""
    if limit == inf or not forks():
        return 1
    return min(PROCESSES, cpu_count() or 1) if workers is None else workers


def run_candidates(clock: Clock, processes: int = 1) -> None:
    """Advances the candidate of the least bound, again and again; at last looks around in those that found best.

    Once a part of the limit is over without a plan, one is looked for in each candidate before more is learned of their
    bounds. Where there is a plan without stages, a pipeline is looked for sooner, and first where no stages share
    ranks: there one is found soonest.
    """
    others, better = dict[CutSearch, Answer](), _Better(clock)
    with ExitStack() as stack:
        while not clock.is_last():
            for one in [one for one, answer in others.items() if answer.is_ready]:
                _receive(one, others.pop(one), clock)
            better.receive(wait=False)
            if left := _left(clock, others):
                free = 0 if clock.is_alone else processes - 1 - len(others) - better.is_sought
                other = _other(left, better.is_sought_of) if free > 0 else None
                if other is not None:
                    others[other] = stack.enter_context(beside(partial(_alone, other, clock, clock.spent), None))
                elif not (free > 0 and better.seek(others, stack)):
                    _advance(left, clock, climbs=not better.is_sought_of(left[0]))
            elif others:
                _receive(*others.popitem(), clock)
            elif not better.receive(wait=_waits(clock)):
                break
        better.receive(wait=_waits(clock))
        _look_around([one for one in clock.searches if one not in others], clock)
        while others:
            _receive(*others.popitem(), clock)


@dataclass(eq=False)
class _Better:
    """A process that seeks a better pipeline of the candidate that found best, while this one raises bounds.

        clock     the time, and all candidates
        sought    the candidate, and the answer
        seen      candidates with what was known of them when a better one was sought
    """

    clock: Clock
    sought: tuple[CutSearch, Answer] | None = None
    seen: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def is_sought(self) -> bool:
        """Whether one is sought now."""
        return self.sought is not None

    def is_sought_of(self, one: CutSearch) -> bool:
        """Whether one of a candidate is sought now."""
        return self.sought is not None and self.sought[0] is one

    def seek(self, others: Collection[CutSearch], stack: ExitStack) -> bool:
        """Seeks a better pipeline than the fastest; whether one is sought from now on.

        First other cuts are tried, once where more is known, and then its layouts are chosen together.
        """
        first = min((one for one in self.clock.searches if one not in others), key=lambda one: one.seconds)
        ways = (CutSearch.find_better, (first, first.rounds, first.seconds)), (
            CutSearch.choose_together, (first, first.seconds))
        way, known = next((one for one in ways if one[1] not in self.seen), (None, ()))
        if self.is_sought or first.cuts.fastest is None or first.seconds > self.clock.best.value or way is None:
            return False
        self.seen.add(known)
        self.sought = first, stack.enter_context(
            beside(partial(_better, way, first, self.clock, self.clock.spent), None))
        return True

    def receive(self, wait: bool) -> bool:
        """Adds what was found to the candidate, if it is there or to be waited for; whether there was an answer."""
        if self.sought is None or not (self.sought[1].is_ready or wait):
            return False
        (one, answer), self.sought = self.sought, None
        answered = _answered(answer, self.clock)
        if answered is not None:
            found, tried = answered
            one.cuts.elsewhere |= tried
            one.cuts.add(found)
        self.seen.add((one, one.rounds, one.seconds))
        _tell(self.clock)
        return True


def _better(way: Callable[[CutSearch], None], one: CutSearch, clock: Clock, spent: float, _: object) -> _Answered:
    """(the fastest pipeline that is found from the fastest of a candidate, the cuts tried) in a process of its own."""
    clock.began = processor_seconds() - spent
    one.tell = lambda what: clock.best.tell(one.seconds)
    way(one)
    assert one.cuts.fastest is not None
    return _Answered((one.cuts.fastest, set(one.cuts.tried) - one.cuts.rough), clock.spent)


def _waits(clock: Clock) -> bool:
    """Whether a better pipeline is waited for: a gap is left, or another process has the best."""
    best = clock.best.value
    gap = any(one.bound < best * (1 - one.part.task.options.tolerance) for one in clock.searches)
    return gap or best < min(clock.unstaged, *(one.seconds for one in clock.searches))


def _left(clock: Clock, others: Collection[CutSearch]) -> list[CutSearch]:
    """The candidates of this process that are not done, those of the least bound first."""
    _tell(clock)
    return sorted((one for one in clock.searches if not one.is_done and one not in others),
                  key=lambda one: one.bound * (1 + PATIENCE * one.rounds))


def _other(left: Sequence[CutSearch], is_sought_of: Callable[[CutSearch], bool]) -> CutSearch | None:
    """The candidate that is searched in another process next: of those that are bounded closely the second least.

    Else it is that with fewer stages of the two least that are bounded closer: it has fewer cuts, and ends sooner. Of
    equally many it is one that is not bounded closely.
    """
    closely = sorted((one for one in left if one.answer is not None), key=lambda one: one.bound)[1:]
    first = sorted((one for one in left if one.is_closer), key=lambda one: one.bound)[:2]
    fewer = [min(reversed(first), key=lambda one: (one.part.stages, one.answer is not None))
             ] if len(first) == 2 else []
    found = [*(one for one in closely if one is not left[0]), *fewer]
    return next((one for one in found if not is_sought_of(one)), None)


def _advance(left: Sequence[CutSearch], clock: Clock, climbs: bool = True) -> None:
    """Advances the first candidate, or looks for a first plan of one; it `climbs` if no other process does."""
    best = clock.best.value
    waiting = [one for one in left if not one.is_hurried and one.bound < best]
    is_none_found = all(one.cuts.fastest is None for one in clock.searches)
    if best == inf and clock.is_over(FIRST_PLAN) and not left[0].is_hurried:
        left[0].hurry()
    elif waiting and clock.is_over(FIRST_PIPELINE) and best < inf and is_none_found:
        min(waiting, key=lambda one: (one.part.shares, one.bound)).hurry()
    else:
        left[0].advance(climbs)


def _tell(clock: Clock) -> None:
    """Tells all processes of the best seconds of these candidates."""
    clock.best.tell(min(one.seconds for one in clock.searches))


def _look_around(searches: Sequence[CutSearch], clock: Clock) -> None:
    """Looks around in the candidates that found best."""
    for one in sorted(searches, key=lambda one: one.seconds)[:LOOKED]:
        one.look_around(min(other.bound for other in clock.searches))
        _tell(clock)


def _alone(one: CutSearch, clock: Clock, spent: float, _: object) -> _Answered:
    """Advances one candidate in a process of its own, and looks around in it where it has the best pipeline."""
    clock.began = processor_seconds() - spent
    one.tell = lambda what: None
    while not one.is_done and not clock.is_last():
        _advance([one], clock)
        _tell(clock)
    if one.seconds <= clock.best.value:
        _look_around([one], clock)
    needed = min((part.needed for part in one.part.every), default=inf)
    return _Answered(_Outcome(one.bound, one.proof, one.cuts.fastest, one.ended, one.cuts.problem, one.cuts.is_full,
                              needed), clock.spent)


def _receive(one: CutSearch, answer: Answer, clock: Clock) -> None:
    """Writes into a candidate what another process found of it."""
    found = _answered(answer, clock)
    if found is None:
        return
    one.bound, one.proof, one.ended, one.needed = found.bound, found.proof, found.ended, found.needed
    one.cuts.problem, one.cuts.is_full = found.problem, found.is_full
    if found.found is not None:
        one.cuts.add(found.found)
    _tell(clock)


def _answered(answer: Answer, clock: Clock) -> Any:
    """What another process answers. Where this one waited for it, it has spent as many seconds as the other.

    None where it ended early, perhaps for lack of memory: then this process goes on alone.
    """
    found, spent = None, clock.spent
    try:
        found, other = answer()
        spent = max(spent, other)
    except MachineError:
        clock.go_on_alone()
    answer.end()
    clock.began = processor_seconds() - spent
    return found
