"""Builds the cluster that a published run ran on, from the words of its row and `systems.yaml`.

    node    as many GPUs as the row says on the named link: one switch, or as the link's own facts have it
    net     nodes on one port per GPU of inter_Gbps_per_node / gpus_per_node

What a row does not tell is that of the reference system of the device's generation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models import Cluster, load_device, parse_cluster
from autoddl.cost_models.cluster import device_names
from autoddl.cost_models.device_names import device_meant, plain_device_name
from autoddl.cost_models.links import expand_link, inner_links
from autoddl.cost_models.machine import Level
from autoddl.cost_models.units import parse_quantity
from autoddl.explain.pareto import level_of_size
from autoddl.validation.facts import find_beginning, read_aliases, read_facts
from autoddl.validation.runs import Run

__all__ = ["LINKS", "LINK_WORDS", "SYSTEMS", "LinkFacts", "LinkWord", "SystemFacts", "build_cluster",
           "cluster_of", "node_of", "part_of", "system_of"]


NODE = 8
"""Devices of a node of most systems."""


@dataclass(frozen=True, slots=True)
class SystemFacts:
    """A device's file in cost_models/hardware/, and what the reference system of its generation has."""

    file: str
    link: str
    """Link between the devices of a node."""
    network: str
    """Rate of the network per GPU, with its unit."""
    node: int = NODE
    """Devices that the link joins: those of a node."""


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """How a node is built of a link, where that is not one switch. Levels are written as in a cluster file."""

    in_network_reduction: bool = False
    """Whether the switch reduces."""
    without_switch: Mapping[str, Any] = field(default_factory=dict)
    """`topology` of a node of at `most` so many devices whose row names no switch."""
    package: Mapping[str, Any] = field(default_factory=dict)
    """`size`, `bandwidth` and `latency` of packages of devices; empty where a device is one package."""
    ring: Mapping[str, Any] = field(default_factory=dict)
    """`bandwidth` and `latency` of the ring that joins packages."""


@dataclass(frozen=True, slots=True)
class LinkWord:
    """The link that a row's word stands for; `any_generation`: that of the device, if it is of the same family."""

    link: str
    any_generation: bool = False


SYSTEMS: Mapping[str, SystemFacts] = {name: SystemFacts(**row)
                                      for name, row in read_facts("systems.yaml", "devices").items()}
_WRITTEN: Mapping[str, str] = dict((
    *((system.file, name) for name, system in list(SYSTEMS.items())[::-1]), *((name, name) for name in SYSTEMS),
    *read_aliases("systems.yaml").items()))
"""Name or alias of a device -> its name in `SYSTEMS`. Of two with one file, the file is the first."""
_NAMES: Mapping[str, str] = {other.lower(): name for other, name in _WRITTEN.items()}
"""The same, in small letters."""
LINKS: Mapping[str, LinkFacts] = {name: LinkFacts(**row) for name, row in read_facts("systems.yaml", "links").items()}
LINK_WORDS: Mapping[str, LinkWord] = {name: LinkWord(**row)
                                      for name, row in read_facts("systems.yaml", "link_words").items()}


def system_of(device: str) -> SystemFacts:
    """Returns what is known of a device by its name or an alias; raises InputError for an unknown one."""
    names = (device.strip().lower(), plain_device_name(device))
    if found := next((_NAMES[name] for name in names if name in _NAMES), None):
        return SYSTEMS[found]
    if file := device_meant(device, device_names()):
        raise InputError(f"gpu_type {device!r} is the device {file}, whose usual system is not known here: write a "
                         f"cluster file with device: {file} and its links, which the column `cluster` names")
    near = near_names(names[1], _WRITTEN, "any other is written in a cluster file, which the column `cluster` names: "
                                          "device: {name, memory, bandwidth, peak}")
    raise InputError(f"gpu_type {device!r} is none of {', '.join(SYSTEMS)}; {near}")


def node_of(device: str, gpus: int) -> int:
    """Returns the devices of a node of the reference system, or the most of them that fill nodes with `gpus` evenly.

    Of a device that is not known they are 8.
    """
    try:
        most = system_of(device).node
    except InputError:
        most = NODE
    return most if most == NODE else max(n for n in range(1, most + 1) if gpus % n == 0)


