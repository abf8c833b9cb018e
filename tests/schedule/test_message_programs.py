"""Messages make every collective: simulated among ranks that are only lists, for all shapes of levels."""

from collections import Counter
from math import prod

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Group, collective, moved_by, parse_cluster
from autoddl.schedule.message_programs import chosen_ways, leaving_fraction, message_program

WAYS = [(2,), (3,), (4,), (2, 2), (3, 2), (2, 4), (4, 2), (2, 2, 2), (2, 3, 2)]
Held = dict[tuple[int, int], Counter[tuple[int, int, int]]]


def simulated(kind: str, ways: tuple[int, ...], pieces: int) -> list[Held]:
    """Per rank, what it knows of each piece: a bag of (contributor, chunk, piece). Fails where ranks wait in a circle.

    A message is told from others between the same ranks by its number, and a rank goes on as far as it can.
    """
    n = prod(ways)
    programs = [message_program(kind, ways, rank, pieces) for rank in range(n)]
    source: list[Held] = [{(c, p): Counter([(rank, c, p)]) for c in range(n) for p in range(pieces)}
                          for rank in range(n)]
    target: list[Held] = [{} for _ in range(n)] if kind == "all-to-all" else source
    wires: dict[tuple[int, int, int], Counter[tuple[int, int, int]]] = {}
    done, sent = [0] * n, [0] * n
    progress = True
    while progress:
        progress = False
        for rank, one in enumerate(programs):
            while sent[rank] < len(one.sends) and one.sends[sent[rank]].after <= done[rank]:
                send = one.sends[sent[rank]]
                assert (rank, send.to, send.number) not in wires
                wires[rank, send.to, send.number] = Counter(source[rank][send.chunk, send.piece])
                sent[rank], progress = sent[rank] + 1, True
            receive = one.receives[min(done[rank], len(one.receives) - 1)]
            if done[rank] < len(one.receives) and (receive.of, rank, receive.number) in wires:
                came, at = wires.pop((receive.of, rank, receive.number)), (receive.chunk, receive.piece)
                target[rank][at] = came + source[rank][at] if receive.add else came
                done[rank], progress = done[rank] + 1, True
    assert all(done[r] == len(p.receives) and sent[r] == len(p.sends) for r, p in enumerate(programs))
    assert not wires
    return target


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_collective_arrives(ways: tuple[int, ...], pieces: int) -> None:
    n = prod(ways)
    units = [(c, p) for c in range(n) for p in range(pieces)]

    def total(c: int, p: int) -> Counter[tuple[int, int, int]]:
        return Counter((rank, c, p) for rank in range(n))

    for held in simulated("all-reduce", ways, pieces):
        assert all(held[unit] == total(*unit) for unit in units)
    for rank, held in enumerate(simulated("reduce-scatter", ways, pieces)):
        assert all(held[rank, p] == total(rank, p) for p in range(pieces))
    for held in simulated("all-gather", ways, pieces):
        assert all(held[c, p] == Counter([(c, c, p)]) for c, p in units)
    for rank, held in enumerate(simulated("all-to-all", ways, pieces)):
        assert held == {(c, p): Counter([(c, rank, p)]) for c, p in units if c != rank}


@pytest.mark.parametrize("ways", WAYS)
def test_no_collective_sends_more_than_the_bound(ways: tuple[int, ...]) -> None:
    """(n-1)/n of the buffer per rank and phase, and (1/m - 1/n) of it out of a unit of m members."""
    n = prod(ways)
    for kind, phases in (("all-reduce", 2), ("all-gather", 1), ("reduce-scatter", 1)):
        for rank in range(n):
            assert leaving_fraction(kind, ways, rank, frozenset(range(n))) == pytest.approx(phases * (n - 1) / n)
            for level in range(1, len(ways)):
                m = prod(ways[:level])
                outside = frozenset(other for other in range(n) if other // m != rank // m)
                assert leaving_fraction(kind, ways, rank, outside) == pytest.approx(phases * (1 / m - 1 / n))


@pytest.mark.parametrize("ways", WAYS)
def test_an_all_to_all_in_stages_sends_as_much_over_the_outermost_level_as_any(ways: tuple[int, ...]) -> None:
    """Inside it sends more: w - 1 parts of w in every level."""
    n, m = prod(ways), prod(ways[:-1])
    for rank in range(n):
        outside = frozenset(other for other in range(n) if other // m != rank // m)
        assert leaving_fraction("all-to-all", ways, rank, outside) == pytest.approx((n - m) / n)
        assert leaving_fraction("all-to-all", ways, rank, frozenset(range(n))) == pytest.approx(
            moved_by("stages", "all-to-all", n, 1.0, ways))


@pytest.mark.parametrize("ways", [(), (2, 2)])
def test_stages_over_unknown_levels_have_no_bytes(ways: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"all-to-all of 8 ranks in stages over levels of (unknown|2x2) members"):
        moved_by("stages", "all-to-all", 8, 1.0, ways)


def test_an_all_to_all_of_few_bytes_over_long_ways_goes_in_stages() -> None:
    """Two messages over 20 ms instead of eight: 2 x 4 ranks, of which one pairs with four others outside."""
    text = TEXT.replace("size: 2, bandwidth: 1 GB/s", "size: 4, bandwidth: 1 GB/s").replace("100 us", "20 ms")
    wide, whole = parse_cluster(text, "test"), Group(((2, 4), (4, 1)))
    assert chosen_ways(wide, "all-to-all", whole, 4_000) == (4, 2)
    price = collective(wide, "all-to-all", whole, 4_000)
    assert price.algorithm == "stages" and price.sent == pytest.approx((3 / 4 + 1 / 2) * 4_000)
    assert price.seconds < 0.4 * collective(wide, "exchange", whole, 4_000).seconds
    assert chosen_ways(wide, "all-to-all", whole, 400_000_000) != (4, 2)


def test_what_is_no_collective_is_refused() -> None:
    with pytest.raises(InputError, match="'broadcast' is made of no messages"):
        message_program("broadcast", (2,), 0)


TEXT = ("name: slow\ndevice: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}\n"
        "levels:\n  - {name: node, size: 2, bandwidth: 1 GB/s, latency: 60 us}\n"
        "  - {name: net, size: 2, bandwidth: 25 MB/s, latency: 100 us, shared_by: node}\n")


def test_the_model_chooses_by_size_group_and_backend() -> None:
    gloo, nccl = parse_cluster(TEXT, "test"), parse_cluster(TEXT + "backend: nccl\n", "test")
    whole, across = Group(((2, 2), (2, 1))), Group(((2, 2),))
    assert [chosen_ways(gloo, kind, whole, 8_000_000) for kind in ("all-reduce", "reduce-scatter", "all-to-all")] == [
        (2, 2), (2, 2), (4,)]
    assert chosen_ways(gloo, "all-reduce", whole, 4_000) is None
    assert chosen_ways(gloo, "all-reduce", across, 8_000_000) is None
    assert chosen_ways(gloo, "reduce-scatter", across, 8_000_000) == (2,)
    assert all(chosen_ways(nccl, kind, whole, 8_000_000) is None
               for kind in ("all-reduce", "reduce-scatter", "all-to-all"))
    assert collective(gloo, "all-reduce", whole, 8_000_000).algorithm == "level rings"
