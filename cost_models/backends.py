"""What the communication libraries can do, as one table of facts: algorithms, wire protocols, seconds to start.

A wire protocol w of a library scales a link to latency w.latency a and bandwidth w.efficiency e b. A transfer goes in
chunks: k of them cost some k a to pass on and t/k to fill the pipeline, the least of which, over all k, is
sqrt(w.fill a t) beyond the t seconds of the bytes alone. So bandwidth depends on size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["BACKENDS", "KINDS", "PLAIN", "TREE_EFFICIENCY", "Backend", "Wire"]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send")


@dataclass(frozen=True, slots=True)
class Wire:
    """How a library moves bytes: factors on the latency and bandwidth of a link, and how slowly its pipeline fills."""

    name: str
    latency: float = 1.0
    efficiency: float = 1.0
    fill: float = 0.0


PLAIN = Wire("plain")


@dataclass(frozen=True, slots=True)
class Backend:
    """What a library can do: algorithms per kind, seconds before the first byte.

    `efficiency` is the fraction of what a link reaches that an algorithm reaches, 1 where not listed; `starts` its own
    seconds before the first byte, besides `startup`. `link_efficiency` is for links that say nothing themselves. With
    `rails` a ring leaves a unit by all of its ports in turn, without by one. A step of what is `handed` from thread to
    thread takes `Host.turn` at least, where that was timed.
    """

    algorithms: Mapping[str, tuple[str, ...]]
    efficiency: Mapping[str, float]
    startup: float
    rails: bool
    link_efficiency: float = 1.0
    wires: tuple[Wire, ...] = (PLAIN,)
    starts: Mapping[str, float] = field(default_factory=dict)
    handed: frozenset[str] = frozenset()


BACKENDS: Mapping[str, Backend] = MappingProxyType({
    # NCCL 2.2x has rings, double binary trees between hosts with chains inside, reduction in NVSwitches (NVLS), these
    # below a tree between hosts (NVLSTree), and Bruck's pattern (PAT) where a group has one rank per host. It has no
    # hierarchical reduce-scatter or all-gather. Wires and startup were fitted by examples/benchmarks/collectives.py
    # to 222 published collectives on A100, V100, H200, B200 and MI300X; link efficiency as 235 of 300 GB/s on 8 A100.
    "nccl": Backend(
        algorithms={"all-reduce": ("ring", "tree", "in-network", "in-network tree"), "all-gather": ("ring", "pat"),
                    "reduce-scatter": ("ring", "pat"), "all-to-all": ("pairwise",), "broadcast": ("ring",),
                    "send": ("send",)},
        efficiency={}, startup=35e-6, rails=True, link_efficiency=0.8,
        wires=(Wire("LL", 0.35, 0.17), Wire("LL128", 0.66, 0.9), Wire("Simple", fill=3.5))),
    # gloo, measured with torch 2.13 over shaped links (examples/benchmarks/shaped_collectives.py): its all-reduce and
    # all-gather reach the bound of a ring, but for the all-gather of a pair (PAIR_WAIT); its reduce-scatter takes what
    # an all-reduce takes, its all-to-all reaches 0.65. 1 kB between two ranks of one machine: 0.22 ms. It has no trees,
    # no hierarchy, and leaves a host by one port. "level rings" and "rounds" are the runtime's own, of gloo's
    # point-to-point messages (autoddl.messages): of 4 and 32 kB among 4 and 8 ranks of two cores a step of gloo's rings
    # takes 0.9 to 1.9 ms, one of messages 0.4 to 1.3, for each of gloo's is handed from thread to thread.
    "gloo": Backend(
        algorithms={"all-reduce": ("ring", "level rings"), "all-gather": ("ring in turns", "level rings"),
                    "reduce-scatter": ("as all-reduce", "level rings"), "all-to-all": ("pairwise", "rounds"),
                    "broadcast": ("binomial",), "send": ("send",)},
        efficiency={"pairwise": 0.65}, startup=100e-6, rails=False,
        starts={"level rings": 1e-3, "rounds": 3e-3},
        handed=frozenset(("ring", "ring in turns", "as all-reduce"))),
})

TREE_EFFICIENCY = 0.85
"""A tree of NCCL reaches that of a ring's bandwidth (tuning.cc)."""
