"""Time lines as text: a row per rank and stream, as many columns as the makespan.

    rank 0 | 0F0 0F1         0B0---- 0B1----
    rank 1 |     1F0 1B0---- 1F1 1B1----

A task begins at its column with its name and goes on in dashes; one shorter than its name shows what fits.
"""

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule, check_schedule
from autoddl.cost_models.timelines.pipelines import simulate_pipeline
from autoddl.cost_models.timelines.timeline import COMPUTE, Timeline

__all__ = ["draw_schedule", "draw_timeline", "unit_timeline"]


def draw_timeline(timeline: Timeline, columns: int = 120) -> str:
    """Every rank and stream, in proportion to the seconds."""
    if columns < 1:
        raise InputError(f"{columns} columns: a drawing has at least one")
    places = [(rank, stream) for rank in timeline.ranks for stream in timeline.streams(rank)]
    labels = [f"rank {rank}" + (f" {stream}" if stream != COMPUTE else "") for rank, stream in places]
    width = max(map(len, labels), default=0)
    return "\n".join(f"{label:{width}} | {_row(timeline, *place, columns)}".rstrip()
                     for label, place in zip(labels, places, strict=True))


def _row(timeline: Timeline, rank: int, stream: str, columns: int) -> str:
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    row = [" "] * (columns + 1)
    for task, start, end in zip(timeline.tasks, timeline.starts, timeline.ends, strict=True):
        if rank in task.ranks and task.stream == stream:
            first, last = round(start * scale), round(end * scale)
            row[first:last] = _cell(task.name, last - first)
    return "".join(row)


def _cell(name: str, width: int) -> str:
    """The name and dashes, with a blank at the end where there is room for it."""
    return f"{name[:width - 1]:-<{width - 1}} " if width > 1 else name[:width]


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
