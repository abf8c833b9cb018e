"""Where stderr is a file a long command says now and then what it does; where it is memory it says nothing."""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from threading import enumerate as enumerate_threads
from time import sleep
from typing import TextIO

import pytest

from autoddl.cli import output
from autoddl.cli.output import progress_bar


@contextmanager
def written(path: Path) -> Iterator[TextIO]:
    with open(path, "w") as file, redirect_stderr(file):
        yield file


def test_lines_say_the_time_what_is_done_and_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output._Lines, "FIRST", 0.05)
    with written(tmp_path / "said"), progress_bar() as progress:
        progress("solved pair=2: best 3 ms, no plan below 2 ms, gap 33.33%", 1, 4)
        print("what the user's model prints")
        sleep(0.3)
    lines = (tmp_path / "said").read_text().splitlines()
    assert "what the user's model prints" in lines and not any("\r" in line for line in lines)
    told = [line for line in lines if line.startswith("autoddl: ")]
    assert len(told) > 1 and re.fullmatch(r"autoddl: \d+ s: solved pair=2: .*, gap 33.33% \(1 of 4\)", told[0])


def test_a_short_command_says_nothing_and_its_thread_ends(tmp_path: Path) -> None:
    with written(tmp_path / "said"), progress_bar() as progress:
        progress("quick", 0, 1)
    assert (tmp_path / "said").read_text() == ""
    with redirect_stderr(io.StringIO()) as said, progress_bar() as progress:
        progress("in memory", 0, 1)
    assert said.getvalue() == "" and not [one for one in enumerate_threads() if "progress" in one.name]
