"""Reads the measurements of a calibration, `measured:` in a cluster file, and applies them to the cluster.

    date, versions, seconds     when it was measured, with which libraries, and how long that took
    pulse      seconds of a fixed mixture of work meanwhile: the speed of a machine that is not always equally fast
    device     name and kind as in the file; processor, threads, ranks at once and load while it was measured
    curves     {name, dtype, grid, work, seconds, spread}             -> Device.curves
    links      {level, ranks, bandwidth, latency, error, points}      -> bandwidth and latency of that level
    host       {call, message, byte, wait, turn, late, busy, drag, issue}  -> Device.host

A link keeps its bandwidth as written, and its efficiency becomes the fraction that was measured; where more was
measured, that is its bandwidth. A file whose device is not the one that was measured is refused, because the figures of
one device say nothing of another.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field, StrictInt

from autoddl.core.errors import InputError
from autoddl.cost_models.curves import curves_to_text
from autoddl.cost_models.links import PROTOCOLS
from autoddl.cost_models.machine import Cluster, Device, Host, Level
from autoddl.cost_models.schema import PeakName, Written, validate_tree

__all__ = ["apply_measurements", "scale_to_pulse"]

Positive = Field(gt=0)


class WrittenCurve(Written):
    """Seconds of one kind of kernel on a grid of sizes, as a calibration timed them."""

    name: str
    dtype: PeakName
    grid: tuple[tuple[float, ...], ...] = Field(min_length=1)
    work: tuple[float, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()


class WrittenPoint(Written):
    """Seconds of one collective of one size; `processor` are its CPU seconds."""

    kind: str
    nbytes: float = Positive
    seconds: float = Positive
    spread: float = 0.0
    processor: float = Field(default=0.0, ge=0)


class WrittenLink(Written):
    """Bandwidth in bytes/s and latency in seconds of one level, fitted to `points` with a relative `error`."""

    level: str
    ranks: StrictInt = Field(ge=2)
    bandwidth: float = Positive
    latency: float = Field(ge=0)
    error: float = Field(ge=0)
    points: tuple[WrittenPoint, ...] = ()


class WrittenOrigin(Written):
    """The device that was measured, and how it was used meanwhile."""

    name: str
    kind: str
    processor: str = ""
    threads: StrictInt = Field(default=1, ge=1)
    ranks: StrictInt = Field(default=1, ge=1)
    load: float = 0.0


class WrittenHost(Written):
    """CPU seconds of collectives, with the fields of `Host`."""

    call: float = Field(ge=0)
    message: float = Field(ge=0)
    byte: float = Field(ge=0)
    wait: float = Field(default=0.0, ge=0)
    turn: float = Field(default=0.0, ge=0)
    late: float = Field(default=0.0, ge=0)
    busy: float = Field(default=0.0, ge=0)
    drag: float = Field(default=0.0, ge=0)
    issue: float = Field(default=0.0, ge=0)


class WrittenMeasured(Written):
    """The keys below `measured:`; the docstring of the module explains them."""

    date: str
    versions: dict[str, str]
    device: WrittenOrigin
    seconds: float = 0.0
    pulse: float = Field(default=0.0, ge=0)
    curves: tuple[WrittenCurve, ...] = ()
    links: tuple[WrittenLink, ...] = ()
    host: WrittenHost | None = None


def apply_measurements(tree: Mapping[str, Any] | None, device: Device, levels: tuple[Level, ...], source: str
                       ) -> tuple[str, Device, tuple[Level, ...]]:
    """`measured:` as canonical JSON, and the device and levels with its figures; unchanged without it.

    Raises InputError where the file's device or a level is not the one that was measured.
    """
    if tree is None:
        return "", device, levels
    written = validate_tree(WrittenMeasured, tree, f"{source}: measured")
    origin = written.device
    if (origin.name, origin.kind) != (device.name, device.kind):
        raise InputError(f"{source}: measured is of the {origin.kind} {origin.name!r}, and the file's device is the "
                         f"{device.kind} {device.name!r}; measure this one with `autoddl measure`, or remove measured")
    curves = curves_to_text([curve.model_dump(mode="json") for curve in written.curves], source)
    found = replace(device, curves=curves if written.curves else "")
    if written.host is not None:
        found = replace(found, host=Host(**written.host.model_dump()))
    return json.dumps(tree, sort_keys=True), found, _apply_links(levels, written.links, source)


def scale_to_pulse(cluster: Cluster, pulse: float) -> Cluster:
    """The cluster while the machine has this pulse, in seconds.

    Kernels and the work of the host take longer in proportion to the pulse. Raises InputError where none was measured.
    """
    usual, host, device = cluster.measurements.get("pulse", 0.0), cluster.device.host, cluster.device
    if not usual or pulse <= 0:
        raise InputError(f"cluster {cluster.name}: no pulse to compare {pulse:g} s with; measure it on a CPU")
    by = pulse / usual
    curves = [curve | {"seconds": [by * second for second in curve["seconds"]]}
              for curve in json.loads(device.curves or "[]")]
    slowed = None if host is None else replace(
        host, **{name: by * getattr(host, name) for name in ("call", "message", "byte", "drag", "issue")})
    text = curves_to_text(curves, cluster.name) if curves else ""
    return replace(cluster, device=replace(device, curves=text, host=slowed))


def _apply_links(levels: tuple[Level, ...], links: Sequence[WrittenLink], source: str) -> tuple[Level, ...]:
    """The levels, with bandwidth, efficiency and latency of those that were measured."""
    by_name = {link.level: link for link in links}
    for name in by_name:
        if name not in [level.name for level in levels]:
            raise InputError(f"{source}: measured has a link of level {name!r}, which the file has not; its levels are "
                             f"{', '.join(level.name for level in levels)}; measure again")
    return tuple(_apply_link(level, by_name[level.name]) if level.name in by_name else level for level in levels)


def _apply_link(level: Level, link: WrittenLink) -> Level:
    """`level` with a measured link, whose latency includes that of the protocol."""
    added = PROTOCOLS[level.protocol].latency if level.protocol else 0.0
    return replace(level, bandwidth=max(level.bandwidth, link.bandwidth), latency=max(0.0, link.latency - added),
                   efficiency=min(1.0, link.bandwidth / level.bandwidth))
