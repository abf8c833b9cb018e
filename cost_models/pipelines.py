"""Seconds of a pipeline: a schedule and the seconds of its stages -> its time line.

Stages may differ: embedding and logits make the ends longer (`add_ends`). Per stage s

    F(s) = forward[s]    B(s) = backward[s] where W is split off, else backward[s] + weight[s]    W(s) = weight[s]

With equal stages and p2p = 0, the bubbles are the closed forms of `core.pipeline_schedules`. With unequal stages, the
seconds of GPipe are

    sum F + (N-1) max F + sum B + (N-1) max B

Between two ranks, an activation or its gradient takes the link of that direction, one after another in the order of the
sender. On one rank (the turn of a V) it arrives at once. Gradients of a stage are reduced over the data-parallel
replicas, once all ranks that have the stage (several in Chimera) have its last one. Reductions overlap with
computation. They run one stage after another on a rank. All ranks have the same order of stages, so that no ranks wait
for each other in a circle.

`pipeline_tasks` lists these tasks without their seconds, once for many prices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Action, Schedule, needs
from autoddl.cost_models.events import Edges
from autoddl.cost_models.timeline import Task, Timeline, order_edges, simulate_ordered

__all__ = ["PipelineTasks", "add_ends", "pipeline_tasks", "simulate_pipeline"]


def add_ends(seconds: Sequence[float], embedding: float, logits: float) -> tuple[float, ...]:
    """Seconds per stage with the embedding on the first and the logits and loss on the last."""
    ends = [0.0] * len(seconds)
    ends[0] += embedding
    ends[-1] += logits
    return tuple(stage + end for stage, end in zip(seconds, ends, strict=True))


def simulate_pipeline(schedule: Schedule, forward_seconds: Sequence[float], backward_seconds: Sequence[float],
                      weight_seconds: Sequence[float], p2p_seconds: float | Sequence[float] = 0.0,
                      reduction_seconds: Sequence[float] | None = None, slowdown: float = 1.0) -> Timeline:
    """The time line of one step, from the seconds of each stage.

        backward_seconds     of the gradient of the stage's input
        weight_seconds       of the gradients of its parameters
        p2p_seconds          of one transfer, or of one for each boundary between stages s and s+1
        reduction_seconds    of reducing a stage's gradients over its replicas
        slowdown             factor on tasks of a rank that computes and communicates

    Raises InputError where there are not as many seconds as stages, or one is negative or not finite.
    """
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
    return simulate_ordered(tasks, work.edges, slowdown)


def _check(numbers: Sequence[float], count: int, wanted: str) -> None:
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
        raise InputError(f"{list(numbers)} are no seconds of a pipeline; give finite numbers of at least 0, {wanted}")


KINDS: Mapping[str, str] = MappingProxyType({"F": "forward", "B": "backward", "W": "weight"})


@dataclass(frozen=True, slots=True)
class PipelineTasks:
    """Tasks without seconds; those of task i are of sources[i]: F, B, BW, W, send or reduce, of a stage or boundary."""

    tasks: tuple[Task, ...]
    sources: tuple[tuple[str, int], ...]
    edges: Edges


@lru_cache(maxsize=256)
def pipeline_tasks(schedule: Schedule, crossing: tuple[bool, ...], reduced: tuple[bool, ...]) -> PipelineTasks:
    """The tasks of a schedule; `crossing` says which boundaries take time, `reduced` which stages are reduced."""
    place = {action: i for i, action in enumerate(schedule)}
    sends = _sends(schedule, place, crossing)
    tasks: list[Task] = []
    sources: list[tuple[str, int]] = []
    for action in place:
        rank = schedule.rank(action)
        first = tuple(sends.get((need, rank), place[need]) for need in needs(action, schedule))
        tasks.append(Task(str(action), 0.0, (rank,), needs=first, kind=KINDS[action.kind]))
        whole = action.kind == "B" and action._replace(kind="W") not in place
        sources.append(("BW" if whole else action.kind, action.stage))
    for action, to in sends:
        rank = schedule.rank(action)
        tasks.append(Task(f"{action} to {to}", 0.0, (rank, to), f"{rank} to {to}", (place[action],), "send"))
        sources.append(("send", _boundary(action)))
    for stage, task in _reductions(schedule, place):
        if reduced[stage]:
            tasks.append(task)
            sources.append(("reduce", stage))
    return PipelineTasks(tuple(tasks), tuple(sources), order_edges(tasks))


def _boundary(action: Action) -> int:
    """The boundary that the action's result crosses: behind its stage for F, before it for B."""
    return action.stage if action.kind == "F" else action.stage - 1


def _sends(schedule: Schedule, place: Mapping[Action, int], crossing: tuple[bool, ...]
           ) -> dict[tuple[Action, int], int]:
    """(action whose result is sent, receiving rank) -> position of the task, in the order of the senders."""
    moved = sorted({(place[need], need, schedule.rank(action)) for action in place for need in needs(action, schedule)
                    if schedule.rank(need) != schedule.rank(action) and crossing[_boundary(need)]})
    return {(need, to): len(place) + i for i, (_, need, to) in enumerate(moved)}


def _reductions(schedule: Schedule, place: Mapping[Action, int]) -> list[tuple[int, Task]]:
    """The reduction of each stage, after its last B or W on every rank that has it; the earliest first."""
    last: list[dict[int, int]] = [{} for _ in range(schedule.stages)]
    depth = [0] * schedule.stages
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            if action.kind != "F":
                last[action.stage][rank] = place[action]
                depth[action.stage] = max(depth[action.stage], step)
    order = sorted(range(schedule.stages), key=lambda stage: (depth[stage], stage))
    return [(stage, Task(f"reduce {stage}", 0.0, tuple(sorted(last[stage])), "gradients", tuple(last[stage].values()),
                         "reduce")) for stage in order]
