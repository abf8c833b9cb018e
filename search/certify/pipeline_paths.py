"""Re-walks paths of tasks of a pipeline, from its schedule alone.

A path is a list of names. `2F0` is an action, `2F0 to 3` the transfer of its result to a rank. `gather 2` and
`reduce 2` are of a stage, `update 2 on 3` of a stage on a rank. A task may follow another where it waits for that one:

    action    behind an earlier action of its rank, an action that it needs, the transfer of such a one to its rank;
              an F also behind the gathered parameters of its stage
    transfer  behind its action, or the transfer of an earlier action of that rank to the same rank
    gather    behind that of a stage that begins earlier, if they share a rank
    reduce    behind a B or W of its stage, or the reduction of a stage that ends earlier, if they share a rank
    update    behind its reduction, an action of its rank, or the update there of a stage that ends earlier
"""

import re
from collections.abc import Sequence

from autoddl.core.pipeline import Action, Schedule, needs

__all__ = ["PathWalk"]

Task = tuple[str, int, int, Action | None]
"""(kind, stage or -1, rank or -1, action or None)."""

TERMS = ("F", "B", "W", "gather", "reduce", "update")


class PathWalk:
    """Checks paths of one schedule; `reduces` says whether its stages are reduced."""

    def __init__(self, schedule: Schedule, reduces: bool) -> None:
        self.schedule, self.reduces = schedule, reduces
        self.step = {action: i for actions in schedule.actions for i, action in enumerate(actions)}
        self.begins: dict[int, int] = {}
        last: dict[tuple[int, int], int] = {}
        self.ranks: dict[int, set[int]] = {stage: set() for stage in range(schedule.stages)}
        for action, step in self.step.items():
            self.begins[action.stage] = min(step, self.begins.get(action.stage, step))
            if action.kind != "F":
                last[action.stage, schedule.rank(action)] = step
        self.ends: dict[int, int] = {}
        for (stage, _), step in last.items():
            self.ends[stage] = max(step, self.ends.get(stage, step))
        for pipe in schedule.placement:
            for stage, rank in enumerate(pipe):
                self.ranks[stage].add(rank)

    def count(self, names: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """How often the terms of each stage, and the transfers of each boundary, are on the path.

        Raises AssertionError where a task does not exist, or does not have to wait for the one before.
        """
        tasks = [self._task(name) for name in names]
        for i in range(1, len(tasks)):
            assert self._follows(tasks[i - 1], tasks[i]), f"{names[i]} does not wait for {names[i - 1]}"
        stages = [[0] * len(TERMS) for _ in range(self.schedule.stages)]
        transfers = [0] * (self.schedule.stages - 1)
        for kind, stage, _, action in tasks:
            if kind == "send":
                transfers[stage] += 1
                continue
            stages[stage][TERMS.index(kind)] += 1
            if action is not None and kind == "B" and action._replace(kind="W") not in self.step:
                stages[stage][TERMS.index("W")] += 1
        return stages, transfers

    def _task(self, name: str) -> Task:
        if match := re.fullmatch(r"(gather|reduce) (\d+)", name):
            assert match[1] == "gather" or self.reduces, f"{name}: no stage is reduced"
            assert int(match[2]) in self.ends, f"{name}: there is no such stage"
            return match[1], int(match[2]), -1, None
        if match := re.fullmatch(r"update (\d+) on (\d+)", name):
            assert int(match[2]) in self.ranks.get(int(match[1]), ()), f"{name}: the stage is not there"
            return "update", int(match[1]), int(match[2]), None
        text, _, to = name.partition(" to ")
        action = Action.parse(text)
        assert action in self.step, f"{name}: there is no such action"
        rank = self.schedule.rank(action)
        if not to:
            return action.kind, action.stage, rank, action
        after = action._replace(stage=action.stage + (1 if action.kind == "F" else -1))
        assert action.kind != "W" and after in self.step and action in needs(after, self.schedule), f"{name}: no reader"
        assert self.schedule.rank(after) == int(to) != rank, f"{name}: it is not sent there"
        return "send", min(action.stage, after.stage), int(to), action

    def _follows(self, first: Task, then: Task) -> bool:
        (kind, stage, rank, action), (own_kind, own_stage, own_rank, own) = first, then
        if own_kind in ("gather", "reduce"):
            order = self.begins if own_kind == "gather" else self.ends
            if kind == own_kind:
                return (order[stage], stage) < (order[own_stage], own_stage) and bool(
                    self.ranks[stage] & self.ranks[own_stage])
            return own_kind == "reduce" and kind in ("B", "W") and stage == own_stage
        if own_kind == "update":
            if kind == "update":
                return rank == own_rank and (self.ends[stage], stage) < (self.ends[own_stage], own_stage)
            return stage == own_stage if kind == "reduce" else kind in ("F", "B", "W") and rank == own_rank
        assert own is not None
        if own_kind == "send":
            return action == own if kind != "send" else rank == own_rank and self._before(action, own)
        if kind == "gather":
            return own_kind == "F" and stage == own_stage
        if action is None:
            return False
        if kind == "send":
            return action in needs(own, self.schedule) and rank == own_rank
        return action in needs(own, self.schedule) or self._before(action, own)

    def _before(self, action: Action | None, then: Action) -> bool:
        """Whether both are on one rank, the first one earlier."""
        return action is not None and self.schedule.rank(action) == self.schedule.rank(then) and \
            self.step[action] < self.step[then]
