"""All-reduces in switches that reduce, beside rings, on shaped links: python examples/benchmarks/switch_trees.py

Each rank sits in a network namespace behind `tc tbf` (root needed), and a switch of the level `net` adds up what the
ranks push to it. Per cluster and size: seconds of a ring among the ranks and of the switch tree, interleaved (medians,
the slowest rank's), the median of the paired ratios with its quartiles, and what the cost model predicts for both.

    [RANKS ...] --mb=1,4 --repeats=7 --rate="12.5 MB/s"
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster, Group, collective, parse_cluster
from autoddl.launch.launch import launch
from autoddl.launch.places import placed
from autoddl.runtime.collectives.process_groups import Groups

CLUSTER = """name: switched-{ranks}x1
device: {{name: part of a core, kind: cpu, memory: 1 GB, bandwidth: 5 GB/s, peak: {{float32: 24 GFLOP/s}}}}
levels:
  - {{name: node, size: 1, bandwidth: 1 GB/s, latency: 60 us}}
  - {{name: net, size: {ranks}, bandwidth: {rate}, latency: 100 us, efficiency: 0.97, reduces: true}}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of every repetition, of a ring and of the switch tree."""

    nbytes: int
    ring: list[float]
    tree: list[float]


def without(cluster: Cluster) -> Cluster:
    """The cluster with switches that do not reduce."""
    return replace(cluster, levels=tuple(replace(level, reduces=None) for level in cluster.levels))


def rank_main(job: dict[str, Any]) -> None:
    """Rings and switch trees, interleaved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    cluster, found = parse_cluster(job["cluster"], "the benchmark's cluster"), []
    forms = [Groups(Mesh.parse(f"net={cluster.size}"), [(0,)], timedelta(seconds=120), one)
             for one in (without(cluster), cluster)]
    for nbytes in job["sizes"]:
        given = torch.randn(nbytes // 4)
        rows = []
        for _ in range(job["repeats"] + 1):
            row = []
            for groups in forms:
                buffer = given.clone()
                dist.barrier()
                start = time.perf_counter()
                groups.start("all-reduce", (0,), buffer, buffer, asynchronous=False)
                row.append(time.perf_counter() - start)
            rows.append(row)
        found.append(rows[1:])
    dist.barrier()
    Path(job["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(cluster: Cluster, sizes: list[int], repeats: int) -> Iterator[Row]:
    """Starts ranks and switches on shaped links and times both forms."""
    with tempfile.TemporaryDirectory() as folder, placed(cluster) as (_, places):
        job = {"folder": folder, "sizes": sizes, "repeats": repeats, "cluster": cluster.to_yaml()}
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        launch(cluster.size, [sys.executable, __file__, "--rank", str(path)], places=places)
        every = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(cluster.size)]
    for i, nbytes in enumerate(sizes):
        ring, tree = ([max(one[i][r][form] for one in every) for r in range(repeats)] for form in (0, 1))
        yield Row(nbytes, ring, tree)


def main(arguments: list[str]) -> None:
    """Prints the table."""
    if arguments[:1] == ["--rank"]:
        rank_main(json.loads(Path(arguments[1]).read_text()))
        return
    options = dict(a[2:].split("=") for a in arguments if "=" in a)
    sizes = [int(float(mb) * 1e6) for mb in options.get("mb", "1,4").split(",")]
    print(f"{'ranks':>5}{'MB':>5}{'ring s':>9}{'tree s':>9}{'faster':>8}  quartiles  "
          f"{'model ring':>11}{'model tree':>11}{'errors':>14}")
    for ranks in [int(a) for a in arguments if not a.startswith("--")] or [4, 8]:
        cluster = parse_cluster(CLUSTER.format(ranks=ranks, rate=options.get("rate", "12.5 MB/s")), "benchmark")
        for row in measured(cluster, sizes, int(options.get("repeats", "7"))):
            low, half, high = statistics.quantiles([a / b for a, b in zip(row.ring, row.tree, strict=True)])
            ring, tree = statistics.median(row.ring), statistics.median(row.tree)
            models = [collective(one, "all-reduce", Group(((ranks, 1),)), float(row.nbytes)).seconds
                      for one in (without(cluster), cluster)]
            print(f"{ranks:5}{row.nbytes / 1e6:5g}{ring:9.4f}{tree:9.4f}{half:8.2f}  {low:.2f}, {high:.2f} "
                  f"{models[0]:11.4f}{models[1]:11.4f}{models[0] / ring - 1:+7.1%}{models[1] / tree - 1:+7.1%}",
                  flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
