"""A profile: how many times longer than the package says a machine's kernels, links and host take.

    matmul         products and convolutions           seconds = work / (peak * efficiency) * matmul
    attention      fused attention, both ways
    memory         kernels that move bytes: norms, activations, copies, the optimizer's update
    launch         to start a kernel
    inner_links    bytes over the innermost level      seconds = bytes / bandwidth * inner_links
    outer_links    bytes over every other level
    latency        a message, at every level
    host           the host, per operator that it launches (`Software.host`)

`autoddl calibrate` fits these factors to measured runs and writes them to a file. A profile belongs to the devices that
it was fitted on. Its constants are uncertain: the logarithms of the factors are normal, with this covariance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from autoddl.core.errors import InputError
from autoddl.cost_models.machine import Cluster, Device, Host, Level
from autoddl.cost_models.measured import apply_measurements
from autoddl.cost_models.schema import Written, validate_tree
from autoddl.cost_models.software import Software, software_named

__all__ = ["CONSTANTS", "SHIPPED", "SPREAD", "Profile", "least_factors", "load_profile", "parse_profile",
           "read_profile"]

CONSTANTS = ("matmul", "attention", "memory", "launch", "inner_links", "outer_links", "latency", "host")
"""Names of the factors, in the order of every row and column of a covariance."""

SPREAD: Mapping[str, float] = {"matmul": 0.1, "attention": 0.2, "memory": 0.15, "launch": 0.3, "inner_links": 0.2,
                               "outer_links": 0.25, "latency": 0.3, "host": 0.5}
"""Standard deviation of the logarithm of each factor before any run is known. Assumed: a machine's products are known
best, what its host needs for an operator least."""

ELEMENTWISE = "elementwise_efficiency"
ATTENTION = ("attention", "attention backward")
ABOVE = 1 + 1e-9
_CONSTANT_OF = dict.fromkeys(("efficiency", "convolution", "float8_e4m3fn", "float16", "float32", "float64"), "matmul"
                             ) | dict.fromkeys(ATTENTION, "attention")
"""A device's efficiency -> the constant that it belongs to; all others are of kernels that move bytes."""
LEAST = 0.5
"""The least factor on what has no peak here, links among them: no link reaches twice the share of its wire."""
_GRIDS = {3: "matmul", 2: "attention", 1: "memory"}
"""Sizes of a kernel on the grid of its measured curve -> the constant that it belongs to."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Factors on seconds, how sure they are, and what they were fitted on."""

    factors: tuple[float, ...] = (1.0,) * len(CONSTANTS)
    """By constant, how many times longer it takes than the package says."""
    covariance: tuple[tuple[float, ...], ...] = tuple(
        tuple(SPREAD[a] ** 2 if a == b else 0.0 for b in CONSTANTS) for a in CONSTANTS)
    """Covariance of the logarithms of the factors."""
    residual: float = 0.0
    """Standard deviation of log(measured / predicted) of runs that were left out; 0 where none were."""
    runs: int = 0
    """Number of runs that it was fitted to."""
    devices: tuple[str, ...] = ()
    """Names of the devices of these runs; empty for any."""
    software: str | None = None
    """Name of the software profile of these runs, where they have one in common."""

    def __getitem__(self, constant: str) -> float:
        return self.factors[CONSTANTS.index(constant)]

    def times(self, constant: str, factor: float) -> "Profile":
        """Returns the profile with one constant multiplied."""
        return replace(self, factors=tuple(one * (factor if name == constant else 1.0)
                                           for name, one in zip(CONSTANTS, self.factors, strict=True)))

    def on(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with these constants. Raises InputError for a device that it was not fitted on."""
        for device in dict.fromkeys((cluster.device, *(part for part, _ in cluster.parts))):
            if self.devices and not set(device.name.split("+")) <= set(self.devices):
                raise InputError(f"the profile was fitted on {', '.join(self.devices)} and says nothing of "
                                 f"{device.name}: calibrate runs on that, or plan without --profile")
        return _on(self, cluster)

    def by(self, software: Software) -> Software:
        """Returns the program on a host with these constants."""
        return replace(software, host=software.host * self["host"])

    def to_json(self) -> dict[str, Any]:
        """Returns what `parse_profile` reads, as plain values."""
        return {"software": self.software, "devices": list(self.devices), "runs": self.runs,
                "residual": self.residual, "constants": dict(zip(CONSTANTS, self.factors, strict=True)),
                "covariance": {name: dict(zip(CONSTANTS, row, strict=True))
                               for name, row in zip(CONSTANTS, self.covariance, strict=True)}}

    def to_yaml(self) -> str:
        """Returns the text that reads back as this very value."""
        return yaml.safe_dump(self.to_json(), sort_keys=False, default_flow_style=None, width=120)


SHIPPED = Profile()
"""The constants of the package as they are, with the spread that is assumed of each."""


class WrittenProfile(Written):
    """The keys of a profile's file."""

    software: str | None = None
    devices: tuple[str, ...] = ()
    runs: int = Field(default=0, ge=0)
    residual: float = Field(default=0.0, ge=0)
    constants: dict[str, float]
    covariance: dict[str, dict[str, float]] = Field(default_factory=dict)


def load_profile(path: str | Path) -> Profile:
    """Reads a profile's file. Raises InputError, with the place and the way out."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the profile {str(path)!r}: {reason}; write one with `autoddl calibrate "
                         "RUNS.csv -o FILE`") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, source: str) -> Profile:
    """Reads the text of a profile; `source` names it in errors."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{source}: this is no YAML: {' '.join(str(error).split())}; a profile is what `autoddl "
                         "calibrate` writes") from None
    return read_profile(tree, source)


