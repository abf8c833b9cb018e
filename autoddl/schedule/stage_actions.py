"""Makes the list of what every rank of a pipeline does: its part of the schedule, with what it sends and receives.

    rank 0: 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
    rank 1: 1F0<0 1F0 1F1<0 1B0 1B0>0 1F1 1B1 1B1>0

    0F0>1    sends stage 1 what the forward of microbatch 0 through stage 0 made for it
    1F0<0    from here on stage 1 takes in what stage 0 sends for the forward of microbatch 0; 1F0 waits for it
    1B0>0    sends the gradients of what stage 0 had sent

One walk places all of them: every rank runs its next action once what that needs is done. A rank sends right behind the
action, and in that moment the receive goes to the end of the other rank's list so far. So two ranks name what they
exchange in one order. And the walk itself is an order in which all could run, one after the other, each send together
with its receive. That is why no rank waits in a circle, even where a send waits for its receive.

A list is run with its receives one action earlier (`posted_early`), so that a message travels while the rank computes.
That waits for nothing more, since a receive alone does not wait.

`check_stage_actions` proves this of any lists. The rules, in the order in which they are checked:

    1  every send has its receive on the rank of the other stage, in one order for every pair of ranks
    2  a receive stands before the action that waits for it, a send behind the action that makes it
    3  when all ranks run as far as they can, sends and receives in pairs, no rank is stuck
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from autoddl.core.errors import InputError
from autoddl.core.pipeline import Action, Schedule, needs

__all__ = ["Link", "StageAction", "StageActions", "arrived", "check_stage_actions", "forwards", "posted_early",
           "sent_by", "stage_actions"]

Way = Literal["", ">", "<"]


class Link(NamedTuple):
    """Stage `source` sends stage `target` something in every microbatch; `gradient`: something comes back."""

    source: int
    target: int
    gradient: bool


class StageAction(NamedTuple):
    """An action of the schedule, or with `way` > or < what is sent behind it, or received for it."""

    action: Action
    way: Way = ""
    other: int = -1

    def __str__(self) -> str:
        return f"{self.action}{self.way}{self.other if self.way else ''}"

    @classmethod
    def parse(cls, text: str) -> "StageAction":
        """The action that `text` says. Raises InputError where it is none."""
        match = re.fullmatch(r"([^<>]+)(?:([<>])(\d+))?", text)
        if match is None:
            raise InputError(f"{text!r} is no action of a rank: write it like '0F1', '0F1>1' or '1F1<0'")
        return cls(Action.parse(match[1]), cast(Way, match[2] or ""), int(match[3] or -1))


@dataclass(frozen=True, slots=True)
class StageActions:
    """`lists[rank]` is what a rank does, in order; `placement[pipe][stage]` is the rank of a stage."""

    placement: tuple[tuple[int, ...], ...]
    lists: tuple[tuple[StageAction, ...], ...]

    def there(self, one: StageAction) -> int:
        """The rank of the other stage of a send or a receive."""
        return self.placement[one.action.pipe][one.other]

    def __str__(self) -> str:
        rows = (f"rank {rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.lists))
        return "\n".join(rows)

    def __iter__(self) -> Iterator[tuple[int, StageAction]]:
        return ((rank, one) for rank, row in enumerate(self.lists) for one in row)


def forwards(schedule: Schedule) -> Schedule:
    """The schedule with its forwards alone, for evaluation."""
    rows = tuple(tuple(one for one in row if one.kind == "F") for row in schedule.actions)
    return Schedule(schedule.placement, rows, schedule.microbatches)


def sent_by(action: Action, links: Collection[Link]) -> list[int]:
    """The stages to which a stage sends behind `action`: readers of its tensors, or makers of what it read."""
    if action.kind == "F":
        return sorted({one.target for one in links if one.source == action.stage})
    if action.kind == "W":
        return []
    return sorted({one.source for one in links if one.target == action.stage and one.gradient})


def stage_actions(schedule: Schedule, links: Collection[Link]) -> StageActions:
    """The list of every rank. Stages on one rank hand over directly, which is no action.

    Raises InputError for a schedule that cannot run.
    """
    made = _walk(schedule, links)
    check_stage_actions(made)
    return made


def _walk(schedule: Schedule, links: Collection[Link]) -> StageActions:
    done, at, moved = set[Action](), [0] * len(schedule.actions), True
    lists: list[list[StageAction]] = [[] for _ in schedule.actions]
    while moved:
        ready = [(rank, row[at[rank]]) for rank, row in enumerate(schedule.actions) if at[rank] < len(row)
                 and done.issuperset(needs(row[at[rank]], schedule))]
        moved = bool(ready)
        for rank, action in ready:
            lists[rank].append(StageAction(action))
            at[rank] += 1
        for rank, action in ready:
            for other in sent_by(action, links):
                there = schedule.placement[action.pipe][other]
                if there != rank:
                    lists[rank].append(StageAction(action, ">", other))
                    lists[there].append(_receive(action, other))
        done.update(action for _, action in ready)
    stuck = next((row[at[rank]] for rank, row in enumerate(schedule.actions) if at[rank] < len(row)), None)
    if stuck is not None:
        raise InputError(f"the schedule cannot run: {stuck} waits for what never comes; `check_schedule` says why")
    return StageActions(schedule.placement, tuple(map(tuple, lists)))


def _receive(action: Action, other: int) -> StageAction:
    """The receive at stage `other` of what is sent behind `action`."""
    return StageAction(action._replace(stage=other), "<", action.stage)


def posted_early(row: Iterable[StageAction]) -> tuple[StageAction, ...]:
    """A rank's list with every receive in front of the action that it stood behind; receives stay in order."""
    found, start = list[StageAction](), 0
    for one in row:
        if one.way == "<":
            found.insert(start, one)
            start += 1
        else:
            start = len(found) if not one.way else start
            found.append(one)
    return tuple(found)


