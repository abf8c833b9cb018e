"""Writes and reads DeepSpeed's JSON.

    data, zero-1, 2, 3     zero_optimization.stage 0, 1, 2, 3
    zero-2 zero-3          stage 3 with zero_hpz_partition_size: weights stay whole in a node between forward and
                           backward
    tensor                 tensor_parallel.autotp_size, beside stages 0, 1 and 2

The number of ranks is that of train_batch_size = micro batch x accumulation x ranks that split the batch. Pipelines and
recomputation are called from the model's code there. Releases before 0.19 knew mics_shard_size, whole copies of what
some ranks share: it is read as `data zero-3`, and not written.
"""

import json
from collections.abc import Mapping
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.precision import Precision
from autoddl.export.configuration import DATA_ROLES, Configuration, Degree
from autoddl.export.target import Model, Target, TargetLimits, check_keys, section, whole_number

__all__ = ["DEEPSPEED"]

PLAIN = frozenset({(), ("data",), ("zero-1",), ("zero-2",)})

LIMITS = TargetLimits(data=PLAIN | {("zero-3",), ("zero-2", "zero-3")}, beside=PLAIN, stages=False,
                      recompute=("none", "full"), sequence=(False,),
                      precisions=("float32", "bf16-mixed", "bf16-mixed,reduce=bfloat16"))


def _write(given: Configuration, model: Model) -> str:
    """The configuration as JSON."""
    data = [one for one in given.degrees if one.role in DATA_ROLES]
    zero: dict[str, Any] = {"stage": DATA_ROLES.index(data[-1].role) if data else 0}
    if len(data) == 2:
        zero["zero_hpz_partition_size"] = data[1].size
    found: dict[str, Any] = {"train_batch_size": given.rows, "train_micro_batch_size_per_gpu": given.microbatch,
                             "gradient_accumulation_steps": given.microbatches, "zero_optimization": zero}
    recipe = Precision.parse(given.precision)
    if recipe.is_mixed:
        wire = "fp32" if recipe.reduce == "float32" else "bf16"
        found |= {"bf16": {"enabled": True}, "communication_data_type": wire}
    if given.degree("tensor") > 1:
        found["tensor_parallel"] = {"autotp_size": given.degree("tensor")}
    if given.recompute == "full":
        found["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(found, indent=2) + "\n"


ZERO = ("stage", "mics_shard_size", "mics_hierarchical_params_gather", "zero_hpz_partition_size",
        "zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights",
        "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions", "reduce_scatter", "overlap_comm",
        "contiguous_gradients", "round_robin_gradients", "sub_group_size", "offload_param", "offload_optimizer",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_gather_16bit_weights_on_model_save", "ignore_unused_parameters",
        "load_from_fp32_weights", "elastic_checkpoint", "use_multi_rank_bucket_allreduce", "log_trace_cache_warnings",
        "compute_grad_norm", "legacy_stage1", "parameter_alignment", "zenflow", "memory_efficient_linear",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "pipeline_loading_checkpoint", "override_module_apply", "enable_sanity_checks", "leaf_module",
        "save_muon_momentum_buffer_in_memory", "model_persistence_threshold",
        "stage3_gather_fp16_weights_on_model_save")
TOP = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16",
       "fp16", "communication_data_type", "tensor_parallel", "activation_checkpointing", "optimizer", "scheduler",
       "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_gradients", "data_types",
       "gradient_predivide_factor", "sparse_gradients", "dump_state", "flops_profiler", "tensorboard", "wandb",
       "csv_monitor", "comms_logger", "aio", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
       "checkpoint", "data_efficiency", "compile", "seed", "timers", "zero_optimization_autotp", "amp")


def _read(text: str, ranks: int | None) -> Configuration:
    """The configuration that JSON says. Raises InputError for unknown settings and values that there are not."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"this is no JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise InputError("DeepSpeed's configuration is one JSON object, like {\"zero_optimization\": {\"stage\": 3}}")
    check_keys(found, TOP, "DeepSpeed's configuration")
    zero = section(found, "zero_optimization", "DeepSpeed's section")
    check_keys(zero, ZERO, "DeepSpeed's section zero_optimization")
    inner = section(found, "tensor_parallel", "DeepSpeed's section")
    tensor = max(1, whole_number("tensor_parallel.autotp_size", inner.get("autotp_size", 1), 0))
    microbatch, microbatches, data = _batch(found, tensor, ranks)
    return Configuration((*_sharding(zero, data), Degree("tensor", tensor)), microbatch, microbatches,
                         precision=_recipe(found), recompute="full" if "activation_checkpointing" in found else "none")


def _batch(found: Mapping[str, Any], tensor: int, ranks: int | None) -> tuple[int, int, int]:
    """Rows of a microbatch on a rank, microbatches, and ranks that split the batch; two of three numbers say it."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, rows, parts = (None if found.get(name, "auto") == "auto" else whole_number(name, found[name])
                          for name in names)
    if ranks is not None and ranks % tensor:
        raise InputError(f"{ranks} ranks are no multiple of autotp_size {tensor}: let it divide")
    if ranks is None and (whole is None or rows is None):
        raise InputError("train_batch_size and train_micro_batch_size_per_gpu say together how many ranks there are: "
                         "give both, or the cluster, or --devices N")
    data = ranks // tensor if ranks is not None else (whole or 1) // ((rows or 1) * (parts or 1))
    if rows is None:
        rows = (whole or data) // (data * (parts or 1))
    parts = parts or ((whole or rows * data) // (rows * data) if data else 0)
    if whole not in (None, rows * parts * data) or not rows * parts * data:
        raise InputError(f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {rows} x "
                         f"gradient_accumulation_steps {parts} x {data} ranks that split the batch: let them agree")
    return rows, parts, data


def _sharding(zero: Mapping[str, Any], data: int) -> tuple[Degree, ...]:
    """The roles of the ranks that split the batch."""
    stage = whole_number("zero_optimization.stage", zero.get("stage", 0), 0)
    if stage >= len(DATA_ROLES):
        raise InputError(f"zero_optimization.stage is {stage}; stages are 0, 1, 2 and 3")
    inner, outer = 1, ""
    for key, role in (("mics_shard_size", "data"), ("zero_hpz_partition_size", "zero-2")):
        size = zero.get(key, -1)
        if size not in (-1, 1) and stage == 3:
            inner, outer = whole_number(f"zero_optimization.{key}", size), role
    if not outer:
        return (Degree(DATA_ROLES[stage], data),)
    if data % inner:
        raise InputError(f"{data} ranks that split the batch are no multiple of partitions of {inner}: let it divide")
    return Degree(outer, data // inner), Degree("zero-3", inner)


def _recipe(found: Mapping[str, Any]) -> str:
    if section(found, "fp16", "DeepSpeed's section").get("enabled"):
        raise InputError("fp16 is no recipe of precision here: price bf16 in its place, whose bytes are as large")
    if not section(found, "bf16", "DeepSpeed's section").get("enabled"):
        return "float32"
    wide = found.get("communication_data_type") in ("fp32", "float32", "torch.float32")
    return "bf16-mixed" if wide else "bf16-mixed,reduce=bfloat16"


def _notes(given: Configuration) -> list[str]:
    """Names what is different there though it has the same name."""
    return ["recomputation full: the model's code calls deepspeed.checkpointing for every block; the JSON says only "
            "how"] if given.recompute == "full" else []


DEEPSPEED = Target("deepspeed", "DeepSpeed", LIMITS, _write, _read, _notes)
