"""What the tables for people share: their look, and layers folded into ranges (`layers.0-31.q_proj`)."""

import re
from collections.abc import Sequence

from rich.table import Table

__all__ = ["NUMBER", "columns", "grid", "ranges"]

NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a dotted name that is a number."""


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def grid() -> Table:
    """Two columns without a head: what, and its value."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bold", no_wrap=True)
    made.add_column()
    return made


def columns(*names: str) -> Table:
    """Columns with heads and no lines."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        made.add_column(name, overflow="fold")
    return made
