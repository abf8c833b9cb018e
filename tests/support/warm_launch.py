"""Ranks that `launch` forks, from what the tests have imported: as `forked_ranks`, without seconds for its imports.

    with warm_launch() as ranks:
        shell("run", ...)            their ids: ranks[0].pid; test_launch and the slow tests start real ones
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe

import pytest
import torch
from ranks import start_server

from autoddl.launch import forked_ranks

__all__ = ["WarmRank", "warm_launch"]


@dataclass(frozen=True)
class WarmRank:
    """One rank, with the methods of `subprocess.Popen` that a launcher needs."""

    pid: int

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return start_server().poll([self.pid])[0]

    def kill(self) -> None:
        start_server().end([self.pid], kill=True)

    def wait(self) -> int:
        return start_server().end([self.pid], kill=False)[0]


def _run(rank: int, environments: Sequence[Mapping[str, str]], module: str, arguments: Sequence[str], folder: str,
         _: object) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    forked_ranks._run(importlib.import_module(module).main, environments[rank], [module, *arguments], os.getppid())


@contextmanager
def warm_launch() -> Iterator[list[WarmRank]]:
    """While open, ranks are forks of the tests' own server; the list has those that were started."""
    ranks = list[WarmRank]()

    def start(environments: Sequence[Mapping[str, str]], command: Sequence[str], *_: object) -> list[WarmRank]:
        module, *arguments = command[3:]
        given = [dict(one) for one in environments], module, arguments, os.getcwd()
        pids = start_server().start(_run, given, [Pipe()[1] for _ in environments])
        ranks.extend(map(WarmRank, pids))
        return ranks[-len(pids):]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoddl.launch.launch.start_forks", start)
        yield ranks
