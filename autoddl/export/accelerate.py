"""Writes and reads the YAML that `accelerate launch --config_file` takes.

    data                   parallelism_config_dp_replicate_size; alone it is DDP, distributed_type MULTI_GPU
    zero-3, zero-2         parallelism_config_dp_shard_size, with fsdp_reshard_after_forward true | false (FSDP2)
    context, tensor        parallelism_config_cp_size, parallelism_config_tp_size

Ranks lie in this order, tensor innermost. The file has no place for the batch and for gradients' dtype, which the
script says. Here they stand as comments, by the names of transformers' `TrainingArguments`, and are read back.
"""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from autoddl.core.errors import InputError
from autoddl.core.precision import Precision
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.target import Model, Target, TargetLimits, check_keys, section, whole_number

__all__ = ["ACCELERATE"]

SHARDED = frozenset({(), ("zero-2",), ("zero-3",), ("data", "zero-2"), ("data", "zero-3")})

LIMITS = TargetLimits(data=SHARDED | {("data",)}, beside=SHARDED, context=True, stages=False,
                      recompute=("none", "full"), sequence=(False,),
                      precisions=("float32", "bf16-mixed", "bf16-mixed,reduce=bfloat16"))

PREFIX = "parallelism_config_"


def _is_sharded(given: Configuration) -> bool:
    return given.degree("zero-2", "zero-3") > 1


def _write(given: Configuration, model: Model) -> str:
    """The configuration as YAML, with comments for what the script says."""
    recipe = Precision.parse(given.precision)
    sharded = _is_sharded(given)
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "mixed_precision": "bf16" if recipe.is_mixed else "no", "num_processes": given.ranks}
    if sharded:
        found["fsdp_config"] = {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": given.degree("zero-3") > 1,
            "fsdp_activation_checkpointing": given.recompute == "full"}
    degrees = {"dp_replicate_size": given.degree("data"), "dp_shard_size": given.degree("zero-2", "zero-3"),
               "cp_size": given.degree("context"), "tp_size": given.degree("tensor")}
    if sharded or degrees["cp_size"] * degrees["tp_size"] > 1:
        found["parallelism_config"] = {f"{PREFIX}{name}": size for name, size in degrees.items()}
    said = {"per_device_train_batch_size": given.microbatch, "gradient_accumulation_steps": given.microbatches}
    comments = [f"# {name}: {value}" for name, value in said.items()]
    if recipe.is_mixed and recipe.reduce != _reduced(sharded):
        comments.append(f"# reduce_dtype: {recipe.reduce}")
    if given.recompute == "full" and not sharded:
        comments.append("# gradient_checkpointing: true")
    return "\n".join(comments) + "\n" + yaml.safe_dump(found, sort_keys=False)


FSDP = ("fsdp_version", "fsdp_auto_wrap_policy", "fsdp_reshard_after_forward", "fsdp_activation_checkpointing",
        "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params", "fsdp_offload_params", "fsdp_state_dict_type",
        "fsdp_cpu_ram_efficient_loading", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params",
        "fsdp_sync_module_states", "fsdp_sharding_strategy", "fsdp_ignored_modules")
DEGREES = tuple(f"{PREFIX}{name}" for name in (
    "dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size", "cp_backend", "sp_backend",
    "cp_comm_strategy", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"))
TOP = ("compute_environment", "distributed_type", "mixed_precision", "num_processes", "num_machines", "machine_rank",
       "use_cpu", "debug", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
       "main_training_function", "enable_cpu_affinity", "downcast_bf16", "fsdp_config", "parallelism_config",
       "dynamo_config", "tpu_env", "tpu_use_cluster", "tpu_use_sudo")


def _read(text: str, ranks: int | None) -> Configuration:
    """The configuration that YAML says. Raises InputError for unknown settings and values that there are not."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"this is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise InputError("accelerate's configuration is a YAML mapping, like `distributed_type: FSDP`")
    check_keys(found, TOP, "accelerate's configuration")
    fsdp, degrees = (section(found, name, "accelerate's section") for name in ("fsdp_config", "parallelism_config"))
    check_keys(fsdp, FSDP, "accelerate's section fsdp_config")
    check_keys(degrees, DEGREES, "accelerate's section parallelism_config")
    sizes = {name: whole_number(f"{PREFIX}{name}", degrees.get(f"{PREFIX}{name}", 1))
             for name in ("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size", "sp_size")}
    world = found.get("num_processes", ranks)
    copies, shard = _data(found, sizes, None if world is None else whole_number("num_processes", world))
    role = "zero-3" if fsdp.get("fsdp_reshard_after_forward", True) else "zero-2"
    if sizes["sp_size"] > 1:
        raise InputError("sp_size above 1 is Ulysses' sequence parallelism, which no configuration here says: leave it "
                         "out")
    comments = dict(re.findall(r"^#\s*(\w+):\s*(\S+)\s*$", text, re.M))
    grid = (Degree("data", copies), Degree(role, shard), Degree("context", sizes["cp_size"]),
            Degree("tensor", sizes["tp_size"]))
    full = bool(fsdp.get("fsdp_activation_checkpointing")) or comments.get("gradient_checkpointing") == "true"
    return Configuration(
        grid, whole_number("per_device_train_batch_size", comments.get("per_device_train_batch_size", 1)),
        whole_number("gradient_accumulation_steps", comments.get("gradient_accumulation_steps", 1)),
        precision=_recipe(found, comments.get("reduce_dtype", _reduced(shard > 1))),
        recompute="full" if full else "none")


def _data(found: Mapping[str, Any], sizes: Mapping[str, int], ranks: int | None) -> tuple[int, int]:
    """Ranks with whole copies, and ranks that share one."""
    if "parallelism_config" in found:
        return sizes["dp_replicate_size"], sizes["dp_shard_size"]
    if ranks is None:
        raise InputError("accelerate's configuration says how many ranks there are by num_processes: give it, or the "
                         "cluster, or --devices N")
    kind = found.get("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "MULTI_CPU", "NO"):
        raise InputError(f"distributed_type {kind!r} is not read here: FSDP, MULTI_GPU and MULTI_CPU are; DeepSpeed's "
                         "JSON is imported with --from deepspeed")
    return (1, ranks) if kind == "FSDP" else (ranks, 1)


def _reduced(sharded: bool) -> str:
    """The dtype in which accelerate sums gradients beside mixed_precision bf16."""
    return "bfloat16" if sharded else "float32"


def _recipe(found: Mapping[str, Any], reduced: str) -> str:
    word = str(found.get("mixed_precision", "no"))
    if word not in ("no", "False", "bf16"):
        raise InputError(f"mixed_precision {word!r} is no recipe of precision here: no and bf16 are")
    return str(Precision("bf16-mixed", reduced)) if word == "bf16" else "float32"


def _notes(given: Configuration) -> list[str]:
    """Names what is different there though it has the same name."""
    found = []
    if given.precision == "bf16-mixed" and _is_sharded(given):
        found.append("precision bf16-mixed: accelerate reduces sharded gradients in bfloat16 unless the script gives "
                     "FullyShardedDataParallelPlugin a mixed_precision_policy with reduce_dtype=torch.float32")
    if given.degree("tensor") > 1:
        found.append("tensor parallelism: accelerate takes it from the tp_plan of a model of transformers")
    return found


ACCELERATE = Target("accelerate", "accelerate", LIMITS, _write, _read, _notes)
