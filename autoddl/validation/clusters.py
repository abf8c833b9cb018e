"""Where a published run ran: its cluster, from the words of its row.

    node        GPUs on the named link: one switch, or as the link has it (`links.yaml`)
                V100 without a switch: the hybrid cube mesh of 8; MI250X: packages of two GCDs, and a ring of these
    net         nodes on one port per GPU of inter_Gbps_per_node / gpus_per_node

A device or link is known by the beginning of its name. What a row does not tell is that of the generation's reference
system (NVIDIA DGX A100 and DGX H100 user guides: one 200 or 400 Gb/s port per GPU; DGX-2: 8 ports of 100 Gb/s for 16).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster, load_device
from autoddl.cost_models.links import expanded
from autoddl.cost_models.machine import Level
from autoddl.cost_models.units import parse
from autoddl.validation.runs import Run

__all__ = ["cluster_of"]


@dataclass(frozen=True, slots=True)
class _Device:
    """A file of hardware/, and what its reference system has: the link inside a node, network bytes/s per GPU."""

    name: str
    link: str
    network: float


DEVICES: Mapping[str, _Device] = MappingProxyType({
    "P100": _Device("P100-16GB", "PCIe3", 1.5625e9),
    "V100": _Device("V100-32GB", "NVLink2", 6.25e9), "V100-16GB": _Device("V100-16GB", "NVLink2", 6.25e9),
    "V100-SXM2-16GB": _Device("V100-16GB", "NVLink2", 6.25e9),
    "A100": _Device("A100-80GB", "NVLink3", 25e9), "A100-40GB": _Device("A100-40GB", "NVLink3", 25e9),
    "A100-SXM4-40GB": _Device("A100-40GB", "NVLink3", 25e9),
    "A100-SXM-40GB": _Device("A100-40GB", "NVLink3", 25e9),
    "A100-PCIe-40GB": _Device("A100-PCIe-40GB", "PCIe4", 12.5e9),
    "H100": _Device("H100-80GB", "NVLink4", 50e9), "H100-96GB": _Device("H100-96GB", "NVLink4", 50e9),
    "H200": _Device("H200-141GB", "NVLink4", 50e9), "B200": _Device("B200-180GB", "NVLink5", 50e9),
    "MI300X": _Device("MI300X-192GB", "xGMI3", 50e9), "MI250X": _Device("MI250X-GCD", "xGMI2", 12.5e9)})
"""Beginning of gpu_type -> device; the longest beginning wins."""
LINKS: Mapping[str, str] = MappingProxyType({
    "NVLink5": "NVLink5", "NVLink4": "NVLink4", "NVLink3": "NVLink3", "NVLink2": "NVLink2", "PCIe3": "PCIe3",
    "PCIe4": "PCIe4", "PCIe5": "PCIe5", "xGMI": "xGMI3", "Infinity Fabric": "xGMI3"})
"""Beginning of intra_link -> link of hardware/links.yaml; xGMI is that of the device."""


def _known(device: str) -> _Device:
    names = [name for name in DEVICES if device.lower().startswith(name.lower())]
    if not names:
        raise InputError(f"gpu_type {device!r} is none of {', '.join(DEVICES)}; add its figures to hardware/")
    return DEVICES[max(names, key=len)]


def _link(link: str, device: _Device) -> str:
    """The link inside a node by the name that `_inside` knows."""
    found = device.link if not link else next(
        (LINKS[name] for name in LINKS if link.lower().startswith(name.lower())), None)
    if found is None:
        raise InputError(f"intra_link {link!r} is none of {', '.join(LINKS)}; add it to hardware/links.yaml")
    return device.link if found.startswith("xGMI") and device.link.startswith("xGMI") else found


def _inside(link: str, size: int, node: int, words: str) -> list[Level]:
    """The levels inside a node of which `size` of `node` devices take part."""
    if link == "xGMI2":
        return _gcds(size)
    facts = expanded({"link": link})
    bandwidth, topology = parse(facts["bandwidth"], "bytes/s"), facts.get("topology", "switch")
    if topology == "fully-connected" and size > 1:
        bandwidth *= (size - 1) / max(1, node - 1)
    if link == "NVLink2" and node <= 8 and "switch" not in words.lower():
        topology = "hybrid-cube-mesh"
    return [Level("node", size, bandwidth, parse(facts["latency"], "seconds"), protocol=facts["protocol"],
                  topology=topology if size > 1 else "switch", efficiency=facts.get("efficiency"),
                  in_network_reduction=link in ("NVLink4", "NVLink5"),
                  in_network_efficiency=facts.get("in_network_efficiency", 0.85))]


def _gcds(size: int) -> list[Level]:
    """Frontier's node (OLCF user guide): 200 GB/s between the two GCDs of a package, 100 to either neighbour of it."""
    pair = Level("package", min(2, size), 200e9, 3.4e-6, protocol="direct")
    if size > 2 and size % 2:
        raise InputError(f"{size} GCDs are no whole packages of two")
    return [pair] if size <= 2 else [pair, Level("node", size // 2, 100e9, 3.4e-6, topology="ring", protocol="direct")]


@lru_cache(maxsize=512)
def _cluster(device: str, gpus: int, node: int, link: str, network: float, tuned: float) -> Cluster:
    known, size = _known(device), min(gpus, node)
    if gpus % size:
        raise InputError(f"{gpus} GPUs do not fill nodes of {node}")
    levels = _inside(_link(link, known), size, node, link)
    if gpus > size:
        rate = network / node if network else known.network
        levels.append(Level("net", gpus // size, rate, 14e-6, topology="fat-tree", protocol="rdma"))
    found = load_device(known.name)
    found = replace(found, efficiency=min(1.0, found.efficiency * tuned))
    return Cluster(f"{device} x {gpus}", found, tuple(levels), "nccl")


def cluster_of(run: Run, ranks: int = 0) -> Cluster:
    """The cluster of a run; with `ranks` only so many nodes of it as hold them. Unknown words raise InputError."""
    nodes = -(-ranks // run.node) if ranks else run.gpus
    return _cluster(run.device, min(run.gpus, nodes * run.node), run.node, run.link, run.network, run.tuned)
