"""Schedules of pipelines: which rank runs which stage on which microbatch, and in which order.

A schedule is a list of actions per rank. A stage is on one rank per pipe, and a microbatch goes through one pipe. So a
stage has a copy in every pipe. The text of a schedule of two ranks and two microbatches (`Schedule.parse`):

    microbatches 2, stages on ranks 0 1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

The action `2F0` is the forward F of microbatch 0 through stage 2. `B` is the backward. Where `W` stands for the
gradient of the weights, B computes the gradient of the input alone. In schedules of several pipes (Chimera) `1:2F0` is
in pipe 1.

An action may run once all actions are finished that it `needs`:

    F(s) <- F(s-1)        B(s) <- F(s), B(s+1)        W(s) <- B(s)        all of the same microbatch and pipe

Activations are live from F until the last of B and W (Qi et al. 2024, "Zero bubble pipeline parallelism", section 2).

`check_schedule` says whether a schedule can run. The rules, in the order in which they are checked:

    1  pipes have equally many stages, on ranks that have a list of actions
    2  an action names a stage, pipe and microbatch that exist, on the rank of that stage, and stands once
    3  every microbatch goes through one pipe, with an F and a B at each of its stages
    4  when all ranks run as far as they can, no rank is stuck
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, cast

from autoddl.core.errors import InputError

__all__ = ["Action", "Flight", "Kind", "RankMoment", "RankMoments", "Schedule", "begun_stages", "check_copies",
           "check_schedule", "counted_flights", "first_ranks", "flights_of", "fullest", "live_activations",
           "moments_of", "needs", "peak_activations", "rank_moments", "sizes_of", "sizes_text"]

Kind = Literal["F", "B", "W"]


class Action(NamedTuple):
    """The work of one stage on one microbatch: `kind` is F, B or W. Text: `2F0`, in pipe 1 `1:2F0`."""

    stage: int
    kind: Kind
    microbatch: int
    pipe: int = 0

    def __str__(self) -> str:
        return f"{f'{self.pipe}:' if self.pipe else ''}{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that `text` says; InputError where it is none."""
        match = re.fullmatch(r"(?:(\d+):)?(\d+)([FBW])(\d+)", text)
        if match is None:
            raise InputError(f"{text!r} is no action; write stage, F, B or W, and microbatch, like '2F0' or '1:2F0'")
        return cls(int(match[2]), cast(Kind, match[3]), int(match[4]), int(match[1] or 0))


class Flight(NamedTuple):
    """The microbatches that a stage has at once.

        in_flight   microbatches whose activations are there, from F until B
        waiting     others, whose gradients of weights wait for W then; 0 where backward is not split
        begun       whether a backward has ended before, so that there are sums of gradients
        most        (in flight, waiting) at most at any time, where the others are those of one moment; None: the same
        later       how many more wait for W at another time, when at least as many fewer are in flight
    """

    in_flight: int
    waiting: int = 0
    begun: bool = True
    most: tuple[int, int] | None = None
    later: int = 0

    @property
    def own(self) -> "Flight":
        """The most that the stage has at any time."""
        return Flight(*(self.most or self[:2]), later=self.later)

    @property
    def is_several(self) -> bool:
        """Whether it ever has several, or one waits: gathered weights stay then, and layouts to choose from differ."""
        return sum(self.most or self[:2]) + self.later > 1

    @property
    def counted(self) -> "Flight":
        """What says how many bytes it has at the moment: equal for stages that differ at other times alone."""
        stays = self.is_several and sum(self[:2]) <= 1
        return Flight(*self[:3], (1, 1) if stays else None, self.later)


class RankMoment(NamedTuple):
    """What is on a rank while it runs an action.

        stage     the stage that runs
        kind      of the action
        flights   by stage of the rank what it has, with what the action itself adds or takes away
    """

    stage: int
    kind: Kind
    flights: tuple[Flight, ...]

    @property
    def total(self) -> tuple[int, int]:
        """(microbatches of all stages, stages of which a backward has ended)."""
        return sum(one.in_flight + one.waiting for one in self.flights), sum(one.begun for one in self.flights)


class RankMoments(NamedTuple):
    """The stages that some ranks have, and their moments: of any other one there is one with at least as much."""

    stages: tuple[int, ...]
    moments: tuple[RankMoment, ...]

    @property
    def fullest(self) -> RankMoment | None:
        """The moment with most microbatches, of those at which every stage has one in flight; None without any.

        Of several it is that at which stages have most alike. Those with more of them then keep less of each. So no
        more is there where one of these has more yet, and another stage less.
        """
        return max((one for one in self.moments if all(flight.in_flight for flight in one.flights)),
                   key=lambda one: (one.total, -sum(sum(flight[:2]) ** 2 for flight in one.flights)), default=None)


