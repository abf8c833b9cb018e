"""Clusters for shaped links, and whether links can be shaped here."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from autoddl.core.errors import MachineError
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.launch.shaped_network import check_machine

LEVELS = "  - {name: node, size: %d, bandwidth: 1 GB/s, latency: 60 us}\n  - {name: net, size: %d, bandwidth: %s%s}\n"
SLOW = "name: slow\ndevice: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: %s}}\nlevels:\n"


def cluster(ranks: int, nodes: int, bandwidth: str, more: str = "", peak: str = "10 MFLOP/s") -> Cluster:
    text = SLOW % peak + LEVELS % (ranks, nodes, bandwidth, ", latency: 100 us" + more)
    return parse_cluster(text, "test")


def why_not() -> str:
    """Why links cannot be shaped here, or ''."""
    try:
        check_machine()
        name = f"autoddl-probe-{os.getpid()}"
        made = subprocess.run(("ip", "netns", "add", name), capture_output=True, text=True)
        subprocess.run(("ip", "netns", "del", name), capture_output=True)
        return made.stderr.strip()
    except MachineError as error:
        return str(error)


SKIP = why_not()


def shaping(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that shapes links: it needs root's rights, starts processes, and is skipped where links cannot be
    shaped."""
    allowed = pytest.mark.skipif(bool(SKIP), reason=SKIP or "links can be shaped here")
    marked: Callable[..., None] = pytest.mark.ranks(pytest.mark.root(allowed(test)))
    return marked


def spaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def owned_by(pid: int) -> list[str]:
    return [name for name in spaces() if name.split("-")[2:3] == [str(pid)]]
