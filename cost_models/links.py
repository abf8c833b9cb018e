"""Links by name and protocols by name: `link: NVLink3` in place of bandwidth, latency and efficiency.

`hardware/links.yaml` lists the links with their sources. A level reaches the fraction e of its bandwidth, and has the
latency a:

    e = efficiency of the level, else of its protocol, else of the backend
    a = latency of the level + latency of its protocol
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models.machine import Level
from autoddl.cost_models.units import parse_quantity

__all__ = ["LINKS_FILE", "PROTOCOLS", "Protocol", "expand_link", "inner_links", "is_network", "latency_of",
           "link_rates", "protocol_of"]

LINKS_FILE = Path(__file__).parent / "hardware" / "links.yaml"


@dataclass(frozen=True, slots=True)
class Protocol:
    """How messages are moved: the fraction of a link that large ones reach, and the seconds added to each.

    `network` says whether they leave a host.
    """

    efficiency: float
    latency: float
    network: bool = True


PROTOCOLS: Mapping[str, Protocol] = MappingProxyType({
    # Loads and stores of the devices: NVLink, xGMI, PCIe with peer access. 235 of 300 GB/s on 8 A100.
    "direct": Protocol(0.8, 0.0, network=False),
    # Devices without peer access: one writes to host memory, the other reads there. Fitted to the two shares of a step
    # that were published for two A100-PCIe of one node (GPT-2-Medium, T5-Large).
    "shm": Protocol(0.30, 5e-6, network=False),
    # The card reads device memory itself (GPUDirect): 92 % of the cards of 4 x 8 H200 (nccl-tests).
    "rdma": Protocol(0.92, 0.0),
    "roce": Protocol(0.90, 1e-6),
    # The others as measured between pairs of A100-PCIe with one 100 Gb/s InfiniBand or 10 Gb/s Ethernet port: at most
    # 60 Gb/s by RDMA through host memory, 20 Gb/s by IP over InfiniBand, 9 Gb/s by TCP; half round trips of sockets.
    "rdma-host": Protocol(0.60, 5e-6),
    "ipoib": Protocol(0.20, 15e-6),
    "tcp": Protocol(0.90, 25e-6),
})
"""One efficiency and latency per protocol, whatever the cluster."""


def protocol_of(name: str) -> Protocol:
    """The protocol called `name`; InputError where there is none."""
    if name not in PROTOCOLS:
        raise InputError(f"{name!r} is no protocol; it is one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


def is_network(level: Level, index: int) -> bool:
    """Whether a level leaves the host: by its protocol, else every one but the innermost, which has index 0."""
    return protocol_of(level.protocol).network if level.protocol else index > 0


def latency_of(level: Level) -> float:
    """Seconds of one message over a level, by its protocol."""
    return level.latency + (protocol_of(level.protocol).latency if level.protocol else 0.0)


_OTHER_WORDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "spectrum": ("RoCE-400G", "RoCE-800G"), "infinity": ("xGMI3", "xGMI4"), "nvl72": ("NVLink5",),
    "nvswitch": ("NVLink3", "NVLink4", "NVLink5"), "neuron": ("NeuronLink3",), "quantum": ("InfiniBand-NDR",
                                                                                          "InfiniBand-XDR")})
"""Beginning of another name, of a product or a family -> the links that it may mean, which differ in their rates."""


@lru_cache(maxsize=1)
def _links() -> Mapping[str, Mapping[str, Any]]:
    return MappingProxyType(yaml.safe_load(LINKS_FILE.read_text(encoding="utf-8")))


def link_rates(network: bool, device: str = "") -> dict[str, float]:
    """The bytes/s of links by name, one direction: of those that leave a host, or of those that do not.

    A device that some link is for has that link, and those that are for any device; one that none is for may have all.
    """
    there = {name: facts for name, facts in _links().items() if PROTOCOLS[facts["protocol"]].network == network}
    own = {name for name, facts in there.items() if device.startswith(tuple(facts.get("devices", ())))}
    return {name: parse_quantity(facts["bandwidth"], "bytes/s") for name, facts in there.items()
            if not own or name in own or "devices" not in facts}


def inner_links() -> dict[str, tuple[str, ...]]:
    """Returns the links inside a host by name, each with the first letters of its devices; nothing where any has it."""
    return {name: tuple(facts.get("devices", ())) for name, facts in _links().items()
            if "devices" in facts or not PROTOCOLS[facts["protocol"]].network}


def _near(name: str) -> str:
    """Asks whether a link was meant whose name begins so, that the name stands for, or that is near; else lists all."""
    known = f"known are {', '.join(_links())}"
    word = name.lower()
    meant = [one for one in _links() if one.lower().startswith(word)] or [
        one for begin, links in _OTHER_WORDS.items() if word.startswith(begin) for one in links]
    if len(meant) > 1:
        rates = [f"{one!r} ({_links()[one]['bandwidth']})" for one in meant]
        return f"did you mean {', '.join(rates[:-1])} or {rates[-1]}? K{known[1:]}"
    return near_names(meant[0] if meant else name, _links(), known, most=1)


def expand_link(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a level, with those of its `link` filled in; a key that is written wins.

    Raises InputError where the link is unknown, naming the nearest that exists.
    """
    name = str(tree["link"])
    by_lower = {known.lower(): known for known in _links()}
    if name.lower() not in by_lower:
        raise InputError(f"{name!r} is no known link; {_near(name)}; any other is written as bandwidth and latency")
    facts = {key: value for key, value in _links()[by_lower[name.lower()]].items() if key != "devices"}
    if "protocol" in tree and tree["protocol"] != facts.get("protocol"):
        facts.pop("efficiency", None)  # it was that of the usual protocol
    return {**facts, **{key: value for key, value in tree.items() if key != "link"}}
