"""The look that all tables for people share."""

from rich.table import Table

__all__ = ["columns", "grid"]


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
