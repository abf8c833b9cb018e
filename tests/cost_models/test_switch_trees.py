"""Switches that reduce: what a cluster file says of them, what their all-reduce takes, and where a ring replaces it."""

from math import inf

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, Group, collective, moved_by, parse_cluster
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.machine import Switch
from autoddl.cost_models.switches import blocks_under_way, why_not

TEXT = """name: switched
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 GFLOP/s}}
levels:
  - {name: node, size: 2, bandwidth: 1 GB/s, latency: 10 us}
  - {name: net, size: 4, bandwidth: 10 MB/s, latency: 100 us, reduces: %s}
"""
NET = Group(((4, 2),))
STARTUP = 100e-6


def cluster(reduces: str, **words: str) -> Cluster:
    text = TEXT % reduces
    for before, after in words.items():
        text = text.replace(before, after)
    return parse_cluster(text, "test")


@pytest.mark.parametrize(("written", "value"), [
    ("true", Switch()), ("{}", Switch()), ("{rate: 1 GB/s}", Switch(rate=1e9)),
    ("{block: 4 KiB, memory: 12345678 B}", Switch(block=4096.0, memory=12345678.0))])
def test_what_a_file_says_of_switches_round_trips(written: str, value: Switch) -> None:
    found = cluster(written)
    assert found.levels[1].reduces == value
    assert parse_cluster(found.to_yaml(), "again") == found and hash(found)


def test_switches_that_do_not_reduce_leave_the_fingerprint_as_it_was() -> None:
    plain = parse_cluster(TEXT.replace(", reduces: %s", ""), "test")
    assert cluster("false") == plain and cluster("false").fingerprint == plain.fingerprint
    assert cluster("true").fingerprint != plain.fingerprint


@pytest.mark.parametrize(("written", "said"), [
    ("{blok: 4 KiB}", "unknown key 'blok'; did you mean 'block'"), ("{block: 4096}", "4096 has no unit"),
    ("{rate: 3 GB}", "'GB' is no unit of bytes/s"), ("7", "7 does not say how the switches reduce: write true, or"),
    ("{memory: 0 B}", "greater than 0")])
def test_bad_words_about_switches_are_refused_with_the_way_out(written: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        cluster(written)


def test_a_tree_takes_one_pass_over_the_link_and_fills_block_by_block() -> None:
    found = collective(cluster("{block: 10 kB}"), "all-reduce", NET, 1e6)
    assert found.algorithm == "switch tree" and found.sent == 1e6
    # up and down: 2 latencies, the block that arrives first and the one that leaves last; the rest streams
    assert found.seconds == pytest.approx(STARTUP + 2 * (100e-6 + 1e-3) + (1e6 - 1e4) / 10e6)


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_the_gain_over_a_ring_grows_with_the_ranks_to_two(n: int) -> None:
    def seconds(reduces: str) -> float:
        machine = parse_cluster(TEXT.replace("size: 4", f"size: {n}") % reduces, "test")
        return collective(machine, "all-reduce", Group(((n, 2),)), 1e9).seconds

    assert seconds("false") / seconds("true") == pytest.approx(max(1.0, 2 * (n - 1) / n), rel=0.01)


def test_a_slow_adder_and_little_memory_bound_the_rate() -> None:
    """8 flows meet in the switch: those of 4 children in each of 2 groups."""
    slow = collective(cluster("{rate: 40 MB/s}"), "all-reduce", NET, 1e9)
    assert slow.algorithm == "ring"  # 8 N / 40 MB/s = 0.2 s a megabyte, and a ring takes 0.15
    assert collective(cluster("{rate: 64 MB/s}"), "all-reduce", NET, 1e9).seconds == pytest.approx(125, rel=0.01)
    few = cluster("{block: 1 kB, memory: 16 kB}")
    assert blocks_under_way(crossings(few, NET)[0]) == 2
    stays = 2 * (100e-6 + 1e3 / 10e6)
    assert 1e9 * stays / 2e3 > 1e9 * 1.5 / 10e6
    assert collective(few, "all-reduce", NET, 1e9).algorithm == "ring"


def test_without_room_or_on_a_level_that_does_not_reduce_the_reason_is_said() -> None:
    small, whole = cluster("{memory: 1 MB}"), Group(((8, 1),))
    assert why_not(crossings(small, NET)) == ("a switch of level net has 1 MB for blocks, and 2 of 65.5 kB from 8 "
                                              "children take 1.05 MB")
    assert collective(small, "all-reduce", NET, 1e9).algorithm == "ring"
    assert why_not(crossings(small, whole)) == "the switches of level node do not reduce"
    assert why_not(crossings(cluster("true"), NET)) == ""
    both = cluster("true", **{"latency: 10 us": "latency: 10 us, reduces: true", "100 us": "100 us, shared_by: node"})
    assert collective(both, "all-reduce", whole, 1e9).seconds == pytest.approx(100, rel=0.01)
    assert blocks_under_way(crossings(cluster("false"), NET)[0]) == 0


def test_only_an_all_reduce_is_added_up_in_switches() -> None:
    for kind in ("all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "shift"):
        assert collective(cluster("true"), kind, NET, 1e8) == collective(cluster("false"), kind, NET, 1e8)
    assert moved_by("switch tree", "all-reduce", 4, 100, ()) == 100
    assert moved_by("ring", "all-reduce", 4, 100, ()) == 150
    assert collective(cluster("true", **{"kind: cpu": "kind: gpu"}), "all-reduce", NET, 1e8).algorithm == "switch tree"
    assert Switch().memory == inf
