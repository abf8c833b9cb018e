"""Run a function on several gloo processes from a test.

    results = on_ranks(4, function, *args)        function(*args) on every rank; its results in the order of ranks

Everything is pickled by value, tensors too: nothing is shared between processes.

    @shared                                       a function whose results are kept, by its arguments; what the
    def captured(name: str) -> Captured: ...      test's process has made is not made again by ranks

A model that a rank captures is captured by one process: the test's, or the first rank that comes to it (`captures`).

Importing torch costs seconds, so ranks are forked from one server (`fork_server`) that has imported what they need and
that has done nothing else: `start_server()` forks it off once the tests are collected. A pool of each size is kept
until the test run ends. `function` is named at the top of a module. An error on any rank is raised here with the rank's
traceback, and the pool is started anew.
"""

import atexit
import gc
import importlib
import os
import pickle
import tempfile
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial, wraps
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from captures import MOST, Others
from fork_server import ForkServer
from pickled import pickled

from autoddl.capture.capture import Captured

__all__ = ["GARBAGE", "RankError", "before_start", "forget", "may_share", "on_ranks", "others", "shared",
           "start_server"]


GARBAGE = (20_000, 20, 50)
"""How much is made between collections of garbage, as `gc.set_threshold` takes it: tests trace and plan an eighth
faster."""


class RankError(AssertionError):
    """What went wrong on a rank."""


P = ParamSpec("P")
R = TypeVar("R")
Key = tuple[str, str, tuple[Hashable, ...]]
"""Module and name of a function, and its arguments."""

_made: dict[Key, Any] = {}
"""What shared functions have returned."""
others = Others()
"""What this process has captured; on a rank it asks the test's for what it has not."""
_sent: "OrderedDict[bytes, bytes]" = OrderedDict()
"""Captures that ranks have made or asked for, by digest, pickled."""


def shared(function: Callable[P, R]) -> Callable[P, R]:
    """Keep what `function` returns, and send it to the ranks that run functions of its module."""
    @wraps(function)
    def kept(*args: P.args, **kwargs: P.kwargs) -> R:
        key = function.__module__, function.__qualname__, (*args, *sorted(kwargs.items()))
        if key not in _made:
            _made[key] = function(*args, **kwargs)
        found: R = _made[key]
        return found

    return kept


def _ask(pipe: "Connection[Any, Any]", key: bytes, make: Callable[[], Captured]) -> Captured:
    """On a rank: what another process has captured, or what `make` captures, which the others are then sent."""
    pipe.send_bytes(pickle.dumps(("asks", key)))
    if there := pipe.recv_bytes():
        found: Captured = pickle.loads(there)
        return found
    ask, others.ask, made = others.ask, None, b""
    try:
        found = make()
        with suppress(Exception):  # what does not pickle stays here
            made = pickled(found)
        return found
    finally:
        others.ask = ask
        pipe.send_bytes(pickle.dumps(("made", (key, made))))


def _serve(rank: int, world: int, store: str, pipe: "Connection[Any, Any]") -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is not looked at again in every collection
    gc.set_threshold(*GARBAGE)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    while (task := pickle.loads(pipe.recv_bytes())) is not None:
        function, args, made, shares = task
        _made.update(made)
        others.ask = partial(_ask, pipe) if shares else None
        try:
            answer = pickle.dumps(("did", function(*args)))
        except BaseException:
            answer = pickle.dumps(("failed", traceback.format_exc()))
        pipe.send_bytes(answer)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()
    pipe.send_bytes(pickle.dumps(("did", None)))
    os._exit(0)


IMPORTED = ["pytest", "torch._dynamo", "torch.export._trace", "torch.fx.experimental.validator",
            "transformers.models.t5.modeling_t5", "autoddl.planner.assemble", "autoddl.runtime.checkpoints.checkpoint",
            "autoddl.launch.worker"]
"""What most ranks need; a module that is not there is left out."""


@cache
def start_server() -> ForkServer:
    """The process that ranks are forks of, forked off at the first call."""
    for name in IMPORTED:
        importlib.import_module(name)
    others.know_rules()
    return ForkServer()


class _Pool:
    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._has = set[Key]()
        pairs = [Pipe() for _ in range(world)]
        self.pipes = [here for here, _ in pairs]
        self._pids = start_server().start(_serve, (world, f"{self._folder.name}/store"), [there for _, there in pairs])

    def run(self, function: Callable[..., Any] | None, args: tuple[Any, ...], seconds: float) -> list[Any]:
        made = {key: value for key, value in _made.items()
                if function is not None and key[0] == function.__module__ and key not in self._has}
        self._has |= made.keys()
        task = pickled(None if function is None else (function, args, made, may_share()))
        for pipe in self.pipes:
            pipe.send_bytes(task)
        results: dict[int, Any] = {}
        makers: dict[bytes, list[int]] = {}
        while len(results) < len(self.pipes):
            left = [rank for rank in range(len(self.pipes)) if rank not in results]
            ready = wait([self.pipes[rank] for rank in left], seconds)
            if not ready:
                raise RankError(f"ranks {left} did not answer within {seconds} s")
            for rank in (rank for rank in left if self.pipes[rank] in ready):
                try:
                    kind, said = pickle.loads(self.pipes[rank].recv_bytes())
                except EOFError:
                    (code,) = start_server().end(self._pids[rank:rank + 1], kill=True)
                    raise RankError(f"rank {rank} ended with {code}") from None
                if kind == "failed":
                    raise RankError(f"rank {rank} of {len(self.pipes)}:\n{said}")
                if kind == "did":
                    results[rank] = said
                elif kind == "asks":
                    self._answer(makers, said, [rank])
                else:
                    key, _sent[key] = said
                    self._answer(makers, key, makers.pop(key))
        return [results[rank] for rank in range(len(self.pipes))]

    def _answer(self, makers: dict[bytes, list[int]], key: bytes, ranks: list[int]) -> None:
        """Sends ranks a capture. Where there is none yet, the first of them makes it, for which the others wait."""
        if not _sent.get(key) and key in others.found:
            with suppress(Exception):
                _sent[key] = pickled(others.found[key])
        while len(_sent) > MOST:
            _sent.popitem(last=False)
        for rank in ranks:
            there = _sent.get(key, b"")
            if not there and key in makers:
                makers[key].append(rank)
                continue
            if not there:
                makers[key] = []
            self.pipes[rank].send_bytes(there)

    def close(self, kill: bool) -> None:
        if not kill:
            self.run(None, (), 60)
        start_server().end(self._pids, kill)
        for pipe in self.pipes:
            pipe.close()
        self._folder.cleanup()


_pools: dict[int, _Pool] = {}


def before_start(world: int) -> None:
    """Called before every use of `world` ranks, warm or not: conftest.py replaces it to check the test's mark."""


def may_share() -> bool:
    """Whether ranks may share what they capture: conftest.py replaces it, tests of captures do not."""
    return False


def on_ranks(world: int, function: Callable[..., Any], *args: Any, seconds: float = 300) -> list[Any]:
    """`function(*args)` on `world` ranks of one initialised gloo group; what each returned."""
    before_start(world)
    if world not in _pools:
        _pools[world] = _Pool(world)
    try:
        return _pools[world].run(function, args, seconds)
    except BaseException:
        _pools.pop(world).close(kill=True)
        raise


def forget(world: int) -> None:
    """End the pool of `world` ranks, whose groups a test has broken."""
    if world in _pools:
        _pools.pop(world).close(kill=True)


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close(kill=False)
