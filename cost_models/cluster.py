"""Cluster files: YAML -> Cluster, with every wrong word answered by its place, the rule and the way out.

    name: two-racks
    device: A100-80GB                        # a file of hardware/, as B200 alone too, or the same keys inline
    levels:                                  # innermost first; size = children per parent
      - {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}
      - {name: rack, size: 2, link: InfiniBand-HDR, shared_by: node, oversubscription: 2}   # a link of hardware/

Optional: `measured:`, which a calibration writes, and `backend:`, the library of collectives. By default it is gloo for
a cpu and nccl for a gpu, which AMD calls RCCL. A device of hardware/ may name its own, like hccl.
Where devices differ, `parts: [{device: A100-80GB, ranks: 8}, {device: V100-16GB, ranks: 8}]` stands for `device:`.
What the words mean is said in `machine`, where the values are; this module only reads them.

Devices that differ between parts of a cluster: what all of them can do.

    memory, bandwidth, peak per dtype, efficiencies    the least of any part
    launch, part of exponentials in attention          the longest, the largest
    units                                              the fewest

An even split waits for the slowest rank and must fit the smallest, so this device prices it.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.core.names import is_factory, near_files
from autoddl.cost_models.device_names import device_meant, plain_device_name
from autoddl.cost_models.links import LINKS_FILE
from autoddl.cost_models.machine import SCALINGS, Cluster, Device, Level, Switch
from autoddl.cost_models.measured import apply_measurements
from autoddl.cost_models.schema import WrittenCluster, WrittenDevice, WrittenLevel, validate_tree
from autoddl.cost_models.topologies import check_topology
from autoddl.cost_models.units import show_bytes, show_rate

__all__ = ["Cluster", "Device", "Level", "device_names", "load_cluster", "load_device", "near_devices",
           "parse_cluster", "weakest_device"]

_HARDWARE = Path(__file__).parent / "hardware"
_LAUNCH_SECONDS = {"gpu": 5e-6, "cpu": 3e-6}
"""The least a kernel takes: a CUDA launch, an ATen dispatch."""


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster file. Raises InputError for one that cannot be read, or that is something else."""
    name, other = str(path), "a factory" if is_factory(str(path)) else ""
    text = "" if other else _read(Path(path), "cluster file")
    if other or '"decisions": [' in text[:1000]:
        raise InputError(f"{name} looks like {other or 'a plan'}, and a cluster file is asked for here: give the path "
                         "of a YAML file, like cluster.yaml")
    return parse_cluster(text, name)


def parse_cluster(text: str, source: str) -> Cluster:
    """Read the text of a cluster file; `source` names it in errors."""
    written = validate_tree(WrittenCluster, _tree(text, source), source)
    levels = tuple(_level(level, source) for level in written.levels)
    texts = [_written(part.device, f"{source}: parts.{i}.device") for i, part in enumerate(written.parts)]
    parts = tuple((_device(text), part.ranks) for text, part in zip(texts, written.parts, strict=True))
    texts = texts or [_written(written.device, f"{source}: device")]
    device = weakest_device([each for each, _ in parts]) if parts else _device(texts[0])
    _check_levels(levels, source)
    backend = written.backend or _backend(texts, source)
    measured, device, levels = apply_measurements(written.measured, device, levels, source)
    cluster = Cluster(written.name, device, levels, backend, measured, parts)
    if parts and sum(ranks for _, ranks in parts) != cluster.size:
        raise InputError(f"{source}: parts have {sum(ranks for _, ranks in parts)} ranks, but the levels multiply to "
                         f"{cluster.size}; list the devices of all ranks")
    return cluster


def _written(written: Any, source: str) -> WrittenDevice:
    """A device as it is written, inline or in the file of hardware/ that is named."""
    return validate_tree(WrittenDevice, written, source) if isinstance(written, dict) else _of_hardware(str(written))


def _backend(devices: Sequence[WrittenDevice], source: str) -> str:
    """The library of collectives of devices. Raises InputError where these have different ones."""
    found = dict.fromkeys(one.backend or ("gloo" if one.kind == "cpu" else "nccl") for one in devices)
    if len(found) > 1:
        raise InputError(f"{source}: the parts talk by {' and '.join(found)}, and a group of ranks by one of them: "
                         "describe a cluster of one kind, or write backend")
    return next(iter(found))


def _level(written: WrittenLevel, source: str) -> Level:
    """The value, with its tables as tuples, checked against its topology."""
    plain = written.model_dump(exclude={"link", "reduces"})
    switch = None if written.reduces is None else Switch(**written.reduces.model_dump(exclude_none=True))
    level = Level(**{**plain, "group_bandwidth": tuple(sorted(plain["group_bandwidth"].items())), "reduces": switch})
    try:
        check_topology(level)
    except InputError as error:
        raise InputError(f"{source}: level {level.name!r}: {error}") from None
    return level


