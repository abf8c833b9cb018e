"""Checks that marks are true, and deals tests to the workers of `make test`.

A test that starts a process and is not marked `ranks`, or makes a network namespace and is not marked `root`, fails:
so `pytest tests/<room> -m "not ranks"` starts none. The search's own forked workers do not count, they are a part of
planning.

Workers are dealt whole files (`--dist loadgroup`), so that what a file has captured or planned is made once. Tests that
measure time or shape links disturb each other: one worker runs them all, one after another (the group `clock`, to which
every `root` test belongs).
"""

import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import ranks

LONG = ("search", "explain", "planner", "operators", "schedule", "capture", "whole", "validation", "pricing")

_current: list[pytest.Item] = []
"""The test that runs or whose fixtures are being made; empty between tests."""


def _require(mark: str, what: str) -> None:
    if _current and _current[0].get_closest_marker(mark) is None:
        raise AssertionError(f"{_current[0].nodeid} starts {what} and is not marked `{mark}`")


def _checked(start: Callable[..., None]) -> Callable[..., None]:
    """Wrap Popen.__init__ so that it looks at the mark of the test first."""

    def checked_start(self: Any, args: str | Sequence[Any], *others: Any, **options: Any) -> None:
        words = [args] if isinstance(args, str) else [str(word) for word in args]
        _require("ranks", f"the process {' '.join(words)[:60]!r}")
        if words[:3] == ["ip", "netns", "add"]:
            _require("root", "a network namespace")
        start(self, args, *others, **options)

    return checked_start


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(subprocess.Popen, "__init__", _checked(subprocess.Popen.__init__))
    patch.setattr(ranks, "before_start", lambda world: _require("ranks", f"{world} ranks"))
    config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _current.append(item)
    try:
        return (yield)
    finally:
        _current.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal whole files to workers, which share what a file has made: those with ranks first, as they take longest."""
    if not config.getoption("loadgroup", False):
        return
    ranked = Counter(item.path for item in items if item.get_closest_marker("ranks"))
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.xdist_group("clock"))
        elif item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(config.rootpath))))
    items.sort(key=lambda item: (item.get_closest_marker("root") is None, -ranked[item.path], _turn(item)))


def _turn(item: pytest.Item) -> int:
    """The place of the test's room: those whose files take long come before the many that take a second."""
    room = item.path.parent.name
    return LONG.index(room) if room in LONG else len(LONG)
