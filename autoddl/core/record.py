"""The record of a run: which collectives every rank ran in every step, and when.

Times of a step are seconds from its start. A collective is in flight from `start` to `end`. During the last `wait`
seconds of that, its rank did nothing but wait. `end` is when the wait ended. Where the collective was done before
anybody waited for it, `end` is when its library reported that.

    exposed = sum of wait                      hidden = time with anything in flight, without the time spent waiting
    own     = end - max(start, end of the one before it on the same axes)         seconds that it took by itself

A record is written as JSON lines, so it can be read up to the line where a run broke off:

    {"autoddl_record": 1, "plan": fingerprint, ...}     the header: plan, model, mesh, cluster, ranks, versions
    {"step": 0, "rank": 2, "events": [...], ...}        one line per step and rank, written when the step is over

Where the ranks ran on several machines, a record is in parts FILE.0, FILE.1, ..., each with the header.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autoddl.core.errors import InputError

__all__ = ["FORMAT", "Event", "Header", "Record", "RecordedStep", "header_text", "hidden_seconds", "own_seconds",
           "parse_record", "read_record", "step_text"]

FORMAT = 1
"""Version of the text."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective of one rank.

        step         number of the step
        rank         number of the rank
        direction    the pass in which it ran, like `forward`
        kind         of the collective, like `all-gather`
        axes         mesh axes of its group, like `net+node`
        level        outermost level of the cluster that the group crosses
        nbytes       bytes of the full buffer
        start        seconds from the start of the step to its start
        end          seconds from the start of the step to its end
        wait         seconds that the rank waited for it
        origin       the tensor, parameter or bucket that was sent
        algorithm    by which it was sent, as the cost model chose it; "" where there was no choice
        words        of 4 bytes that the rank sent for a sparse sum; 0 of all others
    """

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
    algorithm: str = ""
    words: int = 0


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of one rank.

        step       number of the step
        rank       number of the rank
        began      seconds since 1970 at its start
        seconds    that it took
        passes     (name, seconds from the start of the step to its first) of each pass, in order
        events     the collectives
    """

    step: int
    rank: int
    began: float
    seconds: float
    passes: tuple[tuple[str, float], ...]
    events: tuple[Event, ...]

    @property
    def exposed(self) -> float:
        """Seconds that the rank waited for its collectives."""
        return sum(event.wait for event in self.events)

    @property
    def hidden(self) -> float:
        """Seconds with a collective in flight while the rank did not wait."""
        return hidden_seconds(self.events, self.events)

    def during(self, name: str) -> float:
        """Seconds in the passes called `name`."""
        starts = [start for _, start in self.passes] + [self.seconds]
        return sum(after - start for (one, start), after in zip(self.passes, starts[1:], strict=True) if one == name)


@dataclass(frozen=True, slots=True)
class Header:
    """The plan whose run was recorded, and what ran it.

        plan        fingerprint of the plan
        model       name of the model
        mesh        text of the mesh
        cluster     name of the cluster
        backend     communication library
        ranks       number of ranks
        versions    version by package
    """

    plan: str
    model: str
    mesh: str
    cluster: str
    backend: str
    ranks: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """All steps of a run, of all its ranks. `cut` says that the last line was not whole and is left out."""

    header: Header
    steps: tuple[RecordedStep, ...]
    cut: bool = False

    def of_rank(self, rank: int) -> tuple[RecordedStep, ...]:
        """The steps of one rank, in order."""
        return tuple(step for step in self.steps if step.rank == rank)


def hidden_seconds(events: Iterable[Event], waited: Iterable[Event]) -> float:
    """Seconds with any of `events` in flight, without those in which the rank waited for any of `waited`."""
    flights = [(e.start, e.end) for e in events]
    waits = [(e.end - e.wait, e.end) for e in waited if e.wait > 0]
    return max(0.0, _covered(flights + waits) - _covered(waits))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def own_seconds(events: Sequence[Event]) -> tuple[float, ...]:
    """Seconds that each event took by itself: it starts no earlier than the one before it on its axes ended."""
    free: dict[str, float] = {}
    found = [0.0] * len(events)
    for i in sorted(range(len(events)), key=lambda i: (events[i].end, events[i].start)):
        event = events[i]
        found[i] = event.end - max(event.start, free.get(event.axes, event.start))
        free[event.axes] = event.end
    return tuple(found)


