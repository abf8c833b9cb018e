"""What a GPU says of AutoDDL: python examples/benchmarks/gpu.py [NAME=VALUE ...]

    parts=check,measure,steps,variants,fsdp2,compiled   precisions=float32,bf16-mixed
    models=gpt2,vit,vgg16,llama (also bert, resnet50, qwen3, t5)
    seconds=60 (of measuring kernels)   budget=3 (seconds of one row of steps)   warm=0 (seconds of steps before a row)
    out=gpu.json (a line for every result)
    cluster=FILE (measured before; without it, `measure` writes one beside `out`)   device=cuda   small=yes

    check       small models planned for one device, then for four ranks that share this GPU over gloo, against the
                module itself
    measure     `autoddl measure` on the device: the curves of its kernels
    steps       each model in each precision: predicted (from the data sheet, and by the curves) and measured seconds
                and peak bytes of a step, beside the same module without AutoDDL; waiting inside a step; kernels by
                kind and operators; the step as one CUDA graph
    variants    recomputation and microbatches
    fsdp2       the same module under FSDP2 with one rank
    compiled    the same module under torch.compile, and the plan run with compile=True, predicted and measured

Seconds are of forward and backward, without the optimizer. *Host* is how long the host takes to hand a step over. Bytes
are torch's own count (`torch.cuda.max_memory_allocated`) in a step with AdamW. Where there is no GPU, that is one line
and status 2.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from gpu_clocks import cleared, freed, kernels, operators, peak, synchronisations, timed
from gpu_models import SMALL, made

import autoddl
from autoddl.api import compare
from autoddl.calibrate.measure import measure
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import load_cluster
from autoddl.cost_models.kernel import kernel_seconds
from autoddl.operators.fusion import as_compiled
from autoddl.operators.work import base, work
from autoddl.planner.question import rebuild
from autoddl.pricing.kernel_prices import kernel_of
from autoddl.runtime.parallelize import parallelize

Row = dict[str, Any]
Say = Callable[..., None]
Pace = tuple[float, float]
"""Seconds of a row of steps, and of the steps before it."""
DEFAULTS = {"parts": "check,measure,steps,variants,fsdp2,compiled", "models": "gpt2,vit,vgg16,llama", "precisions":
            "float32,bf16-mixed", "seconds": "60", "budget": "3", "warm": "0", "out": "gpu.json", "cluster": "",
            "device": "cuda", "small": ""}
CLUSTER = """name: one gpu
device: %s
backend: nccl
levels: [{name: gpu, size: %d, bandwidth: 100 GB/s, latency: 10 us}]
"""
SHARED, STRATEGIES = ("gpt2", "vgg16", "llama"), ("data parallel", "ZeRO-3", "tensor parallel")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"recompute": "full"}), ("llama", {"recompute": "selective"}), ("llama", {"microbatches": (2,)}),
    ("gpt2", {"recompute": "full", "microbatches": (4,)}))


def told(out: Path, /, **row: Any) -> None:
    """Prints a result, and adds it to the file."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
                    if not isinstance(value, dict | list)), flush=True)


def graphed(name: str, small: bool, plan: Plan, truth: dict[str, Tensor], device: torch.device, pace: Pace
            ) -> tuple[float, float, float]:
    """Seconds of the step as one CUDA graph, of the host's part, and how its gradients differ from `truth`."""
    module, sample = made(name, small, device)
    parallel = parallelize(module, plan, sample, device=device, graph=True)
    for _ in range(3):
        cleared(module)
        parallel.step(sample)
    found = difference(gradients(module), truth)
    seconds, host, _ = timed(lambda: parallel.step(sample), module, device, *pace)
    return seconds, host, found


def variants(say: Say, device: torch.device, small: bool, clusters: Mapping[str, Path], pace: Pace) -> None:
    """Plans of some models that recompute or take microbatches: seconds and bytes, predicted and measured."""
    for name, options in VARIANTS:
        module, sample = made(name, small, device)
        plans = {key: autoddl.plan(module, path, sample, precision="bf16-mixed", **options)
                 for key, path in clusters.items()}
        plan = next(iter(plans.values()))
        parallel = parallelize(module, plan, sample, device=device)
        seconds, host, rows = timed(partial(parallel.step, sample), module, device, *pace)
        cleared(module)
        used = peak(partial(parallel.step, sample), module, device) if device.type == "cuda" else {}
        say(part="variants", model=name, options=str(options), ours=seconds, host=host, rows=rows, **used,
            **{f"predicted_{key}": one.predicted.seconds - one.predicted.update for key, one in plans.items()},
            predicted_peak=plan.predicted.peak_bytes)
        del module, parallel
        freed(device)


