"""The tasks of a pipelined step, without their seconds: what `pipelines` prices again and again.

Between two ranks an activation or its gradient takes the link of that direction, one after another in the order of the
sender; on one rank (the turn of a V) it is there at once. When the last gradient of a stage has come on every rank that
holds it (several in Chimera), it is reduced over the data-parallel replicas: beside what still computes, one stage
after another on a rank, and in one order on all ranks, so that none waits for another in a circle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autoddl.core.pipeline import Action, Schedule, needs
from autoddl.cost_models.events import Edges
from autoddl.cost_models.timeline import Task, edges_of

__all__ = ["PipelineTasks", "pipeline_tasks"]

KINDS: Mapping[str, str] = MappingProxyType({"F": "forward", "B": "backward", "W": "weight"})


@dataclass(frozen=True, slots=True)
class PipelineTasks:
    """Tasks of no seconds; sources[i] says whose seconds task i takes: F, B, BW, W, send or reduce, and of where."""

    tasks: tuple[Task, ...]
    sources: tuple[tuple[str, int], ...]
    edges: Edges


@lru_cache(maxsize=256)
def pipeline_tasks(schedule: Schedule, crossing: tuple[bool, ...], reduced: tuple[bool, ...]) -> PipelineTasks:
    """`crossing` says which boundaries between stages take time, `reduced` which stages are reduced."""
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
    return PipelineTasks(tuple(tasks), tuple(sources), edges_of(tasks))


def _boundary(action: Action) -> int:
    """Where what the action yields crosses: behind its stage for F, before it for B."""
    return action.stage if action.kind == "F" else action.stage - 1


def _sends(schedule: Schedule, place: Mapping[Action, int], crossing: tuple[bool, ...]
           ) -> dict[tuple[Action, int], int]:
    """(what is sent, to which rank) -> position of the task, in the order of the senders."""
    moved = sorted({(place[need], need, schedule.rank(action)) for action in place for need in needs(action, schedule)
                    if schedule.rank(need) != schedule.rank(action) and crossing[_boundary(need)]})
    return {(need, to): len(place) + i for i, (_, need, to) in enumerate(moved)}


def _reductions(schedule: Schedule, place: Mapping[Action, int]) -> list[tuple[int, Task]]:
    """Per stage, once the last B or W of it has run on every rank that holds it; the earliest first."""
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
