"""A predicted step and a recorded one as a trace for https://ui.perfetto.dev and chrome://tracing.

One process is the prediction, one each rank of the record, all from the same zero. A plan with stages has a predicted
process for the ranks of each part of the cluster, with a track for each of its streams. The others have the tracks

    compute   ops, where predicted; passes, where recorded        waiting   the rank waits, for what
    net, ...  what is in flight over these axes: a bar begins where the one before it ended, `args` have all times

Times are microseconds, as the format (Chrome's Trace Event) has it. Ranks of one machine share its clock; those of
several machines are aligned as well as the machines' clocks are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoddl.core.plan import Plan
from autoddl.core.record import Event, RecordedStep, own_seconds
from autoddl.cost_models.timelines.timeline import Timeline
from autoddl.explain.compare_run import foreseen
from autoddl.explain.staged_run import foreseen_stages, ranks_text
from autoddl.schedule.timeline import Span

__all__ = ["plan_trace"]

Row = dict[str, Any]


def plan_trace(plan: Plan, recorded: Sequence[RecordedStep]) -> str:
    """The JSON document: the predicted step of the plan above one step of every rank.

    Raises InputError for a plan that does not keep its graph.
    """
    rows, zero = list(_predicted(plan)), min((step.began for step in recorded), default=0.0)
    first = 1 + max(row["pid"] for row in rows)
    for step in sorted(recorded, key=lambda step: step.rank):
        rows += _process(first + step.rank, f"recorded, rank {step.rank}, step {step.step}", step, _passes(step),
                         step.began - zero)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": rows}) + "\n"


def _predicted(plan: Plan) -> Iterator[Row]:
    if plan.pipeline is None:
        predicted = foreseen(plan)
        yield from _process(0, "predicted, rank 0", predicted.step, predicted.computes, 0.0)
        return
    line = foreseen_stages(plan).timeline
    for rank in line.ranks:
        yield from _part(rank, f"predicted, {ranks_text(plan, rank)}", line)


def _part(rank: int, name: str, line: Timeline) -> Iterator[Row]:
    """The process of one part of the cluster."""
    tracks = {stream: tid for tid, stream in enumerate(line.streams(rank))}
    yield from _names(rank, name, tracks)
    for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True):
        if rank in task.ranks:
            yield _bar(rank, tracks[task.stream], task.name, start, end - start, {"kind": task.kind})


def _names(pid: int, name: str, tracks: Mapping[str, int]) -> Iterator[Row]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for track, tid in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _process(pid: int, name: str, step: RecordedStep, computes: Sequence[Span], later: float) -> Iterator[Row]:
    tracks = {"compute": 0, "waiting": 1}
    for event in step.events:
        tracks.setdefault(event.axes, len(tracks))
    yield from _names(pid, name, tracks)
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
