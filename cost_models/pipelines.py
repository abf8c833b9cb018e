"""Seconds of a pipeline: a schedule and the seconds of its stages -> its time line.

Stages may differ: embedding and logits make the ends longer (`with_ends`). Per stage s

    F(s) = forward[s]    B(s) = backward[s] where W is split off, else backward[s] + weight[s]    W(s) = weight[s]

With equal stages and p2p = 0 the bubbles are the closed forms of `schedules`; with unequal ones GPipe takes
sum F + (N-1) max F + sum B + (N-1) max B. What moves and what is reduced when is in `pipeline_tasks`.
"""

from collections.abc import Sequence

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule
from autoddl.cost_models.pipeline_tasks import pipeline_tasks
from autoddl.cost_models.timeline import Task, Timeline, run

__all__ = ["pipeline", "with_ends"]


def with_ends(seconds: Sequence[float], embedding: float, logits: float) -> tuple[float, ...]:
    """Seconds per stage with the embedding on the first and the logits and loss on the last."""
    ends = [0.0] * len(seconds)
    ends[0] += embedding
    ends[-1] += logits
    return tuple(stage + end for stage, end in zip(seconds, ends, strict=True))


def pipeline(schedule: Schedule, forward_seconds: Sequence[float], backward_seconds: Sequence[float],
             weight_seconds: Sequence[float], p2p_seconds: float | Sequence[float] = 0.0,
             reduction_seconds: Sequence[float] | None = None, slowdown: float = 1.0) -> Timeline:
    """`backward_seconds` are those of the input's gradient; p2p may differ per boundary between stages s and s+1."""
    stages = schedule.stages
    between = [p2p_seconds] * (stages - 1) if isinstance(p2p_seconds, int | float) else p2p_seconds
    reductions = [0.0] * stages if reduction_seconds is None else reduction_seconds
    for numbers in (forward_seconds, backward_seconds, weight_seconds, reductions):
        _check(numbers, stages, f"one for each of {stages} stages")
    _check(between, stages - 1, f"one for each of {stages - 1} boundaries between stages")
    whole = [b + w for b, w in zip(backward_seconds, weight_seconds, strict=True)]
    seconds = {"F": forward_seconds, "B": backward_seconds, "BW": whole, "W": weight_seconds, "send": between,
               "reduce": reductions}
    work = pipeline_tasks(schedule, tuple(s > 0 for s in between), tuple(s > 0 for s in reductions))
    tasks = [Task(task.name, seconds[what][at], task.ranks, task.stream, task.needs, task.kind)
             for task, (what, at) in zip(work.tasks, work.sources, strict=True)]
    return run(tasks, work.edges, slowdown)


def _check(numbers: Sequence[float], count: int, wanted: str) -> None:
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
        raise InputError(f"{list(numbers)} are no seconds of a pipeline; give finite numbers of at least 0, {wanted}")
