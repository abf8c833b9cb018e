"""Characterises the communication of a plan: what a rank sends in one step, in messages of which sizes, on which level.

    row      all collectives or messages of one pass, kind and group of ranks; with their buffers' least, median and
             largest bytes, and how many buffers there are of each size. Messages between stages are told apart by what
             they have: activations, their gradients, the gradient of a parameter that several stages read, the loss
    by       the algorithm: as the cost model chooses it for a buffer of that size, and as the run took it
    moved    the bytes that the rank itself sends for them: for a buffer of B bytes among n ranks
             2 (n-1)/n B in an all-reduce, B where switches reduce it, (n-1)/n B in the others, B in a message between
             stages
    level    the outermost level of the cluster that the group crosses

With a record, the same rows are counted in one step of its run. Anthony et al., "Demystifying the Communication
Characteristics for Distributed Transformer Models" (2024), describe runs of transformers by such tables.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from statistics import median
from typing import TypeVar

from autoddl.core.plan import Plan, level_of
from autoddl.core.record import Event, Record
from autoddl.cost_models import moved_by
from autoddl.explain.compare_run import axis_sizes, check_record, graph_of_plan, planned_traffic
from autoddl.explain.record_statistics import later
from autoddl.schedule.moved_bytes import algorithm_of, levels_of
from autoddl.schedule.stage_lanes import copies_of
from autoddl.schedule.traffic import PlannedCollective

__all__ = ["SIZES", "LevelBytes", "MessageRow", "level_bytes", "message_rows"]

SIZES = (10**3, 10**4, 10**5, 10**6, 10**7, 10**8)
"""Upper ends of the classes of sizes, in bytes: 1 kB to 100 MB by tens; the last class is above."""


@dataclass(frozen=True, slots=True)
class MessageRow:
    """The collectives or messages of one pass, kind and group, of one rank in one step; pairs are planned, recorded.

    Without a record the second of a pair is None.
    """

    rank: int
    """The rank that sends them."""
    direction: str
    """The pass, `forward` or `backward`."""
    kind: str
    """The kind of collective, like `all-reduce`, or `send`."""
    axes: str
    """Names of the mesh axes of the group."""
    ranks: int
    """How many ranks the group has."""
    level: str
    """The outermost level of the cluster that the group crosses."""
    count: tuple[int, int | None]
    """How many there are."""
    nbytes: tuple[int, int | None]
    """Bytes of their buffers."""
    moved: tuple[float, float | None]
    """Bytes that the rank sends."""
    sizes: tuple[int, int, int]
    """Bytes of the least, the median and the largest buffer; as recorded where nothing was planned."""
    classes: tuple[int, ...]
    """How many buffers there are of each class of `SIZES`, and above the last."""
    algorithm: tuple[str, str | None] = ("", None)
    """Names of the algorithms by which they are sent; "" for messages, and where the plan has no cluster."""
    of: str = ""
    """What a message between stages has, like `activations` or the gradient of a parameter; "" for collectives."""


@dataclass(frozen=True, slots=True)
class LevelBytes:
    """The bytes that one rank sends over groups whose outermost level is this one; planned, then recorded or None."""

    rank: int
    level: str
    moved: tuple[float, float | None]


_Key = tuple[str, str, str, str]
_Sent = tuple[int, str]
_Number = TypeVar("_Number")


def message_rows(plan: Plan, record: Record | None = None) -> tuple[MessageRow, ...]:
    """The rows of the first rank of every part of the cluster: rank 0, or the first of each stage's ranks.

    Raises InputError for a plan that does not keep its question, and MismatchError for a record of another plan.
    """
    if record is not None:
        check_record(plan, record)
    graph = graph_of_plan(plan)
    ranks = sorted({one.first for one in copies_of(plan.pipeline)}) if plan.pipeline else [0]
    return tuple(row for rank in ranks for row in _rows(
        plan, rank, planned_traffic(plan, graph, rank), None if record is None else _recorded(record, rank)))


def level_bytes(rows: Iterable[MessageRow]) -> tuple[LevelBytes, ...]:
    """The bytes that each rank of `rows` sends, by level, in the order of the rows."""
    planned, recorded = defaultdict[tuple[int, str], float](float), defaultdict[tuple[int, str], float](float)
    known = True
    for row in rows:
        planned[row.rank, row.level] += row.moved[0]
        recorded[row.rank, row.level] += row.moved[1] or 0.0
        known = known and row.moved[1] is not None
    return tuple(LevelBytes(rank, level, (moved, recorded[rank, level] if known else None))
                 for (rank, level), moved in planned.items())


def _recorded(record: Record, rank: int) -> tuple[Event, ...]:
    """The events of the first later step of a rank; none where the record has no step of it."""
    return next((step.events for step in later(record) if step.rank == rank), ())


def _rows(plan: Plan, rank: int, planned: Iterable[PlannedCollective], recorded: Iterable[Event] | None
          ) -> list[MessageRow]:
    ahead, behind = _sizes(plan, planned), _sizes(plan, recorded or ())
    return [_row(plan, rank, key, ahead.get(key, []), None if recorded is None else behind.get(key, []))
            for key in sorted({*ahead, *behind}, key=lambda key: (key[0] != "forward", *key))]


def _sizes(plan: Plan, many: Iterable[PlannedCollective | Event]) -> dict[_Key, list[_Sent]]:
    """By pass, kind, axes and what messages have, the bytes of the buffers, rising, with their algorithms.

    A rank that receives a message sends nothing."""
    found = defaultdict[_Key, list[_Sent]](list)
    for one in many:
        if one.kind != "receive":
            by = one.algorithm if isinstance(one, Event) else _algorithm(plan, one)
            found[one.direction, one.kind, one.axes, _content(one)].append((one.nbytes, by))
    return {key: sorted(sizes) for key, sizes in found.items()}


def _content(one: PlannedCollective | Event) -> str:
    """What a message between stages has, by the lane that it belongs to; "" of a collective."""
    if one.kind != "send":
        return ""
    way, _, lane = one.origin.partition(" ")
    known = {"forward": "activations", "backward": "gradients of activations", "loss": "loss"}
    return known.get(way) or f"gradient of {lane.partition(' ')[0]}"


def _algorithm(plan: Plan, one: PlannedCollective) -> str:
    """The algorithm of a planned collective; "" of a message."""
    return next(filter(None, (algorithm_of(part, one.kind, one.axes, one.nbytes) for part in _with_stages(plan)
                              if one.kind != "send")), "")


def _row(plan: Plan, rank: int, key: _Key, planned: list[_Sent], recorded: list[_Sent] | None) -> MessageRow:
    direction, kind, axes, content = key
    sizes = axis_sizes(plan)
    ranks = 2 if kind == "send" else prod(sizes[name] for name in axes.split("+"))
    ways = next(filter(None, (levels_of(part, axes) for part in _with_stages(plan))), ())

    def of(many: Callable[[list[_Sent]], _Number]) -> tuple[_Number, _Number | None]:
        return many(planned), None if recorded is None else many(recorded)

    seen = [size for size, _ in planned or recorded or [(0, "")]]
    return MessageRow(
        rank, direction, kind, axes, ranks, _level(plan, axes), of(len), of(lambda some: sum(size for size, _ in some)),
        of(lambda some: sum(moved_by(by, kind, ranks, size, ways) for size, by in some)),
        (seen[0], int(median(seen)), seen[-1]), _classes(seen),
        of(lambda some: ", ".join(sorted({by for _, by in some if by}))), content)


def _level(plan: Plan, axes: str) -> str:
    """The outermost level that a group along the axes crosses."""
    return next(filter(None, (level_of(one, axes) for one in _with_stages(plan))), "")


def _with_stages(plan: Plan) -> list[Plan]:
    """The plan, and those of its stages, whose meshes have axes of their own."""
    return [plan, *(stage.plan for stage in (plan.pipeline.stages if plan.pipeline else ()))]


def _classes(sizes: list[int]) -> tuple[int, ...]:
    """How many sizes lie in each class: up to each of `SIZES`, and above."""
    found = [0] * (len(SIZES) + 1)
    for size in sizes:
        found[bisect_left(SIZES, size)] += 1
    return tuple(found)
