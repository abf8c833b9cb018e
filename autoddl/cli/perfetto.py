"""A predicted step and a recorded one as a trace for https://ui.perfetto.dev and chrome://tracing.

One process is the prediction, one each rank of the record, all from the same zero. Each has the tracks

    compute   ops, where predicted; passes, where recorded        waiting   the rank waits, for what
    net, ...  what is in flight over these axes: a bar begins where the one before it ended, `args` have all times

Times are microseconds, as the format (Chrome's Trace Event) has it. Ranks of one machine share its clock; those of
several machines are aligned as well as the machines' clocks are.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from autoddl.core.record import Event, RecordedStep, own_seconds
from autoddl.schedule.timeline import PredictedStep, Span

__all__ = ["trace_text"]

Row = dict[str, Any]


def trace_text(predicted: PredictedStep, recorded: Sequence[RecordedStep]) -> str:
    """The JSON document: the prediction above one step of every rank."""
    zero = min((step.began for step in recorded), default=0.0)
    rows = list(_process(0, "predicted, rank 0", predicted.step, predicted.computes, 0.0))
    for step in sorted(recorded, key=lambda step: step.rank):
        rows += _process(step.rank + 1, f"recorded, rank {step.rank}, step {step.step}", step, _passes(step),
                         step.began - zero)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}) + "\n"


def _process(pid: int, name: str, step: RecordedStep, computes: Sequence[Span], later: float) -> Iterator[Row]:
    tracks = {"compute": 0, "waiting": 1}
    for event in step.events:
        tracks.setdefault(event.axes, len(tracks))
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for track, tid in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
    for span in computes:
        yield _bar(pid, 0, span.name, later + span.start, span.end - span.start, {})
    for event, own in zip(step.events, own_seconds(step.events), strict=True):
        told = _told(event)
        if event.wait > 0:
            yield _bar(pid, 1, f"for {event.kind}", later + event.end - event.wait, event.wait, told)
        yield _bar(pid, tracks[event.axes], event.kind, later + event.end - own, own, told)


def _bar(pid: int, tid: int, name: str, start: float, seconds: float, args: Row) -> Row:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": round(start * 1e6, 3),
            "dur": round(max(0.0, seconds) * 1e6, 3), "args": args}


def _told(event: Event) -> Row:
    return {"origin": event.origin, "direction": event.direction, "level": event.level, "nbytes": event.nbytes,
            "start": event.start, "end": event.end, "wait": event.wait}


def _passes(step: RecordedStep) -> list[Span]:
    """Each pass as a bar."""
    ends = [start for _, start in step.passes[1:]] + [step.seconds]
    return [Span(name, start, end) for (name, start), end in zip(step.passes, ends, strict=True)]
