"""Collectives against hand-computed seconds, sharing of links, measured tables, and errors."""

from dataclasses import replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from typing import Any

import pytest

from autoddl.core.errors import InputError
from autoddl.cost_models import (
    Cluster,
    Group,
    Level,
    collective,
    link_of,
    load_cluster,
    load_device,
    sent_bytes,
    wire_seconds,
)
from autoddl.cost_models.backends import BACKENDS, KINDS, Algorithm, Backend, Wire
from autoddl.cost_models.call import CollectiveCall
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.hierarchy import FORMULAS
from autoddl.cost_models.machine import Host

CLUSTERS = sorted((Path(__file__).parent.parent.parent / "examples" / "clusters").glob("*.yaml"))
IDEAL = Backend(algorithms={}, efficiency={}, startup=0.0, rails=True)
NODE = Level("node", 8, bandwidth=100e9, latency=2e-6)
NET = Level("net", 4, bandwidth=10e9, latency=10e-6)
INSIDE, WHOLE, ACROSS = Group(((8, 1),)), Group(((32, 1),)), Group(((4, 8),))


def cluster(*levels: Level, backend: str = "nccl") -> Cluster:
    return Cluster("test", load_device("A100-80GB"), levels, backend)


def seconds(name: str, kind: str, group: Group, nbytes: float, *levels: Level, rails: bool = True) -> float:
    """One formula alone, on links that reach what they promise."""
    call = CollectiveCall(replace(IDEAL, rails=rails), kind, crossings(cluster(*levels), group), nbytes)
    return FORMULAS[Algorithm(name)](call)


def test_bytes_sent() -> None:
    assert [sent_bytes(kind, 4, 100) for kind in KINDS] == [150, 75, 75, 75, 100, 100, 100, 100, 75]
    with pytest.raises(InputError, match="'all-reduse' is no collective; the collectives are all-reduce, all-gather"):
        sent_bytes("all-reduse", 4, 100)
    with pytest.raises(InputError, match="at least 0 bytes"):
        sent_bytes("all-reduce", 4, -1)


def test_bytes_keep_a_link_busy_for_less_than_a_collective_takes() -> None:
    """The rest are messages, and the host's part where that was timed, which is no part of it."""
    slow = cluster(Level("net", 4, bandwidth=25e6, latency=100e-6, efficiency=1.0), backend="gloo")
    timed = replace(slow, device=replace(slow.device, host=Host(0.0, 1e-3, 4e-9)))
    for place in (slow, timed):
        assert wire_seconds(place, "all-reduce", Group(((4, 1),)), 1e6) == pytest.approx(1.5e6 / 25e6, rel=1e-4)
    assert collective(timed, "all-reduce", Group(((4, 1),)), 4e4).host == pytest.approx(6e-3, rel=0.05)


def test_ring_inside_one_level() -> None:
    assert seconds("ring", "all-reduce", INSIDE, 8e8, NODE, NET) == pytest.approx(14 * 2e-6 + 14e8 / 100e9)
    for kind in ("all-gather", "reduce-scatter"):
        assert seconds("ring", kind, INSIDE, 8e8, NODE, NET) == pytest.approx(7 * 2e-6 + 7e8 / 100e9)


def test_a_ring_over_the_nodes_leaves_by_all_the_cards_of_a_node() -> None:
    """32 ranks: 28 hops inside and 3 across; 62 of 32 GB pass 8 cards of 10 GB/s."""
    expected = 2 * (28 * 2e-6 + 3 * 10e-6) + 2 * 31e9 / 80e9
    assert seconds("ring", "all-reduce", WHOLE, 32e9, NODE, NET) == pytest.approx(expected)


def test_without_rails_a_ring_leaves_by_one_card() -> None:
    expected = 2 * (28 * 2e-6 + 3 * 10e-6) + 2 * 31e9 / 10e9
    assert seconds("ring", "all-reduce", WHOLE, 32e9, NODE, NET, rails=False) == pytest.approx(expected)


