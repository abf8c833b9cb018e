"""Published collectives against their prices: python examples/benchmarks/collectives.py [--fit] [--leave-out] [FILE]

data/published_collectives.csv holds 222 measured points. Each platform is a cluster of links by name, and a point is
priced as planning prices it. Per platform: the mean absolute error and the mean error (bias) at 64 MiB and above, and
from 1 MiB. An error is (predicted - measured) / measured seconds.

--fit        fit the constants anew: startup and wires of the backend, one efficiency per link; print and table them
--leave-out  for each platform, fit without it and price it; a link nothing was fitted to takes the mean of the others
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from autoddl.cost_models import Cluster, Group, parse_cluster
from autoddl.cost_models.backends import BACKENDS, Backend, Wire
from autoddl.cost_models.collectives import cheapest_price
from autoddl.cost_models.groups import Crossing, crossings

DATA = Path(__file__).parent / "data" / "published_collectives.csv"
KINDS = {"all_reduce": "all-reduce", "p2p": "send"}
LARGE, SMALL = 2.0**26, 2.0**20
PLATFORMS: Mapping[str, tuple[str, str, str]] = {  # GPU in the file -> platform, device, levels
    "A100 SXM4 (NVSwitch)": ("A100", "A100-40GB", "{name: node, size: 8, link: NVLink3}"),
    "A100 SXM": ("A100", "A100-80GB", "{name: node, size: 8, link: NVLink3}"),
    "V100 SXM2": ("V100", "V100-16GB", "{name: node, size: 8, link: NVLink2, topology: hybrid-cube-mesh}"),
    "H100 SXM": ("H100", "H100-80GB", "{name: node, size: 8, link: NVLink4, in_network_reduction: true}"),
    "H200 SXM": ("H200", "H200-141GB", "{name: node, size: 8, link: NVLink4, in_network_reduction: true}"),
    "H200 SXM + EFA": ("H200", "H200-141GB", "{name: node, size: 8, link: NVLink4, in_network_reduction: true}"),
    "H200 SXM + EFA 3200Gb/s node": ("4 x H200, EFA", "H200-141GB", "{name: node, size: 8, link: NVLink4, "
                                     "in_network_reduction: true}, {name: net, size: 4, link: EFA2}"),
    "B200 SXM": ("B200", "B200-180GB", "{name: node, size: 8, link: NVLink5, in_network_reduction: true}"),
    "MI300X": ("MI300X", "MI300X-192GB", "{name: node, size: 8, link: xGMI3}"),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: where, what, how long; `links` names the links crossed."""

    platform: str
    kind: str
    crossed: tuple[Crossing, ...]
    links: tuple[str, ...]
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted: the backend, and per link its efficiency, or with `+` behind the name that of its reduction."""

    backend: Backend
    links: Mapping[str, float]


def points(path: Path = DATA) -> list[Point]:
    """Every row of the file, as a group of a cluster."""
    with path.open(encoding="utf-8") as file:
        return [_point(row) for row in csv.DictReader(file)]


def _point(row: Mapping[str, str]) -> Point:
    platform, device, levels = PLATFORMS[row["gpu"]]
    levels = levels.replace("true", "false") if "disabled" in row["notes"] else levels
    cluster: Cluster = parse_cluster(f"name: {device}\ndevice: {device}\nlevels: [{levels}]\n", row["gpu"])
    crossed = crossings(cluster, Group(((int(row["n_ranks"]), 1),)))
    names = [part.split("link: ")[1].split(",")[0].rstrip("} ") for part in levels.split("}, {")]
    return Point(platform, KINDS[row["collective"]], crossed, tuple(names[:len(crossed)]), float(row["size_bytes"]),
                 float(row["time_us"]) * 1e-6)


def error(point: Point, constants: Constants | None = None) -> float:
    """(predicted - measured) / measured; with the constants of the package if none are given."""
    backend, crossed = BACKENDS["nccl"], point.crossed
    if constants is not None:
        backend = constants.backend
        crossed = tuple(replace(crossing, level=replace(
            crossing.level, efficiency=constants.links[link],
            in_network_efficiency=constants.links.get(f"{link}+", 1.0))) for crossing, link in
            zip(point.crossed, point.links, strict=True))
    return cheapest_price(backend, point.kind, crossed, point.nbytes).seconds / point.seconds - 1


def mean_error(some: Sequence[Point], least: float, constants: Constants | None = None) -> tuple[int, float, float]:
    """Number of points of at least so many bytes, mean absolute error, mean error."""
    errors = [error(point, constants) for point in some if point.nbytes >= least]
    return len(errors), fmean(map(abs, errors)) if errors else 0.0, fmean(errors) if errors else 0.0


def loss(some: Sequence[Point], constants: Constants) -> float:
    """What a fit makes small: the mean absolute error at 64 MiB and above plus that from 1 MiB."""
    return mean_error(some, LARGE, constants)[1] + mean_error(some, SMALL, constants)[1]


def _scaled(constants: Constants, name: str, factor: float) -> Constants:
    """One constant times a factor; names are startup, wire.field, or a link."""
    backend = constants.backend
    if name in constants.links:
        return replace(constants, links={**constants.links, name: min(1.0, constants.links[name] * factor)})
    if name == "startup":
        return replace(constants, backend=replace(backend, startup=backend.startup * factor))
    which, field = name.split(".")
    wires = tuple(_stretched(wire, field, factor) if wire.name == which else wire for wire in backend.wires)
    return replace(constants, backend=replace(backend, wires=wires))


def _stretched(wire: Wire, field: str, factor: float) -> Wire:
    by = {"latency": 1.0, "efficiency": 1.0, "fill": 1.0, field: factor}
    return Wire(wire.name, min(1.0, wire.latency * by["latency"]), min(1.0, wire.efficiency * by["efficiency"]),
                wire.fill * by["fill"])


GLOBAL = ("startup", "LL.latency", "LL.efficiency", "LL128.latency", "LL128.efficiency", "Simple.fill")


def fitted(some: Sequence[Point], rounds: int = 9) -> Constants:
    """Coordinate descent from neutral values, in steps that shrink from 50 % to 1 %."""
    used = {link for point in some for link in point.links}
    used |= {f"{link}+" for point in some for link, crossing in zip(point.links, point.crossed, strict=True)
             if crossing.level.in_network_reduction and point.kind == "all-reduce" and len(point.crossed) == 1}
    wires = (Wire("LL", 0.2, 0.3), Wire("LL128", 0.5, 0.9), Wire("Simple", fill=1.0))
    constants = Constants(replace(BACKENDS["nccl"], startup=20e-6, wires=wires), dict.fromkeys(sorted(used), 0.8))
    some = [point for point in some if point.nbytes >= SMALL]
    for turn in range(rounds):
        step = 1.5 if turn == 0 else 1 + 0.3 * 0.6**turn
        for name in (*sorted(used), *GLOBAL) * 2:
            own = [p for p in some if name in GLOBAL or name.removesuffix("+") in p.links]
            options = [_scaled(constants, name, factor) for factor in (1.0, step, 1 / step)]
            constants = min(options, key=lambda option: loss(own, option))
    return constants


def completed(constants: Constants) -> Constants:
    """Links that nothing was fitted to: the mean of the others; their reduction: that of the others."""
    plain = fmean(value for name, value in constants.links.items() if not name.endswith("+"))
    reduced = fmean(value for name, value in constants.links.items() if name.endswith("+"))
    links = ("NVLink2", "NVLink3", "NVLink4", "NVLink5", "xGMI3", "EFA2")
    return replace(constants, links={**dict.fromkeys(links, plain), **{f"{link}+": reduced for link in links},
                                     **constants.links})


def table(some: Sequence[Point], constants: Constants | None = None) -> None:
    """Print the errors per platform."""
    print(f"{'platform':14} {'>=64 MiB n':>10} {'error':>7} {'bias':>7} {'>=1 MiB n':>10} {'error':>7} {'bias':>7}")
    for name in (*dict.fromkeys(point.platform for point in some), "all"):
        own = [point for point in some if name in (point.platform, "all")]
        large, small = mean_error(own, LARGE, constants), mean_error(own, SMALL, constants)
        print(f"{name:14}" + "".join(f" {n:10} {mean:7.1%} {bias:+7.1%}" for n, mean, bias in (large, small)))


def leave_out(some: Sequence[Point]) -> dict[str, tuple[int, float, float]]:
    """Per platform, its errors at 64 MiB and above with constants fitted to all the others."""
    found = {}
    for name in dict.fromkeys(point.platform for point in some):
        constants = completed(fitted([point for point in some if point.platform != name]))
        found[name] = mean_error([point for point in some if point.platform == name], LARGE, constants)
    return found


def main(arguments: Sequence[str]) -> None:
    """Print the tables that the arguments ask for."""
    files = [argument for argument in arguments if not argument.startswith("--")]
    some = points(Path(files[0]) if files else DATA)
    table(some)
    if "--fit" in arguments:
        constants = fitted(some)
        print(f"\nfitted: startup {constants.backend.startup:.2g} s, {constants.backend.wires}, {constants.links}")
        table(some, completed(constants))
    if "--leave-out" in arguments:
        print(f"\n{'left out':14} {'>=64 MiB n':>10} {'error':>7} {'bias':>7}")
        left = leave_out(some)
        for name, (count, absolute, bias) in left.items():
            print(f"{name:14} {count:10} {absolute:7.1%} {bias:+7.1%}")
        print(f"{'all':14} {sum(n for n, _, _ in left.values()):10} "
              f"{sum(n * e for n, e, _ in left.values()) / sum(n for n, _, _ in left.values()):7.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
