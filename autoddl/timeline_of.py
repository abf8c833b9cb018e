"""The time line that a plan's step will have on one rank: what `issue` lists, run by the discrete-event engine.

Computation is one stream, the collectives over each set of axes another. With gloo, those of the library run two at a
time (`LANES`), ours by messages one after the other over all axes, and one that is waited for at once does not queue
behind those under way; all over the same axes share what they cross, and all that cross the same level its port, where
it has one for all (`ONE_PORT`). What sending takes of the rank's processor is missing to what it computes, which is
slower beside it (`Host.drag`). Ranks that share cores come to a collective at different times, so it begins later
(`Host.late`); beside computation it takes longer (`Host.busy`), and starting it and waiting for it takes time of the
computing stream (`Host.issue`). So

    a collective is in flight from when it is handed over to when its stream has done it and those before it
    exposed = what waiting for it takes         hidden = time in flight during which the rank computes

It is written as a recorded step is, so that both are read by the same functions. `slowdown` is the factor by which
computation and communication slow each other while both run (see `cost_models.timeline`).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import sqrt

from autoddl.actions import Action, Compute, Pass, Start, Wait
from autoddl.cost_models import Cluster
from autoddl.cost_models.machine import Host
from autoddl.cost_models.timeline import COMPUTE, Task, simulate
from autoddl.graph import Graph
from autoddl.issue import Known, issued
from autoddl.plan import Plan
from autoddl.record import Event, Step
from autoddl.record_writer import level_of

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

    step: Step
    computes: tuple[Span, ...]

    @property
    def compute_seconds(self) -> float:
        return sum(span.end - span.start for span in self.computes)


def timeline_of(plan: Plan, graph: Graph, cluster: Cluster, rank: int = 0, slowdown: float = 1.0,
                known: Known | None = None) -> Foreseen:
    """The predicted step of `rank`. `graph` is the planned one (`hubs.planned`), of one microbatch; `known` is of plans
    that differ in their bucket size alone."""
    actions = issued(plan, graph, cluster, rank, known)
    shared = {level.name for level in cluster.levels if level.topology in ONE_PORT}
    links = {name: level if level in shared else "" for name, level in plan.levels.items()}
    gloo, host = cluster.backend == "gloo", cluster.device.host or Host(0.0, 0.0, 0.0)
    tasks, at = _tasks(actions, links, host.late, host.issue) if gloo else _tasks(actions, None)
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
    return Foreseen(Step(0, rank, 0.0, line.makespan, passes, tuple(events)), spans)


def _tasks(actions: Sequence[Action], links: Mapping[str, str] | None, late: float = 0.0, issue: float = 0.0
           ) -> tuple[list[Task], list[int]]:
    """The tasks, and for each action its task: that of a Pass is the next one. Waiting is computing for no time.

    `links` is of each axis the link that it shares; None where collectives over the same axes queue. Ranks met when
    the last of them started a collective that was waited for; `alone` are the seconds that they computed since."""
    tasks: list[Task] = []
    at: list[int] = []
    flights: list[int] = []
    handed: list[float] = []
    turns: Counter[str] = Counter()
    computed: int | None = None
    worked = met = 0.0
    for action, after in zip_longest(actions, actions[1:]):
        at.append(len(tasks))
        if isinstance(action, Pass):
            continue
        if isinstance(action, Start):
            at_once = links is not None and after == Wait(len(flights))
            if issue and not at_once:
                computed, at[-1] = len(tasks), len(tasks) + 1
                tasks.append(Task("issue", issue))
            needs = () if computed is None else (computed,)
            alone = worked - met
            if late and alone > 0 and links is not None:
                tasks.append(Task("late", late * sqrt(alone), stream=f"late {len(flights)}", needs=needs))
                needs, at[-1] = (len(tasks) - 1,), len(tasks)
            stream = _stream(action, turns, at_once) if links is not None else action.sent.axes
            flights.append(len(tasks))
            handed.append(worked)
            tasks.append(_flight(action, needs, stream, links, at_once))
        else:
            computed = len(tasks)
            if isinstance(action, Compute):
                worked += action.seconds
                tasks.append(Task(action.name, action.seconds))
            else:
                met = max(met, handed[action.k])
                tasks.append(Task("wait", 0.0, needs=(flights[action.k],)))
    return tasks, at


def _stream(action: Start, turns: Counter[str], at_once: bool) -> str:
    """Behind what a collective on gloo queues: the library's take the lanes of their axes in `turns`."""
    axes = action.sent.axes
    if at_once:
        return f"{axes} at once"
    if action.ours:
        return "messages"
    turns[axes] += 1
    return f"{axes} lane {turns[axes] % LANES}"


def _flight(action: Start, needs: tuple[int, ...], stream: str, links: Mapping[str, str] | None, at_once: bool) -> Task:
    """A collective. On gloo all over the same axes share what they cross, as all do that cross one port."""
    axes = action.sent.axes
    link = next((links[name] for name in axes.split("+") if links.get(name)), axes) if links is not None else ""
    load = min(1.0, (action.host + action.drag) / action.seconds) if action.host else 0.0
    beside = 1 + action.busy / action.seconds if action.busy and not at_once else 1.0
    share = max(0.0, 1 - action.latency / action.seconds) if action.seconds else 0.0
    return Task(action.sent.origin, action.seconds, stream=stream, needs=needs, link=link, load=load, beside=beside,
                share=share)


def _computed_before(tasks: Sequence[Task]) -> list[int | None]:
    """Per task the last one before it that computes: when that ends, the rank comes to this one."""
    found: list[int | None] = []
    last: int | None = None
    for i, task in enumerate(tasks):
        found.append(last)
        last = i if task.stream == COMPUTE else last
    return found