def device_names() -> tuple[str, ...]:
    """The devices whose figures come with the package."""
    return tuple(sorted(path.stem for path in _HARDWARE.glob("*.yaml") if path != LINKS_FILE))


def near_devices(name: str) -> str:
    """The known devices that a name may mean, with their memory: all that begin with it, or the nearest; "" for none.

    Half of a name may differ: its memory stands behind it.
    """
    by_lower = {known.lower(): known for known in device_names()}
    near = [known for lower, known in by_lower.items() if lower.startswith(name.lower())]
    near = near or [by_lower[lower] for lower in get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)]
    every = [f"{one!r} ({show_bytes(device.memory)} at {show_rate(device.bandwidth)})"
             for one, device in ((one, load_device(one)) for one in near)]
    return " or ".join(filter(None, (", ".join(every[:-1]), *every[-1:])))


def load_device(name: str) -> Device:
    """A device of hardware/ by name, or by another name that it alone has (`device_names`)."""
    return _device(_of_hardware(name))


def _of_hardware(name: str) -> WrittenDevice:
    known = device_meant(name, device_names())
    if not known:
        near = near_devices(plain_device_name(name))
        rest = f"there are {', '.join(device_names())}; any other is written inline: device: " \
               "{name, memory, bandwidth, peak}"
        raise InputError(f"{name!r} is no known device; " + (f"did you mean {near}? T{rest[1:]}" if near else rest))
    path = _HARDWARE / f"{known}.yaml"
    return validate_tree(WrittenDevice, _tree(_read(path, "device file"), path.name), path.name)


def _device(written: WrittenDevice) -> Device:
    launch = _LAUNCH_SECONDS[written.kind] if written.launch is None else written.launch
    return Device(written.name, written.kind, written.memory, written.bandwidth, tuple(sorted(written.peak.items())),
                  launch, written.efficiency, written.memory_efficiency, written.units,
                  tuple(sorted(written.kernels.items())), elementwise_efficiency=written.elementwise_efficiency,
                  exponentials=written.exponentials,
                  compiled=written.compiled, by_hand=written.by_hand,
                  narrow=written.narrow or "", scaling=written.scaling, hides=tuple(sorted(set(written.hides))))


def _check_levels(levels: tuple[Level, ...], source: str) -> None:
    """Names differ, and a port is shared by the units of a level further in."""
    inside: list[str] = []
    for level in levels:
        if level.name in inside:
            raise InputError(f"{source}: two levels are called {level.name!r}; every level needs its own name")
        if level.shared_by is not None and level.shared_by not in inside:
            raise InputError(f"{source}: level {level.name!r} is shared_by {level.shared_by!r}, "
                             f"which is no level inside it; inside are {', '.join(inside) or 'none'}")
        inside.append(level.name)


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        way_out = "give the path of a YAML file"
        raise InputError(f"cannot read {what} {str(path)!r}: {reason}; "
                         f"{way_out if path.exists() else near_files(path, way_out)}") from None


def _tree(text: str, source: str) -> Any:
    """The YAML as plain values; a mistake is named with its line."""
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{source}{line}: this is no YAML: {error.problem}; "
                         "a level looks like {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}: this is no YAML: {error}") from None


def weakest_device(devices: Sequence[Device]) -> Device:
    """One device that each of `devices` can stand in for; of one kind, and with a peak where all list one."""
    first = devices[0]
    if any(device.kind != first.kind for device in devices):
        raise InputError(f"the parts mix kinds of devices, {', '.join(f'{d.name} ({d.kind})' for d in devices)}; "
                         "describe a cluster of one kind")
    shared = set.intersection(*({dtype for dtype, _ in device.peaks} for device in devices))
    if not shared:
        raise InputError(f"the parts {', '.join(d.name for d in devices)} list no peak in common; add one to each")
    kernels = sorted({name for device in devices for name, _ in device.kernels})
    return Device(name="+".join(dict.fromkeys(device.name for device in devices)), kind=first.kind,
                  memory=min(device.memory for device in devices),
                  bandwidth=min(device.bandwidth for device in devices),
                  peaks=tuple((dtype, min(dict(d.peaks)[dtype] for d in devices)) for dtype in sorted(shared)),
                  launch=max(device.launch for device in devices),
                  efficiency=min(device.efficiency for device in devices),
                  memory_efficiency=min(device.memory_efficiency for device in devices),
                  elementwise_efficiency=min(d.elementwise_efficiency or d.memory_efficiency for d in devices),
                  exponentials=max(device.exponentials for device in devices),
                  units=min(device.units for device in devices),
                  kernels=tuple((name, min(device.efficiency_of(name) for device in devices)) for name in kernels),
                  compiled=all(device.compiled for device in devices),
                  by_hand=all(device.by_hand for device in devices),
                  narrow=first.narrow if len({device.narrow for device in devices}) == 1 else "",
                  scaling=max((device.scaling for device in devices), key=SCALINGS.index),
                  hides=tuple(sorted(set.intersection(*(set(device.hides) for device in devices)))))
