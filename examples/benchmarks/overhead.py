"""What running a plan costs beside plain PyTorch: overhead.py [rounds] [part of a name] [width]

Process CPU seconds per step, forward and backward (no optimizer), one thread a rank, paired in turn within one run:

    one rank     the lowered 4-layer GPT (128 tokens, batch 2; width 512 unless given) against the module
    data         two ranks, data parallel, against DistributedDataParallel
    zero         two ranks, ZeRO-3 with gathered weights dropped after forward, against FSDP2 (fully_shard per block)
    zero-1 mixed, zero-3 mixed
                 two ranks in bf16-mixed, against FSDP2 with MixedPrecisionPolicy(bfloat16, reduced in float32), which
                 keeps weights after forward (zero-1) or drops them (zero-3); FSDP2 has norms and loss in bfloat16, too

Two ranks: the sum of both. Ratios are of medians over the rounds, and the median of the paired ratios.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from gpt import gpt

from autoddl.capture.capture import capture
from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import VERSION, Plan
from autoddl.core.precision import Precision
from autoddl.cost_models import parse_cluster
from autoddl.planner.assemble import assemble, plan_of
from autoddl.planner.strategies import strategy
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, variables
from autoddl.runtime.parallelize import parallelize
from autoddl.search import solve

CLUSTER = "name: bench\ndevice: cpu-core\nlevels:\n  - {name: all, size: %d, bandwidth: 1 GB/s, latency: 100 us}\n"
WARM, STEPS = 3, 2
WIDTH = int(sys.argv[3]) if len(sys.argv) > 3 else 512


def model(seed: int = 0, batch: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return gpt(layers=4, width=WIDTH, heads=8, context=128, batch=batch, vocab=256)


def plan_as(role: str, ranks: int, precision: str) -> Plan:
    """The best plan in which the one axis has `role`."""
    captured = capture(model(batch=2 * ranks), None, Precision.parse(precision))
    graph, place = add_hubs(captured.graph), parse_cluster(CLUSTER % ranks, "overhead")
    mesh = Mesh.parse(f"all={ranks}")
    inside = strategy(graph, mesh, {"all": role if ranks > 1 else "data"})

    def region(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        tied = isinstance(item, Tensor) and item.fqn.startswith("tokens")
        split = isinstance(item, Tensor) and "S" in str(choice.outputs[0])
        return inside(graph, item, choice) and (role != "zero" or not split or choice.regather or tied)

    pricing = Pricing(graph, mesh, place)
    space = variables(graph, mesh, region)
    problem = problem_of(pricing, space, None)
    solution = solve(problem)
    prints = {"model": captured.graph.fingerprint(), "cluster": place.fingerprint, "autoddl": str(VERSION)}
    return plan_of(assemble(pricing, solution, space), pricing, solution, {
        "model": role, "bound": solution.bound, "budget": 1e12, "candidates": 1, "sample": dict(captured.spec),
        "fingerprints": prints, "precision": precision})


def paired(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    """CPU seconds per step of both, in turn."""
    found = []
    for i in range(WARM + rounds):
        row = []
        for step in (ours, theirs):
            if dist.is_initialized():
                dist.barrier()
            start = time.process_time()
            for _ in range(STEPS):
                step()
            row.append((time.process_time() - start) / STEPS)
        if i >= WARM:
            found.append((row[0], row[1]))
    return found


def rank_main(rank: int, ranks: int, role: str, plan: Plan, rounds: int, store: str, results: "mp.Queue") -> None:  # type: ignore[type-arg]
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
                                timeout=timedelta(seconds=120))
    module, other = model(batch=2 * ranks), model(batch=2 * ranks)
    batch = module.example_inputs()  # type: ignore[operator]
    parallel = parallelize(module, plan)
    local = tuple(t.chunk(ranks)[rank] for t in batch)
    if role == "data":
        other = DistributedDataParallel(other)
    elif role.startswith("zero"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if plan.precision == "bf16-mixed" else \
            MixedPrecisionPolicy()
        for part in (*other.get_submodule("blocks").children(), other):
            fully_shard(part, mp_policy=policy, reshard_after_forward=role != "zero-1")

    def ours() -> None:
        for p in module.parameters():
            p.grad = None
        parallel.step(batch)

    def theirs() -> None:
        for p in other.parameters():
            p.grad = None
        other(*local).backward()

    results.put((rank, paired(ours, theirs, rounds)))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure(name: str, role: str, ranks: int, rounds: int, precision: str = "as-written") -> None:
    context, store = mp.get_context("spawn"), f"/tmp/autoddl-overhead-{os.getpid()}-{name.replace(' ', '-')}"
    results, plan = context.Queue(), plan_as(role, ranks, precision)
    processes = [context.Process(target=rank_main, args=(r, ranks, role, plan, rounds, store, results))
                 for r in range(ranks)]
    for process in processes:
        process.start()
    rows = [results.get(timeout=600)[1] for _ in range(ranks)]
    for process in processes:
        process.join()
    sums = [tuple(sum(side) for side in zip(*pair, strict=True)) for pair in zip(*rows, strict=True)]
    ours, theirs = (statistics.median(side) for side in zip(*sums, strict=True))
    ratios = sorted(a / b for a, b in sums)
    print(f"{name:12} ours {ours * 1e3:7.1f} ms  theirs {theirs * 1e3:7.1f} ms  ratio {ours / theirs:.3f}  "
          f"paired median {statistics.median(ratios):.3f} [{ratios[0]:.3f} .. {ratios[-1]:.3f}]", flush=True)


if __name__ == "__main__":
    count, wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 15, sys.argv[2] if len(sys.argv) > 2 else ""
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {count} rounds")
    for name, role, ranks, precision in (
            ("one rank", "alone", 1, "as-written"), ("data", "data", 2, "as-written"),
            ("zero", "zero", 2, "as-written"),
            ("zero-1 mixed", "zero-1", 2, "bf16-mixed"), ("zero-3 mixed", "zero-3", 2, "bf16-mixed")):
        if wanted in name:
            measure(name, role, ranks, count, precision)
