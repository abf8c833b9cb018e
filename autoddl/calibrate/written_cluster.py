"""Writes a cluster file of what was read of a machine, each value with where it was read, or that it is a default.

    processors   a device is a core: levels `core` (of a NUMA node), `socket`, and `net` between hosts
    GPUs         a device is a GPU: levels by NVLink, by NUMA node, and `net` between hosts

A default stands where nothing is told without timing: `autoddl measure` replaces these by what it times.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autoddl.calibrate.machine_facts import Accelerator, Card, MachineFacts
from autoddl.core.errors import InputError
from autoddl.cost_models import load_device, parse_cluster, show_bytes, show_rate
from autoddl.cost_models.cluster import device_names
from autoddl.cost_models.units import format_quantity

__all__ = ["cluster_text", "known_device_of", "linked_groups"]

DEFAULT = "a default: `autoddl measure` times it"
_PER_LINK = {"V100": 25e9, "A100": 25e9, "A800": 25e9, "H100": 25e9, "H200": 25e9, "B200": 50e9}
"""Bytes a second and direction of one NVLink, by the vendor's sheets (`hardware/links.yaml`)."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file: its text, and where the value was read."""

    text: str
    origin: str = ""


def cluster_text(facts: MachineFacts) -> str:
    """The text of the cluster file. It loads: the text is parsed before it is returned.

    Raises InputError where the GPUs differ and one of them is not known.
    """
    lines = [_Line(f"name: {re.sub(r'[^A-Za-z0-9_.-]+', '-', facts.host) or 'here'}", "the machine's name")]
    lines += _gpus(facts) if facts.devices else _cores(facts)
    lines += _net(facts)
    if lines[-1].text == "levels:":
        lines[-1] = _Line("levels: []", "one device, and no other host; --hosts FILE says which others there are")
    width = max(len(line.text) for line in lines if line.origin and len(line.text) < 90)
    text = "# What this machine says of itself. Nothing was timed; `autoddl measure` times it and adds what it finds.\n"
    text += "".join(f"{line.text:{width}}  # {line.origin}\n" if line.origin else f"{line.text}\n" for line in lines)
    parse_cluster(text, "the machine's cluster file")
    return text


