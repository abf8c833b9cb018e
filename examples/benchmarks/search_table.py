"""How long planning takes, as tables: python examples/benchmarks/search_table.py [TABLE ...]

    plans     whole commands, from process start: wall and CPU seconds, memory, what capture and search took, gap
    growth    CPU seconds of the solver alone by depth and by ranks, without and with a budget that binds
    four      the largest two of `plans` with meshes of four axes too: minutes each, only where it is asked for
    lossless  those of one model on 64 GPUs, each without and with messages that may be sent lossless, in turn
    descent   coordinate descent (20 restarts) against the exact solver: how often and by how much it loses
"""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from autoddl.core.errors import Infeasible
from autoddl.core.graph import Graph
from autoddl.core.layout import Mesh
from autoddl.core.problem import Problem
from autoddl.cost_models import Cluster, load_cluster, parse_cluster
from autoddl.planner.candidates import Candidate, build_problem
from autoddl.planner.meshes import meshes
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import PlanTask
from autoddl.pricing.space import everything
from autoddl.search import solve

HERE = Path(__file__).parent.parent
CLUSTERS = HERE / "clusters"
Row = tuple[str, ...]
Asked = tuple[str, str, str, list[str], dict[str, int]]

PLANS: list[Asked] = [
    ("Llama-3-8B, batch 64, mesh 8 x 8", "llama.py:llama3_8b", "h100-8x8",
     ["--mesh", "net=8,node=8", "--budget", "1 TB"], {"batch": 64}),
    ("Llama-3-8B, batch 64, mesh 4 x 4 x 4", "llama.py:llama3_8b", "h100-4x4x4",
     ["--mesh", "hall=4,rack=4,node=4", "--budget", "1 TB"], {"batch": 64}),
    ("Llama-3-8B, batch 32, mesh free, 80 GB", "llama.py:llama3_8b", "h100-8x8", ["--budget", "80 GB"], {"batch": 32}),
    ("Llama-3-8B, batch 16, mesh free, 80 GB", "llama.py:llama3_8b", "h100-8x8", ["--budget", "80 GB"], {"batch": 16}),
    ("Llama-3-8B, batch 16, mesh free, 24 GB", "llama.py:llama3_8b", "h100-8x8", ["--budget", "24 GB"], {"batch": 16}),
    ("Llama-3-70B, batch 256, 1,024 GPUs, mesh and microbatches free, 80 GB", "llama.py:llama3_70b", "h100-8x16x8",
     ["--budget", "80 GB", "--microbatches", "1,2,4,8"], {"batch": 256}),
    ("GPT-3 175B, batch 512, 1,024 GPUs, mesh and microbatches free, 80 GB", "gpt3.py:gpt3_175b", "h100-8x16x8",
     ["--budget", "80 GB", "--microbatches", "1,2,4,8"], {"batch": 512}),
    ("Mixture of 64 experts, 48 layers, batch 256, 256 GPUs, mesh free", "mixture.py:mixture", "h100-32x8", [],
     {"layers": 48, "width": 2048, "hidden": 1024, "experts": 64, "batch": 256}),
]


def four() -> Iterator[Row]:
    """The rows whose microbatches are free, on meshes of up to four axes."""
    return plans([(f"{title}, up to 4 axes", factory, cluster, [*options, "--max-axes", "4"], settings)
                  for title, factory, cluster, options, settings in PLANS if "--microbatches" in options])


def lossless() -> Iterator[Row]:
    """The rows of Llama-3-8B, each followed by itself with every lossless codec."""
    return plans([(f"{title}{', lossless' * bool(more)}", factory, cluster, [*options, *more], settings)
                  for title, factory, cluster, options, settings in PLANS if factory == "llama.py:llama3_8b"
                  for more in ([], ["--compress", "lossless"])])


def plans(asked: Sequence[Asked] = PLANS) -> Iterator[Row]:
    """One process per row."""
    yield "problem", "wall s", "CPU s", "GB", "capture s", "search s", "plan", "gap"
    for title, factory, cluster, options, settings in asked:
        command = [sys.executable, "-m", "autoddl.cli", "plan", str(HERE / factory), str(CLUSTERS / f"{cluster}.yaml"),
                   *options, "--json", *(f"--set={name}={value}" for name, value in settings.items())]
        with tempfile.NamedTemporaryFile() as out:
            files = [(os.POSIX_SPAWN_DUP2, out.fileno(), 1)]
            start = time.perf_counter()
            child = os.posix_spawn(sys.executable, command, os.environ, file_actions=files)
            _, status, used = os.wait4(child, 0)
            wall = time.perf_counter() - start
            said = Path(out.name).read_text()
        numbers = f"{wall:.1f}", f"{used.ru_utime + used.ru_stime:.1f}", f"{used.ru_maxrss / 1e6:.2f}"
        if status:
            yield title, *numbers, "", "", f"exit code {os.waitstatus_to_exitcode(status)}", ""
            continue
        plan = json.loads(said)
        yield (title, *numbers, f"{plan['capture_seconds']:.1f}", f"{plan['solve_seconds']:.2f}",
               f"{plan['predicted_seconds']:.4f} s on {plan['mesh']}", f"{plan['gap']:.3%}")


