"""Predicts the time line of a plan's step on one rank: runs the actions of `issue_order` in the discrete-event engine.

Computation is one stream, and the collectives over each set of axes another. So

    a collective is in flight from when it is handed over to when its stream has done it and those before it
    exposed = seconds of waiting for it         hidden = seconds in flight during which the rank computes

With gloo, more is known of the streams and of the CPU:

    lanes         the library's own collectives over the same axes run two at a time (`LANES`)
    messages      collectives by messages of the runtime run one after the other over all axes
    at once       a collective that is waited for at once does not queue behind those in flight
    links         collectives over the same axes share their links; those that cross one level share its port, where
                  it has one port for all (`ONE_PORT`)
    host, drag    computation loses the CPU seconds of sending, and is slower meanwhile (`Host.drag`)
    late          ranks that share cores come to a collective at different times. The last of n ranks comes E(n)
                  later than the mean, the mean of the largest of n normal numbers; `Host.late` is that of all ranks
    busy          a collective takes longer while the rank computes (`Host.busy`). Where it is waited for at once,
                  that counts as much as the fraction of all ranks that is outside its group
    issue         handing it over and waiting for it takes time of the computing stream (`Host.issue`)

The result has the form of a recorded step: the same functions read both. Computation and communication slow each other
by the factor `slowdown` while both run (see `cost_models.timelines.timeline`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from math import prod, sqrt
from statistics import NormalDist

from autoddl.core.graph import Graph
from autoddl.core.plan import Plan, level_of
from autoddl.core.record import Event, RecordedStep
from autoddl.cost_models import Cluster
from autoddl.cost_models.machine import Host
from autoddl.cost_models.timelines.timeline import COMPUTE, Task, simulate
from autoddl.schedule.actions import Action, Compute, Pass, Start, Wait
from autoddl.schedule.issue_order import KnownPrices, list_actions

__all__ = ["PredictedStep", "Span", "predict_timeline"]


LANES = 2
"""Threads of a process group of gloo (ProcessGroupGloo has two for each device, and there is one device)."""
ONE_PORT = ("switch", "fat-tree", "dragonfly")
"""Topologies in which a device has one port to all the others of its level."""


@dataclass(frozen=True, slots=True)
class Span:
    """An op, or a local step of a conversion, from `start` to `end`, in seconds.

    `number` is that of its pass: forward of microbatch k has 2 k, its backward 2 k + 1.
    """

    name: str
    start: float
    end: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A predicted step: its collectives as events of a record, and its computation as spans."""

    step: RecordedStep
    computes: tuple[Span, ...]

    @property
    def compute_seconds(self) -> float:
        """Seconds in which the rank computes."""
        return sum(span.end - span.start for span in self.computes)


def predict_timeline(plan: Plan, graph: Graph, cluster: Cluster, rank: int = 0, slowdown: float = 1.0,
                     known: KnownPrices | None = None) -> PredictedStep:
    """The predicted step of `rank`.

    `graph` is the graph of one microbatch with its hubs (`hubs.add_hubs`). `known` keeps prices for plans that differ
    in their bucket size alone.
    """
    actions = list_actions(plan, graph, cluster, rank, known)
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
    numbers = accumulate(isinstance(action, Pass) for action in actions)
    spans = tuple(Span(action.name, line.starts[at[k]], line.ends[at[k]], number - 1)
                  for k, (action, number) in enumerate(zip(actions, numbers, strict=True))
                  if isinstance(action, Compute))
    return PredictedStep(RecordedStep(0, rank, 0.0, line.makespan, passes, tuple(events)), spans)


def _tasks(actions: Sequence[Action], links: Mapping[str, str] | None, late: float = 0.0, issue: float = 0.0,
           sizes: Mapping[str, int] | None = None) -> tuple[list[Task], list[int]]:
    """The tasks, and the position of each action's task; that of a Pass is the next one.

    `links` maps each axis of the mesh to the link that it shares, `sizes` to its size. Collectives over the same axes
    queue where `links` is None.
    """
    line = _Line(links, late, issue, sizes or {})
    at = [line.add(action, after) for action, after in zip_longest(actions, actions[1:])]
    return line.tasks, at


@dataclass(slots=True)
class _Line:
    """The tasks so far. A wait is a computation of no seconds.

        links       axis of the mesh -> link that it shares; None where collectives over the same axes queue
        late        `Host.late`, in s^(1/2)
        issue       `Host.issue`, in seconds
        sizes       axis of the mesh -> its size
        tasks       the tasks
        flights     of every collective: its task, its axes, and `worked` when it was handed over
        turns       number of library collectives so far, by axes
        met         axis -> `worked` when its ranks last met: at the start of a collective that was waited for
        computed    the last task that computes
        worked      seconds computed so far
    """

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
        """Adds the task of `action`, which `after` follows; returns its position."""
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
        """Adds the tasks of a collective: handing it over, coming late, and the collective itself."""
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
        """Numbers of ranks: in a group over these axes, and in all."""
        return prod(self.sizes.get(axis, 1) for axis in axes), prod(self.sizes.values())

    def _part(self, axes: Sequence[str]) -> float:
        """E(ranks of the group) / E(all ranks): how late the last of the group comes, relative to the last of all."""
        some, every = self._ranks(axes)
        return _largest(some) / _largest(every) if some < every else 1.0

    def _others(self, axes: Sequence[str]) -> float:
        """The fraction of all ranks that is not in the group."""
        some, every = self._ranks(axes)
        return max(0.0, 1 - some / every)

    def _flight(self, action: Start, needs: tuple[int, ...], at_once: bool) -> Task:
        """The task of a collective. On gloo, those over the same axes share a link, as do those that cross one port."""
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
        """The stream on which a collective on gloo queues: the library's take the lanes of their axes in turns."""
        axes = action.sent.axes
        if at_once:
            return f"{axes} at once"
        if action.by_messages:
            return "messages"
        self.turns[axes] += 1
        return f"{axes} lane {self.turns[axes] % LANES}"


def _largest(n: int) -> float:
    """The mean of the largest of n > 1 standard normal numbers (Blom 1958: within 5 %)."""
    return NormalDist().inv_cdf((n - 0.375) / (n + 0.25))


def _computed_before(tasks: Sequence[Task]) -> list[int | None]:
    """For each task, the last one before it that computes: when it ends, the rank comes to this one."""
    found: list[int | None] = []
    last: int | None = None
    for i, task in enumerate(tasks):
        found.append(last)
        last = i if task.stream == COMPUTE else last
    return found
