"""What compressed messages bring and cost: sudo python examples/benchmarks/compression.py PART [NAME=VALUE ...]

    steps   models=gpt-8k,vgg   clusters=4x1-200,2x2-200   rounds=5   seconds=60   pace=0
            Per model and cluster the best plan under each allowance: bytes a rank sends in a step, seconds predicted
            (the time line) and measured, in turns on shaped links. Before, the cluster is measured with all ranks
            running, for `seconds`; with pace=8 it is not, and products of a rank take as long as on a device of 8
            GFLOP/s (`paced`), whatever else the cores do. And the same allowance on unshaped loopback
    loss    steps=500   seeds=3   mine=dp=2,tp=2 (default: what the search finds)   stages=1   microbatches=1
            layers=4   width=160   ranks=4   batch=16   context=128   first=0 (the first seed)   into=losses.json
            A byte-level GPT on Python's standard library, its ranks over loopback, by the plan for a cluster of slow
            links, with AdamW whose rate falls evenly from 1e-3 to 0: the mean loss of the last 50 steps. What has run
            is written `into` a file, and the same command again runs what is missing there

Both take allow=gradients=int8;hybrid;sparse=0.01 (default: nothing, and all of ALLOWED): words of --compress, or the
share of --sparse. A first allowance of nothing is what gains are over: allow=;sparse=0.01 clusters=4x1-20.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from arena import CLUSTERS, contest
from calibrated import calibrated
from demo import batch, corpus
from gpt import gpt
from small_models import made

import autoddl
from autoddl.core.files import write_atomically
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
            "width": "160", "ranks": "4", "batch": "16", "context": "128", "first": "0", "into": "",
            "pace": "0"}
ALLOWED = ("", "gradients=bfloat16", "gradients=int8", "gradients=int8,weights=int8", "gradients=int4,weights=int8",
           "hybrid", "gradients=int4,weights=int4,activations=int4,pipeline=int4", "sparse=0.01", "sparse=0.05")
SLOW = """name: slow links
device: {{name: slow, kind: cpu, memory: 2 GB, bandwidth: 5 GB/s, peak: {{float32: 4 GFLOP/s}}}}
levels: [{{name: net, size: {ranks}, bandwidth: 10 MB/s, latency: 100 us}}]
"""
LAST = 50


def allowance(words: str) -> Options:
    """The options of planning that an allowance says."""
    name, _, rule = words.partition("=")
    return {"sparse": rule} if name == "sparse" else {"compress": (words,)}


def sent(plan: Plan) -> float:
    """Bytes that rank 0 sends in a step."""
    return sum(plan.predicted.volume.values())


def paced(file: Path, folder: Path, speed: float) -> Path:
    """The cluster of a file, with a device whose products are paced at so many GFLOP/s."""
    words = yaml.safe_load(file.read_text(encoding="utf-8"))
    words["device"] = {"name": "paced", "kind": "cpu", "memory": "2 GB", "bandwidth": "5 GB/s", "efficiency": 1.0,
                       "peak": {"float32": f"{speed} GFLOP/s"}}
    path = folder / file.name
    path.write_text(yaml.safe_dump(words), encoding="utf-8")
    return path


def steps(models: str, clusters: str, rounds: int, seconds: float, speed: float, allowed: Sequence[str]) -> None:
    names, folder = clusters.split(","), Path(tempfile.mkdtemp(prefix="autoddl-compression-"))
    shaped = [CLUSTERS / f"rehearsal-{name}.yaml" for name in names]
    found_at = [paced(file, folder, speed) for file in shaped] if speed else calibrated(shaped, folder, seconds)
    places = dict(zip(names, found_at, strict=True))
    for model, name in product(models.split(","), clusters.split(",")):
        path = places[name]
        cluster, (module, sample) = load_cluster(path), made(model)
        plans, files = dict[str, Plan](), dict[str, Path]()
        for words in allowed:
            options: Options = {"overlap": True, **allowance(words)}
            plan = autoddl.plan(module, cluster, sample, name=model, **options)
            plans[words or "nothing"], files[words or "nothing"] = plan, folder / f"{len(files)}.json"
            plan.save(files[words or "nothing"])
        found = {turns.name: turns for turns in contest(path, model, files, [], rounds, update=False,
                                                          pace=1e9 * speed)}
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


class Trained(NamedTuple):
    """What is trained: the GPT, its batches, and for how many steps."""

    steps: int
    layers: int
    width: int
    batch: int
    context: int

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = gpt(layers=self.layers, width=self.width, heads=4, context=self.context, batch=self.batch)
        for parameter in module.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return module

    def batches(self, text: Tensor, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (batch(text, seed * self.steps + step, self.batch, self.context) for step in range(self.steps))


def one_rank(folder: Path, seed: int, one: Trained) -> None:
    """What each process runs: steps of AdamW whose rate falls to 0 evenly; the first writes the losses."""
    torch.set_num_threads(1)
    parallel = parallelize(one.model(seed), load_plan(folder / "plan.json"))
    optimizer, losses = torch.optim.AdamW(parallel.parameters(), lr=1e-3), list[float]()
    falls = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, one.steps)
    for given in one.batches(corpus(), seed):
        losses.append(float(parallel.step(given)))
        optimizer.step()
        optimizer.zero_grad()
        falls.step()
    if os.environ["RANK"] == "0":
        (folder / "losses.json").write_text(json.dumps(losses))
    leave(0)


def loss(one: Trained, ranks: int, seeds: range, allowed: Sequence[str], options: Options, into: Path | None) -> None:
    first = 0.0
    for words in allowed:
        ends = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "slow.yaml").write_text(SLOW.format(ranks=ranks), encoding="utf-8")
            module, chosen = one.model(0), Options(**options, **allowance(words))
            plan = autoddl.plan(module, folder / "slow.yaml", next(one.batches(corpus(), 0)), **chosen)
            plan.save(folder / "plan.json")
            for seed in seeds:
                run = partial(ended, ranks, [name, *map(str, (seed, *one))])
                ends.append(kept(into, f"{plan.fingerprint()} {seed} {tuple(one)}", run))
        mean = statistics.mean(ends)
        first = first or mean
        print(f"{sum(p.numel() for p in module.parameters()):,} weights, {one.steps} steps  {words or 'nothing':28} "
              f"mesh {plan.mesh}, a rank sends {sent(plan) / 1e6:6.2f} MB a step  seeds from {seeds[0]}: loss "
              f"{', '.join(f'{end:.4f}' for end in ends)}  mean {mean:.4f} ({mean / first - 1:+.2%})", flush=True)


def ended(ranks: int, given: Sequence[str]) -> float:
    """The mean of the last losses of a run, whose folder and numbers are `given`."""
    launch(ranks, [sys.executable, __file__, "rank", *given])
    return float(statistics.mean(json.loads(Path(given[0], "losses.json").read_text())[-LAST:]))


def kept(into: Path | None, key: str, run: Callable[[], float]) -> float:
    """The number that a file has for `key`; where it has none, what `run` returns, which is then written there."""
    found = dict[str, float]()
    if into is not None and into.exists():
        found |= json.loads(into.read_text())
    if key not in found:
        found[key] = run()
        if into is not None:
            write_atomically(into, json.dumps(found))
    return found[key]


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        seed, *numbers = map(int, sys.argv[3:])
        one_rank(Path(sys.argv[2]), seed, Trained(*numbers))
    options = DEFAULTS | dict(text.split("=", 1) for text in sys.argv[2:])
    allowed = options["allow"].split(";") if options["allow"] else ALLOWED
    if sys.argv[1:2] == ["steps"]:
        steps(options["models"], options["clusters"], int(options["rounds"]), float(options["seconds"]),
              float(options["pace"]), allowed)
    elif sys.argv[1:2] == ["loss"]:
        first = int(options["first"])
        loss(Trained(*(int(options[name]) for name in Trained._fields)), int(options["ranks"]),
             range(first, first + int(options["seeds"])), allowed,
             {"mine": options["mine"] or None, "stages": (int(options["stages"]),),
              "microbatches": (int(options["microbatches"]),)}, Path(options["into"]) if options["into"] else None)
    else:
        sys.exit("name a part: steps or loss")
