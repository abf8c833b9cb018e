"""Algorithms that treat the levels of a network differently, and the table of all algorithms by name.

    level rings       = phases sum (w_i-1) a_i + max_i t_i + (sum t_i - max t_i) / messages,
                        t_i = wire_i(load_i phases (1/m_i - 1/n) N)
    two-level         = reduce-scatter(N) inside + collective(N / r) across + all-gather(N) inside
    three-level       = two-level, with the collective across itself two-level
    stages            = sum_i [(w_i-1) a_i hops_i + wire_i(load_i (w_i-1)/w_i N)]        an all-to-all, inside first
    in-network tree   = a tree between hosts over the sums of the switches inside: 2 sum a_i, no copy among the ranks

The symbols are those of `algorithms`; r are the members inside. A reduce-scatter has no all-gather inside, and an
all-gather no reduce-scatter.

In level rings, m_i members are behind a port of level i, and all that they send out passes there. In the innermost ring
a rank passes on n/w_1 chunks, each cut in pieces: these are the `messages`. They follow each other through the levels.
The slowest level idles only until the first message arrives and after the last one has left.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, prod
from types import MappingProxyType

from autoddl.cost_models.algorithms import (
    SEGMENT_BYTES,
    as_all_reduce,
    binomial,
    bruck,
    doubling,
    halving_doubling,
    in_network,
    pairwise,
    pat,
    recursive_doubling,
    ring,
    ring_in_turns,
    send,
    shift,
    tree,
    tree_latency,
)
from autoddl.cost_models.backends import TREE_EFFICIENCY, Algorithm
from autoddl.cost_models.call import CollectiveCall
from autoddl.cost_models.switches import switch_tree
from autoddl.cost_models.topologies import hops

__all__ = ["FORMULAS", "in_network_tree", "level_rings", "stages", "three_level", "two_level"]


def level_rings(call: CollectiveCall) -> float:
    """Rings in every level, pipelined, as `schedule.message_programs` sends them (Cho et al., BlueConnect 2019)."""
    n = call.size
    latency = sum((c.ways - 1) * call.latency(c) for c in call.crossings)
    times = [call.seconds(c, c.port_load("ring") * call.phases * (1 / c.members - 1 / n) * call.nbytes)
             for c in call.crossings]
    slowest = max(times)
    messages = max(1.0, call.nbytes / n / SEGMENT_BYTES) * n / call.crossings[0].ways
    return call.phases * latency + slowest + (sum(times) - slowest) / messages


def two_level(call: CollectiveCall) -> float:
    """Inside, across, inside, cut at the best level (Jia et al. 2018, section 3.2; Horovod's hierarchical form)."""
    return min((_split(call, at, _flat) for at in range(1, len(call.crossings))), default=inf)


def three_level(call: CollectiveCall) -> float:
    """Two-level, and two-level again across: devices, hosts and racks reduce in turn (Cho et al., BlueConnect 2019)."""
    return min((_split(call, at, two_level) for at in range(1, len(call.crossings) - 1)), default=inf)


def _split(call: CollectiveCall, at: int, outer: Callable[[CollectiveCall], float]) -> float:
    """Reduce-scatter over the first `at` crossings, `outer` over the others with N / r bytes, all-gather back."""
    if call.kind not in ("all-reduce", "all-gather", "reduce-scatter"):
        return inf
    inner = call.crossings[:at]
    share = prod(crossing.ways for crossing in inner)
    across = tuple(replace(crossing, members=crossing.members // share) for crossing in call.crossings[at:])
    seconds = outer(replace(call, crossings=across, nbytes=call.nbytes / share))
    for part in ("reduce-scatter", "all-gather"):
        if call.kind in (part, "all-reduce"):
            seconds += call.backend.startup + _flat(replace(call, kind=part, crossings=inner))
    return seconds


def _flat(call: CollectiveCall) -> float:
    """The least seconds of one stage by an algorithm without levels."""
    return min(stage(call) for stage in (ring, doubling, halving_doubling, in_network))


def in_network_tree(call: CollectiveCall) -> float:
    """NVLSTree: switches reduce inside hosts, trees of N / r bytes per rank join them, both pipelined (NCCL 2.18).

    2 sum a_i inside + tree latency across + max(wire inside, wire across).
    """
    inside = tuple(crossing for crossing in call.crossings if crossing.inside_host)
    across = call.crossings[len(inside):]
    if not inside or not across or call.kind != "all-reduce":
        return inf
    latency = tree_latency(replace(call, crossings=across))
    tree = max(call.seconds(c, call.rings(c) * 2 * call.nbytes / TREE_EFFICIENCY) for c in across)
    return latency + max(in_network(replace(call, crossings=inside)), tree)


def stages(call: CollectiveCall) -> float:
    """An all-to-all in every level in turn: w_i - 1 messages of N/w_i each, instead of one to every other member.

    Inside, a rank collects what its neighbours send to those who stand where it stands in other units. Sources: Jia et
    al. 2018; Nie et al. 2022, "HetuMoE". Far fewer messages cross the outer levels, as many bytes as before."""
    if call.kind != "all-to-all" or len(call.crossings) < 2:
        return inf
    return sum((c.ways - 1) * call.latency(c) * hops(c.level, c.ways, c.step)
               + call.seconds(c, c.port_load("all-to-all") * (c.ways - 1) / c.ways * call.nbytes)
               for c in call.crossings)


FORMULAS: Mapping[Algorithm, Callable[[CollectiveCall], float]] = MappingProxyType({
    Algorithm.RING: ring, Algorithm.RING_IN_TURNS: ring_in_turns, Algorithm.DOUBLING: doubling,
    Algorithm.HALVING_DOUBLING: halving_doubling, Algorithm.RECURSIVE_DOUBLING: recursive_doubling,
    Algorithm.BRUCK: bruck, Algorithm.PAT: pat, Algorithm.PAIRWISE: pairwise, Algorithm.ROUNDS: pairwise,
    Algorithm.STAGES: stages,
    Algorithm.BINOMIAL: binomial, Algorithm.TREE: tree, Algorithm.IN_NETWORK: in_network,
    Algorithm.IN_NETWORK_TREE: in_network_tree, Algorithm.LEVEL_RINGS: level_rings, Algorithm.TWO_LEVEL: two_level,
    Algorithm.THREE_LEVEL: three_level, Algorithm.SEND: send, Algorithm.SHIFT: shift,
    Algorithm.AS_ALL_REDUCE: as_all_reduce, Algorithm.SWITCH_TREE: switch_tree,
})
"""The seconds of each algorithm, without start-up."""