def predicted(plan: Plan) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Predicted seconds of the kernels by kind, and of the operators by name: forward, backward, calls."""
    made = rebuild(plan)
    graph, kinds, operators = made.pricing.graph, defaultdict[str, float](float), dict[str, list[float]]()
    flows = graph.differentiable()
    for op in graph.ops:
        shapes = [tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
        row = operators.setdefault(base(op), [0.0, 0.0, 0])
        row[2] += 1
        for k, passes in enumerate(work(op, graph, shapes[0], shapes[1], flows)):
            for one in passes:
                kernel = kernel_of(one, graph.tensors[op.outputs[0]].dtype)
                seconds = kernel_seconds(made.pricing.cluster.device, kernel) * one.times
                kinds[{"matmul": "product"}.get(kernel.kind, kernel.kind.split()[0])] += seconds
                row[k] += seconds
    return dict(kinds), operators


def eager(module: nn.Module, sample: Sample, mixed: bool, device: torch.device) -> Callable[[], object]:
    """A step of the module as PyTorch runs it, in the recipe."""
    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = module(*sample.args, **sample.kwargs)
        loss.backward()

    return step


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.detach().cpu() for name, p in module.named_parameters() if p.grad is not None}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of any gradient over the largest gradient."""
    largest = max(float(g.abs().max()) for g in theirs.values())
    return max(float((ours[name] - g).abs().max()) for name, g in theirs.items() if name in ours) / largest


def plain(name: str, mixed: bool, device: torch.device, pace: Pace, small: bool) -> tuple[Row, dict[str, Tensor]]:
    """The numbers of the module without AutoDDL, and its gradients."""
    module, sample = made(name, small, device)
    step = eager(module, sample, mixed, device)
    cleared(module)
    step()
    truth, row = gradients(module), Row()
    row["eager"], row["eager_host"], row["rows"] = timed(step, module, device, *pace)
    if device.type == "cuda":
        row["eager_waits"] = synchronisations(step, device)
        row["eager_kernels"], _ = kernels(step, device)
        row["eager_peak"] = peak(step, module, device)
    return row, truth


def planned(name: str, mixed: bool, clusters: Mapping[str, Path], truth: dict[str, Tensor], device: torch.device,
            pace: Pace, small: bool) -> Row:
    """The numbers of the module as planned: predicted by each cluster, and measured; as one CUDA graph too."""
    module, sample = made(name, small, device)
    began, row = time.perf_counter(), Row()
    plans = {key: autoddl.plan(module, path, sample, precision="bf16-mixed" if mixed else "as-written")
             for key, path in clusters.items()}
    row["planning"] = time.perf_counter() - began
    for key, plan in plans.items():
        row[f"predicted_{key}"], row["predicted_peak"] = plan.predicted.seconds - plan.predicted.update, \
            plan.predicted.peak_bytes
        row[f"kinds_{key}"], row[f"operators_{key}"] = predicted(plan)
    plan = next(iter(plans.values()))
    parallel = parallelize(module, plan, sample, device=device)
    step = partial(parallel.step, sample)
    step()
    ours = gradients(module)
    row["difference"], row["ops"] = difference(ours, truth), len(parallel.graph.ops)
    row["ours"], row["ours_host"], _ = timed(step, module, device, *pace)
    if device.type == "cuda":
        row["waits"] = synchronisations(step, device)
        row["kernels"], row["longest"] = kernels(step, device)
        row["operators"] = operators(step, device)
        cleared(module)
        row["peak"] = peak(step, module, device)
        del module, parallel, step
        freed(device)
        try:
            row["graph"], row["graph_host"], row["graph_difference"] = graphed(name, small, plan, ours, device, pace)
        except InputError as error:  # what waits in a step, or draws numbers
            row["no_graph"] = str(error)
    return row