def test_eight_groups_share_the_one_card_of_a_node() -> None:
    own = seconds("ring", "all-reduce", ACROSS, 4e8, NODE, NET)
    shared = seconds("ring", "all-reduce", ACROSS, 4e8, NODE, replace(NET, shared_by="node"))
    assert own == pytest.approx(6 * 10e-6 + 6e8 / 10e9)
    assert shared == pytest.approx(6 * 10e-6 + 8 * 6e8 / 10e9)


def test_one_group_with_eight_members_per_node_has_the_card_to_itself() -> None:
    expected = 2 * (28 * 2e-6 + 3 * 10e-6) + 2 * 31e9 / 10e9
    assert seconds("ring", "all-reduce", WHOLE, 32e9, NODE, replace(NET, shared_by="node")) == pytest.approx(expected)


def test_two_groups_with_four_members_per_node_halve_the_card() -> None:
    group = Group(((4, 8), (4, 2)))  # every second rank of every node
    inside, across = crossings(cluster(NODE, NET), group)
    assert (inside.ways, inside.members, across.ways, across.members) == (4, 1, 4, 4)
    expected = 2 * (12 * 2e-6 + 3 * 10e-6) + 2 * 2 * 15e9 / 10e9
    assert seconds("ring", "all-reduce", group, 16e9, NODE, replace(NET, shared_by="node")) == pytest.approx(expected)


def test_oversubscription_thins_the_trunk_and_not_the_card() -> None:
    """Racks of 4 servers, 4 to 1: one ring through the uplink has it to itself, four rings share it."""
    rack, hall = Level("rack", 4, 1e9, 0.0), Level("hall", 2, 1e9, 0.0, oversubscription=4)
    assert seconds("ring", "all-gather", Group(((8, 1),)), 8e9, rack, hall, rails=False) == pytest.approx(7.0)
    assert seconds("ring", "all-gather", Group(((2, 4),)), 8e9, rack, hall, rails=False) == pytest.approx(4 * 4.0)


def test_doubling_and_halving_count_their_steps() -> None:
    wire = 8e3 / 100e9
    for kind in ("all-gather", "reduce-scatter"):
        assert seconds("doubling", kind, INSIDE, 8e3, NODE, NET) == pytest.approx(3 * 2e-6 + 7 / 8 * wire)
        across = 24 / 32 * 8e3 / 10e9
        assert seconds("doubling", kind, WHOLE, 8e3, NODE, NET) == pytest.approx(
            3 * 2e-6 + 2 * 10e-6 + 7 / 32 * wire + across)
    assert seconds("doubling", "all-gather", Group(((6, 1),)), 8e3, replace(NODE, size=6)) == inf
    assert seconds("doubling", "all-reduce", INSIDE, 8e3, NODE) == inf


def test_all_reduce_by_doubling_sends_all_in_each_step_or_a_part_in_twice_as_many() -> None:
    wire = 8e3 / 100e9
    assert seconds("recursive doubling", "all-reduce", INSIDE, 8e3, NODE, NET) == pytest.approx(3 * (2e-6 + wire))
    assert seconds("halving-doubling", "all-reduce", INSIDE, 8e3, NODE, NET) == pytest.approx(2 * (6e-6 + 7 / 8 * wire))
    assert seconds("recursive doubling", "all-reduce", Group(((6, 1),)), 8e3, replace(NODE, size=6)) == inf


def test_bruck_takes_any_number() -> None:
    six, group = replace(NODE, size=6), Group(((6, 1),))
    assert seconds("bruck", "all-gather", group, 6e8, six) == pytest.approx(3 * 2e-6 + 5e8 / 100e9)
    assert seconds("bruck", "all-to-all", group, 6e8, six) == pytest.approx(3 * 2e-6 + 3 * 3e8 / 100e9)
    assert seconds("bruck", "broadcast", group, 6e8, six) == inf


