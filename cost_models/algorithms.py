"""Seconds of each algorithm on a hierarchical network: one function per line.

n members, N bytes of full buffer; at level i r_i members per child, w_i ways, latency a_i, and wire_i(v) seconds that v
bytes take through a port (`call`); h_i hops of a ring across level i (sum h_i = n - 1), phases = 2 for all-reduce and 1
otherwise, flows_i rings on a port, crowd_i even loads on a port (`groups`):

    V                  = phases (n-1)/n N                                bytes that a rank sends in a ring
    ring               = phases sum h_i a_i + max_i wire_i(flows_i V)
    ring in turns      = the same, of two members 1 + PAIR_WAIT times as long
    doubling           = sum log2(w_i) a_i + wire_i(crowd_i (w_i-1) r_i/n N)      gather by doubling, scatter by halving
    halving-doubling   = that twice                                      all-reduce: scatter, then gather
    recursive doubling = sum log2(w_i) (a_i + wire_i(crowd_i N))         all-reduce that exchanges everything
    bruck              = sum ceil(log2 w_i) a_i + wire_i(crowd_i (w_i-1) r_i/n N)     any n; all-to-all sends N/2 a step
    pairwise           = sum (w_i-1) r_i a_i hops_i + max_i wire_i(crowd_i (n-r_i)/n N)
    rounds             = the same, in turns that keep peers from meeting at one receiver
    binomial           = sum ceil(log2 w_i) (a_i + wire_i(flows_i N))
    tree               = 2 sum depth_i a_i + max_i wire_i(flows_i 2 N) / tree efficiency
    in-network         = 2 sum a_i + max_i wire_i(flows_i (n+1)/n N) / in-network efficiency
    send               = a hops + wire(crowd N)                          at the outermost level crossed

The hierarchical forms are in `hierarchy`.
"""

from dataclasses import replace
from math import ceil, inf, log2

from autoddl.cost_models.backends import TREE_EFFICIENCY
from autoddl.cost_models.call import CollectiveCall
from autoddl.cost_models.call import sent_bytes as sent
from autoddl.cost_models.groups import Crossing
from autoddl.cost_models.topologies import hops

__all__ = [
    "as_all_reduce",
    "binomial",
    "bruck",
    "doubling",
    "halving_doubling",
    "in_network",
    "message_pieces",
    "pairwise",
    "recursive_doubling",
    "ring",
    "ring_in_turns",
    "send",
    "tree",
    "tree_latency",
]

_GATHERS = ("all-gather", "reduce-scatter")

SEGMENT_BYTES, MOST_MESSAGES = 2**18, 2**14
"""A message of the runtime: 256 KiB to 1 MiB fill a link; smaller ones cost calls, larger ones wait to arrive whole.
A buffer is cut in no more than so many."""

PAIR_WAIT = 0.45
"""1.0 to 2.0 times the seconds of the bytes, at random; the median of gloo's all-gather in a pair, 4 and 8 MB."""


