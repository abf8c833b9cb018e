"""Prints the answer of a verb on stdout and its progress on stderr."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from autoddl.cli.tables import plan_tables

__all__ = ["progress_bar", "show"]


def show(table: RenderableType, data: Any, as_json: bool) -> None:
    """Print the table, or `data` as one JSON document."""
    if as_json:
        print(json.dumps(data, ensure_ascii=False))
    else:
        print(plan_tables.text(table))


class _Bar:
    """progress(what, done, total) as one line."""

    def __init__(self, bar: Progress) -> None:
        self.bar, self.task = bar, bar.add_task("starting", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        self.bar.update(self.task, description=what, completed=done, total=total)


@contextmanager
def progress_bar() -> Iterator[_Bar]:
    """Progress on stderr while something long runs; gone when it ends, silent where stderr is no terminal. What is
    printed meanwhile, by the user's code, goes there too."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())
    with (Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
          redirect_stdout(sys.stderr)):
        yield _Bar(bar)
