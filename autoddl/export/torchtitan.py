"""Writes and reads torchtitan's settings as TOML, by the names of its `ParallelismConfig` and `TrainingConfig`.

    data                   parallelism.data_parallel_replicate_degree
    zero-3, zero-2         parallelism.data_parallel_shard_degree, with fsdp_reshard_after_forward always | never
    context, tensor        parallelism.context_parallel_degree, tensor_parallel_degree, enable_sequence_parallel
    stages                 parallelism.pipeline_parallel_degree, with the modules of every stage
    recomputation          activation_checkpoint.mode full | selective | none; every-K by selective_ac_option K

Releases up to 0.2 read such a file. Later ones have the same names as fields of Python classes and as options, like
`--parallelism.tensor_parallel_degree 8`. Ranks lie with stages outermost, then data, shard, context and tensor. A rank
runs `local_batch_size` rows at a time, which a pipeline divides into microbatches.
"""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.target import Model, Target, TargetLimits, check_keys, section, whole_number

__all__ = ["TORCHTITAN"]

SCHEDULES: Mapping[str, str] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved",
                                "ZBVZeroBubble": "zb-v", "DualPipeV": "dualpipe-v"}
"""Names of schedules there, and here."""

SHARDED = frozenset({(), ("zero-2",), ("zero-3",), ("data", "zero-2"), ("data", "zero-3")})

LIMITS = TargetLimits(data=SHARDED | {("data",)}, context=True, experts=True, schedules=tuple(SCHEDULES.values()),
                      recompute=("none", "full", "selective", "every"), precisions=("float32", "bf16-mixed", "bf16"))


def _sections(given: Configuration, model: Model) -> dict[str, dict[str, Any]]:
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": given.degree("data"),
        "data_parallel_shard_degree": given.degree("zero-2", "zero-3"),
        "fsdp_reshard_after_forward": "never" if given.degree("zero-2") > 1 else "always",
        "tensor_parallel_degree": given.degree("tensor")}
    if given.degree("tensor") > 1:
        parallelism["enable_sequence_parallel"] = given.sequence
    parallelism["pipeline_parallel_degree"] = given.stages
    local = given.microbatch
    if given.stages > 1:
        local *= given.microbatches
        name = next(there for there, here in SCHEDULES.items() if here == given.schedule.partition(":")[0])
        parallelism |= {"pipeline_parallel_schedule": name, "pipeline_parallel_microbatch_size": given.microbatch,
                        "module_fqns_per_model_part": _parts(given, model)}
    if given.degree("context") > 1:
        parallelism["context_parallel_degree"] = given.degree("context")
    if given.experts > 1:
        parallelism["expert_parallel_degree"] = given.experts
    training: dict[str, Any] = {"local_batch_size": local, "global_batch_size": given.rows}
    if model.tokens > 1:
        training["seq_len"] = model.tokens
    training |= {"dtype": "bfloat16" if given.precision == "bf16" else "float32",
                 "mixed_precision_param": "float32" if given.precision == "float32" else "bfloat16",
                 "mixed_precision_reduce": "float32"}
    return {"training": training, "parallelism": parallelism, "activation_checkpoint": _checkpointing(given.recompute)}


def _checkpointing(policy: str) -> dict[str, Any]:
    if policy.startswith("every-"):
        return {"mode": "selective", "selective_ac_option": policy.removeprefix("every-")}
    return {"mode": policy} | ({"selective_ac_option": "op"} if policy == "selective" else {})


