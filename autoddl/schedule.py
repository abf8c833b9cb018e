"""Pipelines as text: who runs which stage on which microbatch, in which order.

An action is `2F0`: stage 2, Forward, microbatch 0. `B` is the backward, `W` the gradient of the weights where that is
split off: then B gives the gradient of the input alone. In schedules of several pipes (Chimera) `1:2F0` is in pipe 1.
A schedule is a list of actions per rank. A stage is on one rank per pipe, a microbatch goes through one pipe:

    microbatches 2, stages on ranks 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

What must have finished before an action is said once, in `needs`:

    F(s) <- F(s-1)        B(s) <- F(s), B(s+1)        W(s) <- B(s)        all of the same microbatch and pipe

Activations are held from F until the last of B and W (Qi et al. 2024, "Zero bubble pipeline parallelism", section 2).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from autoddl.errors import InputError

__all__ = ["Action", "Kind", "Schedule", "held", "needs", "peaks"]

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One stage, one microbatch, one direction. Text: `2F0`, in a further pipe `1:2F0`."""

    stage: int
    kind: Kind
    microbatch: int
    pipe: int = 0

    def __str__(self) -> str:
        return f"{f'{self.pipe}:' if self.pipe else ''}{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        match = re.fullmatch(r"(?:(\d+):)?(\d+)([FBW])(\d+)", text)
        if match is None:
            raise InputError(f"{text!r} is no action; write stage, F, B or W, and microbatch, like '2F0' or '1:2F0'")
        return cls(int(match[2]), cast(Kind, match[3]), int(match[4]), int(match[1] or 0))


@dataclass(frozen=True, slots=True)
class Schedule:
    """placement[pipe][stage] is a rank; actions[rank] is what it runs, in order."""

    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.placement[0])

    def rank(self, action: Action) -> int:
        return self.placement[action.pipe][action.stage]

    def __iter__(self) -> Iterator[Action]:
        """Every action, rank after rank."""
        return (action for actions in self.actions for action in actions)

    def __str__(self) -> str:
        where = " / ".join(" ".join(map(str, pipe)) for pipe in self.placement)
        rows = (f"rank {rank}: {' '.join(map(str, actions))}".rstrip() for rank, actions in enumerate(self.actions))
        return "\n".join((f"microbatches {self.microbatches}, stages on ranks {where}", *rows))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """The schedule that `text` says; `schedule_check.validate` tells whether it can run."""
        head, *rows = [line.strip() for line in text.strip().split("\n")]
        match = re.fullmatch(r"microbatches (\d+), stages on ranks (\d+(?: (?:/ )?\d+)*)", head)
        if match is None:
            raise InputError(f"{head!r} begins no schedule; write it like 'microbatches 4, stages on ranks 0 1 2 3', "
                             "and ' / ' between the pipes")
        placement = tuple(tuple(map(int, pipe.split())) for pipe in match[2].split(" / "))
        return cls(placement, tuple(_row(rank, row) for rank, row in enumerate(rows)), int(match[1]))


def _row(rank: int, row: str) -> tuple[Action, ...]:
    label, _, actions = row.partition(":")
    if label != f"rank {rank}":
        raise InputError(f"{row!r}: here the actions of rank {rank} are expected, like 'rank {rank}: 0F0 0B0'")
    return tuple(map(Action.parse, actions.split()))


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """F(s) <- F(s-1), B(s) <- F(s), B(s+1), W(s) <- B(s): what must have finished before."""
    stage, kind, microbatch, pipe = action
    if kind == "F":
        return (Action(stage - 1, "F", microbatch, pipe),) if stage else ()
    if kind == "W":
        return (Action(stage, "B", microbatch, pipe),)
    forward = Action(stage, "F", microbatch, pipe)
    last = stage == schedule.stages - 1
    return (forward,) if last else (forward, Action(stage + 1, "B", microbatch, pipe))


def held(schedule: Schedule, sizes: Sequence[float] | None = None, kept: float = 1.0) -> tuple[tuple[float, ...], ...]:
    """Activations that each rank holds after each of its actions, in microbatches of a stage, or in bytes.

    `sizes` are the bytes of one microbatch per stage; after a split B the share `kept` of them waits for the W.
    """
    weights = {action for action in schedule if action.kind == "W"}

    def change(action: Action) -> float:
        size = 1.0 if sizes is None else sizes[action.stage]
        if action.kind == "F":
            return size
        if action.kind == "W":
            return -kept * size
        return -(1 - kept) * size if action._replace(kind="W") in weights else -size

    return tuple(tuple(accumulate(map(change, actions))) for actions in schedule.actions)


def peaks(schedule: Schedule, sizes: Sequence[float] | None = None, kept: float = 1.0) -> tuple[float, ...]:
    """The most that each rank holds at once."""
    return tuple(max(row, default=0.0) for row in held(schedule, sizes, kept))
