"""Predicted against tracked peak memory of a rank: python examples/benchmarks/memory.py

Predicted is `plan(...).predicted.peak_bytes`: parameters, gradients, AdamW's state, activations and what conversions
hold. Tracked is the peak of torch's own tracker, `torch.distributed._tools.mem_tracker.MemTracker`, which sees live
storages by a dispatch mode, over forward, backward and optimizer step after a first one, which makes the optimizer's
state; parameters and batch are in it. One process, then rank 0 of four over gloo, each under its best plan.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from steps import MODELS
from torch.distributed._tools.mem_tracker import MemTracker

import autoddl
from autoddl.apply import parallelize
from autoddl.cost_models import load_cluster
from autoddl.launch import launch, leave
from autoddl.plan import load_plan

CLUSTER = """name: memory
device: {name: core, kind: cpu, memory: 16 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s}}
levels: [{name: all, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""
NAMES = ("gpt medium", "llama medium", "vgg medium", "vit medium", "mixture small")


def tracked(folder: Path) -> None:
    """One rank: the peak of each plan of the folder."""
    torch.set_num_threads(1)
    found = {}
    for name in NAMES:
        torch.manual_seed(0)
        model, sample = MODELS[name]()
        parallel = parallelize(model, load_plan(folder / f"{name}.json"), sample)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
        for _ in range(2):
            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                parallel.step(sample)
                optimizer.step()
                optimizer.zero_grad()
            found[name] = max(s["Total"] for s in tracker.get_tracker_snapshot("peak").values())
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    leave(0)


def main() -> None:
    for ranks in (1, 4):
        with tempfile.TemporaryDirectory() as name:
            folder, plans = Path(name), {}
            (folder / "c.yaml").write_text(CLUSTER % ranks, encoding="utf-8")
            for model in NAMES:
                torch.manual_seed(0)
                plans[model] = autoddl.plan(*_swapped(model, load_cluster(folder / "c.yaml")), workers=1)
                plans[model].save(folder / f"{model}.json")
            launch(ranks, [sys.executable, __file__, "--rank", name])
            found, errors = json.loads((folder / "found.json").read_text()), []
            for model, plan in plans.items():
                errors.append(plan.predicted.peak_bytes / found[model] - 1)
                print(f"{ranks} ranks  {model:14} predicted {plan.predicted.peak_bytes / 1e6:8.2f} MB  tracked "
                      f"{found[model] / 1e6:8.2f} MB  {errors[-1]:+7.1%}", flush=True)
            print(f"{ranks} ranks  median {statistics.median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}")


def _swapped(name: str, cluster: autoddl.cost_models.Cluster):  # type: ignore[no-untyped-def]
    model, sample = MODELS[name]()
    return model, cluster, sample


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        tracked(Path(sys.argv[2]))
    else:
        main()