@dataclass(frozen=True, slots=True)
class Schedule:
    """`placement[pipe][stage]` is a rank; `actions[rank]` are the actions that it runs, in order."""

    placement: tuple[tuple[int, ...], ...]
    actions: tuple[tuple[Action, ...], ...]
    microbatches: int

    @property
    def stages(self) -> int:
        """Number of stages of a pipe."""
        return len(self.placement[0])

    @property
    def pipes(self) -> int:
        """Number of pipes, and so of copies of a stage."""
        return len(self.placement)

    def rank(self, action: Action) -> int:
        """The rank that runs `action`."""
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
        """The schedule that `text` says; InputError where it is none. `check_schedule` says whether it can run."""
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


def begun_stages(schedule: Schedule) -> list[int]:
    """The stages, in the order of their earliest steps on any rank: that in which their parameters are gathered."""
    first: dict[int, int] = {}
    for actions in schedule.actions:
        for step, action in enumerate(actions):
            first[action.stage] = min(first.get(action.stage, step), step)
    return sorted(first, key=lambda stage: (first[stage], stage))


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must have finished before: F(s) <- F(s-1), B(s) <- F(s), B(s+1), W(s) <- B(s)."""
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
    """Activations that are live on each rank after each of its actions, in microbatches of a stage, or in bytes.

    `sizes` are the bytes of one microbatch's activations per stage. Where W is split off, the share `kept` of them
    stays live from B to W.
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
    """The most activations that are live at once on each rank, in the units of `live_activations`."""
    return tuple(max(row, default=0.0) for row in live_activations(schedule, sizes, kept))


def fullest(schedule: Schedule) -> tuple[int, int, Action]:
    """(microbatches, rank, action): the most that are live on one rank at once, and the action with which they are."""
    every = [(round(live), -rank, -step) for rank, row in enumerate(live_activations(schedule))
             for step, live in enumerate(row)]
    most, rank, step = max(every)
    return most, -rank, schedule.actions[-rank][-step]


def flights_of(schedule: Schedule) -> tuple[Flight, ...]:
    """By stage, the most microbatches between F and B in any of its copies, and how many more there are with W.

        in flight <= k        that wait <= w        both together <= n        waiting = n - k        later = w - (n - k)
    """
    found = []
    for stage in range(schedule.stages):
        alone, ranks = [float(s == stage) for s in range(schedule.stages)], {pipe[stage] for pipe in schedule.placement}
        k, both = (round(max(peaks[rank] for rank in ranks)) for peaks in (
            peak_activations(schedule, alone, kept) for kept in (0.0, 1.0)))
        waits = max(_most_waiting(schedule, stage, rank) for rank in ranks)
        found.append(Flight(k, both - k, later=waits - (both - k)))
    return tuple(found)


def _most_waiting(schedule: Schedule, stage: int, rank: int) -> int:
    """The most microbatches of a stage that wait for W on a rank."""
    own = [one for one in schedule.actions[rank] if one.stage == stage]
    late = {action._replace(kind="B") for action in own if action.kind == "W"}
    return max(accumulate((one in late) - (one.kind == "W") for one in own), default=0)


def rank_moments(schedule: Schedule, least: int = 2) -> dict[int, RankMoments]:
    """By first rank, the moments of ranks with the same stages, `least` of them or more.

    What F adds is there while it runs, and what B or W takes away. Ranks with one stage in common have all
    (`check_copies`).
    """
    found, firsts = dict[int, dict[RankMoment, None]](), first_ranks(schedule.placement)
    for rank, actions in enumerate(schedule.actions):
        stages = {action.stage for action in actions}
        if len(stages) >= least:
            every = dict.fromkeys(moment for moment, _ in moments_of(schedule, rank))
            found.setdefault(firsts[min(stages)], {}).update(every)
    return {at: RankMoments(tuple(s for s, first in enumerate(firsts) if first == at), _fuller(moments))
            for at, moments in found.items()}


def moments_of(schedule: Schedule, rank: int) -> Iterator[tuple[RankMoment, tuple[Flight, ...]]]:
    """Yields for every action of a rank (its moment, what each stage of the rank has when it has ended)."""
    actions = schedule.actions[rank]
    late = {action._replace(kind="B") for action in actions if action.kind == "W"}
    now = dict.fromkeys(sorted({action.stage for action in actions}), Flight(0, 0, begun=False))
    for action in actions:
        stage, kind, *_ = action
        own = now[stage]
        if kind == "F":
            now[stage] = own._replace(in_flight=own.in_flight + 1)
        moment = RankMoment(stage, kind, tuple(now.values()))
        if kind == "B":
            now[stage] = Flight(own.in_flight - 1, own.waiting + (action in late))
        elif kind == "W":
            now[stage] = Flight(own.in_flight, own.waiting - 1)
        yield moment, tuple(now.values())