def _cores(facts: MachineFacts) -> list[_Line]:
    """The lines of a machine that computes on its processors."""
    cpu = facts.processor
    share, peak = cpu.memory / cpu.cores, cpu.hertz * cpu.flops_per_cycle
    standard = load_device("cpu-core")
    lines = [
        _Line("device:"),
        _Line("  name: core", f"{cpu.name}, /proc/cpuinfo"),
        _Line("  kind: cpu"),
        _Line(f"  memory: {_rounded(share or standard.memory, 'bytes')}",
              f"{show_bytes(cpu.memory)} over {cpu.cores} cores, /proc/meminfo" if share else DEFAULT),
        _Line(f"  bandwidth: {format_quantity(standard.bandwidth, 'bytes/s')}", DEFAULT),
        _Line(f"  peak: {{float32: {_rounded(peak or standard.peak('float32'), 'flop/s')}, "
              f"float64: {_rounded((peak or standard.peak('float32')) / 2, 'flop/s')}}}",
              f"{cpu.hertz / 1e9:.3g} GHz x {cpu.flops_per_cycle} float32 operations a cycle, by the flags of "
              "/proc/cpuinfo" if peak else DEFAULT),
        _Line("levels:")]
    nodes = cpu.nodes if cpu.cores % cpu.nodes == 0 else 1
    for name, size, where in (("core", cpu.cores // nodes, "cores of a NUMA node, /proc/cpuinfo"),
                              ("socket", nodes, "NUMA nodes, /sys/devices/system/node")):
        if size > 1:
            lines += _level(name, size, where, ("bandwidth: 1 GB/s", DEFAULT), ("latency: 60 us", DEFAULT),
                            ("topology: fully-connected", "processes of one machine talk through its memory"))
    return lines


def _gpus(facts: MachineFacts) -> list[_Line]:
    """The lines of a machine with GPUs."""
    devices = facts.devices
    name = known_device_of(devices[0])
    if len({one.name for one in devices}) > 1:
        lines = _parts(facts)
    elif name is not None:
        lines = [_Line(f"device: {name}", f"torch.cuda: {devices[0].name}, {show_bytes(devices[0].memory)}")]
    else:
        lines = [_Line("device:"), _Line(f"  name: {re.sub(r'[^A-Za-z0-9_.-]+', '-', devices[0].name)}", "torch.cuda"),
                 _Line(f"  memory: {_rounded(devices[0].memory, 'bytes')}", "torch.cuda"),
                 _Line("  bandwidth: 1 TB/s", f"no known device: write the vendor's figure; {DEFAULT}"),
                 _Line("  peak: {bfloat16: 100 TFLOP/s, float32: 10 TFLOP/s}",
                       f"no known device: write the vendor's figures; {DEFAULT}"),
                 _Line(f"  units: {devices[0].units}", "torch.cuda: multiprocessors")]
    lines.append(_Line("levels:"))
    groups, links = linked_groups(facts.topology, len(devices))
    inner = len(groups[0]) if len({len(group) for group in groups}) == 1 else 1
    if inner > 1:
        model = next((one for one in _PER_LINK if one in devices[0].name), "")
        rate = links * _PER_LINK.get(model, 25e9)
        lines += _level("node" if inner == len(devices) else "nvlink", inner, "GPUs joined by NVLink, nvidia-smi topo",
                        (f"bandwidth: {_rounded(rate, 'bytes/s')}", f"{links} links of "
                         f"{show_rate(_PER_LINK.get(model, 25e9))} a device" + ("" if model else f"; {DEFAULT}")),
                        ("latency: 3.4 us", DEFAULT), ("protocol: direct", "NVLink"))
    if len(devices) // inner > 1:
        lines += _level("pcie" if inner > 1 else "node", len(devices) // inner, "GPUs behind PCIe, torch.cuda",
                        ("link: PCIe4", f"the generation is {DEFAULT}"))
    return lines


def _parts(facts: MachineFacts) -> list[_Line]:
    """The devices of all ranks where they differ. Raises InputError where one is not known by name."""
    lines = [_Line("parts:")]
    for name, alike in groupby(facts.devices * facts.hosts, key=lambda one: one.name):
        ranks = list(alike)
        known = known_device_of(ranks[0])
        if known is None:
            raise InputError(f"the GPUs differ, and {name} is none that is known: write the cluster file by hand, with "
                             f"parts, and that device's figures; known are {', '.join(device_names())}")
        lines.append(_Line(f"  - {{device: {known}, ranks: {len(ranks)}}}", f"torch.cuda: {name}"))
    return lines


def known_device_of(device: Accelerator) -> str | None:
    """The device of `hardware/` that a GPU is: its model is in the GPU's name, and its memory is nearest; else None."""
    words = set(re.split(r"[^A-Z0-9]+", device.name.upper()))
    found = []
    for name in device_names():
        known = load_device(name)
        model, pcie = name.upper().split("-")[0], "PCIE" in name.upper()
        if known.kind == "gpu" and model in words and 0.75 < device.memory / known.memory < 1.1:
            found.append((pcie != ("PCIE" in words), abs(device.memory - known.memory), name))
    return min(found)[2] if found else None


def linked_groups(topology: str, count: int) -> tuple[list[list[int]], int]:
    """(groups of GPUs that NVLink joins, links of one GPU) of the text of `nvidia-smi topo -m`.

    Through a switch, every cell of a row tells all links of the GPU; otherwise they add up.
    """
    rows = [line.split() for line in topology.splitlines() if re.match(r"GPU\d+\s", line)]
    cells = [row[1:1 + count] for row in rows[:count]]
    left, groups = set(range(count)), list[list[int]]()
    while left:
        group, ahead = list[int](), [min(left)]
        while ahead:
            at = ahead.pop()
            if at in left:
                left.discard(at)
                group.append(at)
                ahead += [k for k, cell in enumerate(cells[at] if at < len(cells) else ()) if cell.startswith("NV")]
        groups.append(sorted(group))
    own = [int(cell[2:]) for cell in (cells[0] if cells else ()) if re.fullmatch(r"NV\d+", cell)]
    return groups, 0 if not own else own[0] if own[0] >= len(own) and len(own) > 1 else sum(own)


def _net(facts: MachineFacts) -> list[_Line]:
    """The lines of the level between hosts; none for one host."""
    if facts.hosts == 1:
        return []
    inside = len(facts.devices) or facts.processor.cores
    where = ", ".join(f"{card.name} {show_rate(card.bandwidth)}" for card in facts.cards)
    total = sum(card.bandwidth for card in facts.cards)
    origin = f"{where}, /sys/class" if facts.cards else DEFAULT
    own = bool(facts.devices) and len(facts.cards) >= inside
    bandwidth = (total / inside if own else total) or 1.25e9
    protocol = "rdma" if any(card.kind == "infiniband" for card in facts.cards) else "tcp"
    port = [] if own or inside == 1 else [(f"shared_by: {_outermost(facts)}", "the devices of a host share its cards")]
    return _level("net", facts.hosts, f"hosts, {facts.hosts_from}",
                  (f"bandwidth: {_rounded(bandwidth, 'bytes/s')}", origin + ", a device" * own),
                  (f"latency: {'14' if protocol == 'rdma' else '25'} us", DEFAULT),
                  (f"protocol: {protocol}", _kinds(facts.cards)), *port)


def _kinds(found: Sequence[Card]) -> str:
    return " and ".join(dict.fromkeys(card.kind for card in found)) or DEFAULT


def _level(name: str, size: int, where: str, *keys: tuple[str, str]) -> list[_Line]:
    """The lines of one level."""
    return [_Line(f"  - name: {name}"), _Line(f"    size: {size}", where),
            *(_Line(f"    {text}", origin) for text, origin in keys)]


def _outermost(facts: MachineFacts) -> str:
    """Name of the outermost level inside a host."""
    if facts.devices:
        groups, _ = linked_groups(facts.topology, len(facts.devices))
        inner = len(groups[0]) if len({len(group) for group in groups}) == 1 else 1
        return "pcie" if 1 < inner < len(facts.devices) else "node"
    nodes = facts.processor.nodes if facts.processor.cores % facts.processor.nodes == 0 else 1
    return "socket" if nodes > 1 else "core"


def _rounded(value: float, dimension: str) -> str:
    """A quantity in three significant digits, down."""
    scale = 10 ** max(0, len(str(int(value))) - 3)
    return format_quantity(float(scale * int(value / scale + 1e-9)), dimension)
