"""Settings that others publish throughput for, as pins, beside what was measured and what the search finds.

    python examples/benchmarks/published_settings.py [part of a row's name]

A row is a model, a cluster, a number of sequences a step, and the setting: roles of the mesh's axes
(`planner.strategies`), microbatches and recomputation. Seconds of a step are predicted in bf16-mixed with AdamW, with
elementwise chains as they are (eager) or in one kernel (compiled); the search has the same batch, compiled, with
everything free but stages. Each plan is made in a process of its own. Predicted; nothing runs.

Sources: torchtitan, `benchmarks/llama3_h100_202412_torchtitan.md` (H100 of 96 GB and 2.4 TB/s, limited to 500 W, with
400 Gb/s each) and `docs/performance.md` (A100); NVIDIA's dgxc-benchmarking v25.02 for Megatron.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from recipes import a100, h100, planned_among
from torch import nn

import autoddl
from autoddl.core.errors import Infeasible
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster
from autoddl.operators.fusion import as_compiled
from autoddl.planner.candidates import Candidate
from autoddl.planner.options import PlanOptions
from autoddl.planner.strategies import strategy

from llama import llama3_8b, llama3_70b  # isort: skip

TOKENS = 8192
"""Tokens of a sequence."""


class Setting(NamedTuple):
    """A published run: tokens a second and device, eager and compiled, where they were published."""

    model: Callable[[int], nn.Module]
    cluster: Callable[[], Cluster]
    sequences: int
    roles: Mapping[str, str]
    recompute: str
    microbatches: int
    published: Mapping[str, float]


def _8b(batch: int) -> nn.Module:
    return llama3_8b(batch=batch)


def _70b(batch: int) -> nn.Module:
    return llama3_70b(batch=batch)


def grand_teton(*sizes: int) -> Cluster:
    """Nodes of eight H100 of 96 GB and 2.4 TB/s."""
    made = h100(*sizes)
    return replace(made, device=replace(made.device, memory=96e9, bandwidth=2.4e12))


ZERO_3 = {"net": "zero-3", "node": "zero-3"}

SETTINGS: Mapping[str, Setting] = {
    "torchtitan 8B, 8 H100, FSDP": Setting(
        _8b, lambda: grand_teton(1), 16, ZERO_3, "selective", 1, {"eager": 5762, "compiled": 6667}),
    "torchtitan 8B, 128 H100, FSDP": Setting(
        _8b, lambda: grand_teton(16), 256, ZERO_3, "selective", 1, {"eager": 5605, "compiled": 6514}),
    "torchtitan 8B, 64 A100, FSDP": Setting(
        _8b, lambda: a100(8), 64, ZERO_3, "selective", 1, {"eager": 2973}),
    "torchtitan 70B, 64 A100, FSDP": Setting(
        _70b, lambda: a100(8), 64, ZERO_3, "full", 1, {"eager": 331}),
    "Megatron 8B, 64 H100, distributed optimizer, CP 2": Setting(
        _8b, lambda: h100(8), 1024, {"net": "zero-1", "node.1": "zero-1", "node.0": "tensor"}, "none", 32,
        {"compiled": 10082}),
}


def mesh_of(cluster: Cluster, roles: Mapping[str, str]) -> Mesh:
    """A mesh whose inner axes are those of a node, the last of two ranks where a node has two."""
    nodes = cluster.size // 8
    inner = {"node": 8} if "node" in roles else {"node.1": 4, "node.0": 2}
    return Mesh.parse(",".join(f"{name}={size}" for name, size in ({"net": nodes} | inner).items()))


def as_set(setting: Setting, cluster: Cluster) -> autoddl.Plan:
    """The best plan that has the setting's roles."""
    options = PlanOptions.of({"precision": "bf16-mixed", "workers": 1, "microbatches": (setting.microbatches,)})
    candidate = Candidate(mesh_of(cluster, setting.roles), lambda graph, mesh: strategy(graph, mesh, setting.roles),
                          setting.microbatches, setting.recompute)
    return planned_among(setting.model(setting.sequences), cluster, options, [candidate])


def found(setting: Setting, cluster: Cluster) -> autoddl.Plan:
    """The best plan of the same batch."""
    counts = tuple(sorted({1, 2, 4, setting.microbatches}))
    return autoddl.plan(setting.model(setting.sequences), cluster, precision="bf16-mixed", workers=1,
                        recompute=("search",), microbatches=counts)


def row(name: str, how: str) -> str:
    """What one cell of the table says: tokens a second and device, and the plan."""
    setting, began = SETTINGS[name], time.process_time()
    cluster = setting.cluster()
    try:
        plan = as_set(setting, as_compiled(cluster) if how == "compiled" else cluster) if how != "search" \
            else found(setting, as_compiled(cluster))
    except Infeasible as error:
        return f"no plan: {error}"
    rate = setting.sequences * TOKENS / plan.predicted.seconds / cluster.size
    said = f", published {setting.published[how]:,.0f}" if how in setting.published else ""
    return (f"{rate:,.0f} tokens/s a device{said}; step {plan.predicted.seconds:.3f} s, gap {plan.gap:.2%}, peak "
            f"{plan.predicted.peak_bytes / 1e9:.1f} GB, mesh {plan.mesh}, {plan.microbatches} microbatches, "
            f"{len(plan.recompute)} blocks recomputed; {time.process_time() - began:.0f} CPU s")


def cells(wanted: str) -> Iterator[tuple[str, str]]:
    for name in SETTINGS:
        if wanted in name:
            for how in ("eager", "compiled", "search"):
                yield name, how


def main(wanted: str = "", name: str = "", how: str = "") -> None:
    """Prints the table, each cell from a process of its own."""
    if name:
        print(json.dumps(row(name, how)))
        return
    for each in cells(wanted):
        command = [sys.executable, __file__, wanted, *each]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        print(f"{each[0]}, {each[1]}: {json.loads(made.stdout) if made.returncode == 0 else made.stderr[-300:]}",
              flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
