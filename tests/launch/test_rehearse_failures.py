"""A rehearsal whose rank dies or whose link is cut ends within its timeout, with a clear error; nothing of it stays."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from shaping import cluster, owned_by, shaping
from shell import FACTORY

from autoddl.api import plan
from autoddl.capture.factory import Factory
from autoddl.core.errors import MachineError
from autoddl.launch.rehearse import Rehearsal, rehearse
from autoddl.launch.run import TrainingResult

STEPS, TIMEOUT = 6, 5.0


def node() -> str:
    """The namespace of the last node."""
    return next(name for name in owned_by(os.getpid()) if name.endswith("-n3"))


def link(state: str) -> None:
    subprocess.run(("ip", "-n", node(), "link", "set", "eth0", state), check=True)


def rehearsed(folder: Path, disturb: Callable[[int], None]) -> Rehearsal:
    """Six steps on four nodes; `disturb` hears often how many are done."""
    made = Factory.parse(FACTORY, {"width": 256, "batch": 64})
    module, sample = made.build()
    path, found = folder / "plan.json", plan(module, cluster(1, 4, "5 MB/s"), sample, mesh="net=4")
    found.save(path)
    return rehearse(path, found, made, steps=STEPS, timeout=TIMEOUT, progress=lambda what, done, total: disturb(done))


@pytest.mark.slow
@shaping
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    def disturb(done: int) -> None:
        if done == 2:
            for pid in subprocess.run(("ip", "netns", "pids", node()), capture_output=True, text=True).stdout.split():
                os.kill(int(pid), signal.SIGKILL)

    with pytest.raises(MachineError, match="rank 3 was killed by SIGKILL; all ranks were ended"):
        rehearsed(tmp_path, disturb)
    assert not owned_by(os.getpid())


@shaping
@pytest.mark.slow
def test_a_link_cut_for_good_ends_it_within_the_timeout(tmp_path: Path) -> None:
    cut: list[float] = []

    def disturb(done: int) -> None:
        if done == 2 and not cut:
            link("down")
            cut.append(time.monotonic())

    with pytest.raises(MachineError, match=r"rank \d.*(?s:.*)"):
        rehearsed(tmp_path, disturb)
    assert time.monotonic() - cut[0] < 3 * TIMEOUT and not owned_by(os.getpid())


@shaping
@pytest.mark.slow
def test_a_link_cut_for_a_moment_only_costs_time(tmp_path: Path) -> None:
    cut: list[float] = []

    def disturb(done: int) -> None:
        if done == 2 and not cut:
            link("down")
            cut.append(time.monotonic())
        elif cut and len(cut) < 2 and time.monotonic() - cut[0] > 2:
            link("up")
            cut.append(time.monotonic())

    found = rehearsed(tmp_path, disturb)
    assert len(found.losses) == STEPS and found.collective_mismatches == 0
    assert max(found.step_seconds[1:]) > 1.5 and not owned_by(os.getpid())


def test_losses_that_are_no_numbers_are_json() -> None:
    losses = (1.0, math.nan, math.inf)
    for found in (TrainingResult(losses, 1.0, 1.0, 2), Rehearsal((1.0,), 1.0, losses, 0, (), 2)):
        text = json.dumps(found.to_json(), allow_nan=False)
        assert json.loads(text)["losses"] == [1.0, None, None]
