"""Writes and reads the flags of Megatron-LM's `pretrain_*.py`, as its `arguments.py` names them.

    tensor                 --tensor-model-parallel-size        sequence     --sequence-parallel
    zero-1                 --use-distributed-optimizer
    data zero-1            with --num-distributed-optimizer-instances, whole copies of the sharded state
    zero-2, zero-3         --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads | optim_grads_params
    zero-1 zero-k          with --outer-dp-sharding-strategy optim
    stages                 --pipeline-model-parallel-size; their blocks --pipeline-model-parallel-layout, where E is
                           the embedding, t a block, L the loss and | the end of a stage
    interleaved:v          --num-virtual-stages-per-pipeline-rank

Ranks there lie with tensor innermost, then context, data, and stages outermost. Its flags do not say how many ranks
there are.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Protocol

from autoddl.core.errors import InputError
from autoddl.core.names import near_names
from autoddl.core.pipeline_schedules import generate
from autoddl.core.precision import Precision
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.target import UNREAD, Model, Target, TargetLimits, whole_number

__all__ = ["MEGATRON", "layers_of_layout", "layout_of_layers"]

STRATEGIES = {"no_shard": "data", "optim": "zero-1", "optim_grads": "zero-2", "optim_grads_params": "zero-3"}
"""Values of --data-parallel-sharding-strategy, and the role that each is."""

LIMITS = TargetLimits(
    data=frozenset({(), ("data",), ("zero-1",), ("data", "zero-1"), *(
        roles for zero in ("zero-2", "zero-3") for roles in ((zero,), ("data", zero), ("zero-1", zero)))}),
    context=True, experts=True, schedules=("1f1b", "interleaved"), recompute=("none", "full", "selective", "first"),
    precisions=("float32", "bf16-mixed", "bf16-mixed,reduce=bfloat16"))


def layout_of_layers(layers: Sequence[int]) -> str:
    """The text of --pipeline-model-parallel-layout: `Et*2|t*3|t*3L`; neighbours that are alike are `(t*3|)*2`."""
    stages = ["t" * (n > 0) + f"*{n}" * (n > 1) for n in layers]
    stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
    found = ""
    for stage, group in groupby(stages[:-1]):
        count = len(list(group))
        found += f"({stage}|)*{count}" if count > 1 else f"{stage}|"
    return found + stages[-1]


def layers_of_layout(text: str) -> tuple[int, ...]:
    """The number of blocks of every stage. Raises InputError for a text that is no layout."""
    plain = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"([EtmL|])\*(\d+)"):
        plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
    if not re.fullmatch(r"E[t|]*L", plain):
        raise InputError(f"{text!r} is no layout of a pipeline that can be read: it has E first, L last, and t and | "
                         "between, like 'Et*2|(t*3|)*2t*2L'")
    return tuple(stage.count("t") for stage in plain.split("|"))


def _flags(given: Configuration) -> dict[str, str | None]:
    """The flags with their values, None for those without."""
    found: dict[str, str | None] = {"--tensor-model-parallel-size": str(given.degree("tensor"))}
    if given.sequence:
        found["--sequence-parallel"] = None
    found["--pipeline-model-parallel-size"] = str(given.stages)
    if given.layers:
        found["--pipeline-model-parallel-layout"] = layout_of_layers(given.layers)
    elif given.schedule != "1f1b":
        found["--num-virtual-stages-per-pipeline-rank"] = given.schedule.partition(":")[2]
    for flag, degree in (("--context-parallel-size", given.degree("context")),
                         ("--expert-model-parallel-size", given.experts)):
        if degree > 1:
            found[flag] = str(degree)
    found |= {"--micro-batch-size": str(given.microbatch), "--global-batch-size": str(given.rows)}
    return found | _sharding(given) | _precision(given) | _recompute(given.recompute)


def _sharding(given: Configuration) -> dict[str, str | None]:
    data = [one for one in given.degrees if one.role not in ("context", "tensor")]
    found: dict[str, str | None] = {}
    if not data or data[-1].role == "data":
        return found
    inner = data[-1].role
    if len(data) == 2:
        found["--num-distributed-optimizer-instances"] = str(data[0].size)
    if inner == "zero-1":
        return {"--use-distributed-optimizer": None, **found}
    strategy = next(name for name, role in STRATEGIES.items() if role == inner)
    outer = {"--outer-dp-sharding-strategy": "optim"} if data[0].role == "zero-1" else {}
    return {"--use-megatron-fsdp": None, "--data-parallel-sharding-strategy": strategy, **found, **outer}


def _precision(given: Configuration) -> dict[str, str | None]:
    recipe = Precision.parse(given.precision)
    found: dict[str, str | None] = {"--bf16": None} if recipe.is_mixed else {}
    return found | ({"--grad-reduce-in-bf16": None} if recipe.reduce != "float32" else {})


def _recompute(policy: str) -> dict[str, str | None]:
    if policy == "none":
        return {}
    if policy == "selective":
        return {"--recompute-granularity": "selective"}
    block = policy.startswith("first-")
    return {"--recompute-granularity": "full", "--recompute-method": "block" if block else "uniform",
            "--recompute-num-layers": policy.removeprefix("first-") if block else "1"}


def _write(given: Configuration, model: Model) -> str:
    """The flags, one a line, as a shell has them."""
    rows = [flag if value is None else f"{flag} {shlex.quote(value)}" for flag, value in _flags(given).items()]
    return " \\\n".join(rows) + "\n"


NUMBERS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size",
           "--expert-model-parallel-size", "--micro-batch-size", "--global-batch-size", "--recompute-num-layers",
           "--num-distributed-optimizer-instances", "--num-virtual-stages-per-pipeline-rank",
           "--num-layers-per-virtual-pipeline-stage", "--num-layers")
WORDS = ("--pipeline-model-parallel-layout", "--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy",
         "--recompute-granularity", "--recompute-method", "--recompute-modules")
SWITCHES = ("--sequence-parallel", "--recompute-activations", "--use-distributed-optimizer", "--use-megatron-fsdp",
            "--bf16", "--fp16", "--grad-reduce-in-bf16", "--accumulate-allreduce-grads-in-fp32")
OTHERS = tuple(f"--{name}" for name in (
    "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "group-query-attention",
    "kv-channels", "seq-length", "max-position-embeddings", "position-embedding-type",
    "use-rotary-position-embeddings", "rotary-base", "rotary-percent", "normalization", "norm-epsilon", "swiglu",
    "untie-embeddings-and-output-weights", "disable-bias-linear", "attention-dropout", "hidden-dropout",
    "init-method-std", "make-vocab-size-divisible-by", "vocab-size", "num-experts", "moe-router-topk",
    "moe-grouped-gemm", "moe-token-dispatcher-type", "moe-aux-loss-coeff", "moe-router-load-balancing-type", "lr",
    "min-lr", "lr-decay-style", "lr-decay-iters", "lr-decay-samples", "lr-warmup-iters", "lr-warmup-samples",
    "lr-warmup-fraction", "weight-decay", "clip-grad", "adam-beta1", "adam-beta2", "adam-eps", "optimizer",
    "train-iters", "train-samples", "exit-interval", "exit-duration-in-mins", "data-path", "data-cache-path", "split",
    "tokenizer-type", "tokenizer-model", "vocab-file", "merge-file", "num-workers", "mock-data", "dataloader-type",
    "save", "load", "save-interval", "eval-interval", "eval-iters", "log-interval", "log-throughput",
    "tensorboard-dir", "wandb-project", "wandb-exp-name", "seed", "distributed-backend",
    "distributed-timeout-minutes", "use-flash-attn", "attention-backend", "transformer-impl", "use-mcore-models",
    "overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap", "delay-wgrad-compute", "manual-gc",
    "manual-gc-interval", "empty-unused-memory-level", "ckpt-format", "use-dist-ckpt", "no-masked-softmax-fusion",
    "attention-softmax-in-fp32", "no-gradient-accumulation-fusion", "cross-entropy-loss-fusion", "no-load-optim",
    "no-load-rng", "no-save-optim", "no-save-rng", "bf16-params", "cp-comm-type"))
"""Flags that say nothing of what a configuration says."""

KNOWN = (*NUMBERS, *WORDS, *SWITCHES, *OTHERS)


def _parsed(text: str) -> Mapping[str, str]:
    """Flag -> value, "" for one without. Raises InputError for an unknown flag, named with the nearest known."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"these are no flags: {error}") from None
    found: dict[str, str] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            if flag not in KNOWN:
                near = near_names(flag, KNOWN, UNREAD, most=1)
                raise InputError(f"Megatron-LM's flag {flag} is not known here; {near}")
            found[flag] = value
        elif not flag:
            raise InputError(f"{word!r} is no flag: flags begin with --, like --tensor-model-parallel-size 8")
        else:
            found[flag] = f"{found[flag]} {word}".strip()
    return found


