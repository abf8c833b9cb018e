"""Finds when tasks start and end, given their order: the two engines of `timeline`.

The first, `run_sequentially`, is one pass in topological order, with end = max(ends before) + seconds. The second,
`run_overlapping`, steps from event to event: the rate of a task changes when another starts or ends on one of its
ranks. Both leave -1 as the end of a task that never starts.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

__all__ = ["Edges", "TaskTraits", "run_overlapping", "run_sequentially"]

Edges = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""(tasks after each task, number of tasks before it)."""

FLOOR = 0.1
"""The least fraction of its CPU that a computation keeps, however much is sent at the same time."""


class TaskTraits(NamedTuple):
    """The traits of a task by which its rate follows from what runs at the same time.

        ranks         the ranks on which it runs
        computes      whether it computes; else it communicates
        link          the link that it shares, "" if none
        load          fraction of its rank's CPU that it takes
        contention    how many times longer it takes while its rank computes
        share         fraction of the link that it uses when alone
    """

    ranks: tuple[int, ...]
    computes: bool
    link: str = ""
    load: float = 0.0
    contention: float = 1.0
    share: float = 1.0


def run_sequentially(seconds: Sequence[float], edges: Edges) -> tuple[list[float], list[float]]:
    """Starts and ends in seconds, of tasks that do not slow each other."""
    after, before = edges[0], [*edges[1]]
    starts, ends = [0.0] * len(seconds), [-1.0] * len(seconds)
    ready = [i for i, count in enumerate(before) if not count]
    while ready:
        task = ready.pop()
        end = ends[task] = starts[task] + seconds[task]
        for later in after[task]:
            if end > starts[later]:
                starts[later] = end
            before[later] -= 1
            if not before[later]:
                ready.append(later)
    return starts, ends


def run_overlapping(seconds: Sequence[float], edges: Edges, where: Sequence[TaskTraits], slowdown: float
                    ) -> tuple[list[float], list[float]]:
    """Starts and ends in seconds, of tasks that `slowdown` slows where one rank computes and communicates."""
    after, before = edges[0], [*edges[1]]
    run = _Run(seconds, where, slowdown)
    ready = [i for i, count in enumerate(before) if not count]
    while ready or run.running:
        run.start(ready)
        ready = []
        for task in run.finish():
            for later in after[task]:
                before[later] -= 1
                if not before[later]:
                    ready.append(later)
    return run.starts, run.ends


class _Run:
    """The clock, the tasks that run, their rates, and when each will end if nothing changes."""

    def __init__(self, seconds: Sequence[float], where: Sequence[TaskTraits], slowdown: float) -> None:
        self.now, self.slowdown, self.where = 0.0, slowdown, where
        self.starts, self.ends = [0.0] * len(seconds), [-1.0] * len(seconds)
        self.left, self.since, self.stretch = [*seconds], [0.0] * len(seconds), [1.0] * len(seconds)
        self.due: list[tuple[float, int]] = []
        self.running: dict[int, float] = {}  # task -> when it is due
        self.on: dict[int, list[int]] = {rank: [] for one in where for rank in one.ranks}

    def start(self, tasks: Iterable[int]) -> None:
        """Starts these tasks now, then adapts the rates on their ranks."""
        for task in tasks:
            self.starts[task] = self.since[task] = self.now
            self._put(task)
            for rank in self.where[task].ranks:
                self.on[rank].append(task)
        self._adapt({rank for task in tasks for rank in self.where[task].ranks})

    def finish(self) -> list[int]:
        """Steps to the next event; returns the tasks that end there, in order."""
        done: list[int] = []
        while self.due and (not done or self.due[0][0] == self.now):
            when, task = heappop(self.due)
            if self.running.get(task) == when:  # else it was put again with another rate
                del self.running[task]
                self.now = self.ends[task] = when
                done.append(task)
        for task in done:
            for rank in self.where[task].ranks:
                self.on[rank].remove(task)
        self._adapt({rank for task in done for rank in self.where[task].ranks})
        return done

    def _put(self, task: int) -> None:
        self.running[task] = self.now + self.left[task] * self.stretch[task]
        heappush(self.due, (self.running[task], task))

    def _adapt(self, ranks: set[int]) -> None:
        """Gives the tasks on these ranks their new rates, with the work that is left of each."""
        for task in sorted({task for rank in ranks for task in self.on[rank]}):
            stretch = self._stretch(task)
            if stretch != self.stretch[task]:
                self.left[task] = max(0.0, self.left[task] - (self.now - self.since[task]) / self.stretch[task])
                self.since[task], self.stretch[task] = self.now, stretch
                self._put(task)

    def _stretch(self, task: int) -> float:
        """How many times slower the task is now than alone."""
        one = self.where[task]
        both = any(map(self._both, one.ranks))
        slowed = self.slowdown if both else 1.0
        if one.computes:
            return slowed * max(map(self._left_over, one.ranks))
        return slowed * self._crowd(task) * (one.contention if both else 1.0)

    def _crowd(self, task: int) -> float:
        """How many times over its link is used, on the rank where that is most; at least 1."""
        one = self.where[task]
        if not one.link:
            return 1.0
        return max(1.0, *(sum(self.where[other].share for other in self.on[rank] if self.where[other].link == one.link)
                          for rank in one.ranks))

    def _left_over(self, rank: int) -> float:
        """How many times slower the rank computes, because communication takes a part of its CPU."""
        taken = sum(one.load / (self._crowd(other) * one.contention * self.slowdown)
                    for other, one in ((other, self.where[other]) for other in self.on[rank]) if one.load)
        return 1 / max(FLOOR, 1 - taken)

    def _both(self, rank: int) -> bool:
        """Whether computation and communication run on the rank."""
        return len({self.where[task].computes for task in self.on[rank]}) == 2
