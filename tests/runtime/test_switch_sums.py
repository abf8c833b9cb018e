"""A switch adds up what its children send in one order, whatever the order in which it comes, or says why not."""

import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from loopback_switches import TOKEN, Bytes, all_at_once, reduce, switch

from autoddl.core.errors import InputError
from autoddl.cost_models import Group, parse_cluster
from autoddl.runtime.switches.frames import DTYPES, Hello, Hop, SumRequest
from autoddl.runtime.switches.offered import OfferedLevel, Switches, with_offered
from autoddl.runtime.switches.round import Round


def values(child: int, elements: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(child)
    if "float" in dtype:
        return (torch.randn(elements, generator=generator) * 100).to(getattr(torch, dtype))
    return torch.randint(0, 100, (elements,), generator=generator).to(getattr(torch, dtype))


def as_bytes(x: torch.Tensor) -> Bytes:
    found: Bytes = x.view(torch.uint8).numpy()
    return found


def in_order(every: list[torch.Tensor], how: str = "sum") -> torch.Tensor:
    """By the definition, one child after the other; floats of two bytes are rounded once."""
    dtype = every[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype
    total = every[0].to(wide)
    for one in every[1:]:
        total = total + one.to(wide) if how == "sum" else torch.maximum(total, one.to(wide))
    return total.to(dtype)


def drawn(seed: int, children: int, blocks: int, nbytes: int, block: int, data: list[Bytes]) -> list[Bytes]:
    """A sum without sockets, in which a random child sends or takes a random number of bytes, again and again."""
    drawing, found = random.Random(seed), [np.zeros(nbytes, np.uint8) for _ in data]
    now = Round(SumRequest("float32", "sum", block, nbytes), children, blocks)
    sent, got = [0] * children, [0] * children
    while not now.is_over:
        child = drawing.randrange(children)
        room, ready = now.room(child), now.leaving(child)
        if len(room) and drawing.random() < 0.5:
            count = drawing.randint(1, len(room))
            room[:count] = data[child][sent[child]:sent[child] + count].data
            sent[child] += count
            now.arrived(child, count)
            assert sent[child] <= min(got) // block * block + blocks * block
        elif len(ready):
            count = drawing.randint(1, len(ready))
            found[child][got[child]:got[child] + count] = np.frombuffer(ready[:count], np.uint8)
            got[child] += count
            now.left(child, count)
    return found


@pytest.mark.parametrize(("blocks", "elements"), [(2, 100), (3, 16), (32, 1001)])
def test_twenty_random_orders_of_arrival_give_the_same_bits(blocks: int, elements: int) -> None:
    every = [values(child, elements, "float32") for child in range(5)]
    truth = as_bytes(in_order(every))
    other = as_bytes(in_order(every[::-1]))
    assert not np.array_equal(truth, other)  # the order matters
    for seed in range(20):
        found = drawn(seed, 5, blocks, 4 * elements, 64, [as_bytes(one) for one in every])
        assert all(np.array_equal(one, truth) for one in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["sum", "max"])
def test_every_dtype_is_added_in_the_order_of_the_children(dtype: str, how: str) -> None:
    every = [values(child, 1001, dtype) for child in range(3)]
    request = SumRequest(dtype, how, 512, every[0].nbytes)
    with switch() as (address, _):
        found = all_at_once([partial(reduce, address, [Hop(child, 3, 4)], as_bytes(one), request)
                             for child, one in enumerate(every)])
    truth = as_bytes(in_order(every, how))
    assert all(isinstance(one, np.ndarray) and np.array_equal(one, truth) for one in found)


def test_infinities_and_nan_pass_and_bfloat16_rounds_to_even() -> None:
    every = [torch.tensor([1.0, float("inf"), float("nan"), 3e38, 1.00390625], dtype=torch.bfloat16),
             torch.tensor([0.00390625, 1.0, 1.0, 3e38, 0.01171875], dtype=torch.bfloat16)]
    with switch() as (address, _):
        found = all_at_once([partial(reduce, address, [Hop(child, 2, 2)], as_bytes(one),
                                     SumRequest("bfloat16", "sum", 8, 10)) for child, one in enumerate(every)])
    assert isinstance(found[0], np.ndarray)
    got = torch.from_numpy(found[0]).view(torch.bfloat16)
    torch.testing.assert_close(got, in_order(every), rtol=0, atol=0, equal_nan=True)


def test_sums_pass_two_levels_of_switches_and_come_down_again() -> None:
    """Two switches of two children each under one: (x_0 + x_1) + (x_2 + x_3)."""
    every = [values(child, 5000, "float32") for child in range(4)]
    request = SumRequest("float32", "sum", 1024, 20000)
    with switch() as (top, _), switch(above=top) as (left, _), switch(above=top) as (right, _):
        ways = [(left if child < 2 else right, [Hop(child % 2, 2, 4), Hop(child // 2, 2, 3)]) for child in range(4)]
        for _ in range(2):
            found = all_at_once([partial(reduce, *way, as_bytes(one), request, group=bytes([turn] * 16))
                                 for turn in range(1) for way, one in zip(ways, every, strict=True)])
            truth = as_bytes((every[0] + every[1]) + (every[2] + every[3]))
            assert all(isinstance(one, np.ndarray) and np.array_equal(one, truth) for one in found)


def test_who_does_not_know_the_token_is_not_served_and_harms_nobody() -> None:
    every = [values(child, 1000, "int32") for child in range(2)]
    request = SumRequest("int32", "sum", 512, 4000)
    with switch() as (address, _):
        with pytest.raises(RuntimeError, match=r"the token is not the launcher's|closed|reset"):
            reduce(address, [Hop(0, 2, 2)], as_bytes(every[0]), request, token=b"?" * 16)
        found = all_at_once([partial(reduce, address, [Hop(child, 2, 2)], as_bytes(one), request)
                             for child, one in enumerate(every)])
    assert isinstance(found[0], np.ndarray) and np.array_equal(found[0], as_bytes(every[0] + every[1]))


@pytest.mark.parametrize(("requests", "memory", "said"), [
    ((SumRequest("int32", "sum", 512, 4000), SumRequest("int32", "max", 512, 4000)), 1e9, "ask for different sums"),
    ((SumRequest("int32", "sum", 512, 4000),) * 2, 1000, "do not fit into 1000 bytes")])
def test_what_cannot_be_added_is_refused_on_every_child(requests: tuple[SumRequest, ...], memory: float, said: str
                                                        ) -> None:
    data = as_bytes(values(0, 1000, "int32"))
    with switch(memory) as (address, _):
        found = all_at_once([partial(reduce, address, [Hop(child, 2, 2)], data, request)
                             for child, request in enumerate(requests)])
    assert all(isinstance(one, str) for one in found)
    assert any(said in one for one in found if isinstance(one, str))


def test_a_switch_that_dies_in_the_middle_is_an_error_on_every_child_and_no_sum() -> None:
    """The third child never sends, so the others wait; then the switch is gone."""
    data, request = as_bytes(values(0, 100_000, "float32")), SumRequest("float32", "sum", 4096, 400_000)
    with switch() as (address, die):
        def kill() -> Bytes:
            time.sleep(0.3)
            die()
            return data

        began = time.monotonic()
        *found, _ = all_at_once([*(partial(reduce, address, [Hop(child, 3, 4)], data, request) for child in range(2)),
                                 kill])
    assert time.monotonic() - began < 3
    assert all(isinstance(one, str) and ("gone" in one or "reset" in one) for one in found)


def test_a_child_that_dies_takes_the_sum_with_it_and_one_that_sleeps_is_waited_for_in_vain() -> None:
    data, request = as_bytes(values(0, 250, "float32")), SumRequest("float32", "sum", 512, 1000)
    with switch() as (address, _):
        found = all_at_once([partial(reduce, address, [Hop(0, 2, 2)], data, request, 0.3)])
        assert isinstance(found[0], str) and "timed out" in found[0]
        found = all_at_once([partial(reduce, address, [Hop(child, 3, 2)], data, request, 0.2 + 5 * child,
                                     group=b"h" * 16) for child in range(2)])
    assert "timed out" in str(found[0]) and "gone" in str(found[1])


def test_frames_are_read_back_and_others_are_refused() -> None:
    hello = Hello(TOKEN, b"g" * 16, (Hop(1, 4, 32), Hop(0, 2, 3)))
    data = hello.to_bytes()
    assert Hello.parse(data) == hello and len(data) == hello.size
    assert all(Hello.parse(data[:k]) is None for k in range(len(data)))
    for wrong in (b"\x80\x04" + data[2:], data[:40] + b"\x00" + data[41:], data[:41] + b"\xff" * 6 + data[47:]):
        with pytest.raises(InputError):
            Hello.parse(wrong)
    request = SumRequest("bfloat16", "max", 4096, 2**40)
    assert SumRequest.parse(request.to_bytes()) == request
    with pytest.raises(InputError, match="no such request"):
        SumRequest.parse(b"\xff" + request.to_bytes()[1:])


LEVELS = """name: two
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}
levels:
  - {name: node, size: 1, bandwidth: 1 GB/s, latency: 1 us}
  - {name: rack, size: 2, bandwidth: 1 MB/s, latency: 1 us, reduces: true}
  - {name: spine, size: 3, bandwidth: 1 MB/s, latency: 1 us, reduces: true}
"""


def test_the_way_of_a_group_passes_the_switches_of_the_levels_that_it_crosses() -> None:
    cluster = parse_cluster(LEVELS, "two")
    racks = OfferedLevel("rack", 2, tuple(("10.0.0.1", port) for port in (1, 2, 3)))
    switches = Switches(TOKEN, (racks, OfferedLevel("spine", 6, (("10.0.0.2", 9),))))
    whole, across = Group(((6, 1),)), Group(((3, 2),))
    places = [switches.way(cluster, whole, range(6), rank, "now") for rank in range(6)]
    assert [address[1] for address, _ in places] == [1, 1, 2, 2, 3, 3]
    assert [[(hop.place, hop.children) for hop in hello.hops] for _, hello in places] == [
        [(rank % 2, 2), (rank // 2, 3)] for rank in range(6)]
    assert len({hello.group for _, hello in places}) == 1
    address, hello = switches.way(cluster, across, [1, 3, 5], 3, "now")
    assert address == ("10.0.0.2", 9) and [(hop.place, hop.children) for hop in hello.hops] == [(1, 3)]
    with pytest.raises(InputError, match="no switches of level rack"):
        Switches(TOKEN, switches.levels[1:]).way(cluster, whole, range(6), 0, "now")


def test_without_switches_a_cluster_is_one_whose_levels_do_not_reduce() -> None:
    cluster = parse_cluster(LEVELS, "two")
    plain = with_offered(cluster, None)
    assert [level.reduces for level in plain.levels] == [None] * 3
    some = with_offered(cluster, Switches(TOKEN, (OfferedLevel("spine", 6, ()),)))
    assert [level.reduces is not None for level in some.levels] == [False, False, True]
    assert with_offered(plain, None) is plain
