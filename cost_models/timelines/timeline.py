"""The time line of a step: tasks on the streams of ranks, a discrete-event simulation.

A task takes `seconds` when alone. It occupies one stream on each of its ranks; a collective or a transfer has several
ranks at once. Tasks of one stream run one at a time, in the order in which they are listed:

    start(t) = max(end(n) for n that t needs, end(p) for p before t on any of its streams)
    end(t)   : the integral from start to end of rate dt = seconds(t)
    rate     = 1/k while, on one of the task's ranks, computation and communication run at once; else 1
             * 1/contention while its rank computes, for communication
             * 1/max(1, sum of shares) over the tasks that run on the same `link` of a rank
             * max(FLOOR, 1 - sum of (load * rate) of the communication on the rank), for computation

The slowdown k is one factor per device type. It slows both computation and communication while they overlap:
T = k * overlapped + rest (Miao et al. 2022, "Galvatron", section 3.4). Where the CPU sends, a transfer takes the
fraction `load` of it. Every stream but `compute` communicates. For each rank

    hidden  = seconds in which both run       exposed = seconds in which only communication runs
    busy    = seconds in which a stream runs  bubble  = 1 - sum of busy compute / (ranks * makespan)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.core.errors import InputError
from autoddl.cost_models.timelines.events import Edges, TaskTraits, run_overlapping, run_sequentially

__all__ = ["COMPUTE", "Task", "Timeline", "order_edges", "simulate", "simulate_ordered"]

COMPUTE = "compute"


class Task(NamedTuple):
    """A task of the time line.

        name          for errors and pictures
        seconds       when nothing else runs
        ranks         the ranks that it occupies
        stream        its stream on each of them
        needs         positions in the list of the tasks that end before it starts
        kind          the kind of work: forward, backward, send ...
        link          the link that it shares with the tasks there, "" if none
        load          fraction of its rank's CPU that it takes
        contention    how many times longer it takes while its rank computes
        share         fraction of the link that it uses when alone
    """

    name: str
    seconds: float
    ranks: tuple[int, ...] = (0,)
    stream: str = COMPUTE
    needs: tuple[int, ...] = ()
    kind: str = ""
    link: str = ""
    load: float = 0.0
    contention: float = 1.0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Tasks with the seconds at which each starts and ends."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last task ends."""
        return max(self.ends, default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that any task occupies, ascending."""
        return tuple(sorted({rank for task in self.tasks for rank in task.ranks}))

    def streams(self, rank: int) -> tuple[str, ...]:
        """Names of the streams that the rank uses, compute first."""
        names = {task.stream for task in self.tasks if rank in task.ranks}
        return tuple(sorted(names, key=lambda name: (name != COMPUTE, name)))

    def busy(self, rank: int, stream: str = COMPUTE) -> float:
        """Seconds in which the stream runs."""
        return _covered(self._spans(rank, {stream}))

    def exposed(self, rank: int) -> float:
        """Seconds in which only communication runs."""
        return _covered(self._spans(rank)) - self.busy(rank)

    def hidden(self, rank: int) -> float:
        """Seconds in which communication and computation both run."""
        return _covered(self._spans(rank, set(self.streams(rank)) - {COMPUTE})) - self.exposed(rank)

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time without computation."""
        return self._without_computation(self.makespan)

    @property
    def bubble_apart(self) -> float:
        """That fraction where steps follow each other on every rank, and no rank waits for all to have ended one.

        A step then takes as long as the longest rank has from its first task to its last (Qi et al. 2024).
        """
        spans = [self._spans(rank) for rank in self.ranks]
        return self._without_computation(max((max(end for _, end in own) - min(start for start, _ in own)
                                              for own in spans), default=0.0))

    def _without_computation(self, seconds: float) -> float:
        """The fraction of so many seconds of every rank that it does not compute."""
        whole = len(self.ranks) * seconds
        computed = sum((end - start) * len(task.ranks) for task, start, end in
                       zip(self.tasks, self.starts, self.ends, strict=True) if task.stream == COMPUTE)
        return 1 - computed / whole if whole else 0.0

    def _spans(self, rank: int, streams: set[str] | None = None) -> list[tuple[float, float]]:
        return [(start, end) for task, start, end in zip(self.tasks, self.starts, self.ends, strict=True)
                if rank in task.ranks and (streams is None or task.stream in streams)]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the spans."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def simulate(tasks: Sequence[Task], slowdown: float = 1.0) -> Timeline:
    """The time line of tasks, with the slowdown k. Raises InputError for impossible seconds, ranks or needs."""
    for task in tasks:
        if not 0 <= task.seconds < float("inf") or not task.ranks or not all(0 <= n < len(tasks) for n in task.needs):
            raise InputError(f"{task}: a task takes a finite time of at least 0, on one rank or more, and needs tasks "
                             f"0 to {len(tasks) - 1}")
    return simulate_ordered(tasks, order_edges(tasks), slowdown)


def order_edges(tasks: Sequence[Task]) -> Edges:
    """For every task the tasks after it and the number before it, by needs and by order on its streams."""
    after: list[list[int]] = [[] for _ in tasks]
    before = []
    last: dict[tuple[int, str], int] = {}
    for i, task in enumerate(tasks):
        previous = {*task.needs}
        for rank in task.ranks:
            if (rank, task.stream) in last:
                previous.add(last[rank, task.stream])
            last[rank, task.stream] = i
        for p in sorted(previous):
            after[p].append(i)
        before.append(len(previous))
    return tuple(map(tuple, after)), tuple(before)


def simulate_ordered(tasks: Sequence[Task], edges: Edges, slowdown: float) -> Timeline:
    """The time line of tasks whose edges are known: they stay the same while the seconds change.

    Raises InputError where the slowdown is below 1 or a task waits for itself.
    """
    if not 1 <= slowdown < float("inf"):
        raise InputError(f"a slowdown of {slowdown}: what overlaps is slowed by a finite factor of at least 1")
    seconds = [task.seconds for task in tasks]
    if slowdown == 1 and not any(task.link or task.load or task.contention > 1 for task in tasks):
        starts, ends = run_sequentially(seconds, edges)
    else:
        where = [TaskTraits(task.ranks, task.stream == COMPUTE, task.link, task.load, task.contention, task.share)
                 for task in tasks]
        starts, ends = run_overlapping(seconds, edges, where, slowdown)
    if min(ends, default=0.0) < 0:
        late = next(i for i, end in enumerate(ends) if end < 0)
        raise InputError(f"task {late}, {tasks[late].name!r}, waits for itself: what it needs, or what stands before "
                         "it on its stream, waits for it")
    return Timeline(tuple(tasks), tuple(starts), tuple(ends))