def _parts(given: Configuration, model: Model) -> list[list[str]]:
    """By stage, the names of its units: blocks as many as it has, and what comes before and behind them.

    Units between blocks go with the block before them.
    """
    count, stages = len(model.blocks), given.all_stages
    layers = given.layers or (count // stages,) * stages
    if sum(layers) != count:
        raise InputError(f"{len(layers)} stages have {sum(layers)} blocks, and {model.model} has {count}: let them "
                         "agree")
    names = [i for i, unit in enumerate(model.units) if unit.rpartition(".")[2].isdigit()]
    ends, at = [], 0
    for own in layers[:-1]:
        at += own
        ends.append(names[at] if at < len(names) else names[-1] + 1)
    return [list(model.units[a:b]) for a, b in zip([0, *ends], [*ends, len(model.units)], strict=True)]


def _write(given: Configuration, model: Model) -> str:
    """The settings as TOML."""
    rows = []
    for name, settings in _sections(given, model).items():
        rows += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in settings.items()), ""]
    return "\n".join(rows[:-1]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        ends = (",\n    ", "\n") if value and isinstance(value[0], list) else (", ", "")
        start = "\n    " if ends[1] else ""
        return f"[{start}{ends[0].join(map(_toml, value))}{ends[1]}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


KNOWN: Mapping[str, Sequence[str]] = {
    "parallelism": (
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "enable_sequence_parallel", "pipeline_parallel_degree", "module_fqns_per_model_part",
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
        "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size", "context_parallel_degree", "context_parallel_load_balancer",
        "context_parallel_rotate_method", "expert_parallel_degree", "expert_tensor_parallel_degree",
        "expert_parallel_comm_backend", "disable_loss_parallel", "enable_async_tensor_parallel",
        "enable_compiled_autograd", "spmd_backend", "enable_fsdp_symm_mem"),
    "training": (
        "local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "enable_cpu_offload", "dtype",
        "mixed_precision_param", "mixed_precision_reduce", "gc_freq", "gc_debug", "dataset", "dataset_path", "seed",
        "deterministic", "debug_moe_force_load_balance", "disable_cuda_graphs"),
    "activation_checkpoint": ("mode", "selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns",
                              "early_stop", "memory_budget", "visualize_memory_budget_pareto"),
}
"""Settings of the sections that are read."""

SECTIONS = (*KNOWN, "job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "checkpoint", "compile",
            "quantize", "float8", "comm", "memory_estimation", "fault_tolerance", "experimental", "validation", "debug")


def _read(text: str, ranks: int | None) -> Configuration:
    """The configuration that a TOML file says. Raises InputError for unknown settings and values that there are not."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is no TOML: {error}") from None
    check_keys(found, SECTIONS, "torchtitan's configuration")
    parts = {name: section(found, name, "torchtitan's section") for name in KNOWN}
    for name, keys in KNOWN.items():
        check_keys(parts[name], keys, f"torchtitan's section [{name}]")
    parallelism, training = parts["parallelism"], parts["training"]

    def degree(name: str, default: int = 1) -> int:
        return whole_number(f"parallelism.{name}", parallelism.get(name, default))

    stages, copies, tensor = (degree(f"{name}_degree") for name in (
        "pipeline_parallel", "data_parallel_replicate", "tensor_parallel"))
    context = degree("context_parallel_degree")
    shard = _shard(parallelism, stages * copies * tensor * context, ranks)
    schedule, layers = _schedule(parallelism, stages)
    microbatch, microbatches = _batch(parallelism, training, stages, copies * shard)
    key = "fsdp_reshard_after_forward"
    reshard = _one_of(f"parallelism.{key}", parallelism.get(key, "default"), ("default", "always", "never"))
    role = "zero-2" if reshard == "never" or (reshard == "default" and stages > 1) else "zero-3"
    grid = (Degree("data", copies), Degree(role, shard), Degree("context", context), Degree("tensor", tensor))
    sequence = tensor > 1 and bool(parallelism.get("enable_sequence_parallel", True))
    return Configuration(grid, microbatch, microbatches, stages, schedule, layers, sequence,
                         degree("expert_parallel_degree"), _recipe(training), _policy(parts["activation_checkpoint"]))


def _shard(parallelism: Mapping[str, Any], others: int, ranks: int | None) -> int:
    """The shard degree; -1, the default, is whatever ranks are left."""
    said = parallelism.get("data_parallel_shard_degree", -1)
    if said != -1:
        return whole_number("parallelism.data_parallel_shard_degree", said)
    if ranks is None:
        raise InputError("a data_parallel_shard_degree of -1 is what is left of the ranks: give the cluster, or "
                         "--devices N")
    if ranks % others:
        raise InputError(f"{ranks} ranks are no multiple of the other degrees, {others} together: let them divide")
    return ranks // others


def _schedule(parallelism: Mapping[str, Any], stages: int) -> tuple[str, tuple[int, ...]]:
    """The schedule, and the blocks of every stage."""
    if stages == 1:
        return "1f1b", ()
    name = _one_of("parallelism.pipeline_parallel_schedule", parallelism.get("pipeline_parallel_schedule", "1F1B"),
                   tuple(SCHEDULES))
    parts = parallelism.get("module_fqns_per_model_part") or []
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts) or len(parts) % stages:
        raise InputError(f"parallelism.module_fqns_per_model_part is a list of lists of modules, one for every stage "
                         f"of {stages} ranks, and it has {len(parts)}")
    layers = tuple(sum(str(unit).rpartition(".")[2].isdigit() for unit in part) for part in parts)
    kind = SCHEDULES[name]
    if kind == "interleaved":
        return f"interleaved:{max(2, len(parts) // stages)}", layers
    count = Configuration(stages=stages, schedule=kind).all_stages
    if len(parts) not in (0, count):
        raise InputError(f"schedule {name} has {count} stages on {stages} ranks, and module_fqns_per_model_part has "
                         f"{len(parts)}")
    return kind, layers


def _batch(parallelism: Mapping[str, Any], training: Mapping[str, Any], stages: int, data: int) -> tuple[int, int]:
    """Rows of a microbatch on a rank, and the number of microbatches."""
    local = whole_number("training.local_batch_size", training.get("local_batch_size", 8))
    whole = training.get("global_batch_size", -1)
    rows = local * data if whole == -1 else whole_number("training.global_batch_size", whole)
    each = whole_number("parallelism.pipeline_parallel_microbatch_size",
                        parallelism.get("pipeline_parallel_microbatch_size", 1)) if stages > 1 else local
    if local % each or rows % (local * data):
        raise InputError(f"a global_batch_size of {rows} is no multiple of local_batch_size {local} x {data} ranks "
                         f"that split the batch, or that of microbatches of {each} rows: let them divide")
    return each, rows // (each * data)


def _one_of(name: str, value: object, values: Sequence[str]) -> str:
    if value not in values:
        near = near_names(str(value), values, f"it is one of {', '.join(values)}", most=1)
        raise InputError(f"{name} is {value!r}; {near}")
    return str(value)


def _recipe(training: Mapping[str, Any]) -> str:
    dtypes = ("bfloat16", "float32")
    if _one_of("training.dtype", training.get("dtype", "float32"), dtypes) == "bfloat16":
        return "bf16"
    _one_of("training.mixed_precision_reduce", training.get("mixed_precision_reduce", "float32"), ("float32",))
    used = _one_of("training.mixed_precision_param", training.get("mixed_precision_param", "bfloat16"), dtypes)
    return "bf16-mixed" if used == "bfloat16" else "float32"


def _policy(found: Mapping[str, Any]) -> str:
    mode = _one_of("activation_checkpoint.mode", found.get("mode", "selective"), ("none", "full", "selective"))
    option = str(found.get("selective_ac_option", "op" if "mode" not in found or mode == "selective" else ""))
    if mode != "selective" or option == "op":
        return mode
    every = whole_number("activation_checkpoint.selective_ac_option", option)
    return "full" if every == 1 else f"every-{every}"


def _notes(given: Configuration) -> list[str]:
    """Names what is different there though it has the same name."""
    found = []
    if given.precision == "bf16-mixed" and given.degree("zero-2", "zero-3") == 1 and (
            given.degree("tensor") > 1 or given.stages > 1):
        found.append("precision bf16-mixed: torchtitan mixes precisions beside tensor or pipeline parallelism only "
                     "where the shard degree is above 1")
    if given.recompute == "selective":
        found.append("recomputation selective: torchtitan keeps every second product, and AutoDDL every one")
    return found


TORCHTITAN = Target("torchtitan", "torchtitan", LIMITS, _write, _read, _notes)
