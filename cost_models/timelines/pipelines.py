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

Two more tasks run once a step. Kept parameters of a stage are gathered on all its ranks, in the order in which the
stages begin; its first F waits for them. The optimizer updates a stage on each of its ranks, behind its reduction and
all actions of the rank.

Where one boundary takes time, all do, and where one stage does such a task, all do, some in 0 seconds. So which tasks
wait for which does not depend on single seconds, and the makespan is continuous in them.

`pipeline_tasks` lists these tasks without their seconds, once for many prices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Action, Schedule, begun_stages, needs
from autoddl.cost_models.timelines.events import Edges
from autoddl.cost_models.timelines.timeline import Task, Timeline, order_edges, simulate_ordered

__all__ = ["ONCE", "PipelineTasks", "add_ends", "pipeline_tasks", "simulate_pipeline"]

ONCE = ("gather", "reduce", "update")
"""Tasks of a stage that run once a step."""


def add_ends(seconds: Sequence[float], embedding: float, logits: float) -> tuple[float, ...]:
    """Seconds per stage with the embedding on the first and the logits and loss on the last."""
    ends = [0.0] * len(seconds)
    ends[0] += embedding
    ends[-1] += logits
    return tuple(stage + end for stage, end in zip(seconds, ends, strict=True))


def simulate_pipeline(schedule: Schedule, forward_seconds: Sequence[float], backward_seconds: Sequence[float],
                      weight_seconds: Sequence[float], p2p_seconds: float | Sequence[float] = 0.0,
                      reduction_seconds: Sequence[float] | None = None, slowdown: float = 1.0, *,
                      gather_seconds: Sequence[float] | None = None, update_seconds: Sequence[float] | None = None
                      ) -> Timeline:
    """The time line of one step, from the seconds of each stage.

        backward_seconds     of the gradient of the stage's input
        weight_seconds       of the gradients of its parameters
        p2p_seconds          of one transfer, or of one for each boundary between stages s and s+1
        reduction_seconds    of reducing a stage's gradients over its replicas
        slowdown             factor on tasks of a rank that computes and communicates
        gather_seconds       of gathering a stage's kept parameters
        update_seconds       of the optimizer on one rank of a stage

    Raises InputError where there are not as many seconds as stages, or one is negative or not finite.
    """
    stages = schedule.stages
    between = [p2p_seconds] * (stages - 1) if isinstance(p2p_seconds, int | float) else p2p_seconds
    none = [0.0] * stages
    once = dict(zip(ONCE, (gather_seconds or none, reduction_seconds or none, update_seconds or none), strict=True))
    for numbers in (forward_seconds, backward_seconds, weight_seconds, *once.values()):
        _check(numbers, stages, f"one for each of {stages} stages")
    _check(between, stages - 1, f"one for each of {stages - 1} boundaries between stages")
    whole = [b + w for b, w in zip(backward_seconds, weight_seconds, strict=True)]
    seconds = {"F": forward_seconds, "B": backward_seconds, "BW": whole, "W": weight_seconds, "send": between, **once}
    timed = tuple(what for what in ("send", *ONCE) if any(seconds[what]))
    work = pipeline_tasks(schedule, timed)
    tasks = [Task(task.name, seconds[what][at], task.ranks, task.stream, task.needs, task.kind)
             for task, (what, at) in zip(work.tasks, work.sources, strict=True)]
    return simulate_ordered(tasks, work.edges, slowdown)


def _check(numbers: Sequence[float], count: int, wanted: str) -> None:
    if len(numbers) != count or not all(0 <= number < float("inf") for number in numbers):
        raise InputError(f"{list(numbers)} are no seconds of a pipeline; give finite numbers of at least 0, {wanted}")


KINDS: Mapping[str, str] = MappingProxyType({"F": "forward", "B": "backward", "W": "weight"})


@dataclass(frozen=True, slots=True)
class PipelineTasks:
    """Tasks without seconds; those of task i are of sources[i]: F, B, BW, W, send or one of ONCE, and where.

    Stages have all of these but `send`, which boundaries have. BW is a B that is not split.
    """

    tasks: tuple[Task, ...]
    sources: tuple[tuple[str, int], ...]
    edges: Edges


