"""The parts of a published run: shapes and meshes of layer, embedding and head, and how layers stand in stages.

Experts are split over replicas first. Where expert parallelism is larger than the number of replicas, it extends over
cp, tp or both. A layer's graph has the microbatches of all ranks that share its experts. Vocabularies are padded to a
multiple of 128 tp, as Megatron-LM does.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from autoddl.cost_models.software import Software
from autoddl.validation.clusters import cluster_of
from autoddl.validation.facts import find_beginning
from autoddl.validation.layers import Shape
from autoddl.validation.part import Part, PartSpec
from autoddl.validation.price_part import price_part
from autoddl.validation.runs import Run
from autoddl.validation.software import attention_slowdown, runs_expert_biases, software_of

__all__ = ["Unpriced", "expert_replicas", "model_shape", "narrow_dtype", "price_parts", "rank_values", "schedule_of",
           "stage_layers"]

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "bfloat16", "float8": "bfloat16", "fp16": "float16",
          "float16": "float16"}
"""Beginning of the precision -> dtype of activations."""

NARROW = {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
"""Beginning of the precision -> dtype of linear layers, where it is narrower."""

SCHEDULES = {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-2p": "zb-h2", "zb-h2": "zb-h2", "gpipe": "gpipe"}
"""Beginning of a schedule's name -> as `pipeline_schedules.generate` reads it; others are one-forward-one-backward."""


class Unpriced(Exception):
    """Why a run has no price."""


def price_parts(run: Run, microbatch: int) -> dict[str, Part]:
    """Returns the prices of layer, embedding and head; raises Unpriced with the reason where they have none."""
    software = software_of(run)
    shape = model_shape(run, software, microbatch)
    cluster = cluster_of(run, _expert_ranks(run) * run.cp * run.tp)
    layer = PartSpec("layer", shape, _mesh(run, _expert_ranks(run)), run.sequence_parallel,
                     narrow_dtype(run), software.fuses,
                     attention_slowdown(run, software), _inner_expert_axes(run), software.unpads,
                     runs_expert_biases(run, software))
    plain = PartSpec("embedding", replace(shape, batch=microbatch, experts=0, top_k=0), _mesh(run, 1),
                     run.sequence_parallel, "", software.fuses)
    specs = (layer, plain, replace(plain, name="head"))
    return {spec.name: price_part(spec, cluster) for spec in specs}


def model_shape(run: Run, software: Software, microbatch: int) -> Shape:
    """Returns the sizes of a run's layer; experts see the microbatches of all ranks that share them.

    Raises Unpriced for a layer that is none of this room's.
    """
    dtype, pad = _dtype(run), 128 * run.tp
    if "MLA" in run.workload:
        raise Unpriced("multi-head latent attention is no layer of this table")
    if run.experts and (run.seq * run.top_k) % run.experts:
        raise Unpriced(f"{run.seq} tokens do not go evenly to {run.experts} experts")
    return Shape(
        width=run.hidden, heads=run.heads, kv_heads=run.kv_heads, hidden=run.ffn, vocab=-(-run.vocab // pad) * pad,
        batch=microbatch * _expert_ranks(run), length=run.seq, gated=run.gated or run.experts > 0,
        fused=software.attention != "products", dropout=software.dropout, bias=not run.gated, experts=run.experts,
        top_k=run.top_k, activation="relu" if "ReLU" in run.workload else "gelu", head_dim=run.head_dim, dtype=dtype)


def narrow_dtype(run: Run) -> str:
    """Dtype of linear layers where it is narrower than that of activations; else empty."""
    return NARROW.get(find_beginning(run.precision, NARROW), "")


def _dtype(run: Run) -> str:
    """Dtype of activations."""
    if not run.precision:
        raise Unpriced("the precision is not stated")
    name = find_beginning(run.precision, DTYPES)
    if not name:
        raise Unpriced(f"the precision {run.precision!r} has no price")
    return DTYPES[name]


def _mesh(run: Run, experts: int) -> str:
    """The ranks that a layer is cut among, as text."""
    axes = [f"{name}={size}" for name, size in (("ep", experts), ("cp", run.cp), ("tp", run.tp)) if size > 1]
    return ",".join(axes) or "tp=1"


def _expert_ranks(run: Run) -> int:
    """Replicas among which experts are cut."""
    return gcd(run.ep, run.dp) if run.experts else 1


def _inner_expert_axes(run: Run) -> str:
    """The axes that cut experts besides: what is beyond the replicas is cp, tp, or both."""
    beyond = run.ep // _expert_ranks(run) if run.experts else 1
    ways = {run.cp * run.tp: "cp tp", run.tp: "tp", run.cp: "cp", 1: ""}
    if beyond not in ways:
        raise Unpriced(f"ep {run.ep} is no product of a divisor of dp {run.dp} with cp {run.cp}, tp {run.tp} or both")
    return ways[beyond]


def expert_replicas(run: Run) -> tuple[int, int]:
    """Returns how many ranks have every expert, and the stride between two of these ranks."""
    cut = _expert_ranks(run) * (run.cp if "cp" in _inner_expert_axes(run) else 1)
    return run.dp * run.cp // cut, run.tp * cut


def schedule_of(run: Run) -> tuple[str, int]:
    """Returns the schedule's name as `pipeline_schedules.generate` reads it, and the chunks of layers per rank.

    Raises Unpriced for a schedule that it does not know.
    """
    text = run.schedule.lower()
    if run.pp == 1:
        return "1f1b", 1
    known = find_beginning(text, SCHEDULES)
    if known:
        return SCHEDULES[known], 1
    if text and not text.startswith(("1f1b", "interleaved")):
        raise Unpriced(f"the schedule {run.schedule!r} has no price")
    chunks = run.chunks or max(1, -(-run.layers // run.pp))
    if chunks > 1:
        return f"interleaved:{chunks}", chunks
    return "1f1b", 1


def stage_layers(run: Run) -> tuple[int, ...]:
    """Returns the layers of each stage; where they do not divide, embedding and head count as a layer each."""
    stages = run.pp * schedule_of(run)[1]
    if run.layers % stages == 0:
        return (run.layers // stages,) * stages
    if (run.layers + 2) % stages == 0:
        each = (run.layers + 2) // stages
        return tuple(each - (s == 0) - (s == stages - 1) for s in range(stages))
    low, more = divmod(run.layers, stages)
    return tuple(low + (s < more) for s in range(stages))


def rank_values(run: Run, parts: Mapping[str, Part]) -> tuple[float, float]:
    """Returns the parameters of the rank that has most: (replicated over dp, cut among experts' ranks)."""
    layers, one = stage_layers(run), parts["layer"]
    ends = [0.0] * run.pp
    ends[0] += parts["embedding"].values
    ends[-1] += parts["head"].values
    _, most, end = max((count * one.values + end, count, end) for count, end in
                       ((sum(layers[rank::run.pp]), ends[rank]) for rank in range(run.pp)))
    return most * (one.values - one.expert_values) + end, most * one.expert_values
