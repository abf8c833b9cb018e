"""Folds dotted names that differ in one number into one name, `layers.0-31.q_proj`, and finds names near another."""

import re
from collections.abc import Hashable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

__all__ = ["fold_names", "fold_rows", "is_factory", "near_files", "near_names", "number_ranges"]

Value = TypeVar("Value", bound=Hashable)

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a part of a dotted name that is a number."""


def fold_names(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Folded name -> the names behind it, in order: those that differ in their first number only."""
    return {name: tuple(members) for name, _, members in fold_rows((name, None) for name in names)}


def fold_rows(rows: Iterable[tuple[str, Value]]) -> list[tuple[str, Value, list[str]]]:
    """Rows of equal value whose names differ in their first number only, as one row.

    Returns (name with the numbers as ranges, value, names) in the order in which the rows first appear.
    """
    groups: dict[tuple[str, Value], dict[str, int | None]] = {}
    for name, value in rows:
        match = _NUMBER.search(name)
        pattern = f"{name[:match.start()]}\0{name[match.end():]}" if match else name
        groups.setdefault((pattern, value), {})[name] = int(match[0]) if match else None
    return [(pattern.replace("\0", number_ranges([n for n in members.values() if n is not None])), value, list(members))
            for (pattern, value), members in groups.items()]


def number_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def near_files(path: Path, rest: str) -> str:
    """`near_names` of a missing file among those of its folder with the same suffix."""
    try:
        there = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    except OSError:
        return rest
    return near_names(path.name, there, rest)


def near_names(asked: str, known: Iterable[str], rest: str, most: int = 3) -> str:
    """Asks whether the names nearest to an unknown one were meant, and goes on with `rest`: what there is.

    To a pattern with `*` names are compared with `*` in place of their numbers, so that a pattern is suggested.
    """
    as_pattern = any(sign in asked for sign in "*?[")
    names = dict.fromkeys(_NUMBER.sub("*", name) if as_pattern else name for name in known if name)
    lower = {name.lower(): name for name in reversed(names)}
    found = [repr(lower[name]) for name in get_close_matches(asked.lower(), lower, n=most, cutoff=0.6)]
    if not found:
        return rest
    meant = " or ".join(filter(None, (", ".join(found[:-1]), found[-1])))
    return f"did you mean {meant}? {rest[:1].upper()}{rest[1:]}".rstrip()


def is_factory(text: str) -> bool:
    """Whether a text looks like `FILE.py:NAME`, or like a file of Python alone."""
    return text.endswith(".py") or ".py:" in text