@lru_cache(maxsize=256)
def pipeline_tasks(schedule: Schedule, timed: tuple[str, ...] = ()) -> PipelineTasks:
    """The tasks of a schedule; `timed` says what takes time besides the actions: send, and what is in ONCE.

    The actions come first, rank after rank.
    """
    place = {action: i for i, action in enumerate(schedule)}
    sends = _sends(schedule, place) if "send" in timed else {}
    last = len(place) + len(sends)
    gathers = {stage: last + i for i, stage in enumerate(begun_stages(schedule))} if "gather" in timed else {}
    found = [(_action_task(schedule, action, place, sends, gathers), (_source(action, place), action.stage))
             for action in place]
    found += [(Task(f"{action} to {to}", 0.0, (schedule.rank(action), to), f"{schedule.rank(action)} to {to}",
                    (place[action],), "send"), ("send", _boundary(action))) for action, to in sends]
    found += [(Task(f"gather {stage}", 0.0, _owners(schedule, stage), "parameters", kind="gather"), ("gather", stage))
              for stage in gathers]
    found += _ends(schedule, place, len(found), timed)
    tasks, sources = zip(*found, strict=True)
    return PipelineTasks(tasks, sources, order_edges(tasks))


def _action_task(schedule: Schedule, action: Action, place: Mapping[Action, int],
                 sends: Mapping[tuple[Action, int], int], gathers: Mapping[int, int]) -> Task:
    """The task of an action, which waits for what is sent to it, and for the gathered parameters of its stage."""
    rank = schedule.rank(action)
    first = tuple(sends.get((need, rank), place[need]) for need in needs(action, schedule))
    if action.kind == "F" and action.stage in gathers:
        first = (*first, gathers[action.stage])
    return Task(str(action), 0.0, (rank,), needs=first, kind=KINDS[action.kind])


def _source(action: Action, place: Mapping[Action, int]) -> str:
    whole = action.kind == "B" and action._replace(kind="W") not in place
    return "BW" if whole else action.kind


def _owners(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The ranks that have the stage, ascending."""
    return tuple(sorted({pipe[stage] for pipe in schedule.placement}))


def _boundary(action: Action) -> int:
    """The boundary that the action's result crosses: behind its stage for F, before it for B."""
    return action.stage if action.kind == "F" else action.stage - 1


def _sends(schedule: Schedule, place: Mapping[Action, int]) -> dict[tuple[Action, int], int]:
    """(action whose result is sent, receiving rank) -> position of the task, in the order of the senders."""
    moved = sorted({(place[need], need, schedule.rank(action)) for action in place for need in needs(action, schedule)
                    if schedule.rank(need) != schedule.rank(action)})
    return {(need, to): len(place) + i for i, (_, need, to) in enumerate(moved)}


def _ends(schedule: Schedule, place: Mapping[Action, int], at: int, timed: tuple[str, ...]
          ) -> list[tuple[Task, tuple[str, int]]]:
    """The reductions and updates of the stages, from position `at` on; the stage that ends first comes first."""
    last = _last_actions(schedule, place)
    order = sorted(range(schedule.stages), key=lambda stage: (max(step for step, _ in last[stage].values()), stage))
    found = []
    if "reduce" in timed:
        found += [(Task(f"reduce {stage}", 0.0, tuple(sorted(last[stage])), "gradients",
                        tuple(i for _, i in last[stage].values()), "reduce"), ("reduce", stage)) for stage in order]
    before = {stage: (at + i,) for i, stage in enumerate(order)} if "reduce" in timed else {}
    if "update" in timed:
        found += [(Task(f"update {stage} on {rank}", 0.0, (rank,), needs=before.get(stage, ()), kind="update"),
                   ("update", stage)) for stage in order for rank in last[stage]]
    return found


def _last_actions(schedule: Schedule, place: Mapping[Action, int]) -> list[dict[int, tuple[int, int]]]:
    """For every stage, rank -> (step, position) of its last B or W there."""
    last: list[dict[int, tuple[int, int]]] = [{} for _ in range(schedule.stages)]
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions):
            if action.kind != "F":
                last[action.stage][rank] = step, place[action]
    return last
