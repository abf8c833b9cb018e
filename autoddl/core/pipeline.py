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

Whether a schedule can run: every microbatch once through every stage, forward and backward, and nobody stuck.

    1  placement: pipes of equally many stages, on ranks that have a list
    2  every action names a stage, pipe and microbatch that exist, on the rank where the stage is, and only once
    3  every microbatch goes through one pipe, with an F and a B at each of its stages
    4  run rank by rank, every action finds what it `needs` finished

The first breach is raised with rank and step in words, and the schedule with that row marked.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from autoddl.core.errors import InputError

__all__ = ["Action", "Kind", "Schedule", "check_schedule", "live_activations", "needs", "peak_activations"]

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
        """The schedule that `text` says; `check_schedule` tells whether it can run."""
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


def live_activations(schedule: Schedule, sizes: Sequence[float] | None = None, kept: float = 1.0
                     ) -> tuple[tuple[float, ...], ...]:
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


def peak_activations(schedule: Schedule, sizes: Sequence[float] | None = None, kept: float = 1.0) -> tuple[float, ...]:
    """The most that each rank holds at once."""
    return tuple(max(row, default=0.0) for row in live_activations(schedule, sizes, kept))


def check_schedule(schedule: Schedule) -> None:
    """Raise InputError at the first breach."""
    _placement(schedule)
    _each(schedule)
    _complete(schedule)
    _runs(schedule)


def _fail(schedule: Schedule, rank: int, step: int, words: str) -> InputError:
    """`step` counts from 1; one past the end marks what is missing there."""
    rows = []
    for row, actions in enumerate(schedule.actions):
        texts = [f"[{a}]" if (row, i) == (rank, step) else str(a) for i, a in enumerate(actions, start=1)]
        if row == rank:
            texts += ["[]"] * (step > len(actions)) + ["   <-- here"]
        rows.append(f"  rank {row}: {' '.join(texts)}")
    return InputError("\n".join((f"rank {rank}, step {step}: {words}", *rows)))


def _placement(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or len({len(pipe) for pipe in schedule.placement}) != 1 or not schedule.stages:
        raise InputError(f"{str(schedule).splitlines()[0]!r}: a schedule has at least one microbatch and stage, "
                         "and equally many stages in every pipe")
    beyond = sorted({rank for pipe in schedule.placement for rank in pipe if rank >= len(schedule.actions)})
    if beyond:
        raise InputError(f"stages are placed on rank {beyond[0]}, but actions are given for "
                         f"{len(schedule.actions)} ranks; add a line 'rank {beyond[0]}: ...'")


def _each(schedule: Schedule) -> None:
    """Every action is possible where it stands, and stands once."""
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.actions):
        for step, action in enumerate(actions, start=1):
            if action.pipe >= len(schedule.placement) or action.stage >= schedule.stages:
                raise _fail(schedule, rank, step, f"{action} names a stage that is nowhere; there are pipes 0 to "
                            f"{len(schedule.placement) - 1} with stages 0 to {schedule.stages - 1}")
            if action.microbatch >= schedule.microbatches:
                raise _fail(schedule, rank, step, f"{action}: the microbatches are 0 to {schedule.microbatches - 1}")
            if schedule.rank(action) != rank:
                raise _fail(schedule, rank, step, f"{action} is of a stage on rank {schedule.rank(action)}; "
                            "move it there")
            if action in seen:
                raise _fail(schedule, rank, step, f"{action} has been run before; every action runs once")
            seen.add(action)


def _complete(schedule: Schedule) -> None:
    """Nothing is missing."""
    seen = set(schedule)
    kinds: tuple[Kind, ...] = ("F", "B")
    for microbatch in range(schedule.microbatches):
        pipes = sorted({action.pipe for action in seen if action.microbatch == microbatch}) or [0]
        for stage in range(schedule.stages):
            for kind in kinds:
                action = Action(stage, kind, microbatch, pipes[0])
                if action not in seen:
                    rank = schedule.rank(action)
                    raise _fail(schedule, rank, len(schedule.actions[rank]) + 1, f"the rank ends without {action}; "
                                "every microbatch goes through every stage, forward and backward")
        if len(pipes) > 1:
            extra = next(a for a in schedule if a.microbatch == microbatch and a.pipe == pipes[1])
            rank = schedule.rank(extra)
            raise _fail(schedule, rank, schedule.actions[rank].index(extra) + 1,
                        f"{extra}: microbatch {microbatch} goes through pipe {pipes[0]} already")


def _runs(schedule: Schedule) -> None:
    """Run all ranks as far as they come; if one is stuck, say where and for what it waits."""
    done: set[Action] = set()
    at = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while at[rank] < len(actions) and done.issuperset(needs(actions[at[rank]], schedule)):
                done.add(actions[at[rank]])
                at[rank] += 1
                moved = True
    stuck = [rank for rank, actions in enumerate(schedule.actions) if at[rank] < len(actions)]
    if stuck:
        raise _stuck(schedule, stuck, at, done)


def _stuck(schedule: Schedule, stuck: list[int], at: list[int], done: set[Action]) -> InputError:
    """A rank that waits for itself explains most; else the first."""
    found = []
    for rank in stuck:
        action = schedule.actions[rank][at[rank]]
        missing = next(need for need in needs(action, schedule) if need not in done)
        owner = schedule.rank(missing)
        later = f"which comes later on the same rank, at step {schedule.actions[rank].index(missing) + 1}" \
            if owner == rank else f"which rank {owner} runs only after {schedule.actions[owner][at[owner]]}"
        found.append((owner != rank, rank, f"{action} waits for {missing}, {later}"))
    _, rank, words = min(found)
    return _fail(schedule, rank, at[rank] + 1, f"{words}; so none of them ever runs")
