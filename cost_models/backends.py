"""What the communication libraries can do, as one table of facts: algorithms, efficiencies, seconds to start."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["BACKENDS", "IN_NETWORK_EFFICIENCY", "KINDS", "LOW_LATENCY_EFFICIENCY", "Backend"]

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast")


@dataclass(frozen=True, slots=True)
class Backend:
    """What a library can do: algorithms per kind, the fraction of the link it reaches, seconds before the first byte.

    With `rails` a ring leaves a unit by all of its ports in turn, without by one.
    """

    algorithms: Mapping[str, tuple[str, ...]]
    efficiency: Mapping[str, float]
    startup: float
    rails: bool


_TREES = ("ring", "doubling", "two-level")
BACKENDS: Mapping[str, Backend] = MappingProxyType({
    # Efficiency: 235 of 300 GB/s on 8 A100, 368 of 450 on 8 H200 without NVLS, 92 % of the NICs of 4 x 8 H200.
    # Startup: all-reduce of 1 MiB on 2, 4, 8 A100 takes 44, 51, 93 us, of which 2, 6, 14 hops are 3.4 us each.
    # Doubling stands for NCCL's logarithmic trees, which run in its low-latency protocol.
    "nccl": Backend(
        algorithms={"all-reduce": (*_TREES, "in-network"), "all-gather": _TREES, "reduce-scatter": _TREES,
                    "all-to-all": ("pairwise",), "broadcast": ("ring",)},
        efficiency=dict.fromkeys(KINDS, 0.8), startup=25e-6, rails=True),
    # Measured with torch 2.13 over shaped links: all-reduce and all-gather reach the bound of a ring, a reduce-scatter
    # takes what an all-reduce takes, an all-to-all reaches 0.65. 1 kB between two ranks of one machine: 0.22 ms.
    "gloo": Backend(
        algorithms={"all-reduce": ("ring",), "all-gather": ("ring",), "reduce-scatter": ("as all-reduce",),
                    "all-to-all": ("pairwise",), "broadcast": ("binomial",)},
        efficiency={**dict.fromkeys(KINDS, 1.0), "all-to-all": 0.65}, startup=100e-6, rails=False),
})
IN_NETWORK_EFFICIENCY = 0.69
"""8 H200 with NVLS: 482 GB/s of bus bandwidth = 275 GB/s of buffer, times 9/8, of 450 GB/s."""

LOW_LATENCY_EFFICIENCY = 0.29
"""NCCL's LL protocol: 87.7 GB/s of the 300 of an A100, 141 of the 450 of an H100 (tuning.cc)."""
