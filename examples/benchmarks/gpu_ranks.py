"""Plans of every kind on four ranks that share one GPU: python examples/benchmarks/gpu_ranks.py [NAME=VALUE ...]

    device=cuda   out=gpu_ranks.json (a line for every plan)   only=TEXT (cases whose name has it)   limit=280 (seconds)

Random plans of small models (`tests/support`): layouts, recomputation, rings of attention, tokens sent to experts,
halos of images, complex weights, coded and sparse gradients, stages under several schedules. The ranks send over gloo
what lies on the GPU. The loss and every gradient are compared with those of the module alone on the same device; what
lossy codings and sparse sums change is said and not judged. Status 1 where a plan fails. Where there is no GPU, that is
one line and status 2; device=cpu tries the program.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "support"))

import spectral
import zoo
from random_plans import random_plan
from staged_plans import apart, even_cuts, staged_plan

from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample, parted
from autoddl.core.layout import Split
from autoddl.core.plan import Plan, load_plan
from autoddl.runtime.parallelize import parallelize

Make = Callable[[str], Plan]
LOSSLESS = 1e-4
"""Of the largest gradient: what float32 may differ by."""


def built(name: str) -> tuple[nn.Module, Sample]:
    torch.manual_seed(0)
    if name in spectral.MODELS:
        module, batch = spectral.named(name)
        return module, Sample(batch)
    family, _, kind = name.partition(":")
    return zoo.named(family, **({"family": kind} if kind else {}), **({"B": 8} if family != "segmenter" else {}))


def drawn(seed: int, like: Callable[[Plan], bool] = lambda plan: True, **options: Any) -> Make:
    """The first random plan from `seed` on that is as asked."""
    def make(name: str) -> Plan:
        captured = capture(*built(name))
        plans = (random_plan(captured, seed + more, **options) for more in range(60))
        return next(plan for plan in plans if like(plan))

    return make


def staged(schedule: str, stages: int, mesh: str, microbatches: int) -> Make:
    def make(name: str) -> Plan:
        module, sample = built(name)
        captured = capture(module, parted(sample, microbatches))
        cuts = even_cuts(captured.graph, stages)
        plans = (staged_plan(captured, cuts, schedule, mesh, microbatches, seed) for seed in range(60))
        return next(plan for plan in plans if apart(captured, plan) is None)

    return make


def sends(plan: Plan) -> bool:
    """Whether tokens are sent to the ranks of their experts."""
    found = [d for name, d in plan.index().decisions.items() if name.startswith("experts")]
    return any(tokens == Split(0) == weights for d in found
               for tokens, weights in zip(d.inputs[0], d.inputs[4], strict=True))


CASES: dict[str, tuple[str, Make]] = {
    **{f"{name} random": (name, drawn(0)) for name in ("gpt2", "llama", "t5", "vit", "vgg_bn", "resnet", "bert", "unet",
                                                       "segmenter", *spectral.MODELS)},
    "llama recomputed": ("llama", drawn(1, recompute=True)), "llama rings": ("llama", drawn(3, rings=True)),
    "mixtral random": ("routed:Mixtral", drawn(0)), "mixtral sent": ("routed:Mixtral", drawn(0, sends)),
    "deepseek sent": ("routed:DeepseekV3", drawn(0, sends)), "gpt2 coded": ("gpt2", drawn(0, codecs=("int8",))),
    "gpt2 sparse": ("gpt2", drawn(0, sparse="0.05")),
    "gpt2 1f1b": ("gpt2-4", staged("1f1b", 4, "one=1", 4)), "gpt zb-v": ("gpt-4", staged("zb-v", 4, "all=2", 4)),
    "llama zb-h1": ("llama-4", staged("zb-h1", 2, "all=2", 4)),
    "llama chimera": ("llama-4", staged("chimera:1", 4, "one=1", 4)),
    "vit interleaved": ("vit-4", staged("interleaved:2", 4, "all=2", 4)),
    "t5 gpipe": ("t5", staged("gpipe", 2, "all=2", 2))}


def planned(folder: Path, only: str) -> Iterator[tuple[str, str]]:
    """Writes the plan of every case into the folder: (its name, what failed)."""
    for case, (name, make) in CASES.items():
        if only in case:
            try:
                make(name).save(folder / f"{case.replace(' ', '_')}.json")
                yield case, ""
            except Exception as error:
                yield case, f"{type(error).__name__}: {error}"[:300]


def moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def compared(case: str, path: Path, device: torch.device) -> dict[str, Any]:
    """How far this rank's loss and gradients are from the module's own."""
    module, sample = built(CASES[case][0])
    sample = Sample(tuple(moved(v, device) for v in sample.args), {k: moved(v, device) for k, v in
                                                                   sample.kwargs.items()})
    loss = module.to(device)(*sample.args, **sample.kwargs)
    loss.backward()
    loss = loss.detach()
    truth = {name: p.grad.detach().cpu() for name, p in module.named_parameters() if p.grad is not None}
    parallel = parallelize(built(CASES[case][0])[0].to(device), load_plan(path), sample, device=device)
    found, largest, worst = float(parallel.step(sample)), max(float(g.abs().max()) for g in truth.values()), 0.0
    places = set()
    for name, p in parallel.named_parameters():
        piece = truth.get(name)
        if piece is not None and p.grad is not None:
            for dim, (offset, size) in enumerate(parallel.piece(name)):
                piece = piece.narrow(dim, offset, size)
            mine = getattr(p.grad, "_local_tensor", p.grad)
            places.add(mine.device.type)
            if piece.numel():
                worst = max(worst, float((mine.cpu() - piece).abs().max()) / largest)
    return {"loss": abs(found - float(loss)) / abs(float(loss)), "gradients": worst, "places": sorted(places)}


def rank_main(folder: Path, kind: str) -> None:
    """One of the ranks that share the device."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("gloo")
    for case in CASES:
        path = folder / f"{case.replace(' ', '_')}.json"
        if not path.exists():
            continue
        row: dict[str, Any] = {"case": case, "rank": dist.get_rank()}
        try:
            row |= compared(case, path, device)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            row["at"] = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(
                traceback.extract_tb(error.__traceback__)[-4:]))
        print(json.dumps(row), flush=True)
        dist.barrier()
    os._exit(0)


