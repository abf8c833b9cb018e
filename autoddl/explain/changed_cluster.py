"""Reads changes of a cluster as people write them, `WHERE=VALUE`, and makes the changed cluster.

    net.bandwidth=2x           a key of a level's line in a cluster file, multiplied, or
    net.latency='3 us'         written anew, with its unit
    node.size=16               the children of a level; its links follow (`pareto.level_of_size`)
    net.link=InfiniBand-NDR    bandwidth, latency and protocol of a link with a name
    device=H200                another device with a name
    device.memory=2x           a key of the device; device.peak is that of every dtype, device.peak.bfloat16 of one
    device.speed=2x            kernels in half of the seconds: peaks, bandwidth, launches, and curves that were timed

A change is made in the tree of the cluster's file, which is then read as any file: the same rules, the same errors.
What was measured of a link or a device that is replaced is left out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.cost_models import Cluster, parse_cluster, parse_quantity, show_bytes, show_rate, show_seconds
from autoddl.cost_models.cluster import device_names, near_devices
from autoddl.cost_models.units import format_quantity
from autoddl.explain.pareto import level_of_size

__all__ = ["Change", "changed_cluster", "times"]

Tree = dict[str, Any]

_TIMES = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)x")
_HOST = ("call", "message", "byte", "drag", "issue")
"""What a rank's processor does of a collective (`Host`)."""

DIMENSIONS = {"bandwidth": "bytes/s", "latency": "seconds", "memory": "bytes", "launch": "seconds", "peak": "flop/s"}
"""Keys that have a unit."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change `where=value`, with the value that was there before, as text."""

    where: str
    before: str
    after: str


def times(text: str) -> float | None:
    """The factor of a text like `2x`; None for any other. Raises InputError for a factor of 0."""
    found = _TIMES.fullmatch(text.strip())
    try:
        factor = float(found[1]) if found else None
    except ValueError:
        return None
    if factor == 0:
        raise InputError(f"{text!r} leaves nothing: a factor is above 0, like 0.5x")
    return factor


def changed_cluster(cluster: Cluster, changes: Sequence[str]) -> tuple[Cluster, tuple[Change, ...]]:
    """The cluster with every change made, in order, and what each one replaced.

    Raises InputError, which begins with the change, where one cannot be made.
    """
    found = []
    for text in changes:
        where, equals, value = (part.strip() for part in text.partition("="))
        if not (where and equals and value):
            raise InputError(f"{text!r} is no change: write WHERE=VALUE, like net.bandwidth=2x or node.size=16")
        try:
            cluster, before, after = _changed(cluster, where, value)
        except InputError as error:
            raise InputError(f"{text}: {error}") from None
        found.append(Change(where, before, after))
    return cluster, tuple(found)


def _changed(cluster: Cluster, where: str, value: str) -> tuple[Cluster, str, str]:
    """The cluster with one change, and the values before and after, as text."""
    place, _, key = where.partition(".")
    names = [level.name for level in cluster.levels]
    name = max((one for one in names if where.startswith(f"{one}.")), key=len, default="")
    if name:
        place, key = name, where[len(name) + 1:]
    if place == "device" and not name:
        return _device(cluster, key, value)
    if not name or not key:
        there = f"there are {', '.join([*names, 'device'])}, each with the keys of a cluster file, like " \
                f"{names[0]}.bandwidth"
        near = there if place in names else near_names(place, [*names, "device"], there, most=1)
        raise InputError(f"there is no {where!r} to change; {near}; arguments of a model, like its batch, are "
                         "changed by planning again: autoddl plan --set")
    index = names.index(name)
    if key == "size":
        return _sized(cluster, index, value)
    tree = _tree(cluster)
    level = tree["levels"][index]
    _drop_link(tree, name)
    before = level.get(key, getattr(cluster.levels[index], key, None))
    if key == "link":
        before = _shown(level["bandwidth"], "bandwidth")
        for own in ("bandwidth", "latency", "protocol", "efficiency"):
            level.pop(own, None)
    level[key] = _value(before, key, value)
    if key == "bandwidth" and level.get("group_bandwidth"):
        ratio = parse_quantity(level[key], "bytes/s") / cluster.levels[index].bandwidth
        level["group_bandwidth"] = {n: _times(rate, key, ratio) for n, rate in level["group_bandwidth"].items()}
    return _read(tree), _shown(before, key), _shown(level[key], key)


def _sized(cluster: Cluster, index: int, value: str) -> tuple[Cluster, str, str]:
    """The cluster with another number of children at one level."""
    level, factor = cluster.levels[index], times(value)
    if cluster.parts:
        raise InputError("the devices of this cluster differ, and a number does not say which the new ones are: "
                         "write a cluster file of its own")
    size = value if factor is None else f"{level.size * factor:g}"
    if not size.isdigit() or int(size) < 1:
        raise InputError(f"a level has a whole number of children, at least 1, and not {size}")
    sized = level_of_size(level, int(size))
    levels = tuple(sized if i == index else one for i, one in enumerate(cluster.levels))
    return replace(cluster, levels=levels), str(level.size), size


