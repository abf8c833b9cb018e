"""Folds dotted names that differ in numbers into one name, `layers.0-31.q_proj`, and finds names near another."""

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
    """Folded name -> the names behind it, in order: those that differ in their numbers only."""
    return {name: tuple(members) for name, _, members in fold_rows((name, None) for name in names)}


def fold_rows(rows: Iterable[tuple[str, Value]]) -> list[tuple[str, Value, list[str]]]:
    """Rows of equal value whose names differ in their numbers only, as one row that stands for exactly these names.

    The first part of the names is folded first, then the next. So `a.0.0`, `a.0.1`, `a.1.0`, `a.1.1` and `a.1.2` are
    `a.0-1.0-1` and `a.1.2`. Returns (name with the numbers as ranges, value, names), rows and names in the
    order in which they first appear.
    """
    once = dict.fromkeys(rows)
    order = {name: i for i, (name, _) in enumerate(once)}
    found = [(tuple(name.split(".")), value, [name]) for name, value in once]
    for place in range(max((len(parts) for parts, *_ in found), default=0)):
        found = _folded_at(place, found)
    return [(".".join(parts), value, sorted(names, key=order.__getitem__)) for parts, value, names in found]


def _folded_at(place: int, rows: list[tuple[tuple[str, ...], Value, list[str]]]
               ) -> list[tuple[tuple[str, ...], Value, list[str]]]:
    """Rows that are alike but for a number at one place of their names, as one."""
    groups: dict[tuple[tuple[str, ...], Value], dict[str, list[str]]] = {}
    for parts, value, names in rows:
        number = parts[place] if len(parts) > place and parts[place].isdecimal() else ""
        pattern = (*parts[:place], "", *parts[place + 1:]) if number else parts
        groups.setdefault((pattern, value), {})[number] = names
    return [((*pattern[:place], number_ranges([int(n) for n in members]), *pattern[place + 1:])
             if "" not in members else pattern, value, [name for names in members.values() for name in names])
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
