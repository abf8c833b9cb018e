"""Time lines as text: a row per rank and stream, as many columns as the makespan.

    rank 0 | 0F0 0F1         0B0---- 0B1----
    rank 1 |     1F0 1B0---- 1F1 1B1----

A task begins at its column with its name and goes on in dashes. One that is shorter than its name has the microbatch
alone, F1, or the letter. A message stands in the row of its sender, and rows without anything are left out.
"""

import re
from collections.abc import Callable

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Action, Schedule, check_schedule
from autoddl.cost_models.timelines.pipelines import ONCE, simulate_pipeline
from autoddl.cost_models.timelines.timeline import COMPUTE, Task, Timeline

__all__ = ["draw_schedule", "draw_timeline", "timeline_legend", "unit_timeline"]

LETTERS = {"forward": "F a forward", "backward": "B its backward", "weight": "W its gradients of weights",
           "gather": "g parameters that are gathered", "reduce": "r gradients that are added up",
           "update": "u the optimizer's update"}
"""By kind of task, its letter and what that means."""


def _rank_text(rank: int) -> str:
    return f"rank {rank}"


def draw_timeline(timeline: Timeline, columns: int = 120, ranks: Callable[[int], str] = _rank_text) -> str:
    """Every rank and stream, in proportion to the seconds; `ranks` says a rank of the time line in words."""
    if columns < 1:
        raise InputError(f"{columns} columns: a drawing has at least one")
    places = [(rank, stream) for rank in timeline.ranks for stream in timeline.streams(rank)
              if _is_drawn(rank, stream)]
    rows = [(_label(rank, stream, ranks), _row(timeline, rank, stream, columns)) for rank, stream in places]
    shown = [(label, row) for label, row in rows if row.strip()]
    width = max((len(label) for label, _ in shown), default=0)
    return "\n".join(f"{label:{width}} | {row}".rstrip() for label, row in shown)


def _is_drawn(rank: int, stream: str) -> bool:
    """Whether a stream is in the rows of the rank: a message is in those of its sender alone."""
    sender, to, _ = stream.partition(" to ")
    return not to or int(sender) == rank


def _label(rank: int, stream: str, ranks: Callable[[int], str]) -> str:
    _, to, receiver = stream.partition(" to ")
    what = f"to {ranks(int(receiver))}" if to else stream
    return ranks(rank) + f" {what}" * (stream != COMPUTE)


def _row(timeline: Timeline, rank: int, stream: str, columns: int) -> str:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    row = [" "] * (columns + 1)
    for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        if rank in task.ranks and task.stream == stream:
            first, last = round(start * scale), round(end * scale)
            row[first:last] = _cell(_names(task), last - first)
    return "".join(row)


def _names(task: Task) -> tuple[str, ...]:
    """What may stand for a task, the longest first."""
    if task.kind in ONCE:
        return " ".join(task.name.split()[:2]), task.kind, task.kind[0]
    name = task.name.partition(" to ")[0]
    if re.fullmatch(r"(\d+:)?\d+[FBW]\d+", name) is None:
        return (name,)
    action = Action.parse(name)
    return name, f"{action.kind}{action.microbatch}", action.kind


def _cell(names: tuple[str, ...], width: int) -> str:
    """The longest name that fits, and dashes, with a blank at the end where there is room for it."""
    name = next((one for one in names if len(one) < width), names[-1])
    return f"{name[:width - 1]:-<{width - 1}} " if width > 1 else name[:width]


def timeline_legend(timeline: Timeline) -> str:
    """Says what a time line's names are, of the kinds of tasks that it has."""
    kinds = {task.kind for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True)
             if end > start}
    letters = ", ".join(text for kind, text in LETTERS.items() if kind in kinds)
    pipes = "; 1:0F3 is of pipe 1" * any(":" in task.name for task in timeline.tasks)
    return (f"0F3 is stage 0 with microbatch 3, in a row of messages what it sends; F3 or F the same where room is "
            f"short: {letters}{pipes}")


def unit_timeline(schedule: Schedule) -> Timeline:
    """The schedule with F, B and W of one unit each (a B that is not split is two), free transfers."""
    check_schedule(schedule)
    ones = [1.0] * schedule.stages
    return simulate_pipeline(schedule, ones, ones, ones)


def draw_schedule(schedule: Schedule) -> str:
    """The time line of `unit_timeline`, each unit as wide as the longest name of a task."""
    timeline = unit_timeline(schedule)
    cell = max(len(task.name) for task in timeline.tasks) + 1
    return draw_timeline(timeline, round(timeline.makespan) * cell)