def message_pieces(n: int, nbytes: float) -> int:
    """Messages in which a chunk, one n-th of the full buffer, is sent."""
    return max(1, min(ceil(nbytes / n / SEGMENT_BYTES), MOST_MESSAGES // n))


def ring(call: CollectiveCall) -> float:
    """phases sum h_i a_i + max_i wire_i(flows_i V); every phase passes each hop once (Patarasuk & Yuan 2009)."""
    latency, beyond = 0.0, call.size
    for crossing in call.crossings:
        steps, beyond = beyond - beyond // crossing.ways, beyond // crossing.ways
        latency += steps * call.latency(crossing)
    volume = sent(call.kind, call.size, call.nbytes)
    return call.phases * latency + max(call.seconds(c, c.flows(call.backend.rails) * volume) for c in call.crossings)


def ring_in_turns(call: CollectiveCall) -> float:
    """A ring whose members send before they post a receive: two share one connection, on which the word that one is
    ready waits behind what it sends."""
    return ring(call) * (1 + PAIR_WAIT * (call.size == 2))


def _piece(call: CollectiveCall, crossing: Crossing) -> float:
    """(w_i-1) r_i/n N, r_i/n N in the first step and doubling; each of the crowd on the port sends that."""
    return crossing.crowd("all-to-all") * (crossing.ways - 1) * crossing.members / call.size * call.nbytes


def doubling(call: CollectiveCall) -> float:
    """sum log2(w_i) a_i + wire_i(...): recursive doubling gather, halving scatter (Thakur et al. 2005, 4.1 and 4.4)."""
    if call.kind not in _GATHERS or not log2(call.size).is_integer():
        return inf
    return sum(log2(c.ways) * call.latency(c) + call.seconds(c, _piece(call, c)) for c in call.crossings)


def halving_doubling(call: CollectiveCall) -> float:
    """Reduce-scatter by halving, all-gather by doubling (Rabenseifner 2004; Thakur et al. 2005, section 4.5)."""
    return sum(doubling(replace(call, kind=kind)) for kind in _GATHERS) if call.kind == "all-reduce" else inf


def recursive_doubling(call: CollectiveCall) -> float:
    """sum log2(w_i) (a_i + wire_i(crowd_i N)): all exchange all of it in each step (Thakur et al. 2005, 4.5)."""
    if call.kind != "all-reduce" or not log2(call.size).is_integer():
        return inf
    return sum(log2(c.ways) * (call.latency(c) + call.seconds(c, c.crowd("all-to-all") * call.nbytes))
               for c in call.crossings)


def bruck(call: CollectiveCall) -> float:
    """ceil(log2 w_i) steps whatever n is (Bruck et al. 1997), level by level; an all-to-all sends half of N in each.

    NCCL's PAT (2.23) has the steps of the gather, for groups with one rank per host.
    """
    seconds = 0.0
    for c in call.crossings:
        steps = ceil(log2(c.ways))
        volume = steps * c.crowd("all-to-all") * call.nbytes / 2 if call.kind == "all-to-all" else _piece(call, c)
        seconds += steps * call.latency(c) + call.seconds(c, volume)
    return seconds if call.kind in (*_GATHERS, "all-to-all") else inf


def pat(call: CollectiveCall) -> float:
    """bruck, where NCCL has it: between hosts, of which each holds one member (NCCL 2.23 release notes)."""
    return inf if any(crossing.inside_host for crossing in call.crossings) else bruck(call)


def pairwise(call: CollectiveCall) -> float:
    """One message of N/n to every peer (Thakur et al. 2005, section 4.3): all but r_i of n leave a child of level i."""
    latency = sum((c.ways - 1) * c.members * call.latency(c) * hops(c.level, c.ways, c.step) for c in call.crossings)
    return latency + max(call.seconds(c, c.crowd("all-to-all") * (call.size - c.members) / call.size * call.nbytes)
                         for c in call.crossings)


def binomial(call: CollectiveCall) -> float:
    """sum ceil(log2 w_i) (a_i + wire_i(flows_i N)): each step doubles who has it (Thakur et al. 2005, section 4.2)."""
    return sum(ceil(log2(c.ways)) * (call.latency(c) + call.seconds(c, c.flows(call.backend.rails) * call.nbytes))
               for c in call.crossings)


def tree_latency(call: CollectiveCall) -> float:
    """2 sum depth_i a_i: up and down; a chain inside a host and a binary tree between (NCCL, tuning.cc)."""
    return 2 * sum((c.ways - 1 if c.inside_host else ceil(log2(c.ways))) * call.latency(c) for c in call.crossings)


def tree(call: CollectiveCall) -> float:
    """Two trees with half of N each, every rank a leaf of one: 2 N in and out (Sanders, Speck & Traeff 2009)."""
    if call.kind != "all-reduce":
        return inf
    return tree_latency(call) + max(call.seconds(c, c.flows(call.backend.rails) * 2 * call.nbytes / TREE_EFFICIENCY)
                                    for c in call.crossings)


def in_network(call: CollectiveCall) -> float:
    """2 sum a_i + max_i wire_i(flows_i (n+1)/n N): up once, reduced, and down once, if all switches crossed can.

    nccl-tests, PERFORMANCE.md; the switch reaches `in_network_efficiency` of the link.
    """
    if call.kind != "all-reduce" or not all(crossing.level.in_network_reduction for crossing in call.crossings):
        return inf
    volume = (call.size + 1) / call.size * call.nbytes
    return 2 * sum(call.latency(c) for c in call.crossings) + max(
        call.seconds(c, c.flows(call.backend.rails) * volume / c.level.in_network_efficiency) for c in call.crossings)


def send(call: CollectiveCall) -> float:
    """a hops + wire(crowd N): every rank sends its message at once, over the outermost level (Hockney 1994)."""
    c = call.crossings[-1]
    return call.latency(c) * hops(c.level, c.ways, c.step) + call.seconds(c, c.crowd("send") * call.nbytes)


def as_all_reduce(call: CollectiveCall) -> float:
    """A reduce-scatter that is an all-reduce of which each rank keeps its part."""
    return ring(replace(call, kind="all-reduce"))
