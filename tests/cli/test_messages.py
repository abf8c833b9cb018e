"""What the shell answers to wrong input, kept as text files that a person can read through.

A file of `messages` has a paragraph for each command: the command behind `$`, then the message. The commands run in the
root of the repository, in a folder of their own for what they write. Where a message is meant to change, write all
anew with `PYTHONPATH=tests/support python tests/cli/test_messages.py` and read the difference.
"""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import shell

HERE = Path(__file__).parent / "messages"
FILES = sorted(HERE.glob("*.txt"))
MODEL = "tests/support/tiny.py:tiny"
PLACE = "examples/clusters/laptop.yaml"
"""What stands for `MODEL` and `CLUSTER` in a command; `PLAN` is a plan of them."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("messages") / "plan.json"
    assert shell("plan", MODEL, PLACE, "--set", "layers=1", "--max-axes", "1", "-o", str(made)).code == 0
    return made


def paragraphs(path: Path) -> Iterator[tuple[str, str]]:
    """The commands of a file, each with its message."""
    for part in path.read_text().split("\n\n"):
        command, _, message = part.strip().partition("\n")
        yield command.removeprefix("$ autoddl "), message


def answer(command: str, plan: Path) -> str:
    """What the shell says to a command, with the names of files as the command has them."""
    given = [{"MODEL": MODEL, "CLUSTER": PLACE, "PLAN": str(plan)}.get(word, word) for word in shlex.split(command)]
    said = shell(*given)
    assert said.code in (2, 3) and said.out == "", said
    message = said.err.strip()
    for name, file in (("PLAN", str(plan)), ("MODEL", MODEL), ("CLUSTER", PLACE)):
        message = message.replace(file, name)
    return message


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_messages_are_those_on_record(path: Path, plan: Path) -> None:
    for command, message in paragraphs(path):
        assert answer(command, plan) == message, command


def test_every_message_is_one_line_that_says_more_than_no() -> None:
    """The value, the rule and the way out do not fit in less than fifty letters."""
    for path in FILES:
        for command, message in paragraphs(path):
            assert message.startswith("autoddl: ") and "\n" not in message and len(message) >= 50, command


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    made = Path("/tmp") / f"messages-{os.getpid()}.json"
    shell("plan", MODEL, PLACE, "--set", "layers=1", "--max-axes", "1", "-o", str(made))
    for path in FILES:
        path.write_text("\n\n".join(f"$ autoddl {command}\n{answer(command, made)}"
                                    for command, _ in paragraphs(path)) + "\n")
    made.unlink()