def _link(words: str, system: SystemFacts) -> str:
    """The link of links.yaml that a row's words name; the system's own where they are empty."""
    if not words:
        return system.link
    inner = inner_links()
    known = {**{name: LinkWord(name) for name in inner}, **LINK_WORDS}
    name = find_beginning(words, known)
    if not name:
        near = near_names(words, known, "any other is written in a cluster file, which the column `cluster` names")
        raise InputError(f"intra_link {words!r} is none of {', '.join(known)}; {near}")
    word = known[name]
    if _family(word.link) == _family(system.link):
        return system.link if word.any_generation else word.link
    devices = inner.get(word.link, ())
    if devices and not system.file.startswith(devices):
        raise InputError(f"intra_link {words!r} is of {', '.join(devices)}, and gpu_type is {system.file}: leave it "
                         f"empty for {system.link}, or write a cluster file, which the column `cluster` names")
    return word.link


def _family(link: str) -> str:
    """The name of a link without its generation: `NVLink` of `NVLink4-8links`."""
    return re.sub(r"\d.*", "", link)


def _node_levels(link: str, size: int, node: int, words: str) -> list[Level]:
    """The levels inside a node of `node` devices, `size` of which take part."""
    facts = LINKS.get(link, LinkFacts())
    if facts.package:
        return _package_levels(facts, size)
    written = expand_link({"link": link})
    bandwidth, topology = parse_quantity(written["bandwidth"], "bytes/s"), written.get("topology", "switch")
    if topology == "fully-connected" and size > 1:
        bandwidth *= (size - 1) / max(1, node - 1)
    if facts.without_switch and node <= facts.without_switch["most"] and "switch" not in words.lower():
        topology = facts.without_switch["topology"]
    return [Level("node", size, bandwidth, parse_quantity(written["latency"], "seconds"), protocol=written["protocol"],
                  topology=topology if size > 1 else "switch", efficiency=written.get("efficiency"),
                  in_network_reduction=facts.in_network_reduction,
                  in_network_efficiency=written.get("in_network_efficiency", 0.85))]


def _package_levels(facts: LinkFacts, size: int) -> list[Level]:
    """Packages of devices, and a ring of these."""
    package, ring = ((parse_quantity(level["bandwidth"], "bytes/s"), parse_quantity(level["latency"], "seconds"))
                     for level in (facts.package, facts.ring))
    each = facts.package["size"]
    inner = Level("package", min(each, size), *package, protocol="direct")
    if size <= each:
        return [inner]
    if size % each:
        raise InputError(f"{size} GCDs are no whole packages of {each}; take part with whole packages")
    return [inner, Level("node", size // each, *ring, topology="ring", protocol="direct")]


@lru_cache(maxsize=64)
def _read_cluster(text: str) -> Cluster:
    return parse_cluster(text, "the cluster of a run")


def part_of(cluster: Cluster, ranks: int) -> Cluster:
    """Returns as much of a cluster as `ranks` fill, its inner levels first.

    Raises InputError where they fill no part of it.
    """
    levels, left = list[Level](), ranks
    for level in cluster.levels:
        size = min(left, level.size)
        if left % size:
            raise InputError(f"{ranks} ranks do not fill whole units of {level.size} of level {level.name!r} of "
                             f"cluster {cluster.name}; take a multiple, or fewer than one unit has")
        levels, left = [*levels, level_of_size(level, size)], left // size
    if left > 1 or cluster.parts:
        raise InputError(f"cluster {cluster.name} has {cluster.size} devices of {cluster.device.name}: it has no part "
                         f"of {ranks} devices alike")
    return replace(cluster, levels=tuple(levels))


@lru_cache(maxsize=512)
def build_cluster(device: str, gpus: int, node: int, link: str, network: float) -> Cluster:
    """Builds a cluster of `gpus` devices in nodes of `node`; `network` is bytes/s of a node, 0 for the reference's."""
    system, size = system_of(device), min(gpus, node)
    if gpus % size:
        raise InputError(f"{gpus} GPUs do not fill nodes of {node}: write gpus_per_node that divides n_gpus, or leave "
                         "it empty")
    levels = _node_levels(_link(link, system), size, node, link)
    if gpus > size:
        rate = network / node if network else parse_quantity(system.network, "bytes/s")
        levels.append(Level("net", gpus // size, rate, 14e-6, topology="fat-tree", protocol="rdma"))
    return Cluster(f"{device} x {gpus}", load_device(system.file), tuple(levels), "nccl")


def cluster_of(run: Run, ranks: int = 0) -> Cluster:
    """Returns the cluster of a run, or with `ranks` only as many of its nodes as hold them.

    Raises InputError for a device or link that `systems.yaml` does not list.
    """
    if run.cluster:
        return part_of(_read_cluster(run.cluster), run.gpus)
    nodes = -(-ranks // run.gpus_per_node) if ranks else run.gpus
    return build_cluster(run.device, min(run.gpus, nodes * run.gpus_per_node), run.gpus_per_node, run.link,
                         run.network)
