"""The time line that a plan's step will have on one rank: what `issue` lists, run by the discrete-event engine.

Computation is one stream, the collectives over each set of axes another. With gloo, those of the library run two at a
time (`LANES`), ours by messages one after the other over all axes, and one that is waited for at once does not queue
behind those under way; all over the same axes share what they cross, and all that cross the same level its port, where
it has one for all (`ONE_PORT`). What sending takes of the rank's processor is missing to what it computes, which is
slower beside it (`Host.drag`). Ranks that share cores come to a collective at different times, so it begins later
(`Host.late`, of the last of all; of n ranks the last comes E(n) later, the mean of the largest of n normal numbers);
beside computation it takes longer (`Host.busy`), its own or, where only a part of the ranks waits for it, by as much of
that as the part of the others; and starting it and waiting for it takes time of the computing stream (`Host.issue`). So

    a collective is in flight from when it is handed over to when its stream has done it and those before it
    exposed = what waiting for it takes         hidden = time in flight during which the rank computes

It is written as a recorded step is, so that both are read by the same functions. `slowdown` is the factor by which
computation and communication slow each other while both run (see `cost_models.timeline`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod, sqrt
from statistics import NormalDist

from autoddl.core.graph import Graph
from autoddl.core.plan import Plan, level_of
from autoddl.core.record import Event, RecordedStep
from autoddl.cost_models import Cluster
from autoddl.cost_models.machine import Host
from autoddl.cost_models.timeline import COMPUTE, Task, simulate
from autoddl.schedule.actions import Action, Compute, Pass, Start, Wait
from autoddl.schedule.issue_order import Known, issued

__all__ = ["Foreseen", "Span", "timeline_of"]


LANES = 2
"""Threads of a process group of gloo (ProcessGroupGloo: two for each device, and there is one)."""
ONE_PORT = ("switch", "fat-tree", "dragonfly")
"""Topologies in which a device has one port to all the others of its level."""


@dataclass(frozen=True, slots=True)
class Span:
    """An op, or a local step of a conversion, from `start` to `end`, in seconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A predicted step: its collectives as events of a record, and what it computes."""

    step: RecordedStep
    computes: tuple[Span, ...]

    @property
    def compute_seconds(self) -> float:
        return sum(span.end - span.start for span in self.computes)


def timeline_of(plan: Plan, graph: Graph, cluster: Cluster, rank: int = 0, slowdown: float = 1.0,
                known: Known | None = None) -> Foreseen:
    """The predicted step of `rank`.

    `graph` is the graph of one microbatch with its hubs (`hubs.add_hubs`); `known` is of plans that differ in their
    bucket size alone."""
    actions = issued(plan, graph, cluster, rank, known)
    shared = {level.name for level in cluster.levels if level.topology in ONE_PORT}
    links = {name: level if level in shared else "" for name, level in plan.levels.items()}
    gloo, host = cluster.backend == "gloo", cluster.device.host or Host(0.0, 0.0, 0.0)
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    tasks, at = _tasks(actions, links, host.late, host.issue, sizes) if gloo else _tasks(actions, None)
    line = simulate(tasks, slowdown)
    began = [line.ends[n] if n is not None else 0.0 for n in _computed_before(tasks)]
    starts = [k for k, action in enumerate(actions) if isinstance(action, Start)]
    waits = {action.k: at[k] for k, action in enumerate(actions) if isinstance(action, Wait)}
    events = []
    for number, k in enumerate(starts):
        action, task = actions[k], at[k]
        assert isinstance(action, Start)
        wait = line.starts[waits[number]] - began[waits[number]] if number in waits else 0.0
        sent = action.sent
        events.append(Event(0, rank, sent.direction, sent.kind, sent.axes, level_of(plan, sent.axes), sent.nbytes,
                            began[task], line.ends[task], wait, sent.origin))
    passes = tuple((action.name, began[at[k]] if at[k] < len(tasks) else line.makespan)
                   for k, action in enumerate(actions) if isinstance(action, Pass))
    spans = tuple(Span(action.name, line.starts[at[k]], line.ends[at[k]])
                  for k, action in enumerate(actions) if isinstance(action, Compute))
    return Foreseen(RecordedStep(0, rank, 0.0, line.makespan, passes, tuple(events)), spans)


def _tasks(actions: Sequence[Action], links: Mapping[str, str] | None, late: float = 0.0, issue: float = 0.0,
           sizes: Mapping[str, int] | None = None) -> tuple[list[Task], list[int]]:
    """The tasks, and for each action its task: that of a Pass is the next one.

    `links` is of each axis of the mesh the link that it shares; None where collectives over the same axes queue.
    `sizes` are those of the axes."""
    line = _Line(links, late, issue, sizes or {})
    at = [line.add(action, after) for action, after in zip_longest(actions, actions[1:])]
    return line.tasks, at


@dataclass(slots=True)
class _Line:
    """The tasks so far; of every collective its task, its axes and the seconds that were `worked` before it.

    Waiting is computing for no time. Ranks along an axis met when the last of them started a collective over it that
    was waited for; `met` has the seconds worked until then."""

    links: Mapping[str, str] | None
    late: float
    issue: float
    sizes: Mapping[str, int]
    tasks: list[Task] = field(default_factory=list)
    flights: list[tuple[int, list[str], float]] = field(default_factory=list)
    turns: Counter[str] = field(default_factory=Counter)
    met: dict[str, float] = field(default_factory=dict)
    computed: int | None = None
    worked: float = 0.0

    def add(self, action: Action, after: Action | None) -> int:
        """The task of `action`, which `after` follows."""
        match action:
            case Start():
                return self._start(action, self.links is not None and after == Wait(len(self.flights)))
            case Compute():
                self.worked += action.seconds
                return self._compute(Task(action.name, action.seconds))
            case Wait():
                flight, axes, handed = self.flights[action.k]
                self.met |= {axis: max(self.met.get(axis, 0.0), handed) for axis in axes}
                return self._compute(Task("wait", 0.0, needs=(flight,)))
        return len(self.tasks)

    def _compute(self, task: Task) -> int:
        self.computed = len(self.tasks)
        self.tasks.append(task)
        return self.computed

    def _start(self, action: Start, at_once: bool) -> int:
        """Handing it over, coming late, and the collective."""
        axes = action.sent.axes.split("+")
        alone = self.worked - min(self.met.get(axis, 0.0) for axis in axes)
        if self.issue and not at_once:
            self._compute(Task("issue", self.issue))
        needs = () if self.computed is None else (self.computed,)
        if self.late and alone > 0 and self.links is not None:
            late = self.late * sqrt(alone) * self._part(axes)
            self.tasks.append(Task("late", late, stream=f"late {len(self.flights)}", needs=needs))
            needs = (len(self.tasks) - 1,)
        self.flights.append((len(self.tasks), axes, self.worked))
        self.tasks.append(self._flight(action, needs, at_once))
        return len(self.tasks) - 1

    def _ranks(self, axes: Sequence[str]) -> tuple[int, int]:
        """Those of a group over these axes, and all."""
        return prod(self.sizes.get(axis, 1) for axis in axes), prod(self.sizes.values())

    def _part(self, axes: Sequence[str]) -> float:
        """E(ranks of the group) / E(all ranks)."""
        some, every = self._ranks(axes)
        return _largest(some) / _largest(every) if some < every else 1.0

    def _others(self, axes: Sequence[str]) -> float:
        """The part of all ranks that is not in the group."""
        some, every = self._ranks(axes)
        return max(0.0, 1 - some / every)

    def _flight(self, action: Start, needs: tuple[int, ...], at_once: bool) -> Task:
        """A collective. On gloo all over the same axes share what they cross, as all do that cross one port."""
        if self.links is None:
            return Task(action.sent.origin, action.seconds, stream=action.sent.axes, needs=needs)
        axes, busy = action.sent.axes, action.busy
        link = next((self.links[name] for name in axes.split("+") if self.links.get(name)), axes)
        load = min(1.0, (action.host + action.drag) / action.seconds) if action.host else 0.0
        own = busy * self._others(axes.split("+")) if at_once and self.late else 0.0
        contention = 1 + busy / action.seconds if busy and not at_once else 1.0
        share = min(1.0, action.wire / action.seconds) if action.seconds else 0.0
        return Task(action.sent.origin, action.seconds + own, stream=self._stream(action, at_once), needs=needs,
                    link=link, load=load, contention=contention, share=share)

    def _stream(self, action: Start, at_once: bool) -> str:
        """Behind what a collective on gloo queues: the library's take the lanes of their axes in `turns`."""
        axes = action.sent.axes
        if at_once:
            return f"{axes} at once"
        if action.ours:
            return "messages"
        self.turns[axes] += 1
        return f"{axes} lane {self.turns[axes] % LANES}"


def _largest(n: int) -> float:
    """The mean of the largest of n > 1 standard normal numbers (Blom 1958: within 5 %)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _computed_before(tasks: Sequence[Task]) -> list[int | None]:
    """Per task the last one before it that computes: when that ends, the rank comes to this one."""
    found: list[int | None] = []
    last: int | None = None
    for i, task in enumerate(tasks):
        found.append(last)
        last = i if task.stream == COMPUTE else last
    return found