def compiled(name: str, mixed: bool, device: torch.device, pace: Pace, small: bool, clusters: Mapping[str, Path]
             ) -> Row:
    """The seconds of the module under torch.compile, and of its plan with its programs compiled."""
    module, sample = made(name, small, device)
    began = time.perf_counter()
    step = eager(torch.compile(module), sample, mixed, device)  # type: ignore[arg-type]
    step()
    truth, took = gradients(module), time.perf_counter() - began
    seconds, host, rows = timed(step, module, device, *pace)
    row = {"compiled": seconds, "compiled_host": host, "rows": rows, "compiled_took": took}
    del module, step
    freed(device)
    for key, path in clusters.items():
        cluster = as_compiled(load_cluster(path))
        module, sample = made(name, small, device)
        plan = autoddl.plan(module, cluster, sample, precision="bf16-mixed" if mixed else "as-written")
        row[f"predicted_{key}"] = plan.predicted.seconds - plan.predicted.update
    return row | compiled_plan(plan, module, sample, truth, device, pace)


def compiled_plan(plan: Plan, module: nn.Module, sample: Sample, truth: dict[str, Tensor], device: torch.device,
                  pace: Pace) -> Row:
    """The numbers of a plan that runs compiled, and on a GPU as one CUDA graph too."""
    began = time.perf_counter()
    parallel = parallelize(module, plan, sample, device=device, compile=True)
    step = partial(parallel.step, sample)
    step()
    row: Row = {"took": time.perf_counter() - began, "difference": difference(gradients(module), truth)}
    row["ours"], row["ours_host"], _ = timed(step, module, device, *pace)
    if device.type == "cuda":
        cleared(module)
        row |= {"predicted_peak": plan.predicted.peak_bytes, **peak(step, module, device)}
        cleared(module)
        parallel = parallelize(module, plan, sample, device=device, compile=True, graph=True)
        row["graph"], row["graph_host"], _ = timed(partial(parallel.step, sample), module, device, *pace)
    return row


def fsdp(name: str, mixed: bool, device: torch.device, pace: Pace, small: bool) -> Row:
    """The seconds of the module under FSDP2 on a mesh of one rank."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", init_method=f"file://{folder}/store",
                                rank=0, world_size=1)
        try:
            module, sample = made(name, small, device)
            blocks = [block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part]
            for part in (*blocks, module):
                fully_shard(part, mp_policy=policy)
            seconds, host, rows = timed(eager(module, sample, False, device), module, device, *pace)
        finally:
            dist.destroy_process_group()
    return {"fsdp2": seconds, "host": host, "rows": rows}


def checked(say: Say, device: torch.device, folder: Path) -> None:
    """Every small model, planned for one rank, against the module itself in float64, on the device."""
    for name in SMALL:
        for mixed in (False, True):
            module, sample = made(name, True, device)
            path = folder / "check.yaml"
            path.write_text(CLUSTER % (sheet(device), 1), encoding="utf-8")
            plan = autoddl.plan(module, path, sample, precision="bf16-mixed" if mixed else "as-written")
            step = eager(module, sample, mixed, device)
            step()
            truth = gradients(module)
            module, sample = made(name, True, device)
            parallel = parallelize(module, plan, sample, device=device)
            parallel.step(sample)
            say(part="check", model=name, precision=plan.precision, difference=difference(gradients(module), truth))
    shared(say, device, folder)


def shared(say: Say, device: torch.device, folder: Path) -> None:
    """Named plans for four ranks, which share this GPU over gloo: their gradients against one process."""
    path = folder / "four.yaml"
    path.write_text(CLUSTER % ("cpu-core", 4), encoding="utf-8")  # slow, so that splitting pays
    for name in SHARED:
        module, sample = made(name, True, torch.device("cpu"))
        for row in compare(module, path, sample):
            if row.plan is not None and row.name in STRATEGIES:
                row.plan.save(folder / f"{name},{row.name.replace(' ', '_')}.json")
    environment = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555",
                   "GPU_JOB": f"{folder} {device.type}", "LOCAL_RANK": "0"}
    ranks = [subprocess.Popen([sys.executable, __file__, "rank"], env={**environment, "RANK": str(r)},
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(4)]
    texts = [rank.communicate(timeout=150)[0] for rank in ranks]
    say(part="shared", ok=not any(rank.returncode for rank in ranks), lines=len(texts[0].splitlines()))
    print(texts[0][-6000:])


def rank_main() -> None:
    """One of the ranks that share the GPU: its step under every plan against the module's own."""
    folder, kind = os.environ["GPU_JOB"].split(" ")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device("cpu")
    dist.init_process_group("gloo")
    wrong = 0
    for path in sorted(Path(folder).glob("*,*.json")):
        name = path.stem.split(",")[0]
        try:
            error = shard_difference(name, load_plan(path), device)
            said = f"largest difference of a gradient {error:.2g}"
        except Exception as failure:
            error, said = 1.0, f"{type(failure).__name__}: {failure}"[:600]
        wrong += not error < 1e-4
        print(f"rank {dist.get_rank()} {path.stem}: {said}", flush=True)
    os._exit(1 if wrong else 0)


