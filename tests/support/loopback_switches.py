"""Switches that reduce, as threads of the test on loopback, and children that send to them."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

import numpy as np
import numpy.typing as npt

from autoddl.runtime.switches.aggregator import Address, Aggregator
from autoddl.runtime.switches.client import connect
from autoddl.runtime.switches.frames import Hello, Hop, SumRequest

TOKEN = bytes(range(16))
Bytes = npt.NDArray[np.uint8]


@contextmanager
def switch(memory: float = inf, above: Address | None = None) -> Iterator[tuple[Address, Callable[[], None]]]:
    """A running switch: its address, and what makes it die."""
    found = Aggregator("127.0.0.1", TOKEN, memory, above)
    reads, writes = os.pipe()
    thread = threading.Thread(target=found.serve, args=(reads,))
    thread.start()

    def stop() -> None:
        if thread.is_alive():
            os.write(writes, b"x")
            thread.join()

    try:
        yield found.address, stop
    finally:
        stop()
        os.close(reads)
        os.close(writes)


def reduce(address: Address, hops: Sequence[Hop], data: Bytes, request: SumRequest, seconds: float = 5.0,
           token: bytes = TOKEN, group: bytes = b"g" * 16) -> Bytes:
    """What one child gets for its data."""
    link, found = connect(address, Hello(token, group, tuple(hops)), seconds), data.copy()
    try:
        link.reduce(found.data, request, seconds)
    finally:
        link.close()
    return found


def all_at_once(calls: Sequence[Callable[[], Bytes]]) -> list[Bytes | str]:
    """What every call returns, each in a thread of its own; the text of the error where one fails."""
    found: list[Bytes | str] = [""] * len(calls)

    def run(k: int) -> None:
        try:
            found[k] = calls[k]()
        except RuntimeError as error:
            found[k] = str(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
