"""Shapes a cluster's links on this one machine: slow links are really slow, nested levels really nested.

    innermost level       a *node*: its ranks share one network namespace and talk over loopback, which is not shaped
    each level further    one bridge per unit, in a namespace of its own; every child has an *uplink* into it, a veth
                          pair whose two ends are shaped by `tc tbf`, so that each direction carries

    rate of an uplink = ports * bandwidth / oversubscription,     ports = devices behind it / devices that share a port

Levels of size 1 further out are passed over. Latency stays what the machine gives.

    packet = 16 KiB at most, as nodes send it   of the 64 KiB that are usual four would pass an idle link at once
    burst = max(2 packet, 0.25 ms of the rate)  what an idle link lets through for nothing; a packet above it would be
                                                cut in software
    limit = max(2 burst, 5 ms of the rate)      a longer queue holds small messages back behind bulk data; of the
                                                fastest rate behind it, where that is faster: what a full queue drops
                                                is sent again
    mtu 9000, and reno in each namespace        headers are 0.7 %, and no other control fills short queues as evenly

Namespaces are called `autoddl-PIDNS-PID-START-N-...` by their owner, a process of that id and start time. What a dead
owner left is removed when the next network is built, and nothing else is touched.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from autoddl.core.errors import InputError, MachineError
from autoddl.core.processes import signals_raise
from autoddl.cost_models import Cluster, show_rate

__all__ = ["Node", "ShapedNetwork", "SwitchPlace", "Uplink", "check_machine", "plan_network", "remove_stale",
           "sent_over", "shape_links"]

PORT = "eth0"
MTU = 9000
PACKET = 16 * 1024
FASTEST = 4e9 / 8
"""Bytes per second that two ordinary cores still shape exactly."""

_NAMES = re.compile(r"autoddl-(\d+)-(\d+)-(\d+)-\d+-.+")
_NAMESPACES = Path("/run/netns")
_SERIALS = count()
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Node:
    """A namespace with the ranks `first` .. `first + ranks - 1`, and its IP address."""

    namespace: str
    address: str
    first: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Uplink:
    """The veth pair between one child of a unit of a level and that unit's bridge."""

    level: str
    """The name of the level."""
    first: int
    """The first of the ranks behind the uplink, which are consecutive."""
    ranks: int
    """The number of ranks behind the uplink."""
    rate: float
    """Bytes per second in each direction."""
    namespace: str
    """The namespace of the child."""
    interface: str
    """The child's end, which sends the traffic that leaves the child."""
    parent: str
    """The namespace of the unit's bridge."""
    port: str
    """The bridge's end, which sends the traffic that enters the child."""


@dataclass(frozen=True, slots=True)
class SwitchPlace:
    """A bridge whose switch reduces: the level of its unit, the ranks behind it, its namespace and its IP address."""

    level: str
    first: int
    ranks: int
    namespace: str
    address: str


@dataclass(frozen=True, slots=True)
class ShapedNetwork:
    """Nodes by rank, uplinks from the innermost level out, the namespaces of the bridges, and those that reduce."""

    nodes: tuple[Node, ...]
    uplinks: tuple[Uplink, ...]
    switches: tuple[str, ...]
    reducing: tuple[SwitchPlace, ...] = ()

    def node_of(self, rank: int) -> Node:
        """Returns the node of a rank."""
        return next(node for node in self.nodes if node.first <= rank < node.first + node.ranks)


