"""The record of a run: what every rank sent in every step, and when. `record_file` has its text.

Times of a step are seconds from its start. A collective is in flight from `start` to `end`, and the last `wait` seconds
of that its rank did nothing but wait:

    exposed = sum of wait                      hidden = time with anything in flight, without the time spent waiting
    own     = end - max(start, end of the one before it on the same axes)         the time that it took by itself

`end` is when waiting ended; of one that was done before anybody waited, when its library said so.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Event", "Header", "Record", "Step", "hidden_seconds", "own_seconds"]


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of one rank: `axes` like `net+node`, `level` of the cluster, `nbytes` of its full buffer, `origin`
    for what it was."""

    step: int
    rank: int
    direction: str
    kind: str
    axes: str
    level: str
    nbytes: int
    start: float
    end: float
    wait: float
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank. `began` is seconds since 1970; `passes` are (name, its first second), in order."""

    step: int
    rank: int
    began: float
    seconds: float
    passes: tuple[tuple[str, float], ...]
    events: tuple[Event, ...]

    @property
    def exposed(self) -> float:
        return sum(event.wait for event in self.events)

    @property
    def hidden(self) -> float:
        return hidden_seconds(self.events, self.events)

    def during(self, name: str) -> float:
        """Seconds in the passes called `name`."""
        starts = [start for _, start in self.passes] + [self.seconds]
        return sum(after - start for (one, start), after in zip(self.passes, starts[1:], strict=True) if one == name)


@dataclass(frozen=True, slots=True)
class Header:
    """Of which plan the record is, and what ran it; `versions` by package."""

    plan: str
    model: str
    mesh: str
    cluster: str
    backend: str
    ranks: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """`cut`: the last line is not whole."""

    header: Header
    steps: tuple[Step, ...]
    cut: bool = False

    def of_rank(self, rank: int) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.rank == rank)


def hidden_seconds(events: Iterable[Event], beside: Iterable[Event]) -> float:
    """Time with any of `events` in flight, without that in which the rank waited for any of `beside`."""
    flights = [(e.start, e.end) for e in events]
    waits = [(e.end - e.wait, e.end) for e in beside if e.wait > 0]
    return max(0.0, _covered(flights + waits) - _covered(waits))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def own_seconds(events: Sequence[Event]) -> tuple[float, ...]:
    """What each event took by itself: it begins where the one before it on its axes ended."""
    free: dict[str, float] = {}
    found = [0.0] * len(events)
    for i in sorted(range(len(events)), key=lambda i: (events[i].end, events[i].start)):
        event = events[i]
        found[i] = event.end - max(event.start, free.get(event.axes, event.start))
        free[event.axes] = event.end
    return tuple(found)
