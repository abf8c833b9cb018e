"""Tables of what a plan's ranks send: by pass, kind and group, by size of the buffers, and by level of the cluster."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType

from autoddl.cli.tables.table_style import columns
from autoddl.cost_models import show_bytes

if TYPE_CHECKING:
    from autoddl.core.plan import Plan
    from autoddl.core.record import Record
    from autoddl.explain.message_sizes import LevelBytes, MessageRow

__all__ = ["twice", "with_messages"]


def twice(values: tuple[Any, Any], shown: Callable[[Any], str]) -> str:
    """Writes what was planned, and what was recorded where that is known and differs."""
    planned, recorded = values
    same = recorded is None or recorded == planned
    return shown(planned) if same else f"{shown(planned)}, {shown(recorded)} recorded"


def with_messages(table: RenderableType, data: dict[str, Any], plan: "Plan", record: "Record | None" = None
                  ) -> tuple[RenderableType, dict[str, Any]]:
    """The table and the data of a plan, with what its ranks send; beside what the record says they sent."""
    from autoddl.explain.message_sizes import SIZES, level_bytes, message_rows
    rows = message_rows(plan, record)
    levels = level_bytes(rows)
    return (Group(table, "", _sent(rows), "", _classes(rows, SIZES), "", _levels(levels)),
            data | {"messages": [asdict(row) for row in rows], "up_to_bytes": SIZES,
                    "levels": [asdict(one) for one in levels]})


def _sent(rows: Sequence["MessageRow"]) -> RenderableType:
    table = columns("rank", "pass", "sent", "by", "axes", "ranks", "outermost level", "count", "bytes",
                    "moved by the rank", "least, median, largest")
    for row in rows:
        table.add_row(str(row.rank), row.direction, _kind(row), twice(row.algorithm, str) or "message", row.axes,
                      str(row.ranks), row.level or "none",
                      twice(row.count, str), twice(row.nbytes, show_bytes), twice(row.moved, show_bytes),
                      ", ".join(map(show_bytes, row.sizes)))
    return table


def _kind(row: "MessageRow") -> str:
    """The kind of collective, or what is sent to another stage."""
    return f"{row.kind} {row.of}".rstrip()


def _classes(rows: Sequence["MessageRow"], sizes: Sequence[int]) -> RenderableType:
    table = columns("rank", "pass", "sent", "axes", *(f"to {show_bytes(size)}" for size in sizes), "above")
    for row in rows:
        table.add_row(str(row.rank), row.direction, _kind(row), row.axes, *(str(count or "") for count in row.classes))
    return table


def _levels(levels: Sequence["LevelBytes"]) -> RenderableType:
    table = columns("rank", "outermost level of the group", "moved by the rank")
    for one in levels:
        table.add_row(str(one.rank), one.level or "none", twice(one.moved, show_bytes))
    return table