def _read(text: str, ranks: int | None) -> Configuration:
    """The configuration that flags say.

    Raises InputError for unknown flags, for values that there are not, and for a pipeline that Megatron-LM cannot run.
    """
    found = _parsed(text)
    for flag in SWITCHES:
        if found.get(flag):
            raise InputError(f"{flag} takes no value, and has {found[flag]!r}: leave it out")

    def number(flag: str, default: int = 1) -> int:
        return whole_number(flag, found[flag]) if flag in found else default

    tensor, stages, context = (number(f"--{name}-size") for name in (
        "tensor-model-parallel", "pipeline-model-parallel", "context-parallel"))
    if ranks is None:
        raise InputError("Megatron-LM's flags do not say how many ranks there are: give the cluster, or --devices N")
    if ranks % (tensor * stages * context):
        raise InputError(f"{ranks} ranks are no multiple of tensor {tensor} x pipeline {stages} x context {context}: "
                         "let them divide")
    data = ranks // (tensor * stages * context)
    rows = number("--micro-batch-size")
    batch = number("--global-batch-size", rows * data)
    if batch % (rows * data):
        raise InputError(f"--global-batch-size {batch} is no multiple of --micro-batch-size {rows} x {data} ranks that "
                         "split the batch: let it divide")
    schedule, layers = _schedule(found, stages, number)
    generate(schedule, stages, batch // (rows * data))
    return Configuration((*_data(found, data, number), Degree("context", context), Degree("tensor", tensor)), rows,
                         batch // (rows * data), stages, schedule, layers,
                         tensor > 1 and "--sequence-parallel" in found,
                         number("--expert-model-parallel-size"), _recipe(found), _policy(found, number))


class Number(Protocol):
    """Reads the number of a flag, or the default where it is left out."""

    def __call__(self, flag: str, default: int = 1) -> int: ...


def _data(found: Mapping[str, str], data: int, number: Number) -> tuple[Degree, ...]:
    """The roles of the ranks that split the batch."""
    copies = number("--num-distributed-optimizer-instances")
    if data % copies:
        raise InputError(f"--num-distributed-optimizer-instances {copies} does not divide the {data} ranks that split "
                         "the batch: let it divide")
    role = "zero-1" if "--use-distributed-optimizer" in found else "data"
    if "--use-megatron-fsdp" in found:
        role = _chosen("--data-parallel-sharding-strategy", found, STRATEGIES, "no_shard")
    outer = _chosen("--outer-dp-sharding-strategy", found, {"no_shard": "data", "optim": "zero-1"}, "no_shard")
    return Degree(outer if copies > 1 else role, copies), Degree(role, data // copies)


def _chosen(flag: str, found: Mapping[str, str], values: Mapping[str, str], default: str) -> str:
    """Returns what the value of a flag stands for. Raises InputError for one that there is not."""
    value = found.get(flag, default)
    if value not in values:
        near = near_names(value, values, f"it is one of {', '.join(values)}", most=1)
        raise InputError(f"{flag} {value!r} is not known here; {near}")
    return values[value]


def _schedule(found: Mapping[str, str], stages: int, number: Number) -> tuple[str, tuple[int, ...]]:
    """The schedule, and the blocks of every stage."""
    chunks = _chunks(found, stages, number)
    layout = found.get("--pipeline-model-parallel-layout")
    layers = layers_of_layout(layout) if layout is not None and stages > 1 else ()
    if layers:
        if len(layers) % stages:
            raise InputError(f"--pipeline-model-parallel-layout has {len(layers)} stages, which {stages} ranks do not "
                             "share evenly")
        chunks = len(layers) // stages
    return "1f1b" if chunks == 1 else f"interleaved:{chunks}", layers


VIRTUAL, EACH = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"


def _chunks(found: Mapping[str, str], stages: int, number: Number) -> int:
    """The stages of each part of the pipeline. Raises InputError where Megatron-LM has none so."""
    asked = [flag for flag in (VIRTUAL, EACH) if flag in found]
    if not asked:
        return 1
    if len(asked) == 2:
        raise InputError(f"{VIRTUAL} and {EACH} both say how many stages a part of the pipeline has: give one")
    if EACH in found and "--num-layers" not in found:
        raise InputError(f"{EACH} says how many stages there are only beside --num-layers: give both")
    total, many = number("--num-layers", 0), number(asked[0])
    if total % (many * stages):
        what = f"{many} layers in each stage" if EACH in found else f"{many} stages on each"
        raise InputError(f"--num-layers {total} is no multiple of {what} of {stages} ranks: let it divide")
    chunks = total // (many * stages) if EACH in found else many
    if stages == 1 and chunks > 1:
        raise InputError(f"{asked[0]} {many} gives one part {chunks} stages, and --pipeline-model-parallel-size is 1: "
                         "give it too, or leave both out")
    return chunks


def _recipe(found: Mapping[str, str]) -> str:
    if "--fp16" in found:
        raise InputError("--fp16 is no recipe of precision here: price --bf16 in its place, whose bytes are as "
                         "large")
    mixed = "--bf16" in found
    return "bf16-mixed,reduce=bfloat16" if mixed and "--grad-reduce-in-bf16" in found else \
        "bf16-mixed" if mixed else "float32"


def _policy(found: Mapping[str, str], number: Number) -> str:
    granularity = found.get("--recompute-granularity")
    if granularity is None:
        return "selective" if "--recompute-activations" in found else "none"
    _chosen("--recompute-granularity", found, {"selective": "", "full": ""}, "full")
    if granularity == "selective":
        return "selective"
    count = number("--recompute-num-layers")
    block = _chosen("--recompute-method", found, {"uniform": "", "block": "block"}, "uniform")
    return f"first-{count}" if block else "full"


def _notes(given: Configuration) -> list[str]:
    """Names what is different there though it has the same name."""
    if given.recompute == "selective":
        return ["recomputation selective: Megatron-LM computes the core of attention again, and keeps activation "
                "functions and norms"]
    return []


MEGATRON = Target("megatron", "Megatron-LM", LIMITS, _write, _read, _notes, keeps=True)