def main() -> int:
    options = {"device": "cuda", "out": "gpu_ranks.json", "only": "", "limit": "280"} | dict(
        text.split("=", 1) for text in sys.argv[1:])
    if options["device"] == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: run this on a machine with one, or device=cpu to try the program", file=sys.stderr)
        return 2
    wrong, began = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Path(options["out"]).open("w", encoding="utf-8") as out:
        for case, failed in planned(Path(folder), options["only"]):
            if failed:
                wrong += 1
                print(f"{case}: no plan: {failed}", flush=True)
        print(f"planned in {time.perf_counter() - began:.0f} s", flush=True)
        environment = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29556",
                       "GPU_JOB": f"{folder} {options['device']}", "LOCAL_RANK": "0"}
        ranks = [subprocess.Popen([sys.executable, __file__, "rank"], env={**environment, "RANK": str(r)}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT if r == 0 else subprocess.DEVNULL)
                 for r in range(4)]
        for rank in ranks:
            try:
                text = rank.communicate(timeout=max(5.0, float(options["limit"]) - time.perf_counter() + began))[0]
            except subprocess.TimeoutExpired:
                rank.kill()
                text = rank.communicate()[0]
            wrong += told(text, out)
    return 1 if wrong else 0


def told(text: str, out: Any) -> int:
    """Prints the rows of a rank that differ or fail, and the worst of all; returns how many do."""
    wrong = 0
    for line in text.splitlines():
        if not line.startswith('{"case"'):
            print(line[:200], flush=True)
            continue
        out.write(line + "\n")
        row = json.loads(line)
        exact = not any(word in row["case"] for word in ("coded", "sparse"))
        bad = "failed" in row or (exact and not max(row["loss"], row["gradients"]) < LOSSLESS)
        wrong += bad
        if bad or row["rank"] == 0:
            print(row.pop("case"), *(f"{key} {value:.2g}" if isinstance(value, float) else f"{key} {value}"
                                     for key, value in row.items()), "WRONG" if bad else "", flush=True)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main(Path(os.environ["GPU_JOB"].split(" ")[0]), os.environ["GPU_JOB"].split(" ")[1])
    sys.exit(main())
