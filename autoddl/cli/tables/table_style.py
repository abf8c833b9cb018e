"""The look that all tables for people share."""

from rich.table import Table

__all__ = ["columns", "grid", "layout_legend"]


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


def layout_legend() -> Table:
    """Returns what the letters of layouts mean, in three lines."""
    made = grid()
    made.add_row("layouts", "a letter for each mesh axis: S(0) split along dim 0, B the same on every rank, P parts of "
                            "a sum; stored is what a rank owns")
    made.add_row("sent", "S(0)->B all-gather, P->S(0) reduce-scatter, P->B all-reduce, S(0)->S(1) all-to-all; B->S(0) "
                         "cuts and sends nothing")
    made.add_row("split", "where a weight is stored split: O gathered once a step, OG its gradient summed in pieces "
                          "too, OGW gathered again for backward; - is whole")
    return made
