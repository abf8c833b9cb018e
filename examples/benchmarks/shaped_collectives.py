"""Collectives on shaped links against the bound of the links: python examples/benchmarks/shaped_collectives.py

Each rank sits in a network namespace behind `tc tbf` (root needed). Per cluster, kind and size: the bandwidth bound of
the links, seconds of our messages and of gloo's own collective (median of interleaved repetitions, the slowest rank's),
the fraction of the bound, and what the cost model predicts with the algorithm that it names.

    [CLUSTER ...] --mb=1,8,64 --kinds=... --repeats=5 --members=N (groups of N neighbours, all at once; else one of all)
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoddl.cost_models import Cluster, Group, collective, load_cluster
from autoddl.cost_models.groups import crossings
from autoddl.launch.launch import Place, launch
from autoddl.launch.shaped_network import PORT, plan_network, shape_links
from autoddl.runtime.collectives.message_collectives import exchange
from autoddl.schedule.message_programs import leaving_fraction

CLUSTERS = Path(__file__).parent.parent / "clusters"
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
MTU_SHARE = (9000 - 52) / (9000 + 14)
"""Payload of a frame: what is left of a link after the headers of Ethernet, IP and TCP."""
GLOO: dict[str, Callable[..., Any]] = {
    "all-gather": dist.all_gather_single, "reduce-scatter": dist.reduce_scatter_single,
    "all-to-all": dist.all_to_all_single}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; seconds are medians."""

    kind: str
    nbytes: float
    ours: float
    gloo: float


def bound(cluster: Cluster, kind: str, nbytes: float, members: int) -> float:
    """Least seconds that the links allow: what must leave a unit over its uplink, the largest over all uplinks."""
    ways = tuple(crossing.ways for crossing in crossings(cluster, Group(((members, 1),))))
    found = []
    for uplink in plan_network(cluster, "bound").uplinks:
        inside = range(uplink.first, uplink.first + uplink.ranks)
        sent = 0.0
        for rank in inside:
            first = rank - rank % members
            outside = frozenset(m for m in range(members) if first + m not in inside)
            sent += leaving_fraction(kind, ways, rank - first, outside) * nbytes
        found.append(sent / (uplink.rate * MTU_SHARE))
    return max(found)


def buffers(kind: str, n: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives and what is given, float32."""
    count = nbytes // 4 // n * n
    whole, part = torch.ones(count), torch.ones(count // n)
    if kind == "all-reduce":
        return whole, whole
    if kind == "all-to-all":
        return torch.ones(count), whole
    return (whole, part) if kind == "all-gather" else (part, whole)


def timed(action: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def rank_main(job: dict[str, Any]) -> None:
    """Both forms of every collective, interleaved."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    n, size = job["members"], dist.get_world_size()
    group = [dist.new_group([*range(first, first + n)]) for first in range(0, size, n)][dist.get_rank() // n]
    found = []
    for kind, nbytes in job["calls"]:
        got, given = buffers(kind, n, nbytes)
        flat = partial(dist.all_reduce, given) if kind == "all-reduce" else partial(GLOO[kind], got, given)
        flat = partial(flat, group=group)
        mine = partial(exchange, kind, got, given, tuple(job["ways"]), group)
        rows = [(timed(mine), timed(flat)) for _ in range(job["repeats"] + 1)][1:]
        found.append(rows)
    dist.barrier()
    Path(job["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measured(cluster: Cluster, calls: list[tuple[str, int]], repeats: int, members: int) -> Iterator[Row]:
    """Start the ranks of `cluster` on shaped links and time `calls`."""
    ways = [crossing.ways for crossing in crossings(cluster, Group(((members, 1),)))]
    with tempfile.TemporaryDirectory() as folder, shape_links(cluster) as built:
        job = {"folder": folder, "calls": calls, "repeats": repeats, "ways": ways, "members": members}
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        places = [Place(("ip", "netns", "exec", built.node_of(rank).namespace),
                        {"GLOO_SOCKET_IFNAME": PORT, "MASTER_ADDR": built.nodes[0].address,
                         "TORCH_CPP_LOG_LEVEL": "ERROR"})
                  for rank in range(cluster.size)]
        launch(cluster.size, [sys.executable, __file__, "--rank", str(path)], places=places)
        every = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(cluster.size)]
    for i, (kind, nbytes) in enumerate(calls):
        slowest = [[max(one[i][r][form] for one in every) for r in range(repeats)] for form in (0, 1)]
        yield Row(kind, nbytes, *map(statistics.median, slowest))


def main(arguments: list[str]) -> None:
    """Print the table."""
    if arguments[:1] == ["--rank"]:
        rank_main(json.loads(Path(arguments[1]).read_text()))
        return
    names = [a for a in arguments if not a.startswith("--")] or ["4x1-200", "2x2-200", "2racks"]
    options = dict(a[2:].split("=") for a in arguments if "=" in a)
    sizes = [int(float(mb) * 1e6) for mb in options.get("mb", "1,8,64").split(",")]
    kinds = options.get("kinds", ",".join(KINDS)).split(",")
    print(f"{'cluster':10}{'kind':15}{'MB':>6}{'bound s':>9}{'ours s':>9}{'gloo s':>9}{'of bound':>9}{'faster':>8}"
          f"{'model s':>9}{'error':>7}  algorithm")
    for name in names:
        cluster = load_cluster(CLUSTERS / f"rehearsal-{name}.yaml")
        members = int(options.get("members", cluster.size))
        for row in measured(cluster, [(k, b) for k in kinds for b in sizes], int(options.get("repeats", "5")), members):
            least = bound(cluster, row.kind, row.nbytes, members)
            price = collective(cluster, row.kind, Group(((members, 1),)), row.nbytes)
            print(f"{name:10}{row.kind:15}{row.nbytes / 1e6:6g}{least:9.4f}{row.ours:9.4f}{row.gloo:9.4f}"
                  f"{least / row.ours:9.2f}{row.gloo / row.ours:8.2f}{price.seconds:9.4f}"
                  f"{price.seconds / row.ours - 1:+7.1%}  {price.algorithm}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
