"""The time line of a step: tasks on the streams of ranks, a discrete-event simulation.

A task takes `seconds` when alone. It occupies one stream on each of its ranks (a collective or a transfer on several at
once), and the tasks of a stream run one at a time in the order in which they are listed:

    start(t) = max(end(n) for n that t needs, end(p) for p before t on any of its streams)
    end(t)   : the integral from start to end of rate dt = seconds(t)
    rate     = 1/k while, on one of the task's ranks, computation and communication run at once; else 1
             * 1/beside while its rank computes, for what communicates
             * 1/max(1, sum of shares) of one of the tasks that run on the same `link` of a rank
             * 1 - sum of (load * rate) of what communicates on the rank, for computation, and no less than FLOOR

k is one factor per device type: what overlaps is slowed on both sides, T = k * overlapped + rest (Miao et al. 2022,
"Galvatron", section 3.4). `load` is the part of a rank's processor that a transfer takes where its host sends. Every
stream but `compute` communicates. For each rank

    hidden  = seconds in which both run       exposed = seconds in which only communication runs
    busy    = seconds in which a stream runs  bubble  = 1 - sum of busy compute / (ranks * makespan)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.core.errors import InputError
from autoddl.cost_models.events import Edges, TaskTraits, run_overlapping, run_sequentially

__all__ = ["COMPUTE", "Task", "Timeline", "order_edges", "simulate", "simulate_ordered"]

COMPUTE = "compute"


class Task(NamedTuple):
    """`needs` are positions in the list of tasks; `kind` is what it counts as: forward, backward, send ...

    A task with a `link` shares it with what runs there at the same time, and alone uses `share` of it; `load` is what
    it takes of a processor, and `beside` by how much longer it takes while its rank computes."""

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
    """When each task starts and ends."""

    tasks: tuple[Task, ...]
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(self.ends, default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for task in self.tasks for rank in task.ranks}))

    def streams(self, rank: int) -> tuple[str, ...]:
        """Those that the rank uses, compute first."""
        names = {task.stream for task in self.tasks if rank in task.ranks}
        return tuple(sorted(names, key=lambda name: (name != COMPUTE, name)))

    def busy(self, rank: int, stream: str = COMPUTE) -> float:
        """Seconds in which the stream runs."""
        return _covered(self._spans(rank, {stream}))

    def exposed(self, rank: int) -> float:
        """Seconds in which only communication runs."""
        return _covered(self._spans(rank)) - self.busy(rank)

    def hidden(self, rank: int) -> float:
        """Seconds in which communication runs beside computation."""
        return _covered(self._spans(rank, set(self.streams(rank)) - {COMPUTE})) - self.exposed(rank)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time without computation."""
        whole = len(self.ranks) * self.makespan
        computed = sum((end - start) * len(task.ranks) for task, start, end in
                       zip(self.tasks, self.starts, self.ends, strict=True) if task.stream == COMPUTE)
        return 1 - computed / whole if whole else 0.0

    def _spans(self, rank: int, streams: set[str] | None = None) -> list[tuple[float, float]]:
        return [(start, end) for task, start, end in zip(self.tasks, self.starts, self.ends, strict=True)
                if rank in task.ranks and (streams is None or task.stream in streams)]


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def simulate(tasks: Sequence[Task], slowdown: float = 1.0) -> Timeline:
    """Run all tasks; `slowdown` is k."""
    for task in tasks:
        if not 0 <= task.seconds < float("inf") or not task.ranks or not all(0 <= n < len(tasks) for n in task.needs):
            raise InputError(f"{task}: a task takes a finite time of at least 0, on one rank or more, and needs tasks "
                             f"0 to {len(tasks) - 1}")
    return simulate_ordered(tasks, order_edges(tasks), slowdown)


def order_edges(tasks: Sequence[Task]) -> Edges:
    """For every task those after it, and how many are before it: needs and neighbours on a stream alike."""
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
    """`simulate` with the edges given, which stay the same while the seconds change."""
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
