"""What compressed messages bring and cost: sudo python examples/benchmarks/compression.py PART [NAME=VALUE ...]

    steps   models=gpt-8k,vgg   clusters=4x1-200,2x2-200   rounds=5   seconds=60
            Per model and cluster the best plan under each allowance: bytes a rank sends in a step, seconds predicted
            (the time line) and measured, in turns on shaped links. Before, the cluster is measured with all ranks
            running, for `seconds`. And the same allowance on unshaped loopback
    loss    steps=500   seeds=3   mine=dp=2,tp=2 (default: what the search finds)   stages=1   microbatches=1
            layers=4   width=160
            A byte-level GPT on Python's standard library, four ranks over loopback, by the plan for a cluster of slow
            links: the mean loss of the last 50 steps

Both take allow=gradients=int8;hybrid;sparse=0.01 (default: nothing, and all of ALLOWED): words of --compress, or the
share of --sparse. A first allowance of nothing is what gains are over: allow=;sparse=0.01 clusters=4x1-20.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from arena import CLUSTERS, contest
from calibrated import calibrated
from demo import batch, corpus
from gpt import gpt
from small_models import made

import autoddl
from autoddl.core.graph import graph_from_text
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import load_cluster
from autoddl.launch.launch import launch, leave
from autoddl.planner.options import Options
from autoddl.runtime.parallelize import parallelize
from autoddl.schedule.timeline import predict_timeline

DEFAULTS = {"models": "gpt-8k,vgg", "clusters": "4x1-200,2x2-200", "rounds": "5", "steps": "500", "seeds": "3",
            "allow": "", "seconds": "60", "mine": "", "stages": "1", "microbatches": "1", "layers": "4",
            "width": "160"}
ALLOWED = ("", "gradients=bfloat16", "gradients=int8", "gradients=int8,weights=int8", "gradients=int4,weights=int8",
           "hybrid", "gradients=int4,weights=int4,activations=int4,pipeline=int4", "sparse=0.01", "sparse=0.05")
SLOW = """name: slow links
device: {name: slow, kind: cpu, memory: 2 GB, bandwidth: 5 GB/s, peak: {float32: 4 GFLOP/s}}
levels: [{name: net, size: 4, bandwidth: 10 MB/s, latency: 100 us}]
"""
LAST = 50


def allowance(words: str) -> Options:
    """The options of planning that an allowance says."""
    name, _, rule = words.partition("=")
    return {"sparse": rule} if name == "sparse" else {"compress": (words,)}


def sent(plan: Plan) -> float:
    """Bytes that rank 0 sends in a step."""
    return sum(plan.predicted.volume.values())


def steps(models: str, clusters: str, rounds: int, seconds: float, allowed: Sequence[str]) -> None:
    names, folder = clusters.split(","), Path(tempfile.mkdtemp(prefix="autoddl-compression-"))
    places = dict(zip(names, calibrated([CLUSTERS / f"rehearsal-{name}.yaml" for name in names], folder, seconds),
                      strict=True))
    for model, name in product(models.split(","), clusters.split(",")):
        path = places[name]
        cluster, (module, sample) = load_cluster(path), made(model)
        plans, files = dict[str, Plan](), dict[str, Path]()
        for words in allowed:
            options: Options = {"overlap": True, **allowance(words)}
            plan = autoddl.plan(module, cluster, sample, name=model, **options)
            plans[words or "nothing"], files[words or "nothing"] = plan, folder / f"{len(files)}.json"
            plan.save(files[words or "nothing"])
        found = {turns.name: turns for turns in contest(path, model, files, [], rounds, update=False)}
        first = statistics.median(found[allowed[0] or "nothing"].seconds)
        for words, plan in plans.items():
            line = predict_timeline(plan, add_hubs(graph_from_text(plan.source["graph"])), cluster).step.seconds
            took = statistics.median(found[words].seconds)
            print(f"{model:8} {name:8} {words:28} mesh {plan.mesh!s:14} sent {sent(plan) / 1e6:7.2f} MB  predicted "
                  f"{line * 1e3:7.1f} ms  measured {took * 1e3:7.1f} ms ({took / line - 1:+.0%})  {first / took:.2f} "
                  f"times as fast as the first, coded: {', '.join(plan.codecs) or 'nothing'}, sparse: "
                  f"{len(plan.sparse_sums)} gradients", flush=True)
        loopback = autoddl.plan(module, CLUSTERS / "laptop.yaml", sample, **allowance(allowed[-1]))
        print(f"{model:8} loopback {allowed[-1]:28} coded: {', '.join(loopback.codecs) or 'nothing'}, sparse: "
              f"{len(loopback.sparse_sums)} gradients", flush=True)


def model(seed: int, layers: int, width: int) -> nn.Module:
    torch.manual_seed(seed)
    module = gpt(layers=layers, width=width, heads=4, context=128, batch=16)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return module


def one_rank(folder: Path, count: int, seed: int, size: tuple[int, int]) -> None:
    """What each process runs: `count` steps of AdamW; the first writes the losses."""
    torch.set_num_threads(1)
    parallel = parallelize(model(seed, *size), load_plan(folder / "plan.json"))
    optimizer, text, losses = torch.optim.AdamW(parallel.parameters(), lr=1e-3), corpus(), list[float]()
    for step in range(count):
        losses.append(float(parallel.step(batch(text, seed * count + step))))
        optimizer.step()
        optimizer.zero_grad()
    if os.environ["RANK"] == "0":
        (folder / "losses.json").write_text(json.dumps(losses))
    leave(0)


def loss(count: int, seeds: int, allowed: Sequence[str], mine: str, stages: int, microbatches: int,
         size: tuple[int, int]) -> None:
    for words in allowed:
        ends = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "slow.yaml").write_text(SLOW, encoding="utf-8")
            module = model(0, *size)
            options: Options = {"mine": mine or None, "stages": (stages,), "microbatches": (microbatches,),
                                **allowance(words)}
            plan = autoddl.plan(module, folder / "slow.yaml", batch(corpus(), 0), **options)
            plan.save(folder / "plan.json")
            for seed in range(seeds):
                launch(4, [sys.executable, __file__, "rank", name, *map(str, (count, seed, *size))])
                ends.append(statistics.mean(json.loads((folder / "losses.json").read_text())[-LAST:]))
        print(f"{sum(p.numel() for p in module.parameters()):,} weights, {count} steps  {words or 'nothing':28} mesh "
              f"{plan.mesh}, a rank sends {sent(plan) / 1e6:6.2f} MB a step  loss "
              f"{', '.join(f'{end:.4f}' for end in ends)}  mean {statistics.mean(ends):.4f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        count, seed, *size = map(int, sys.argv[3:7])
        one_rank(Path(sys.argv[2]), count, seed, (size[0], size[1]))
    options = DEFAULTS | dict(text.split("=", 1) for text in sys.argv[2:])
    allowed = options["allow"].split(";") if options["allow"] else ALLOWED
    if sys.argv[1:2] == ["steps"]:
        steps(options["models"], options["clusters"], int(options["rounds"]), float(options["seconds"]), allowed)
    elif sys.argv[1:2] == ["loss"]:
        loss(int(options["steps"]), int(options["seeds"]), allowed, options["mine"], int(options["stages"]),
             int(options["microbatches"]), (int(options["layers"]), int(options["width"])))
    else:
        sys.exit("name a part: steps or loss")
