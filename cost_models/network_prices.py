"""Counts the switches and cables that join N ports, and what they cost (Hoefler et al., HammingMesh, SC 2022, table 2).

A port has L links of 50 GB/s. Switches have R ports; up to R/2 links of a switch may go up.

    fat tree      L planes. A switch has d = floor(R / (1 + taper)) ports down and R - d up:
                  leaves ceil(N/d), each d down and R - d up; above them spines, in two levels where one has no room
    HammingMesh   L/4 planes, at least one, of four links a device. r x c devices on boards of a x a; the two ends of
                  each row of c/a boards meet in one network of 2c/a ports, those of a column in one of 2r/a. A switch
                  has as many such networks as fit on its ports; larger ones are trees of two levels
    HyperX        a HammingMesh of boards of one device
    torus         L/4 planes; boards of 2 x 2 devices, and a cable between neighbouring boards
    dragonfly     L planes. Groups of R/2 switches, each with R/4 ports down, R/4 to other groups and one to each
                  switch of its group (Kim et al. 2008)

    copper cables lead from a device to its first switch (along rows), and within a group of a dragonfly
    optical cables are all others
    dollars = planes (switches * price + copper * price + optical * price)
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil, isqrt
from types import MappingProxyType

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Cluster, Level
from autoddl.cost_models.topologies import slowdown

__all__ = ["LINK", "NETWORKS", "PRICES", "Bill", "Prices", "bill", "grid", "level_of", "ports_of", "prices_of",
           "shares"]

LINK = 50e9
"""Bytes a second and direction of a link: 400 Gb/s."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars of the parts of a network.

        ports      ports of a switch
        switch     of a switch
        copper     of a copper cable
        optical    of an active optical cable
    """

    ports: int = 64
    switch: float = 14280.0
    copper: float = 272.0
    optical: float = 603.0


PRICES = Prices()
"""List prices of 2022, as that paper has them."""


@dataclass(frozen=True, slots=True)
class Bill:
    """The parts of a network: those of each of its `planes`, which are alike."""

    planes: int
    switches: int
    copper: int
    optical: int

    def dollars(self, prices: Prices = PRICES) -> float:
        """Adds up what all planes cost."""
        return self.planes * (self.switches * prices.switch + self.copper * prices.copper
                              + self.optical * prices.optical)


def prices_of(written: object, source: str) -> Prices:
    """The prices of a table that was read from `source`. Raises InputError where one is missing or no number."""
    names = [one.name for one in fields(Prices)]
    if not isinstance(written, dict) or set(written) != set(names):
        missing = [name for name in names if not isinstance(written, dict) or name not in written]
        unknown = [str(key) for key in written if key not in names] if isinstance(written, dict) else []
        what = f"has no {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which is no price"
        raise InputError(f"{source}: the table of prices {what}; it is one line for each of {', '.join(names)}, like "
                         "switch: 14280")
    for name, value in written.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"{source}: {name}: {value!r} is no price; write a number above 0, in dollars")
    if written["ports"] % 4 or written["ports"] != int(written["ports"]):
        raise InputError(f"{source}: ports: {written['ports']} of a switch are no multiple of 4; half of them lead up")
    return Prices(int(written["ports"]), *(float(written[name]) for name in names[1:]))


def ports_of(cluster: Cluster) -> tuple[int, int]:
    """(ports of the outermost level of a cluster, links of 50 GB/s in each, at least one)."""
    outer = len(cluster.levels) - 1
    return cluster.size // cluster.sharers(outer), max(1, round(cluster.levels[outer].bandwidth / LINK))


def grid(ports: int, board: int) -> tuple[int, int] | None:
    """Rows and columns of devices, as square as can be, on boards of `board` x `board`; None where there are none."""
    boards, rest = divmod(ports, board * board)
    if rest:
        return None
    x = next(side for side in range(isqrt(boards), 0, -1) if boards % side == 0)
    return x * board, boards // x * board


def _fat_tree(ports: int, links: int, prices: Prices, taper: float) -> Bill | str:
    radix = prices.ports
    if ports <= radix:
        return Bill(links, 1, ports, 0)
    down = int(radix / (1 + taper))
    leaves = ceil(ports / down)
    up = leaves * (radix - down)
    if leaves <= radix:
        return Bill(links, leaves + ceil(up / radix), ports, up)
    middle = ceil(up / (radix // 2))
    if middle > radix * radix // 2:
        return f"more than three levels of switches of {radix} ports"
    higher = middle * (radix // 2)
    return Bill(links, leaves + middle + ceil(higher / radix), ports, up + higher)


def _hamming_mesh(ports: int, links: int, prices: Prices, board: int) -> Bill | str:
    shape = grid(ports, board)
    if shape is None:
        return f"{ports} ports are no boards of {board} x {board}"
    switches = inner = 0
    for lines, along in (shape, shape[::-1]):
        ends = 2 * along // board
        if ends <= prices.ports:
            switches += ceil(lines / (prices.ports // ends))
            continue
        leaves = ceil(ends / (prices.ports // 2))
        up = leaves * (prices.ports // 2)
        if leaves > prices.ports:
            return f"more than two levels of switches of {prices.ports} ports in a row"
        switches += lines * (leaves + ceil(up / prices.ports))
        inner += lines * up
    rows, columns = shape
    return Bill(ceil(links / 4), switches, rows * 2 * columns // board, columns * 2 * rows // board + inner)


def _torus(ports: int, links: int, _: Prices, board: int) -> Bill | str:
    shape = grid(ports, board)
    if shape is None:
        return f"{ports} ports are no boards of {board} x {board}"
    rows, columns = shape
    if rows * columns == board * board:
        return "one board has nothing to join"
    cables = sum(lines * (along // board if along > board else 0) for lines, along in (shape, (columns, rows)))
    return Bill(ceil(links / 4), 0, 0, cables)


def _dragonfly(ports: int, links: int, prices: Prices) -> Bill | str:
    down, size = prices.ports // 4, prices.ports // 2
    groups = ceil(ports / (down * size))
    if groups > size * down + 1:
        return f"more than {size * down + 1} groups"
    routers = ceil(ports / down) if groups == 1 else groups * size
    within = groups * (routers // groups) * (routers // groups - 1) // 2
    return Bill(links, routers, ports + within, groups * size * down // 2 * (groups > 1))


TAPERS: Mapping[str, float] = MappingProxyType({"fat tree": 1.0, "fat tree, half up": 0.5,
                                                "fat tree, a quarter up": 0.25})
"""Links up of a first switch over its links down."""
BOARDS: Mapping[str, int] = MappingProxyType({"HyperX": 1, "HammingMesh, 2 x 2": 2, "HammingMesh, 4 x 4": 4,
                                              "torus": 2})
"""Devices along the side of a board."""
NETWORKS = (*TAPERS, "dragonfly", *BOARDS)
"""The networks by name."""


def bill(name: str, ports: int, links: int = 16, prices: Prices = PRICES) -> Bill | str:
    """The parts of a network of `ports` ports of `links` links each, or why it cannot be built.

    Raises InputError for a network that is not known, and for less than two ports or one link.
    """
    if name not in NETWORKS:
        raise InputError(f"{name!r} is no network; the networks are {', '.join(NETWORKS)}")
    if ports < 2 or links < 1:
        raise InputError(f"{ports} ports of {links} links: a network joins at least two ports of one link")
    if name in TAPERS:
        return _fat_tree(ports, links, prices, TAPERS[name])
    if name == "dragonfly":
        return _dragonfly(ports, links, prices)
    return (_torus if name == "torus" else _hamming_mesh)(ports, links, prices, BOARDS[name])


def level_of(name: str, level: Level) -> Level | None:
    """The level with its children joined by the network `name`, each port as fast as before.

    None where its children do not fill the network. Group bandwidths, measured on another network, are left out.
    """
    plain = replace(level, topology="fat-tree", oversubscription=1.0, dims=(), board=1, leaf=None, group_bandwidth=(),
                    in_network_reduction=False, reduces=None)
    if name in TAPERS:
        return replace(plain, oversubscription=1 / TAPERS[name])
    if name == "dragonfly":
        return replace(plain, topology="dragonfly")
    board = BOARDS[name]
    shape = grid(level.size, board)
    if shape is None or 1 in shape:
        return None
    if name == "torus":
        return replace(plain, topology="torus", dims=shape)
    return replace(plain, topology="hammingmesh", dims=(shape[0] // board, shape[1] // board), board=board)


def shares(name: str, ports: int) -> tuple[float, float] | None:
    """The parts of a port's bandwidth that an all-reduce by rings and an even all-to-all of all ports reach.

    None where so many ports do not fill the network. Source: `topologies`, whose formulas are those of the paper.
    """
    level = level_of(name, Level("net", ports, 1.0, 0.0))
    if level is None:
        return None
    ring, even = (1 / slowdown(level, ports, 1, pattern) for pattern in ("ring", "all-to-all"))
    return ring, even