def _device(cluster: Cluster, key: str, value: str) -> tuple[Cluster, str, str]:
    """The cluster with another device, or with a key of its device changed."""
    tree = _tree(cluster)
    if not key:
        tree.pop("parts", None)
        tree.pop("measured", None)
        tree["device"] = known_device(value)
        found = _read(tree)
        if found.device.kind != cluster.device.kind or cluster.backend != "gloo":  # devices may have another library
            del tree["backend"]
            found = _read(tree)
        return found, cluster.device.name, tree["device"]
    devices: list[Tree] = [part["device"] for part in tree["parts"]] if "parts" in tree else [tree["device"]]
    if key == "speed":
        return _faster(tree, devices, value)
    name, _, dtype = key.partition(".")
    if tree.get("measured", {}).get("curves") and name in ("peak", "bandwidth", "efficiency", "launch"):
        raise InputError(f"the kernels of this device were timed, and {name} prices none of them: "
                         "write device.speed=2x, or plan with a file without measured")
    before, after = "", ""
    for device in devices:
        parts, one = (device[name], dtype) if dtype and isinstance(device.get(name), dict) else (device, key)
        old = parts.get(one)
        parts[one] = ({each: _value(peak, name, value) for each, peak in old.items()} if isinstance(old, dict)
                      else _value(old, name, value))
        before, after = _shown(old, name), _shown(parts[one], name)
    return _read(tree), before, after


def _faster(tree: Tree, devices: Sequence[Tree], value: str) -> tuple[Cluster, str, str]:
    """The cluster with devices of another speed: what is priced by figures, and what was timed."""
    factor = times(value)
    if factor is None:
        raise InputError("a speed is relative: write it like device.speed=2x")
    for device in devices:
        device |= {"peak": {dtype: _times(peak, "peak", factor) for dtype, peak in device["peak"].items()},
                   "bandwidth": _times(device["bandwidth"], "bandwidth", factor),
                   "launch": _times(device["launch"], "launch", 1 / factor)}
    measured = tree.get("measured", {})
    for curve in measured.get("curves", ()):
        curve["seconds"] = [float(second) / factor for second in curve["seconds"]]
    if measured.get("host"):
        measured["host"] |= {name: float(measured["host"][name]) / factor for name in _HOST if name in measured["host"]}
    return _read(tree), "1x", value


def known_device(text: str) -> str:
    """The name of the device that `text` names, or that alone begins with it, like `H200` for `H200-141GB`."""
    found = [name for name in device_names() if name.lower().startswith(f"{text.lower()}-")]
    if len(found) > 1 and text.lower() not in map(str.lower, device_names()):
        raise InputError(f"{text!r} names {len(found)} devices: write one of {near_devices(text)}")
    return found[0] if len(found) == 1 else text


def _value(before: Any, key: str, value: str) -> Any:
    """The value to write: the text as it is, or the value before, multiplied. Of an unknown key, the rules tell."""
    factor = times(value)
    if factor is None or before is None:
        return value if key in DIMENSIONS or before is None else yaml.safe_load(value)
    if key in DIMENSIONS:
        return _times(before, key, factor)
    if isinstance(before, bool) or not isinstance(before, int | float):
        raise InputError(f"{key} has no number to multiply: write its value, without x")
    return factor * before


def _times(before: Any, key: str, factor: float) -> str:
    """A quantity of the tree, multiplied."""
    return format_quantity(factor * parse_quantity(before, DIMENSIONS[key]), DIMENSIONS[key])


def _shown(value: Any, key: str) -> str:
    """The value as text, with its unit."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(one, key)}" for name, one in value.items())
    if key not in DIMENSIONS or value is None:
        return "none" if value is None else str(value)
    number = parse_quantity(value, DIMENSIONS[key])
    match DIMENSIONS[key]:
        case "bytes":
            return show_bytes(number)
        case "seconds":
            return show_seconds(number)
        case "flop/s":
            return show_rate(number, "FLOP")
    return show_rate(number)


def _drop_link(tree: Tree, level: str) -> None:
    """Leaves out what was measured of a level's link; its figures stand in the level itself."""
    if "measured" in tree:
        tree["measured"]["links"] = [one for one in tree["measured"].get("links", ()) if one["level"] != level]


def _tree(cluster: Cluster) -> Tree:
    found: Tree = yaml.safe_load(cluster.to_yaml())
    return found


def _read(tree: Tree) -> Cluster:
    """The cluster that the tree describes. The error says nothing of a file."""
    try:
        return parse_cluster(yaml.safe_dump(tree, sort_keys=False), "cluster")
    except InputError as error:
        raise InputError(str(error).removeprefix("cluster: ")) from None
