"""A switch adds sparse vectors: what leaves is as long as the union of the indices, whatever the order of arrival."""

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
from loopback_switches import TOKEN, Bytes, all_at_once, switch

from autoddl.core.errors import InputError
from autoddl.runtime.switches.aggregator import Address
from autoddl.runtime.switches.client import connect
from autoddl.runtime.switches.frames import Hello, Hop, SumRequest
from autoddl.runtime.switches.sparse import FrameReader, SparseRound, ranges_of, to_frames

Vector = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]
SIZE = 10_000
REQUEST = SumRequest("float32", "sparse sum", 700, SIZE)


def vector(child: int, count: int) -> Vector:
    drawing = np.random.default_rng(child)
    indices = np.sort(drawing.choice(SIZE, count, replace=False)).astype(np.uint32)
    return indices, drawing.standard_normal(count).astype(np.float32) * 100


def dense(every: list[Vector]) -> npt.NDArray[np.float32]:
    """By the definition: whole vectors, one child after the other."""
    total = np.zeros(SIZE, np.float32)
    for indices, values in every:
        whole = np.zeros(SIZE, np.float32)
        whole[indices] = values
        total = total + whole
    return total


def ask(address: Address, hops: list[Hop], given: Vector, into: list[npt.NDArray[np.uint32]]) -> Bytes:
    link = connect(address, Hello(TOKEN, b"s" * 16, tuple(hops)), 5)
    indices, values = link.reduce_sparse(*given, REQUEST, 5)
    link.close()
    into.append(indices)
    return values


def check(calls: list[Callable[[], Bytes]], union: list[npt.NDArray[np.uint32]], every: list[Vector]) -> None:
    found, truth = all_at_once(calls), np.unique(np.concatenate([indices for indices, _ in every]))
    assert all(np.array_equal(one, truth) for one in union) and len(union) == len(calls)
    for values in found:
        assert isinstance(values, np.ndarray) and len(values) == 4 * len(truth)
        assert np.array_equal(values.view(np.float32), dense(every)[truth])


@pytest.mark.parametrize("counts", [(100, 100, 100), (0, 7, SIZE), (0, 0, 1)])
def test_the_union_comes_back_with_the_sums_of_its_values(counts: tuple[int, ...]) -> None:
    every, union = [vector(child, count) for child, count in enumerate(counts)], list[npt.NDArray[np.uint32]]()
    with switch() as (address, _):
        check([partial(ask, address, [Hop(child, 3, 2)], one, union) for child, one in enumerate(every)], union, every)


def test_sparse_sums_pass_two_levels_of_switches() -> None:
    """Integers in float32, whose sums are the same in any order: a tree of two levels adds pairs first."""
    every = [(indices, np.round(values)) for indices, values in (vector(child, 500) for child in range(4))]
    union = list[npt.NDArray[np.uint32]]()
    with switch() as (top, _), switch(above=top) as (left, _), switch(above=top) as (right, _):
        check([partial(ask, left if child < 2 else right, [Hop(child % 2, 2, 3), Hop(child // 2, 2, 2)], one, union)
               for child, one in enumerate(every)], union, every)


def drawn(seed: int, data: list[bytes]) -> tuple[list[bytes], int]:
    """What every child gets where random children send and take random numbers of bytes; and most frames ahead."""
    drawing, now = random.Random(seed), SparseRound(REQUEST, len(data), 3)
    sent, got = [0] * len(data), [b""] * len(data)
    most = 0
    while not now.is_over:
        child = drawing.randrange(len(data))
        room, ready = now.room(child), now.leaving(child)
        if len(room) and drawing.random() < 0.5:
            count = drawing.randint(1, len(room))
            room[:count] = data[child][sent[child]:sent[child] + count]
            sent[child] += count
            now.arrived(child, count)
            most = max(most, sum(map(len, now._waiting)))
        elif len(ready):
            count = drawing.randint(1, len(ready))
            got[child] += bytes(ready[:count])
            now.left(child, count)
    return got, most


def test_twenty_random_orders_of_arrival_give_the_same_bytes_and_no_more_than_the_union() -> None:
    every = [vector(child, 400) for child in range(4)]
    data = [to_frames(*one, REQUEST) for one in every]
    union = len(np.unique(np.concatenate([indices for indices, _ in every])))
    assert all(len(one) == 400 * 8 + 4 * ranges_of(REQUEST) for one in data)
    first = drawn(0, data)[0][0]
    assert len(first) == union * 8 + 4 * ranges_of(REQUEST)
    for seed in range(20):
        got, most = drawn(seed, data)
        assert got == [first] * 4 and most <= 3 * 4


@pytest.mark.parametrize("indices", [[5, 5], [9, 3], [701]])
def test_indices_that_do_not_rise_in_their_range_are_refused(indices: list[int]) -> None:
    frame = len(indices).to_bytes(4, "big") + np.array(indices, np.uint32).tobytes() + bytes(4 * len(indices))
    reader = FrameReader(REQUEST, 4)
    reader.room()[:] = frame[:4]
    assert reader.arrived(4) is None
    reader.room()[:] = frame[4:]
    with pytest.raises(InputError, match="do not rise"):
        reader.arrived(len(frame) - 4)
    huge = FrameReader(REQUEST, 4)
    huge.room()[:] = b"\xff" * 4
    with pytest.raises(InputError, match="a frame of 4294967295 values"):
        huge.arrived(4)
