"""Runs a pipeline once: the seconds of its stages and transfers -> those of a step, from its schedule alone.

Tasks wait as in `pipeline_paths`. So a step takes as long as the longest path there.
"""

from collections.abc import Sequence

from autoddl.core.pipeline import Action, Schedule, needs
from autoddl.core.pipeline_cuts import StageSeconds

__all__ = ["run_pipeline"]


def run_pipeline(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float]) -> float:
    """Seconds until the last stage is updated."""
    gathered = _in_turn(schedule, _order(schedule, False), dict.fromkeys(range(schedule.stages), 0.0),
                        [one.gather for one in stages])
    ends, free = _run_actions(schedule, stages, transfers, gathered)
    done = {s: max(end for action, end in ends.items() if action.stage == s and action.kind != "F")
            for s in range(schedule.stages)}
    reduced = _in_turn(schedule, _order(schedule, True), done, [one.reduce for one in stages])
    last = max([*free, *gathered.values(), *reduced.values()])
    for s in _order(schedule, True):
        for rank in _ranks(schedule, s):
            free[rank] = max(free[rank], reduced[s]) + stages[s].update
            last = max(last, free[rank])
    return last


def _ranks(schedule: Schedule, stage: int) -> set[int]:
    return {pipe[stage] for pipe in schedule.placement}


def _order(schedule: Schedule, by_end: bool) -> list[int]:
    """The stages by the step at which they begin on their ranks, or by that at which they end there."""
    found = dict[int, list[int]]()
    for actions in schedule.actions:
        for step, action in enumerate(actions):
            if action.kind != "F" or not by_end:
                found.setdefault(action.stage, []).append(step)
    return sorted(found, key=lambda s: (max(found[s]) if by_end else min(found[s]), s))


def _in_turn(schedule: Schedule, order: Sequence[int], ready: dict[int, float], seconds: Sequence[float]
             ) -> dict[int, float]:
    """By stage, when its task ends that takes so long, one after another on a rank, none before it is ready."""
    ends = dict[int, float]()
    for s in order:
        before = [end for other, end in ends.items() if _ranks(schedule, other) & _ranks(schedule, s)]
        ends[s] = max([ready[s], *before]) + seconds[s]
    return ends


def _run_actions(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float],
                 gathered: dict[int, float]) -> tuple[dict[Action, float], list[float]]:
    """(when each action ends, when each rank is free)."""
    ends, arrived, links = dict[Action, float](), dict[tuple[Action, int], float](), dict[tuple[int, int], float]()
    splits = {action._replace(kind="B") for action in schedule if action.kind == "W"}
    free, left = [0.0] * len(schedule.actions), [list(actions) for actions in schedule.actions]
    while any(left):
        for rank, actions in enumerate(left):
            while actions and all(one in ends for one in needs(actions[0], schedule)):
                action = actions.pop(0)
                own = stages[action.stage]
                ready = [arrived.get((one, rank), ends[one]) for one in needs(action, schedule)]
                begin = max([free[rank], *ready, *([gathered[action.stage]] if action.kind == "F" else [])])
                seconds = {"F": own.forward, "B": own.backward + (0.0 if action in splits else own.weight),
                           "W": own.weight}[action.kind]
                ends[action] = free[rank] = begin + seconds
                _send(schedule, action, ends[action], transfers, arrived, links)
    return ends, free


def _send(schedule: Schedule, action: Action, end: float, transfers: Sequence[float],
          arrived: dict[tuple[Action, int], float], links: dict[tuple[int, int], float]) -> None:
    """Sends what an action made to the rank that waits for it, behind what was sent there before."""
    if action.kind == "W":
        return
    target = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= target < schedule.stages:
        return
    source, to = schedule.rank(action), schedule.rank(action._replace(stage=target))
    if source != to:
        links[source, to] = max(end, links.get((source, to), 0.0)) + transfers[min(action.stage, target)]
        arrived[action, to] = links[source, to]
