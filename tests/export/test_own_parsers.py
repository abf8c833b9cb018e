"""Texts read by the targets' own parsers, where their packages are installed: degrees, cuts and schedules are equal.

    pip install --no-deps accelerate deepspeed megatron-core torchtitan, and what these import
"""

import importlib.util
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class
from worded import WordedModel

from autoddl.export.accelerate import ACCELERATE
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.deepspeed import DEEPSPEED
from autoddl.export.megatron import layers_of_layout, layout_of_layers
from autoddl.export.torchtitan import SCHEDULES, TORCHTITAN

MODEL = WordedModel(12)


def needs(module: str, package: str) -> pytest.MarkDecorator:
    first = module.partition(".")[0]
    return pytest.mark.skipif(importlib.util.find_spec(first) is None,
                              reason=f"{package} is not installed: pip install --no-deps {package}")


def grid(*degrees: tuple[str, int]) -> tuple[Degree, ...]:
    return tuple(Degree(role, size) for role, size in degrees)


def asked(code: str, *arguments: str) -> Any:
    """What a program prints as JSON: the packages warn when they are imported, and stay out of this process."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.ranks
@needs("accelerate", "accelerate")
def test_accelerate_reads_its_degrees(tmp_path: Path) -> None:
    given = Configuration(grid(("data", 2), ("zero-3", 8), ("tensor", 4)), 2, 4, precision="bf16-mixed")
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE.write(given, MODEL))
    code = """
import json, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.parallelism_config import ParallelismConfig
found = load_config_from_file(sys.argv[1])
sizes = {name.removeprefix("parallelism_config_"): n for name, n in found.parallelism_config.items()}
made = ParallelismConfig(**sizes)
print(json.dumps([found.num_processes, found.mixed_precision, found.distributed_type.value, made.total_size,
                  made.dp_replicate_size, made.dp_shard_size, made.tp_size, found.fsdp_config]))"""
    world, precision, kind, total, copies, shard, tensor, fsdp = asked(code, str(file))
    assert (world, total, copies, shard, tensor) == (64, 64, 2, 8, 4)
    assert (precision, kind, fsdp["fsdp_version"], fsdp["fsdp_reshard_after_forward"]) == ("bf16", "FSDP", 2, True)


@pytest.mark.ranks
@needs("deepspeed", "deepspeed")
@pytest.mark.parametrize(("roles", "stage", "hpz"), [
    ((("data", 8),), 0, 1), ((("zero-1", 8),), 1, 1), ((("zero-2", 2), ("zero-3", 4)), 3, 4)])
def test_deepspeed_reads_its_stage_and_batch(roles: tuple[tuple[str, int], ...], stage: int, hpz: int) -> None:
    given = Configuration(grid(*roles), 2, 4, precision="bf16-mixed", recompute="full")
    code = """
import json, sys
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
text = json.loads(sys.argv[1])
zero = DeepSpeedZeroConfig(**text["zero_optimization"])
comm.get_rank = lambda: 0  # as if it ran
class Unit:
    @staticmethod
    def get_data_parallel_world_size(): return 8
found = DeepSpeedConfig(text, mpu=Unit)
print(json.dumps([int(zero.stage), zero.zero_hpz_partition_size, found.train_batch_size,
                  found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps]))"""
    assert asked(code, DEEPSPEED.write(given, MODEL)) == [stage, hpz, 64, 2, 4]


@pytest.mark.ranks
@needs("megatron.core", "megatron-core")
@pytest.mark.parametrize("layers", [(3, 1, 4, 4), (0, 6, 6, 0), (2, 2, 2, 1, 2, 2, 0, 1)])
def test_megatron_reads_its_layout(layers: tuple[int, ...]) -> None:
    code = """
import json, sys
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
found = PipelineParallelLayerLayout(sys.argv[1], 4)
found.validate_layer_layout(12, None)
rows = [found.layout[s % 4][s // 4].count(LayerType.decoder) for s in range(len(found.layout[0]) * 4)]
print(json.dumps(rows))"""
    text = layout_of_layers(layers)
    assert tuple(asked(code, text)) == layers == layers_of_layout(text)


@pytest.mark.ranks
@needs("torchtitan", "torchtitan")
def test_torchtitan_reads_its_settings() -> None:
    given = Configuration(grid(("data", 2), ("zero-2", 8), ("tensor", 4)), 1, 8, 4, layers=(2, 4, 4, 2), sequence=True,
                          precision="bf16-mixed")
    code = """
import json, sys
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
text = json.loads(sys.argv[1])
one, other = ParallelismConfig(**text["parallelism"]), TrainingConfig(**text["training"])
print(json.dumps([one.data_parallel_replicate_degree, one.data_parallel_shard_degree, one.tensor_parallel_degree,
                  one.pipeline_parallel_degree, one.fsdp_reshard_after_forward, one.enable_sequence_parallel,
                  [len(part) for part in one.module_fqns_per_model_part], other.local_batch_size,
                  other.global_batch_size, other.mixed_precision_param]))"""
    found = asked(code, json.dumps(tomllib.loads(TORCHTITAN.write(given, MODEL))))
    assert found == [2, 8, 4, 4, "never", True, [3, 4, 4, 4], 8, 128, "bfloat16"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torchtitan_are_those_of_torch(name: str) -> None:
    assert get_schedule_class(name).__name__.startswith("Schedule")
