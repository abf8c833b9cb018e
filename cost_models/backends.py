"""Facts about the communication libraries: algorithms, wire protocols, and seconds to start, with their sources.

A wire protocol w of a library turns the latency a of a link into w.latency a, and its bandwidth b into w.efficiency b.
A transfer whose bytes take t seconds goes in k chunks. To pass the chunks on costs in proportion to k a, to fill the
pipeline t/k. At the best k both together are sqrt(w.fill a t), which comes on top of t. So the bandwidth that is
reached depends on the size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

__all__ = ["BACKENDS", "EXECUTABLE", "KINDS", "MESSAGE_ALGORITHMS", "PLAIN", "TREE_EFFICIENCY", "Algorithm", "Backend",
           "Wire"]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send", "shift", "halo", "exchange")


class Algorithm(StrEnum):
    """The algorithms that have a formula (`algorithms`, `hierarchy`); the text is what tables print."""

    RING = "ring"
    RING_IN_TURNS = "ring in turns"
    DOUBLING = "doubling"
    HALVING_DOUBLING = "halving-doubling"
    RECURSIVE_DOUBLING = "recursive doubling"
    BRUCK = "bruck"
    PAT = "pat"
    PAIRWISE = "pairwise"
    ROUNDS = "rounds"
    STAGES = "stages"
    BINOMIAL = "binomial"
    TREE = "tree"
    IN_NETWORK = "in-network"
    IN_NETWORK_TREE = "in-network tree"
    SWITCH_TREE = "switch tree"
    LEVEL_RINGS = "level rings"
    TWO_LEVEL = "two-level"
    THREE_LEVEL = "three-level"
    SEND = "send"
    SHIFT = "shift"
    AS_ALL_REDUCE = "as all-reduce"


MESSAGE_ALGORITHMS = (Algorithm.LEVEL_RINGS, Algorithm.ROUNDS, Algorithm.STAGES, Algorithm.SWITCH_TREE)
"""Algorithms that the runtime runs itself: by messages between ranks, or to switches that reduce."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A wire protocol: factors on the latency and the bandwidth of a link, and the `fill` of its pipeline."""

    name: str
    latency: float = 1.0
    efficiency: float = 1.0
    fill: float = 0.0


PLAIN = Wire("plain")


@dataclass(frozen=True, slots=True)
class Backend:
    """One communication library.

        algorithms         the algorithms that it has, by kind of collective
        efficiency         fraction of a link's rate that an algorithm reaches; 1 where not listed
        startup            seconds before the first byte of any collective
        rails              whether a ring leaves a unit by all of its ports in turn, or by one
        link_efficiency    fraction of a link's bandwidth that is reached, for links that do not say it
        wires              its wire protocols
        starts             more seconds before the first byte, by algorithm
        threaded           algorithms whose steps pass from thread to thread: a step takes `Host.turn` at least
    """

    algorithms: Mapping[str, tuple[Algorithm, ...]]
    efficiency: Mapping[Algorithm, float]
    startup: float
    rails: bool
    link_efficiency: float = 1.0
    wires: tuple[Wire, ...] = (PLAIN,)
    starts: Mapping[Algorithm, float] = field(default_factory=dict)
    threaded: frozenset[Algorithm] = frozenset()


_NCCL = Backend(
    # NCCL 2.2x has rings, double binary trees between hosts with chains inside, reduction in NVSwitches (NVLS), these
    # under a tree between hosts (NVLSTree), and Bruck's pattern (PAT) where a group has one rank per host. Switches of
    # the network reduce through its CollNet, as SHARP does. It has no
    # hierarchical reduce-scatter or all-gather. Wires and startup were fitted by examples/benchmarks/collectives.py
    # to 222 published collectives on A100, V100, H200, B200 and MI300X; link efficiency as 235 of 300 GB/s on 8 A100.
    algorithms={"all-reduce": (Algorithm.RING, Algorithm.TREE, Algorithm.IN_NETWORK, Algorithm.IN_NETWORK_TREE,
                               Algorithm.SWITCH_TREE),
                "all-gather": (Algorithm.RING, Algorithm.PAT), "reduce-scatter": (Algorithm.RING, Algorithm.PAT),
                "all-to-all": (Algorithm.PAIRWISE,), "broadcast": (Algorithm.RING,), "send": (Algorithm.SEND,),
                "shift": (Algorithm.SHIFT,), "halo": (Algorithm.SHIFT,), "exchange": (Algorithm.PAIRWISE,)},
    efficiency={}, startup=35e-6, rails=True, link_efficiency=0.8,
    wires=(Wire("LL", 0.35, 0.17), Wire("LL128", 0.66, 0.9), Wire("Simple", fill=3.5)))

BACKENDS: Mapping[str, Backend] = MappingProxyType({
    "nccl": _NCCL,
    # Nothing of these was measured: they are priced as NCCL.
    "hccl": _NCCL, "xla": _NCCL, "nccom": _NCCL,
    # gloo, measured with torch 2.13 over shaped links (examples/benchmarks/shaped_collectives.py): its all-reduce and
    # all-gather reach the bound of a ring, but for the all-gather of a pair (PAIR_WAIT). Its reduce-scatter takes as
    # long as an all-reduce, and its all-to-all reaches 0.65 of the bound. 1 kB between two ranks of one machine: 0.22
    # ms. It has no trees, no hierarchy, and leaves a host by one port. LEVEL_RINGS, ROUNDS and STAGES are our own,
    # made of gloo's point-to-point messages (`message_programs`). A step of 4 or 32 kB among 4 or 8 ranks of two cores
    # takes 0.9 to 1.9 ms in gloo's rings, each of which is handed from thread to thread, and 0.4 to 1.3 ms by messages.
    "gloo": Backend(
        algorithms={"all-reduce": (Algorithm.RING, Algorithm.LEVEL_RINGS, Algorithm.SWITCH_TREE),
                    "all-gather": (Algorithm.RING_IN_TURNS, Algorithm.LEVEL_RINGS),
                    "reduce-scatter": (Algorithm.AS_ALL_REDUCE, Algorithm.LEVEL_RINGS),
                    "all-to-all": (Algorithm.PAIRWISE, Algorithm.ROUNDS, Algorithm.STAGES),
                    "broadcast": (Algorithm.BINOMIAL,), "send": (Algorithm.SEND,), "shift": (Algorithm.SHIFT,),
                    "halo": (Algorithm.SHIFT,), "exchange": (Algorithm.PAIRWISE,)},
        efficiency={Algorithm.PAIRWISE: 0.65}, startup=100e-6, rails=False,
        starts={Algorithm.LEVEL_RINGS: 1e-3, Algorithm.ROUNDS: 3e-3, Algorithm.STAGES: 1e-3},
        threaded=frozenset((Algorithm.RING, Algorithm.RING_IN_TURNS, Algorithm.AS_ALL_REDUCE))),
})

EXECUTABLE = ("gloo", "nccl")
"""The libraries over which plans run; over the others they are planned, priced and exported."""

TREE_EFFICIENCY = 0.85
"""The fraction of a ring's bandwidth that NCCL's tree reaches (tuning.cc)."""