def test_pat_is_bruck_between_hosts_with_one_rank_each() -> None:
    assert seconds("pat", "all-gather", ACROSS, 4e8, NODE, NET) == pytest.approx(2 * 10e-6 + 3e8 / 10e9)
    assert seconds("pat", "all-gather", WHOLE, 4e8, NODE, NET) == inf
    assert collective(cluster(NODE, NET), "all-gather", ACROSS, 1e3).algorithm == "pat"


def test_a_double_tree_sends_twice_the_buffer_up_and_down() -> None:
    """A chain of 8 inside, a tree of 4 across: 2 (7 + 2) hops; 8 cards carry 2 N."""
    expected = 2 * (7 * 2e-6 + 2 * 10e-6) + max(64e9 / 0.85 / 80e9, 64e9 / 0.85 / 100e9 )
    assert seconds("tree", "all-reduce", WHOLE, 32e9, NODE, NET) == pytest.approx(expected)
    assert seconds("tree", "all-gather", WHOLE, 32e9, NODE, NET) == inf


def test_a_pipeline_fills_in_the_root_of_latency_and_time() -> None:
    crossing = crossings(cluster(NODE), INSIDE)[0]
    call = CollectiveCall(IDEAL, "all-gather", (crossing,), 8e8, Wire("filling", 0.5, 0.8, fill=2.0))
    assert call.seconds(crossing, 8e8) == pytest.approx(0.01 + sqrt(2 * 2e-6 * 0.01))
    assert call.latency(crossing) == 1e-6


def test_two_level_is_a_reduce_scatter_a_reduction_across_and_a_gather() -> None:
    """The parts by halving and doubling: 3 hops inside, 2 across and 2 back."""
    inside, across = 3 * 2e-6 + 28e8 / 100e9, 4 * 10e-6 + 6 / 4 * 4e8 / 10e9
    assert seconds("two-level", "all-reduce", WHOLE, 32e8, NODE, NET) == pytest.approx(2 * inside + across)
    gather = 3 * 2e-6 + 28e8 / 100e9 + 2 * 10e-6 + 3e8 / 10e9
    assert seconds("two-level", "all-gather", WHOLE, 32e8, NODE, NET) == pytest.approx(gather)
    assert seconds("two-level", "all-reduce", INSIDE, 32e8, NODE, NET) == inf


def test_three_level_reduces_what_devices_nodes_and_racks_share() -> None:
    """2 x 2 x 2: N inside, N/2 across nodes, N/4 across racks; rings of two pass one hop each way."""
    pair, node, rack = Level("pair", 2, 100e9, 1e-6), Level("node", 2, 50e9, 2e-6), Level("rack", 2, 10e9, 4e-6)
    inside, middle, outer = 1e-6 + 4e9 / 100e9, 2e-6 + 2e9 / 50e9, 2 * 4e-6 + 2e9 / 10e9
    assert seconds("three-level", "all-reduce", Group(((8, 1),)), 8e9, pair, node, rack) == pytest.approx(
        2 * inside + 2 * middle + outer)
    assert seconds("three-level", "all-reduce", WHOLE, 8e9, NODE, NET) == inf


def test_a_tree_between_hosts_takes_what_the_switches_inside_reduced() -> None:
    """8 cards of 10 GB/s carry 2 N of a tree; inside 9/8 N at 0.85."""
    node = replace(NODE, in_network_reduction=True)
    latency = 2 * 2 * 10e-6
    across = 64e9 / 0.85 / 80e9
    inside = 2 * 2e-6 + 9 / 8 * 32e9 / 0.85 / 100e9
    assert seconds("in-network tree", "all-reduce", WHOLE, 32e9, node, NET) == pytest.approx(
        latency + max(inside, across))
    assert seconds("in-network tree", "all-reduce", ACROSS, 32e9, node, NET) == inf
    assert seconds("in-network tree", "all-reduce", WHOLE, 32e9, NODE, NET) == inf