def plan_network(cluster: Cluster, name: str) -> ShapedNetwork:
    """Returns the network of `cluster` as a value, with namespaces whose names begin with `name`; builds nothing.

    Raises InputError where the cluster has no links to shape, or one that is too fast to be shaped."""
    per_node, units = cluster.levels[0].size, cluster.units
    nodes = tuple(Node(f"{name}-n{k}", f"10.99.{k // 250}.{k % 250 + 1}", k * per_node, per_node)
                  for k in range(cluster.size // per_node))
    uplinks: list[Uplink] = []
    switches: list[str] = []
    reducing: list[SwitchPlace] = []
    inner, port = [node.namespace for node in nodes], PORT
    for i, level in enumerate(cluster.levels):
        if i == 0 or level.size == 1:
            continue
        outer = [f"{name}-s{i}.{unit}" for unit in range(cluster.size // units[i + 1])]
        uplinks += [Uplink(level.name, k * units[i], units[i], _rate(cluster, i), inside, port,
                           outer[k // level.size], f"p{k % level.size}") for k, inside in enumerate(inner)]
        switches += outer
        if level.reduces is not None:
            reducing += [SwitchPlace(level.name, k * units[i + 1], units[i + 1], space, f"10.99.{200 + i}.{k + 1}")
                         for k, space in enumerate(outer)]
        inner, port = outer, "uplink"
    if not uplinks:
        raise InputError(f"cluster {cluster.name} has no links to shape: its ranks share one node. The innermost level "
                         "is a node, whose ranks talk over loopback; add a level of several nodes outside it, and for "
                         "nodes of one rank write {name: node, size: 1, ...} first")
    return ShapedNetwork(nodes, tuple(uplinks), tuple(switches), tuple(reducing))


def _rate(cluster: Cluster, index: int) -> float:
    """Bytes per second of the uplinks into level `index`."""
    level = cluster.levels[index]
    ports = max(1, cluster.units[index] // cluster.sharers(index))
    rate = ports * level.bandwidth / level.oversubscription
    if not 0 < rate <= FASTEST:
        raise InputError(f"level {level.name!r} of cluster {cluster.name} has uplinks of {show_rate(rate)}: a "
                         f"rehearsal shapes more than 0 and at most {show_rate(FASTEST)}; write a cluster with scaled "
                         "bandwidths, like 25 MB/s, and plan for it")
    return rate


def check_machine() -> None:
    """Raises MachineError unless namespaces can be made and links shaped here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise MachineError(f"shaping links needs {' and '.join(missing)}: install iproute2, or rehearse without "
                           "shaping (rehearse --loopback)")
    if os.geteuid() != 0:
        raise MachineError("shaping links needs root, for network namespaces and tc: run it with sudo, or rehearse "
                           "without shaping (rehearse --loopback)")


@contextmanager
def shape_links(cluster: Cluster) -> Iterator[ShapedNetwork]:
    """Builds the shaped links of `cluster`, and removes them again on every way out.

    SIGTERM and SIGHUP leave by SystemExit. Raises InputError as `plan_network` does, and MachineError where this
    machine cannot shape links."""
    check_machine()
    name = f"{_owner()}-{next(_SERIALS)}"
    planned = plan_network(cluster, name)
    with signals_raise():
        try:
            remove_stale()
            for command in commands(planned):
                _call(command)
            yield planned
        finally:
            _remove([space for space in _namespaces() if space.startswith(f"{name}-")])


def commands(planned: ShapedNetwork) -> Iterator[tuple[str, ...]]:
    """Yields the commands that build the network, in order."""
    for space in (*(node.namespace for node in planned.nodes), *planned.switches):
        yield "ip", "netns", "add", space
        yield "ip", "-n", space, "link", "set", "lo", "up"
    for space in (*(node.namespace for node in planned.nodes), *(one.namespace for one in planned.reducing)):
        control = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
        yield "ip", "netns", "exec", space, "sh", "-c", control
    for switch in planned.switches:
        yield "ip", "-n", switch, "link", "add", "bridge", "type", "bridge"
        yield "ip", "-n", switch, "link", "set", "bridge", "mtu", str(MTU), "up"
    for uplink in planned.uplinks:
        behind = max((one.rate for one in planned.uplinks if one.parent == uplink.namespace), default=0.0)
        yield from _cable(uplink, max(behind, uplink.rate))
    for node in planned.nodes:
        yield "ip", "-n", node.namespace, "link", "set", PORT, "gso_max_size", str(PACKET)
        yield "ip", "-n", node.namespace, "addr", "add", f"{node.address}/16", "dev", PORT
    for one in planned.reducing:
        yield "ip", "-n", one.namespace, "link", "set", "bridge", "gso_max_size", str(PACKET)
        yield "ip", "-n", one.namespace, "addr", "add", f"{one.address}/16", "dev", "bridge"


def _cable(uplink: Uplink, fed: float) -> Iterator[tuple[str, ...]]:
    """Makes one veth pair inside the namespaces, each end shaped and in its bridge; a node's end has no bridge.

    One child behind it sends at most `fed` bytes per second."""
    mtu = ("mtu", str(MTU))
    yield ("ip", "link", "add", uplink.interface, "netns", uplink.namespace, *mtu, "type", "veth",
           "peer", "name", uplink.port, "netns", uplink.parent, *mtu)
    for space, interface in ((uplink.namespace, uplink.interface), (uplink.parent, uplink.port)):
        if interface != PORT:
            yield "ip", "-n", space, "link", "set", interface, "master", "bridge"
        yield "ip", "-n", space, "link", "set", interface, "up"
        yield "tc", "-n", space, "qdisc", "replace", "dev", interface, "root", *_bucket(uplink.rate, fed)


def _bucket(rate: float, fed: float) -> tuple[str, ...]:
    """The arguments of tbf for `rate` bytes per second, where up to `fed` arrive."""
    burst = max(2 * PACKET, round(rate * 0.25e-3))
    limit = max(2 * burst, round(fed * 5e-3))
    return "tbf", "rate", f"{round(8 * rate)}bit", "burst", str(burst), "limit", str(limit)


def sent_over(uplink: Uplink) -> tuple[int, int]:
    """Returns the bytes that left the child by this uplink, and those that entered it, since it was built."""
    return _sent(uplink.namespace, uplink.interface), _sent(uplink.parent, uplink.port)


def _sent(space: str, interface: str) -> int:
    shown = json.loads(_call(("ip", "-n", space, "-s", "-j", "link", "show", "dev", interface)))
    return int(shown[0]["stats64"]["tx"]["bytes"])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise MachineError(f"this machine cannot shape links: {' '.join(command)!r} says {said!r}; it needs root with "
                           "network namespaces, bridges and tc's tbf. Rehearse without shaping: rehearse --loopback")
    return done.stdout


def _owner() -> str:
    """The name of this process among all owners."""
    return f"autoddl-{_pid_space()}-{os.getpid()}-{_start_of(os.getpid())}"


def _pid_space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_of(pid: int) -> int | None:
    """When the process of this id started, in ticks since boot; None if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def _namespaces() -> list[str]:
    return sorted(path.name for path in _NAMESPACES.iterdir()) if _NAMESPACES.is_dir() else []


def remove_stale() -> tuple[str, ...]:
    """Removes the namespaces whose owner is dead, with the processes in them, and returns their names."""
    found = []
    for name in _namespaces():
        match = _NAMES.fullmatch(name)
        if match and int(match[1]) == _pid_space() and _start_of(int(match[2])) != int(match[3]):
            found.append(name)
    _remove(found)
    return tuple(found)


def _remove(namespaces: Sequence[str]) -> None:
    """End what runs in the namespaces and delete them; their links go with them. Signals wait until it is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        for name in namespaces:
            for pid in subprocess.run(("ip", "netns", "pids", name), capture_output=True, text=True).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(("ip", "netns", "del", name), capture_output=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    left = sorted(set(namespaces) & set(_namespaces()))
    if left:
        raise MachineError(f"cannot remove the network namespaces {', '.join(left)}: remove them with ip netns del")
