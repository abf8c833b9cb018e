"""The races and the long run of the benchmarks: what did not run, or learnt something else, is not counted."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent.parent / "examples" / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a file of the benchmarks by its name."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(FOLDER.parent)):
            del sys.modules[name]


def played(rivals: ModuleType, monkeypatch: pytest.MonkeyPatch, starts: list[list[Any]]) -> list[Any]:
    """What comes of contests that end so, start by start."""
    turns = iter(starts)
    monkeypatch.setattr(rivals, "load_cluster", lambda path: SimpleNamespace(size=2))
    monkeypatch.setattr(rivals, "rivals", lambda model, size: [SimpleNamespace(name="ddp")])
    monkeypatch.setattr(rivals, "contest", lambda *_: next(turns))
    found: list[Any] = rivals.played("gpt", Path("cluster.yaml"), SimpleNamespace(save=lambda path: None), 2,
                                   len(starts), 0)
    return found


def test_a_rival_that_fails_in_a_later_start_does_not_count(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = benchmarks("rivals")
    ours = rivals.Turns("ours", "ours", (1.0, 2.0), (3.0, 2.0))
    ddp = rivals.Turns("ddp", "ddp", (2.0, 4.0), (3.0, 2.0))
    lost = rivals.Turns("ddp", "ddp", (), (3.0,), failure="RuntimeError: a link is down")
    both = played(rivals, monkeypatch, [[ours, ddp], [ours, ddp]])
    assert [one.seconds for one in both] == [(1.0, 2.0) * 2, (2.0, 4.0) * 2] and "0.500" in rivals.row(both, ("ddp",))
    found = played(rivals, monkeypatch, [[ours, ddp], [ours, lost]])
    assert found[1].failure == lost.failure and rivals.row(found, ("ddp",)) == "none ran"


def test_other_losses_in_any_start_end_a_race(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rivals = benchmarks("rivals")
    ours = rivals.Turns("ours", "ours", (1.0, 2.0), (3.0, 2.0))
    right, wrong = (rivals.Turns("ddp", "ddp", (2.0, 4.0), (3.0, last)) for last in (2.0, 2.1))
    for starts in ([[ours, wrong]], [[ours, right], [ours, wrong]]):
        with pytest.raises(SystemExit, match="the losses of ddp are not ours"):
            played(rivals, monkeypatch, starts)
    lost = rivals.Turns("ours", "ours", (), (), failure="MachineError: a peer died")
    with pytest.raises(SystemExit, match="gpt: ours did not run: MachineError: a peer died"):
        played(rivals, monkeypatch, [[ours, right], [lost, right]])


def test_a_soak_without_a_second_checkpoint_is_refused(benchmarks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    soak = benchmarks("soak")
    monkeypatch.setattr(soak, "model", lambda: pytest.fail("it has begun"))
    for steps in (1, 20, 2 * soak.EVERY - 1):
        with pytest.raises(SystemExit, match=rf"^{steps} steps have no second .*: take {2 * soak.EVERY} or more$"):
            soak.main(steps)