def arrived(made: StageActions, rank: int) -> dict[StageAction, list[StageAction]]:
    """By receive of a rank, the sends of that rank that have arrived once the receive has: their tensors can go.

    What was sent has, if the other stage took it in for an action that it ran before the one whose result is received.
    """
    place = [{one.action: k for k, one in enumerate(row) if not one.way} for row in made.lists]
    open_ones, found = list[StageAction](), dict[StageAction, list[StageAction]]()
    for one in made.lists[rank]:
        if one.way == ">":
            open_ones.append(one)
        elif one.way == "<":
            there = made.there(one)
            until = place[there][one.action._replace(stage=one.other)]
            found[one] = [sent for sent in open_ones if made.there(sent) == there
                          and place[there][sent.action._replace(stage=sent.other)] <= until]
            open_ones = [sent for sent in open_ones if sent not in found[one]]
    return found


def check_stage_actions(made: StageActions) -> None:
    """Raises InputError, naming the rank and the action, where the lists break a rule."""
    _check_pairs(made)
    _check_places(made)
    _check_progress(made)


def _check_pairs(made: StageActions) -> None:
    """Rule 1."""
    sent: Mapping[tuple[int, int], list[StageAction]] = defaultdict(list)
    received: Mapping[tuple[int, int], list[StageAction]] = defaultdict(list)
    for rank, one in made:
        if one.way == ">":
            sent[rank, made.there(one)].append(_receive(one.action, one.other))
        elif one.way == "<":
            received[made.there(one), rank].append(one)
    for a, b in sorted({*sent, *received}):
        here, there = sent.get((a, b), []), received.get((a, b), [])
        for k in range(max(len(here), len(there))):
            wanted, found = (str(row[k]) if k < len(row) else "nothing" for row in (here, there))
            if wanted != found:
                raise InputError(f"rank {a} sends rank {b} what {wanted} receives, where rank {b} has {found} (message "
                                 f"{k + 1} of this pair): both lists name what is sent in one order")


def _check_places(made: StageActions) -> None:
    """Rule 2."""
    for rank, row in enumerate(made.lists):
        place = {one: k for k, one in enumerate(row)}
        for k, one in enumerate(row):
            own = place.get(StageAction(one.action))
            if one.way and (own is None or (own > k) != (one.way == "<")):
                raise InputError(f"rank {rank}, step {k + 1}: {one} stands on the wrong side of {one.action}; what is "
                                 "received stands before the action, what is sent behind it")


def _check_progress(made: StageActions) -> None:
    """Rule 3."""
    at = [0] * len(made.lists)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(made.lists):
            while at[rank] < len(row) and row[at[rank]].way != "<":
                one = row[at[rank]]
                if one.way == ">":
                    there = made.there(one)
                    if made.lists[there][at[there]:at[there] + 1] != (_receive(one.action, one.other),):
                        break
                    at[there] += 1
                at[rank] += 1
                moved = True
    stuck = [rank for rank, row in enumerate(made.lists) if at[rank] < len(row)]
    if stuck:
        waits = ", ".join(f"rank {rank} at {made.lists[rank][at[rank]]}" for rank in stuck)
        raise InputError(f"the ranks wait for each other in a circle: {waits}")