def shard_difference(name: str, plan: Plan, device: torch.device) -> float:
    """The largest difference of this rank's gradients over the largest gradient."""
    module, sample = made(name, True, device)
    eager(module, sample, False, device)()
    truth = gradients(module)
    module, sample = made(name, True, device)
    parallel = parallelize(module, plan, sample, device=device)
    parallel.step(sample)
    worst, largest = 0.0, max(float(g.abs().max()) for g in truth.values())
    for key, p in parallel.named_parameters():
        piece = truth[key]
        for dim, (offset, size) in enumerate(parallel.piece(key)):
            piece = piece.narrow(dim, offset, size)
        if p.grad is not None:
            mine = getattr(p.grad, "_local_tensor", p.grad).cpu()
            worst = max(worst, float((mine - piece).abs().max()) / largest)
    return worst


def sheet(device: torch.device) -> str:
    """The name of the device's data sheet."""
    if device.type == "cpu":
        return "H100-80GB"
    name = torch.cuda.get_device_name(device)
    return next((known for word, known in (("H200", "H200-141GB"), ("H100", "H100-80GB"), ("A100", "A100-80GB"))
                 if word in name), "H100-80GB")


def each(options: Mapping[str, str], part: str, say: Say, device: torch.device, clusters: Mapping[str, Path]) -> None:
    """The numbers of one part for every model in every precision; what fails is a line."""
    small, pace = bool(options["small"]), (float(options["budget"]), float(options["warm"]))
    for name, precision in product(options["models"].split(","), options["precisions"].split(",")):
        mixed, row = precision == "bf16-mixed", Row()
        try:
            if part == "steps":
                row, truth = plain(name, mixed, device, pace, small)
                freed(device)
                row |= planned(name, mixed, clusters, truth, device, pace, small)
            else:
                row = compiled(name, mixed, device, pace, small, clusters) if part == "compiled" else \
                    fsdp(name, mixed, device, pace, small)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        say(part=part, model=name, precision=precision, **row)
        freed(device)


def main() -> int:
    options = DEFAULTS | dict(text.split("=", 1) for text in sys.argv[1:])
    if unknown := set(options) - set(DEFAULTS):
        print(f"unknown {', '.join(unknown)}: the names are {', '.join(DEFAULTS)}", file=sys.stderr)
        return 2
    if options["device"] == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here: run this on a machine with one, or device=cpu to try the program", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0) if options["device"] == "cuda" else torch.device("cpu")
    out = Path(options["out"])
    say, sheet_file = partial(told, out), out.parent / "sheet.yaml"
    say(part="machine", torch=torch.__version__, python=platform.python_version(), cores=os.cpu_count(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    sheet_file.write_text(CLUSTER % (sheet(device), 1), encoding="utf-8")
    clusters = {"sheet": sheet_file} | ({"curves": Path(options["cluster"])} if options["cluster"] else {})
    for part in options["parts"].split(","):
        began = time.perf_counter()
        if part == "check":
            with tempfile.TemporaryDirectory() as folder:
                checked(say, device, Path(folder))
        elif part == "measure":
            clusters["curves"] = out.parent / "measured.yaml"
            measure(sheet_file, output=clusters["curves"], seconds=float(options["seconds"]),
                    small=bool(options["small"]))
        elif part == "variants":
            variants(say, device, bool(options["small"]), clusters, (float(options["budget"]), float(options["warm"])))
        else:
            each(options, part, say, device, clusters)
        say(part=part, seconds=time.perf_counter() - began)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank_main()
    sys.exit(main())
