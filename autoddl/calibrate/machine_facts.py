"""Reads what this machine is from its own files and tools: processors, memory, devices, their links, the network.

    processors   /proc/cpuinfo, /proc/meminfo, /sys/devices/system/node (NUMA)
    devices      torch.cuda, and of NVIDIA the matrix of `nvidia-smi topo -m`
    network      /sys/class/net/*/speed of cards that are up, /sys/class/infiniband/*/ports/*/rate
    hosts        SLURM's list of nodes, or a file with a host a line

Nothing is timed. Every reader takes the root of the files, and texts of tools, so that a test can be another machine.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddl.core.errors import InputError

__all__ = ["Accelerator", "Card", "MachineFacts", "Processor", "accelerators", "cards", "hosts_of", "machine_facts",
           "processor", "topology_text"]


@dataclass(frozen=True, slots=True)
class Processor:
    """The processors of a machine."""

    name: str
    """Name of the model."""
    cores: int
    """Cores, each counted once whatever its threads."""
    nodes: int
    """NUMA nodes."""
    hertz: float
    """Clock in Hz as the system tells it; 0 where it does not."""
    flops_per_cycle: int
    """float32 operations of a core in a cycle, by its widest fused multiply-add."""
    memory: float
    """Bytes of memory of the machine."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU as torch tells it: name, bytes of memory, and number of multiprocessors."""

    name: str
    memory: float
    units: int


@dataclass(frozen=True, slots=True)
class Card:
    """A network card that is up: its name, bytes a second in one direction, and `ethernet` or `infiniband`."""

    name: str
    bandwidth: float
    kind: str


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Everything that is read of a machine."""

    host: str
    """Name of the machine."""
    processor: Processor
    """Its processors."""
    devices: tuple[Accelerator, ...]
    """Its GPUs; none on a machine that computes on processors."""
    topology: str
    """The text of `nvidia-smi topo -m`; empty without."""
    cards: tuple[Card, ...]
    """Its network cards."""
    hosts: int
    """Number of machines like this one."""
    hosts_from: str
    """Where that number was read."""


def machine_facts(hosts_file: Path | None = None, root: Path = Path("/")) -> MachineFacts:
    """The facts of this machine. Raises InputError where the file of hosts cannot be read or names none."""
    devices = accelerators()
    hosts, where = hosts_of(os.environ, hosts_file)
    topology = topology_text() if devices else ""
    return MachineFacts(os.uname().nodename, processor(root), devices, topology, cards(root), hosts, where)


def processor(root: Path = Path("/")) -> Processor:
    """The processors under a root of files."""
    text = _text(root / "proc/cpuinfo")
    blocks = [dict(_pair(line) for line in block.splitlines() if ":" in line) for block in text.split("\n\n") if block]
    first = blocks[0] if blocks else {}
    cores = len({(one.get("physical id", "0"), one.get("core id", str(i))) for i, one in enumerate(blocks)})
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    memory = re.search(r"MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"))
    return Processor(first.get("model name", os.uname().machine), max(1, cores), max(1, nodes),
                     1e6 * float(first.get("cpu MHz", "0")), _flops(first.get("flags", "").split()),
                     1024.0 * int(memory[1]) if memory else 0.0)


def _flops(flags: Sequence[str]) -> int:
    """Two fused multiply-adds of the widest vectors in a cycle; four floats with neither AVX2 nor AVX-512."""
    if "avx512f" in flags:
        return 64
    return 32 if "avx2" in flags and "fma" in flags else 8


def accelerators() -> tuple[Accelerator, ...]:
    """The GPUs that torch sees; none without torch."""
    try:
        import torch
    except ImportError:
        return ()
    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(Accelerator(one.name, float(one.total_memory), one.multi_processor_count) for one in found)


def topology_text() -> str:
    """The matrix of links that the vendor's tool prints; empty where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    said = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return said.stdout if said.returncode == 0 else ""


def cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """The network cards under a root of files that are up and say how fast they are."""
    found = []
    for path in sorted((root / "sys/class/net").glob("*")):
        speed = _text(path / "speed").strip()
        if _text(path / "operstate").strip() == "up" and speed.isdigit() and int(speed) > 0:
            found.append(Card(path.name, int(speed) * 1e6 / 8, "ethernet"))
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"\s*([\d.]+) Gb/sec", _text(path / "rate"))
        if rate and "ACTIVE" in _text(path / "state"):
            found.append(Card(path.parts[-3], float(rate[1]) * 1e9 / 8, "infiniband"))
    fast = [card for card in found if card.kind == "infiniband"]
    return tuple(fast or found)


def hosts_of(environment: Mapping[str, str], hosts_file: Path | None = None) -> tuple[int, str]:
    """(number of hosts, where it was read): a file with a host a line, SLURM's variables, or this one alone.

    Raises InputError where the file cannot be read or names no host.
    """
    if hosts_file is not None:
        try:
            lines = hosts_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot read the hosts in {hosts_file}: {reason}; give a text file with a host a line"
                             ) from None
        names = dict.fromkeys(line.split("#")[0].split()[0] for line in lines if line.split("#")[0].strip())
        if not names:
            raise InputError(f"{hosts_file} names no host: write one a line")
        return len(names), str(hosts_file)
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        if environment.get(name, "").isdigit() and int(environment[name]) > 0:
            nodes = environment.get("SLURM_JOB_NODELIST", "")
            return int(environment[name]), f"{name}" + f", {nodes}" * bool(nodes)
    return 1, ""


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def _text(path: Path) -> str:
    """The text of a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