_COLUMNS = tuple(f.name for f in fields(Event) if f.name not in ("step", "rank"))


def header_text(header: Header) -> str:
    """The first line of a record."""
    return json.dumps({"autoddl_record": FORMAT, **asdict(header), "columns": _COLUMNS}) + "\n"


def step_text(step: RecordedStep) -> str:
    """The line of one step; times are rounded to 0.1 us."""
    rows = [[round(v, 7) if isinstance(v, float) else v for v in (getattr(e, name) for name in _COLUMNS)]
            for e in step.events]
    passes = [[name, round(start, 7)] for name, start in step.passes]
    return json.dumps({"step": step.step, "rank": step.rank, "began": round(step.began, 6),
                       "seconds": round(step.seconds, 7), "passes": passes, "events": rows}) + "\n"


def read_record(path: str | Path) -> Record:
    """The record in the file `path`, or in its parts. Raises InputError, naming the file, where it holds no record."""
    path = Path(path)
    parts = [path] if path.exists() else sorted(p for p in path.parent.glob(f"{path.name}.*") if p.suffix[1:].isdigit())
    try:
        texts = [part.read_text(encoding="utf-8") for part in parts or [path]]
    except OSError as error:
        raise InputError(f"cannot read the record {path}: {error.strerror or error}") from None
    except ValueError:
        raise InputError(f"{path} is no record: not text; `run` and `rehearse` write records") from None
    read = [parse_record(text, str(part)) for text, part in zip(texts, parts, strict=True)]
    if any(one.header.plan != read[0].header.plan for one in read):
        raise InputError(f"the parts of {path} are of different plans; remove those of an earlier run")
    return Record(read[0].header, tuple(step for one in read for step in one.steps), any(one.cut for one in read))


def parse_record(text: str, source: str) -> Record:
    """The record that `text` holds; a last line that is not whole is left out. `source` names it in errors.

    Raises InputError where the header or a line before the last is wrong.
    """
    lines = text.splitlines()
    if not lines:
        raise InputError(f"{source} is no record: it is empty; `run` and `rehearse` write records")
    header, steps = _header(lines[0], source), []
    for number, line in enumerate(lines[1:], 2):
        try:
            steps.append(_step(json.loads(line), header.ranks))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number == len(lines):
                return Record(header, tuple(steps), cut=True)
            raise InputError(f"{source}, line {number}: no step of a record ({type(error).__name__}: {error}); a "
                             "record is written by one run, line by line: make it again") from None
    return Record(header, tuple(steps))


def _header(line: str, source: str) -> Header:
    try:
        data: Any = json.loads(line)
    except ValueError:
        data = None
    if not isinstance(data, dict) or "autoddl_record" not in data:
        raise InputError(f"{source} is no record: its first line is no header; `run` and `rehearse` write records")
    if data["autoddl_record"] != FORMAT:
        raise InputError(f"{source} is a record of format {data['autoddl_record']}; this AutoDDL reads format {FORMAT}")
    for name, kind in (("ranks", int), ("versions", dict), *((f.name, str) for f in fields(Header)[:5])):
        if not isinstance(data.get(name), kind):
            raise InputError(f"{source} is no record: its header has {name} = {data.get(name)!r}; make it again")
    return Header(**{f.name: data[f.name] for f in fields(Header)})


def _step(data: Any, ranks: int) -> RecordedStep:
    step, rank = int(data["step"]), int(data["rank"])
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}")
    events = tuple(_event(step, rank, row) for row in data["events"])
    passes = tuple((str(name), float(start)) for name, start in data["passes"])
    return RecordedStep(step, rank, float(data["began"]), float(data["seconds"]), passes, events)


def _event(step: int, rank: int, row: Sequence[Any]) -> Event:
    direction, kind, axes, level, nbytes, start, end, wait, origin, *more = row
    return Event(step, rank, str(direction), str(kind), str(axes), str(level), int(nbytes), float(start), float(end),
                 float(wait), str(origin), str(more[0] if more else ""), int(more[1]) if more[1:] else 0)