def llama(layers: int, batch: int) -> Graph:
    sys.path.insert(0, str(HERE))
    import llama as models

    from autoddl.capture.capture import capture
    return capture(models.llama3_8b(batch=batch, layers=layers)).graph


def problem_of(graph: Graph, place: Cluster, mesh: Mesh) -> Problem:
    from autoddl.core.hubs import add_hubs
    task = PlanTask(add_hubs(graph), graph, {}, place, 1e15, PlanOptions(), {}, 0.0, 0.0)
    return replace(build_problem(task, Candidate(mesh, lambda g, on: everything))[2], budget=None)


def binding(problem: Problem, share: float = 0.5) -> Problem:
    """A budget between the least bytes and those of the fastest plan."""
    try:
        solve(replace(problem, budget=-1.0))
    except Infeasible as error:
        most = solve(problem).nbytes
        return replace(problem, budget=error.needed + share * (most - error.needed))
    raise AssertionError("a budget below 0 bytes was kept")


def seconds(problem: Problem, rounds: int = 3) -> tuple[float, float]:
    """Least CPU seconds over the rounds, and the gap."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        solution = solve(problem, tolerance=1e-3)
        found.append(time.process_time() - start)
    return min(found), solution.gap


def two_levels(nodes: int, size: int) -> Cluster:
    text = (CLUSTERS / "h100-8x8.yaml").read_text()
    text = text.replace("node, size: 8", f"node, size: {size}").replace("net, size: 8", f"net, size: {nodes}")
    return parse_cluster(text, "h100")


def growth() -> Iterator[Row]:
    yield "layers", "ranks", "free: CPU s", "binding: CPU s", "gap"
    for layers, nodes, size in ((8, 8, 8), (32, 8, 8), (128, 8, 8), (32, 512, 8)):
        problem = problem_of(llama(layers, 64 * max(1, nodes // 8)), two_levels(nodes, size),
                             Mesh.parse(f"net={nodes},node={size}"))
        free, (bound, gap) = seconds(problem)[0], seconds(binding(problem))
        yield str(layers), str(nodes * size), f"{free:.3f}", f"{bound:.3f}", f"{gap:.3%}"


def graphs() -> dict[str, Graph]:
    from autoddl.capture.capture import capture
    sys.path.insert(0, str(HERE))
    import gpt
    import torch
    import vgg
    with torch.device("meta"):
        networks = {"VGG16": vgg.vgg16(), "GPT-2, 4 layers": gpt.gpt(4, 768, 12, 1024, 64, 50257)}
    return {name: capture(model).graph for name, model in networks.items()} | {"Llama, 4 layers": llama(4, 64)}


def descent() -> Iterator[Row]:
    """All meshes of at most three axes of three clusters, no budget. GPT-2 and Llama have four layers: descent takes
    minutes on more."""
    yield "model", "problems", "loses", "mean loss", "median", "worst", "time / exact: mean", "least", "most"
    for name, graph in graphs().items():
        losses, ratios = [], []
        for cluster in ("h100-8x8", "a100-4x8", "two-racks-10g"):
            place = load_cluster(CLUSTERS / f"{cluster}.yaml")
            for mesh in meshes(place, 3):
                problem = problem_of(graph, place, mesh)
                best, exact = timed(problem, "exact")
                other, took = timed(problem, "coordinate-descent")
                losses.append(other / best - 1)
                ratios.append(took / exact)
        lost = sum(loss > 1e-6 for loss in losses)
        yield (name, str(len(losses)), str(lost), f"{mean(losses):.2%}", f"{median(losses):.2%}", f"{max(losses):.2%}",
               f"{mean(ratios):.1f}", f"{min(ratios):.1f}", f"{max(ratios):.1f}")


def timed(problem: Problem, solver: str) -> tuple[float, float]:
    start = time.process_time()
    found = solve(problem, solver).seconds
    return found, time.process_time() - start


def write(rows: Iterator[Row]) -> None:
    for i, row in enumerate(rows):
        print("| " + " | ".join(row) + " |", flush=True)
        if i == 0:
            print("|" + "---|" * len(row))
    print()


if __name__ == "__main__":
    tables: dict[str, Callable[[], Iterator[Row]]] = {"plans": plans, "growth": growth, "descent": descent,
                                                      "four": four, "lossless": lossless}
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.1f}\n")
    for word in sys.argv[1:] or ("plans", "growth", "descent"):
        write(tables[word]())
