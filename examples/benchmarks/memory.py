"""Predicted against tracked peak memory of a rank: python examples/benchmarks/memory.py [part of a model's name]

Predicted is `plan(...).predicted.peak_bytes`, the peak of the memory line: what a rank has in use, action by action, of
parameters, gradients, AdamW's state, activations, conversions and temporaries. Tracked is the peak of torch's own
tracker, `torch.distributed._tools.mem_tracker.MemTracker`, which sees live storages by a dispatch mode, over forward,
backward and optimizer step after a first one, which makes the optimizer's state; parameters and batch are in it. One
process, then rank 0 of four over gloo: the best plan, in float32 and in bf16-mixed, the named strategies, two
microbatches, and the best plans under budgets that bind, which are shares of the peak without one.
"""

import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from steps import MODELS as STEPPED
from steps import Loss, Made, tokens
from torch.distributed._tools.mem_tracker import MemTracker

import autoddl
from autoddl.api import compare
from autoddl.capture.sample import Sample
from autoddl.core.errors import Infeasible
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import Cluster, load_cluster
from autoddl.launch.launch import launch, leave
from autoddl.runtime.parallelize import parallelize

CLUSTER = """name: memory
device: {name: core, kind: cpu, memory: 16 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s, bfloat16: 96 GFLOP/s}}
levels: [{name: all, size: %d, bandwidth: 1 GB/s, latency: 60 us}]
"""


def opt(layers: int, width: int, heads: int, length: int, batch: int, vocab: int) -> Made:
    """OPT, whose head is tied to its embedding."""
    from transformers import OPTConfig, OPTForCausalLM
    config = OPTConfig(vocab_size=vocab, hidden_size=width, word_embed_proj_dim=width, ffn_dim=4 * width,
                       num_hidden_layers=layers, num_attention_heads=heads, max_position_embeddings=length,
                       dropout=0.0, use_cache=False)
    ids = {"input_ids": tokens(batch, length, vocab), "labels": tokens(batch, length, vocab)}
    return Loss(OPTForCausalLM(config)), Sample((), ids)


MODELS: dict[str, Callable[[], Made]] = {**STEPPED, "opt small": lambda: opt(2, 128, 4, 64, 4, 1024)}
NAMES = tuple(name for name in MODELS if "large" not in name and name != "mixture medium")
NAMED = ("data parallel", "ZeRO-3", "tensor parallel")
PARTED = "gpt medium"
SHARES = (0.96, 0.9, 0.8, 0.7)


def tracked(folder: Path) -> None:
    """One rank: the peak of each plan of the folder."""
    torch.set_num_threads(1)
    found = {}
    for path in sorted(folder.glob("*.json")):
        torch.manual_seed(0)
        model, sample = MODELS[path.stem.partition(",")[0]]()
        found[path.stem] = peak(model, sample, load_plan(path))
    if os.environ["RANK"] == "0":
        (folder / "found").write_text(json.dumps(found), encoding="utf-8")
    leave(0)


def peak(model: torch.nn.Module, sample: Sample, plan: Plan) -> int:
    """Bytes at the peak of the second step. What earlier models left in circles is not to be found in it."""
    gc.collect()
    parallel = parallelize(model, plan, sample)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    for _ in range(2):
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            parallel.step(sample)
            optimizer.step()
            optimizer.zero_grad()
    return max(s["Total"] for s in tracker.get_tracker_snapshot("peak").values())


def plans(name: str, cluster: Cluster) -> dict[str, Plan]:
    """What is compared of a model: its best plan; on several ranks the strategies too."""
    torch.manual_seed(0)
    model, sample = MODELS[name]()
    if cluster.size == 1:
        return {name: autoddl.plan(model, cluster, sample, workers=1)}
    found = {f"{name}, {one.name}": one.plan for one in compare(model, cluster, sample, workers=1)
             if one.plan is not None and one.name in ("found", *NAMED)}
    if name == PARTED:
        for role in NAMED:
            one = next(c for c in compare(model, cluster, sample, workers=1, microbatches=(2,)) if c.name == role)
            if one.plan is not None:
                found[f"{name}, {role}, 2 microbatches"] = one.plan
    found[f"{name}, bf16-mixed"] = autoddl.plan(model, cluster, sample, precision="bf16-mixed", workers=1)
    return found | budgeted(name, model, sample, cluster, found[f"{name}, found"].predicted.peak_bytes)


def budgeted(name: str, model: torch.nn.Module, sample: Sample, cluster: Cluster, free: float) -> dict[str, Plan]:
    """The best plans under shares of the bytes that the one without a budget takes, where there are any."""
    found = {}
    for share in SHARES:
        with suppress(Infeasible):
            found[f"{name}, budget {share}"] = autoddl.plan(model, cluster, sample, budget=share * free, workers=1)
    return found


def main(wanted: str) -> None:
    for ranks in (1, 4):
        with tempfile.TemporaryDirectory() as path:
            folder, made = Path(path), dict[str, Plan]()
            (folder / "c.yaml").write_text(CLUSTER % ranks, encoding="utf-8")
            for name in (name for name in NAMES if wanted in name):
                made |= plans(name, load_cluster(folder / "c.yaml"))
            for title, plan in made.items():
                plan.save(folder / f"{title}.json")
            launch(ranks, [sys.executable, __file__, "--rank", path])
            found, errors = json.loads((folder / "found").read_text()), []
            for title, plan in made.items():
                errors.append(plan.predicted.peak_bytes / found[title] - 1)
                print(f"{ranks} ranks  {title:44} predicted {plan.predicted.peak_bytes / 1e6:8.2f} MB  tracked "
                      f"{found[title] / 1e6:8.2f} MB  {errors[-1]:+7.2%}"
                      + (f"  of the budget {found[title] / plan.budget:7.2%}" if "budget" in title else ""), flush=True)
            print(f"{ranks} ranks  median {statistics.median(map(abs, errors)):.2%}, "
                  f"worst {max(map(abs, errors)):.2%}, of {len(errors)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        tracked(Path(sys.argv[2]))
    else:
        main(" ".join(sys.argv[1:]))
