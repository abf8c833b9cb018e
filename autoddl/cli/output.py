"""Prints the answer of a verb on stdout and its progress on stderr: a bar on a terminal, else a line now and then."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import UnsupportedOperation
from threading import Event, Thread
from time import perf_counter
from typing import Any, TextIO

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


class _Lines:
    """progress(what, done, total) as lines, written by a thread; what is done may take longer than from line to line.

    A line is written straight to the file: the search forks, and no child may find the lock of a stream taken.
    """

    FIRST = 10.0
    """Seconds before the first line, and between lines at first; later a tenth of what has passed."""

    def __init__(self, file: int) -> None:
        self.file, self.began, self.said = file, perf_counter(), "starting"
        self.ended, self.thread = Event(), Thread(target=self._write, name="autoddl progress", daemon=True)
        self.thread.start()

    def __call__(self, what: str, done: int, total: int) -> None:
        self.said = f"{what} ({done} of {total})" if total > 1 else what

    def _write(self) -> None:
        wait = self.FIRST
        while not self.ended.wait(wait):
            passed = perf_counter() - self.began
            os.write(self.file, f"autoddl: {passed:.0f} s: {self.said}\n".encode())
            wait = max(self.FIRST, passed / 10)

    def end(self) -> None:
        """Ends the thread, which writes no more."""
        self.ended.set()
        self.thread.join()


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Progress on stderr while something long runs: a bar that is gone when it ends, or lines where stderr is a file.

    What is printed meanwhile, by the user's code, goes to stderr too.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar, redirect_stdout(sys.stderr):
            yield _Bar(bar)
        return
    number = _number(sys.stderr)
    lines = _Lines(number) if number is not None else None
    try:
        with redirect_stdout(sys.stderr):
            yield lines or (lambda *_: None)
    finally:
        if lines:
            lines.end()


def _number(stream: TextIO) -> int | None:
    """The number of the file behind a stream; None for one in memory."""
    try:
        return stream.fileno()
    except (OSError, UnsupportedOperation):
        return None