def test_switches_that_reduce_pass_the_buffer_once() -> None:
    reducing = replace(NODE, in_network_reduction=True)
    assert seconds("in-network", "all-reduce", INSIDE, 8e8, reducing, NET) == pytest.approx(4e-6 + 9e8 / 0.85 / 100e9)
    assert seconds("in-network", "all-reduce", WHOLE, 8e8, reducing, NET) == inf
    assert collective(cluster(reducing, NET), "all-reduce", INSIDE, 1e9).algorithm == "in-network"


def test_pairwise_sends_across_what_the_outside_members_get() -> None:
    latency = 7 * 2e-6 + 24 * 10e-6
    assert seconds("pairwise", "all-to-all", WHOLE, 32e8, NODE, NET) == pytest.approx(latency + 24e8 / 10e9)
    shared = replace(NET, shared_by="node")
    assert seconds("pairwise", "all-to-all", WHOLE, 32e8, NODE, shared) == pytest.approx(latency + 8 * 24e8 / 10e9)


def test_binomial_doubles_who_has_it() -> None:
    assert seconds("binomial", "broadcast", ACROSS, 1e9, NODE, NET) == pytest.approx(2 * (10e-6 + 0.1))


def test_a_send_has_the_port_of_its_rank_or_shares_one() -> None:
    pair = Group(((2, 8),))
    assert seconds("send", "send", pair, 1e9, NODE, NET) == pytest.approx(10e-6 + 0.1)
    assert seconds("send", "send", pair, 1e9, NODE, replace(NET, shared_by="node")) == pytest.approx(10e-6 + 0.8)


@pytest.mark.parametrize(("keys", "reached", "latency"), [
    ({}, 1.0, 10e-6), ({"protocol": "rdma"}, 0.92, 10e-6), ({"protocol": "ipoib"}, 0.2, 25e-6),
    ({"protocol": "tcp"}, 0.9, 35e-6), ({"protocol": "tcp", "efficiency": 0.5}, 0.5, 35e-6),
])
def test_a_protocol_is_an_efficiency_and_a_latency(keys: dict[str, Any], reached: float, latency: float) -> None:
    net = replace(NET, **keys)
    assert seconds("ring", "all-gather", ACROSS, 4e9, NODE, net) == pytest.approx(3 * latency + 3e9 / reached / 10e9)


def test_gloo_has_rings_of_its_own_and_messages_for_what_these_do_badly() -> None:
    """Its reduce-scatter is an all-reduce and its all-to-all reaches 0.65: messages start later and reach more."""
    gloo, group = cluster(NET, backend="gloo"), Group(((4, 1),))

    def price(kind: str, nbytes: float) -> tuple[str, Any]:
        found = collective(gloo, kind, group, nbytes)
        return found.algorithm, pytest.approx(found.seconds - 100e-6)

    assert price("all-reduce", 4e8) == ("ring", 6 * 10e-6 + 6e8 / 10e9)
    assert price("all-gather", 4e8) == ("ring in turns", 3 * 10e-6 + 3e8 / 10e9)
    assert price("reduce-scatter", 4e8) == ("level rings", 1e-3 + 3 * 10e-6 + 3e8 / 10e9)
    assert price("reduce-scatter", 4e3) == ("as all-reduce", 6 * 10e-6 + 6e3 / 10e9)
    assert price("all-to-all", 4e8) == ("rounds", 3e-3 + 3 * 10e-6 + 3e8 / 10e9)
    assert price("all-to-all", 4e3) == ("pairwise", 3 * 10e-6 + 3e3 / 6.5e9)


def test_two_members_gather_in_turns_by_gloo_and_at_once_by_messages() -> None:
    gloo, pair = cluster(NET, backend="gloo"), Group(((2, 1),))
    assert collective(gloo, "all-gather", pair, 4e8).algorithm == "level rings"
    small = collective(gloo, "all-gather", pair, 4e4)
    assert small.algorithm == "ring in turns"
    assert small.seconds == pytest.approx(100e-6 + 1.45 * (10e-6 + 2e4 / 10e9))