def read_profile(tree: Any, source: str) -> Profile:
    """Reads what `Profile.to_json` returns; `source` names it in errors."""
    written = validate_tree(WrittenProfile, tree, source)
    if written.software is not None:
        software_named(written.software)
    factors = tuple(_positive(written.constants, name, source) for name in CONSTANTS)
    unknown = [name for name in (*written.constants, *written.covariance) if name not in CONSTANTS]
    if unknown:
        raise InputError(f"{source}: there is no constant {unknown[0]!r}; the constants are {', '.join(CONSTANTS)}")
    covariance = tuple(tuple(float(written.covariance.get(a, {}).get(b, 0.0)) for b in CONSTANTS) for a in CONSTANTS)
    return Profile(factors, covariance if written.covariance else SHIPPED.covariance, written.residual, written.runs,
                   written.devices, written.software)


def _positive(constants: Mapping[str, float], name: str, source: str) -> float:
    value = constants.get(name, 1.0)
    if not 0 < value < float("inf"):
        raise InputError(f"{source}: constants.{name} is {value:g}; it says how many times longer something takes: "
                         "write a number above 0")
    return value


def least_factors(cluster: Cluster) -> tuple[float, ...]:
    """By constant, the least factor on a cluster: that with which its best kernel reaches its peak, else `LEAST`."""
    return tuple(max((value for device in (cluster.device, *(one for one, _ in cluster.parts))
                      for name, value in _efficiencies(device).items()
                      if _CONSTANT_OF.get(name, "memory") == constant), default=LEAST) for constant in CONSTANTS)


@lru_cache(maxsize=512)
def _on(profile: Profile, cluster: Cluster) -> Cluster:
    if profile.factors == SHIPPED.factors:
        return cluster
    parts = tuple((_device(profile, device), ranks) for device, ranks in cluster.parts)
    device = _device(profile, cluster.device)
    levels = tuple(_level(profile, level, i) for i, level in enumerate(cluster.levels))
    if not cluster.measured:
        return replace(cluster, device=device, levels=levels, parts=parts)
    tree = _measurements(profile, cluster)
    measured, device, levels = apply_measurements(tree, device, levels, cluster.name)
    return replace(cluster, device=device, levels=levels, parts=parts, measured=measured)


def _efficiencies(device: Device) -> dict[str, float]:
    """The fractions of peak and bandwidth that kernels of a device reach, by kind."""
    usual = {} if device.elementwise_efficiency is None else {ELEMENTWISE: device.elementwise_efficiency}
    return {"efficiency": device.efficiency, "memory_efficiency": device.memory_efficiency, **usual,
            **{kind: device.efficiency_of(kind) for kind in ATTENTION}, **dict(device.kernels)}


def _device(profile: Profile, device: Device) -> Device:
    """The device whose efficiencies are those of the profile."""
    found = {}
    for name, value in _efficiencies(device).items():
        reached, most = value / profile[_CONSTANT_OF.get(name, "memory")], max(1.0, value)  # a window of keys: above 1
        if reached > most * ABOVE:
            raise InputError(f"by the profile, {name} of {device.name} is {reached:.2f} of its peak, and no kernel is "
                             "above that: calibrate with runs of this device")
        found[name] = min(most, reached)
    return replace(device, launch=device.launch * profile["launch"], efficiency=found.pop("efficiency"),
                   memory_efficiency=found.pop("memory_efficiency"),
                   elementwise_efficiency=found.pop(ELEMENTWISE, None), kernels=tuple(sorted(found.items())))


def _link_factor(profile: Profile, index: int) -> float:
    return profile["outer_links" if index else "inner_links"]


def _level(profile: Profile, level: Level, index: int) -> Level:
    """The level whose links are as fast as the profile says."""
    by = _link_factor(profile, index)
    return replace(level, bandwidth=level.bandwidth / by, latency=level.latency * profile["latency"],
                   group_bandwidth=tuple((n, rate / by) for n, rate in level.group_bandwidth))


def _measurements(profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """The measurements of a cluster, with their seconds multiplied by the profile's factors."""
    tree, names = cluster.measurements, [level.name for level in cluster.levels]
    for curve in tree.get("curves", ()):
        by = profile[_GRIDS[len(curve["grid"])]]
        curve["seconds"] = [by * float(second) for second in curve["seconds"]]
    for link in tree.get("links", ()):
        link["bandwidth"] = float(link["bandwidth"]) / _link_factor(profile, names.index(link["level"]))
        link["latency"] = float(link["latency"]) * profile["latency"]
    if tree.get("host"):
        timed = {one.name for one in fields(Host)} - {"late"}
        tree["host"] = {name: float(value) * (profile["host"] if name in timed else 1.0)
                        for name, value in tree["host"].items()}
    return tree
