"""Seconds of each algorithm of a collective on a hierarchical network: one function per line.

The symbols. `i` runs over the levels that the group crosses:

    n, N         members of the group, bytes of the full buffer
    r_i, w_i     members of the group in each child of level i, and the number of such children
    a_i          latency of level i, in seconds
    wire_i(v)    seconds that v bytes take through a port of level i (`call`)
    h_i          hops of a ring across level i; sum h_i = n - 1
    phases       2 for an all-reduce, 1 otherwise
    rings_i      rings that share a port of level i (`Crossing.port_rings`)
    load_i       senders that share a port of level i in an even exchange (`Crossing.port_load`)
    V            phases (n-1)/n N, the bytes that a rank sends in a ring

The algorithms:

    ring               = phases sum h_i a_i + max_i wire_i(rings_i V)
    ring in turns      = ring, with two members 1 + PAIR_WAIT times as long
    doubling           = sum log2(w_i) a_i + wire_i(load_i (w_i-1) r_i/n N)       gather by doubling, scatter by halving
    halving-doubling   = doubling twice                                  all-reduce: scatter, then gather
    recursive doubling = sum log2(w_i) (a_i + wire_i(load_i N))          all-reduce that exchanges everything
    bruck              = sum ceil(log2 w_i) a_i + wire_i(load_i (w_i-1) r_i/n N)      any n; all-to-all sends N/2 a step
    pairwise           = sum (w_i-1) r_i a_i hops_i + max_i wire_i(load_i (n-r_i)/n N)
    rounds             = pairwise, in rounds in which every receiver has one sender
    binomial           = sum ceil(log2 w_i) (a_i + wire_i(rings_i N))
    tree               = 2 sum depth_i a_i + max_i wire_i(rings_i 2 N) / tree efficiency
    in-network         = 2 sum a_i + max_i wire_i(rings_i (n+1)/n N) / in-network efficiency
    send               = a hops + wire(load N)                           at the outermost level crossed
    shift              = max_i (a_i hops_i + wire_i(rings_i N))          one step of a ring; so a halo of N bytes

Hierarchical forms are in `hierarchy`. A function returns inf for a kind of collective that its algorithm cannot do.
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
    "shift",
    "tree",
    "tree_latency",
]

_GATHERS = ("all-gather", "reduce-scatter")

SEGMENT_BYTES = 2**18
"""Bytes of a message of the runtime. 256 KiB to 1 MiB fill a link: smaller messages cost calls, and larger ones are
passed on late, because they must arrive whole first."""
MOST_MESSAGES = 2**14
"""Messages into which a buffer is cut at most."""

PAIR_WAIT = 0.45
"""Time that gloo's all-gather of a pair loses, as a part of the seconds of its bytes: the median of 4 and 8 MB. It
takes 1.0 to 2.0 times those seconds, at random."""


def message_pieces(n: int, nbytes: float) -> int:
    """Number of messages in which a chunk, one n-th of the full buffer of `nbytes`, is sent."""
    return max(1, min(ceil(nbytes / n / SEGMENT_BYTES), MOST_MESSAGES // n))


def ring(call: CollectiveCall) -> float:
    """phases sum h_i a_i + max_i wire_i(rings_i V); every phase passes each hop once (Patarasuk & Yuan 2009)."""
    latency, beyond = 0.0, call.size
    for crossing in call.crossings:
        steps, beyond = beyond - beyond // crossing.ways, beyond // crossing.ways
        latency += steps * call.latency(crossing)
    volume = sent(call.kind, call.size, call.nbytes)
    return call.phases * latency + max(call.seconds(c, call.rings(c) * volume) for c in call.crossings)


def ring_in_turns(call: CollectiveCall) -> float:
    """A ring whose members send before they post a receive.

    Two members share one connection. On it, the message that one of them is ready to receive waits behind the data that
    it sends.
    """
    return ring(call) * (1 + PAIR_WAIT * (call.size == 2))


def _piece(call: CollectiveCall, crossing: Crossing) -> float:
    """load_i (w_i-1) r_i/n N: a rank sends r_i/n N bytes in its first step across level i, then doubles them."""
    return crossing.port_load("all-to-all") * (crossing.ways - 1) * crossing.members / call.size * call.nbytes


def doubling(call: CollectiveCall) -> float:
    """Recursive doubling of an all-gather, halving of a reduce-scatter (Thakur et al. 2005, sections 4.1 and 4.4)."""
    if call.kind not in _GATHERS or not log2(call.size).is_integer():
        return inf
    return sum(log2(c.ways) * call.latency(c) + call.seconds(c, _piece(call, c)) for c in call.crossings)


def halving_doubling(call: CollectiveCall) -> float:
    """Reduce-scatter by halving, all-gather by doubling (Rabenseifner 2004; Thakur et al. 2005, section 4.5)."""
    return sum(doubling(replace(call, kind=kind)) for kind in _GATHERS) if call.kind == "all-reduce" else inf


def recursive_doubling(call: CollectiveCall) -> float:
    """sum log2(w_i) (a_i + wire_i(load_i N)): pairs exchange all N bytes in each step (Thakur et al. 2005, 4.5)."""
    if call.kind != "all-reduce" or not log2(call.size).is_integer():
        return inf
    return sum(log2(c.ways) * (call.latency(c) + call.seconds(c, c.port_load("all-to-all") * call.nbytes))
               for c in call.crossings)


def bruck(call: CollectiveCall) -> float:
    """ceil(log2 w_i) steps for any n, level by level (Bruck et al. 1997); an all-to-all sends N/2 in each step."""
    seconds = 0.0
    for c in call.crossings:
        steps = ceil(log2(c.ways))
        volume = steps * c.port_load("all-to-all") * call.nbytes / 2 if call.kind == "all-to-all" else _piece(call, c)
        seconds += steps * call.latency(c) + call.seconds(c, volume)
    return seconds if call.kind in (*_GATHERS, "all-to-all") else inf


def pat(call: CollectiveCall) -> float:
    """bruck, where NCCL has it: for groups with one member per host (PAT, release notes of NCCL 2.23)."""
    return inf if any(crossing.inside_host for crossing in call.crossings) else bruck(call)


def pairwise(call: CollectiveCall) -> float:
    """One message of N/n to every peer; n - r_i of them leave a child of level i (Thakur et al. 2005, section 4.3)."""
    latency = sum((c.ways - 1) * c.members * call.latency(c) * hops(c.level, c.ways, c.step) for c in call.crossings)
    return latency + max(call.seconds(c, c.port_load("all-to-all") * (call.size - c.members) / call.size * call.nbytes)
                         for c in call.crossings)


def binomial(call: CollectiveCall) -> float:
    """sum ceil(log2 w_i) (a_i + wire_i(rings_i N)): each step doubles the holders (Thakur et al. 2005, section 4.2)."""
    return sum(ceil(log2(c.ways)) * (call.latency(c) + call.seconds(c, call.rings(c) * call.nbytes))
               for c in call.crossings)


def tree_latency(call: CollectiveCall) -> float:
    """2 sum depth_i a_i, up and down: a chain inside a host, a binary tree between hosts (NCCL, tuning.cc)."""
    return 2 * sum((c.ways - 1 if c.inside_host else ceil(log2(c.ways))) * call.latency(c) for c in call.crossings)


def tree(call: CollectiveCall) -> float:
    """Two trees of N/2 bytes, every rank a leaf of one: 2 N bytes in and out (Sanders, Speck & Traeff 2009)."""
    if call.kind != "all-reduce":
        return inf
    return tree_latency(call) + max(call.seconds(c, call.rings(c) * 2 * call.nbytes / TREE_EFFICIENCY)
                                    for c in call.crossings)


def in_network(call: CollectiveCall) -> float:
    """2 sum a_i + max_i wire_i(rings_i (n+1)/n N): up once, reduced in the switches, and down once.

    All levels crossed must have such switches; they reach `in_network_efficiency` of the link (nccl-tests,
    PERFORMANCE.md).
    """
    if call.kind != "all-reduce" or not all(crossing.level.in_network_reduction for crossing in call.crossings):
        return inf
    volume = (call.size + 1) / call.size * call.nbytes
    return 2 * sum(call.latency(c) for c in call.crossings) + max(
        call.seconds(c, call.rings(c) * volume / c.level.in_network_efficiency) for c in call.crossings)


def send(call: CollectiveCall) -> float:
    """a hops + wire(load N): all ranks send their messages at once, over the outermost level (Hockney 1994)."""
    c = call.crossings[-1]
    return call.latency(c) * hops(c.level, c.ways, c.step) + call.seconds(c, c.port_load("send") * call.nbytes)


def shift(call: CollectiveCall) -> float:
    """max_i (a_i hops_i + wire_i(rings_i N)): each rank sends N bytes to the next of its group, one step of a ring."""
    return max(call.latency(c) * hops(c.level, c.ways, c.step) + call.seconds(c, call.rings(c) * call.nbytes)
               for c in call.crossings)


def as_all_reduce(call: CollectiveCall) -> float:
    """A reduce-scatter that is done as an all-reduce: each rank keeps its part."""
    return ring(replace(call, kind="all-reduce"))
