"""Configurations that others publish throughput for, in the text of their trainers, with the number of devices.

Sources: NVIDIA dgxc-benchmarking v25.02 (Llama 3.1, GPT-3 and Nemotron-4 by NeMo and Megatron-Core); Narayanan et al.
2021, table 1; Korthikanti et al. 2022, table 5, with bf16 in place of fp16; torchtitan,
`benchmarks/llama3_h100_202412_torchtitan.md` and `docs/performance.md`.
"""

from typing import NamedTuple

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
