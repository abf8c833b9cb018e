"""Configurations that others publish throughput for, in the text of their trainers: imported, and priced.

    python examples/benchmarks/published_configurations.py [part of a name]

Those of a model that is here are priced (`autoddl import`), in a process each: seconds of a step beside the published
ones, and the peak, under the memory of the devices or, where they do not fit, without. Predicted; nothing runs.

Sources: NVIDIA dgxc-benchmarking v25.02 (Llama 3.1, GPT-3 and Nemotron-4 by NeMo and Megatron-Core); Narayanan et al.
2021, table 1; Korthikanti et al. 2022, table 5, with bf16 in place of fp16; torchtitan,
`benchmarks/llama3_h100_202412_torchtitan.md` and `docs/performance.md`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["PUBLISHED", "Published"]


class Published(NamedTuple):
    """A text of a target, on so many devices."""

    target: str
    text: str
    devices: int


def _megatron(devices: int, text: str) -> Published:
    return Published("megatron", text, devices)


def _titan(devices: int, rows: int, batch: int, shard: int, reshard: str, tensor: int, policy: str,
           replicate: int = 1) -> Published:
    sequence = "\nenable_sequence_parallel = true" if tensor > 1 else ""
    option = '\nselective_ac_option = "op"' if policy == "selective" else ""
    return Published("torchtitan", f"""[training]
local_batch_size = {rows}
global_batch_size = {batch}
seq_len = 8192
dtype = "float32"
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"

[parallelism]
data_parallel_replicate_degree = {replicate}
data_parallel_shard_degree = {shard}
fsdp_reshard_after_forward = "{reshard}"
tensor_parallel_degree = {tensor}{sequence}
pipeline_parallel_degree = 1

[activation_checkpoint]
mode = "{policy}"{option}
""", devices)


NEMO = "--use-distributed-optimizer --bf16"

PUBLISHED = {
    "Llama 3.1 8B, 64 H100": _megatron(64, f"""--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
        --context-parallel-size 2 --micro-batch-size 1 --global-batch-size 1024 {NEMO}"""),
    "Llama 3.1 70B, 64 H100": _megatron(64, f"""--tensor-model-parallel-size 4 --sequence-parallel
        --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 5 --context-parallel-size 2
        --micro-batch-size 1 --global-batch-size 128 {NEMO}"""),
    "GPT-3 175B, 128 H100": _megatron(128, f"""--tensor-model-parallel-size 4 --sequence-parallel
        --pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 12 --micro-batch-size 1
        --global-batch-size 256 {NEMO}"""),
    "Nemotron-4 15B, 64 H100": _megatron(64, f"""--tensor-model-parallel-size 4 --sequence-parallel
        --pipeline-model-parallel-size 1 --micro-batch-size 4 --global-batch-size 256 {NEMO}"""),
    "GPT 7.5B, 128 A100": _megatron(128, """--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1
        --micro-batch-size 4 --global-batch-size 512 --bf16 --recompute-granularity full --recompute-method uniform
        --recompute-num-layers 1"""),
    "GPT 22B, 8 A100": _megatron(8, """--tensor-model-parallel-size 8 --sequence-parallel
        --pipeline-model-parallel-size 1 --micro-batch-size 4 --global-batch-size 4 --bf16
        --recompute-granularity selective"""),
    "GPT 530B, 280 A100": _megatron(280, """--tensor-model-parallel-size 8 --sequence-parallel
        --pipeline-model-parallel-size 35 --num-virtual-stages-per-pipeline-rank 3 --micro-batch-size 1
        --global-batch-size 280 --bf16 --recompute-granularity selective"""),
    "Llama 3 8B, 8 H100, FSDP": _titan(8, 2, 16, 8, "always", 1, "selective"),
    "Llama 3 8B, 128 H100, FSDP": _titan(128, 2, 256, 128, "always", 1, "selective"),
    "Llama 3 70B, 64 A100, FSDP": _titan(64, 1, 64, 64, "always", 1, "full"),
    "Llama 3 70B, 256 H100, FSDP and tensor parallel": _titan(256, 16, 512, 32, "always", 8, "full"),
}
"""By name of the model and the devices."""

SECONDS: Mapping[str, float] = {
    "Llama 3.1 8B, 64 H100": 13.0, "Llama 3.1 70B, 64 H100": 14.61, "GPT-3 175B, 128 H100": 8.31,
    "Llama 3 8B, 8 H100, FSDP": 16 * 8192 / 8 / 6667, "Llama 3 8B, 128 H100, FSDP": 256 * 8192 / 128 / 6514,
    "Llama 3 70B, 64 A100, FSDP": 8192 / 331,
}
"""Published seconds of a step: as they are, or from tokens a second and device."""


def _priced(name: str) -> str:
    """The row of one configuration."""
    from recipes import a100, h100  # isort: skip
    from gpt3 import gpt3_175b
    from llama import llama3_8b, llama3_70b
    from published_settings import grand_teton

    from autoddl.cost_models import Cluster
    from autoddl.export.exported import import_text, price_anyway
    from autoddl.export.subject import Subject
    from autoddl.operators.fusion import as_compiled
    from autoddl.planner.options import PlanOptions
    from autoddl.planner.task import task_of

    models: Mapping[str, Any] = {"Llama 3.1 8B": llama3_8b, "Llama 3 8B": llama3_8b, "Llama 3.1 70B": llama3_70b,
                                 "Llama 3 70B": llama3_70b, "GPT-3 175B": gpt3_175b}
    model = models.get(name.partition(",")[0])
    target, text, devices = PUBLISHED[name]
    given, began = import_text(text, target, devices), time.process_time()
    if model is None:
        return f"{given}; its model is not here"
    place: Cluster = a100(devices // 8) if "A100" in name else (
        grand_teton(devices // 8) if target == "torchtitan" else h100(devices // 8))
    place = place if name == "Llama 3 70B, 64 A100, FSDP" else as_compiled(place)
    options = PlanOptions(precision=given.precision, microbatches=(given.microbatches,), workers=1)
    task = task_of(model(batch=given.rows), place, None, options, name, None)
    known = Subject(name, task.variant(given.microbatches).original, place, {})
    plan, problem = price_anyway(task, given, known)
    published = f", published {SECONDS[name]:.2f} s" if name in SECONDS else ""
    if plan is None:
        return f"{given}; no plan: {problem}"
    fits = "" if problem is None else f", more than the {place.device.memory / 1e9:.0f} GB that there are"
    return (f"{given}; step {plan.predicted.seconds:.2f} s{published}; peak {plan.predicted.peak_bytes / 1e9:.1f} GB"
            f"{fits}; {time.process_time() - began:.0f} CPU s")


def main(wanted: str = "", name: str = "") -> None:
    """Prints a row for every configuration, each from a process of its own."""
    if name:
        print(json.dumps(_priced(name)))
        return
    for each in PUBLISHED:
        if wanted in each:
            made = subprocess.run([sys.executable, __file__, wanted, each], capture_output=True, text=True, check=False)
            print(f"{each}: {json.loads(made.stdout) if made.returncode == 0 else made.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
