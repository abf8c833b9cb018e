"""The verb `schedule`: who runs which pass of which stage, and when."""

import json
from pathlib import Path

import pytest
from shell import shell

from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_schedules import generate


def test_a_schedule_is_shown_with_its_time_line() -> None:
    said = shell("schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert said.code == 0 and said.err == ""
    assert "microbatches 2, stages on ranks 0 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n" in said.out
    assert "rank 1 |     1F0 1B0---- 1F1 1B1----\n" in said.out and said.out.endswith("9 units, bubble 33.3%\n")


def test_its_json_can_be_read_back() -> None:
    data = json.loads(shell("schedule", "interleaved:2", "--ranks", "4", "--microbatches", "8", "--json").out)
    assert Schedule.parse(data["schedule"]) == generate("interleaved:2", 4, 8) and data["stages"] == 8
    assert data["bubble"] == pytest.approx(3 / (2 * 8 + 3))


def test_what_is_shown_first_is_a_file_of_a_schedule(tmp_path: Path) -> None:
    said = shell("schedule", "zb-h1", "--ranks", "2", "--microbatches", "3").out
    (tmp_path / "own.txt").write_text(said.split("\n\n")[0])
    again = shell("schedule", str(tmp_path / "own.txt"))
    assert (again.code, again.out) == (0, said)
    assert shell("schedule", str(tmp_path / "own.txt"), "--ranks", "4").code == 2


def test_an_unknown_schedule_names_the_known_ones() -> None:
    said = shell("schedule", "2f2b")
    assert said.code == 2 and "'2f2b' is no schedule; write gpipe, 1f1b" in said.err
