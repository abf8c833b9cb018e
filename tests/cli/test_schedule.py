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


@pytest.mark.parametrize(("name", "said"), [("interleaved", "interleaved:2 for 2 chunks"),
                                            ("chimera", "chimera:1 for one pair of pipes")])
def test_a_schedule_that_lacks_a_number_says_which(name: str, said: str) -> None:
    answer = shell("schedule", name)
    assert answer.code == 2 and f"{name!r} is no schedule without a number: write {said}" in answer.err


def test_the_bubble_of_zero_bubble_is_none_where_ranks_end_one_after_another() -> None:
    """As Qi et al. 2024 count it: the longest rank's time from its first pass to its last, beside its work."""
    found = {name: json.loads(shell("schedule", name, "--json").out) for name in ("1f1b", "zb-h1", "zb-h2")}
    assert found["zb-h2"]["bubble_apart"] == 0 and found["zb-h2"]["bubble"] == pytest.approx(3 / 27)
    assert all(found[name]["bubble_apart"] == pytest.approx(found[name]["bubble"]) for name in ("1f1b", "zb-h1"))
    assert "bubble 11.1%; 0.0% where ranks begin and end one after another" in shell("schedule", "zb-h2").out
    assert shell("schedule", "zb-h1").out.endswith("bubble 11.1%\n")
