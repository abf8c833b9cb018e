"""Checks that marks are true.

A test that starts a process and is not marked `ranks`, or makes a network namespace and is not marked `root`, fails:
so `pytest tests/<room> -m "not ranks"` starts none. The search's own forked workers do not count, they are a part of
planning.

`make test` runs the tests that shape links first and alone: they measure time, and would disturb each other. The others
are dealt to two workers by whole files (`--dist loadfile`), so that what a file has captured or planned is made once.

Tests outside of `tests/capture` share what they and their ranks capture of equal models (`captures`).
"""

import gc
import subprocess
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import ranks
from captures import kept

from autoddl.capture.capture import capture

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


def _may_share() -> bool:
    return bool(_current) and _current[0].path.parent.name != "capture"


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all that tests import is there
    patch = pytest.MonkeyPatch()
    patch.setattr(subprocess.Popen, "__init__", _checked(subprocess.Popen.__init__))
    patch.setattr(ranks, "before_start", lambda world: _require("ranks", f"{world} ranks"))
    patch.setattr(ranks, "may_share", _may_share)
    patch.setattr("autoddl.capture.capture.capture", kept(
        capture, lambda: _may_share() or ranks.others.ask is not None, ranks.others))
    config.add_cleanup(patch.undo)


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage need not look at it again, nor be as many.

    Tracing a model makes many objects that live on, which the usual threshold of 700 looks at again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*ranks.GARBAGE)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Fork off what ranks are forked from before any test has done anything."""
    if any(item.get_closest_marker("ranks") for item in session.items):
        ranks.start_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    _current.append(item)
    try:
        return (yield)
    finally:
        _current.clear()