def test_rings_in_levels_send_least_over_each_and_overlap() -> None:
    """16 in 2 nodes of 8 with one port each: 1 - 8/16 of N over it per phase and rank of a node, 15/16 inside."""
    shared = replace(NET, shared_by="node")
    nbytes, group = 16 * 2.0**20, Group(((2, 8), (8, 1)))
    crossed = crossings(cluster(NODE, shared, backend="gloo"), group)
    call = CollectiveCall(BACKENDS["gloo"], "all-reduce", crossed, nbytes)
    inside, across = 2 * 15 / 16 * nbytes / 100e9, 2 * (1 - 8 / 16) * nbytes / 10e9
    messages = 4 * 16 / 8  # chunks of 1 MiB in 4 pieces
    assert FORMULAS[Algorithm.LEVEL_RINGS](call) == pytest.approx(2 * (7 * 2e-6 + 10e-6) + across + inside / messages)


def test_the_cheapest_algorithm_depends_on_the_size() -> None:
    both = cluster(NODE, NET)
    names = [collective(both, "all-reduce", WHOLE, nbytes).algorithm for nbytes in (1e3, 1e6, 1e10)]
    assert names == ["tree", "tree", "ring"]
    price = collective(both, "all-gather", INSIDE, 8e9)
    assert (price.algorithm, price.level) == ("ring", "node")
    assert price.seconds == pytest.approx(35e-6 + 7 * 2e-6 + 7e9 / 80e9 + sqrt(3.5 * 2e-6 * 7e9 / 80e9))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_take_longer_and_nothing_is_free(path: Path, kind: str) -> None:
    some = load_cluster(path)
    prices = [collective(some, kind, Group(((some.size, 1),)), 4.0**power).seconds for power in range(18)]
    assert prices[0] >= BACKENDS[some.backend].startup > 0
    assert all(less < more for less, more in pairwise(prices))


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_and_thinning_never_help(kind: str) -> None:
    for worse in (replace(NET, shared_by="node"), replace(NET, oversubscription=2), replace(NET, latency=1e-3)):
        for group in (WHOLE, ACROSS, Group(((2, 8), (8, 1)))):
            good, bad = (collective(cluster(NODE, net), kind, group, 1e7).seconds for net in (NET, worse))
            assert good <= bad


@pytest.mark.parametrize(("ranks", "nbytes", "measured_us"), [
    (2, 2**20, 44.21), (4, 2**20, 51.4), (8, 2**20, 92.79),  # all-reduce on one NVSwitch (vTrain's table of NCCL)
    (2, 2**24, 131.9), (4, 2**24, 179.6), (8, 2**24, 232.4),
    (2, 2**30, 5442.8), (4, 2**30, 7259.4), (8, 2**30, 8193.0),
])
def test_measured_all_reduces_of_a100s_are_met_within_a_fifth(ranks: int, nbytes: int, measured_us: float) -> None:
    node = load_cluster(next(path for path in CLUSTERS if path.stem == "a100-4x8"))
    price = collective(node, "all-reduce", Group(((ranks, 1),)), nbytes)
    assert price.seconds * 1e6 == pytest.approx(measured_us, rel=0.2)


def test_link_of_names_the_outermost_level() -> None:
    both = cluster(NODE, NET)
    groups = (INSIDE, ACROSS, WHOLE, Group(((4, 2),)))
    assert [link_of(both, group) for group in groups] == ["node", "net", "net", "node"]


@pytest.mark.parametrize(("extents", "message"), [
    (((1, 1),), "one member"), (((64, 1),), "has 32 ranks"),
    (((3, 4),), "lies unevenly over the units of 8 ranks of level 'node'"),
])
def test_a_group_that_does_not_fit_is_refused(extents: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        collective(cluster(NODE, NET), "all-reduce", Group(extents), 1e6)


def test_a_group_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="2@1,2@1 is no group"):
        Group(((2, 1), (2, 1)))
    with pytest.raises(InputError, match="'reduce' is no collective"):
        collective(cluster(NODE, NET), "reduce", WHOLE, 1e6)