def _fuller(every: Iterable[RankMoment]) -> tuple[RankMoment, ...]:
    """Those moments than which no other of the same stage and kind has as much of everything."""
    kept = list[RankMoment]()
    for one in sorted(every, key=lambda one: one.total, reverse=True):
        if not any((one.stage, one.kind) == (other.stage, other.kind) and all(
                a >= b for own, its in zip(other.flights, one.flights, strict=True)
                for a, b in zip(own[:3], its[:3], strict=True)) for other in kept):
            kept.append(one)
    return tuple(kept)


def counted_flights(schedule: Schedule) -> tuple[Flight, ...]:
    """By stage, what it has when its ranks have most; its own most where it is alone there, or no moment has all."""
    found = list(flights_of(schedule))
    for one in rank_moments(schedule).values():
        flights = one.fullest.flights if one.fullest else ()
        for s, flight in zip(one.stages, flights, strict=bool(flights)):
            found[s] = flight._replace(most=(found[s].in_flight, found[s].waiting), later=found[s].later)
    return tuple(found)


def first_ranks(placement: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """By stage, the first rank of `placement[pipe][stage]` that has it.

    Stages with the same first rank have all ranks in common (`check_copies`).
    """
    return tuple(map(min, zip(*placement, strict=True)))


def sizes_text(sizes: Sequence[int]) -> str:
    """The numbers of ranks of all parts as text, `1+1+2`; `even` of none, which are equal parts."""
    return "+".join(map(str, sizes)) or "even"


def sizes_of(text: str) -> tuple[int, ...]:
    """The numbers of ranks of all parts that `1+1+2` says, none of `even`. Raises InputError where it says none."""
    words = [] if text == "even" else text.split("+")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise InputError(f"{text!r} says no ranks of stages: write how many each has, like '1+1+2', or even, or any")
    return tuple(map(int, words))


def check_copies(schedule: Schedule) -> None:
    """Raises InputError where the copies of stages cannot be planned and run as one stage each.

    A rank has no stage twice, and ranks that have a stage in common have all of them in common. So they need the same
    memory. Every pipe has equally many microbatches, so copies run equally many. No backward is split.
    """
    if schedule.pipes == 1:
        return
    every = [(rank, s) for pipe in schedule.placement for s, rank in enumerate(pipe)]
    stages = {rank: frozenset(s for at, s in every if at == rank) for rank, _ in every}
    counts = {sum(one.pipe == pipe and one.stage == 0 and one.kind == "F" for one in schedule)
              for pipe in range(schedule.pipes)}
    if len(set(every)) < len(every) or len(counts) > 1 or any(one.kind == "W" for one in schedule) or any(
            a & b and a != b for a in stages.values() for b in stages.values()):
        raise InputError(f"the copies of stages in the {schedule.pipes} pipes of this schedule differ: a rank has a "
                         "stage once, ranks with one stage in common have all, and pipes run equally many "
                         "microbatches, whose backward is not split; take chimera:1")


def check_schedule(schedule: Schedule) -> None:
    """Raise InputError where the schedule cannot run.

    The message names rank and step, and shows the schedule with that row marked.
    """
    _check_placement(schedule)
    _check_actions(schedule)
    _check_complete(schedule)
    _check_progress(schedule)


def _fail(schedule: Schedule, rank: int, step: int, words: str) -> InputError:
    """The error at `step` of `rank`, counted from 1; one past the end marks a missing action."""
    rows = []
    for row, actions in enumerate(schedule.actions):
        texts = [f"[{a}]" if (row, i) == (rank, step) else str(a) for i, a in enumerate(actions, start=1)]
        if row == rank:
            texts += ["[]"] * (step > len(actions)) + ["   <-- here"]
        rows.append(f"  rank {row}: {' '.join(texts)}")
    return InputError("\n".join((f"rank {rank}, step {step}: {words}:", *rows)))


def _check_placement(schedule: Schedule) -> None:
    """Rule 1."""
    if schedule.microbatches < 1 or len({len(pipe) for pipe in schedule.placement}) != 1 or not schedule.stages:
        raise InputError(f"{str(schedule).splitlines()[0]!r}: a schedule has at least one microbatch and stage, "
                         "and equally many stages in every pipe")
    beyond = sorted({rank for pipe in schedule.placement for rank in pipe if rank >= len(schedule.actions)})
    if beyond:
        raise InputError(f"stages are placed on rank {beyond[0]}, but actions are given for "
                         f"{len(schedule.actions)} ranks; add a line 'rank {beyond[0]}: ...'")


def _check_actions(schedule: Schedule) -> None:
    """Rule 2."""
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


def _check_complete(schedule: Schedule) -> None:
    """Rule 3."""
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


def _check_progress(schedule: Schedule) -> None:
    """Rule 4: run all ranks as far as they come."""
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
    """The error for the first stuck rank that waits for itself, which explains most; else for the first stuck rank."""
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
