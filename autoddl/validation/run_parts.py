"""The parts of a published run: shapes and meshes of layer, embedding and head, and how layers stand in stages.

Experts are cut among replicas first, and what is beyond these over cp, tp or both; a layer's graph has the microbatches
of all ranks that share its experts. Vocabularies are padded to a multiple of 128 tp, as Megatron-LM does.
"""

from dataclasses import replace
from math import gcd

from autoddl.validation.clusters import cluster_of
from autoddl.validation.layers import Shape
from autoddl.validation.priced_part import Asked, Part, part
from autoddl.validation.runs import Run
from autoddl.validation.software import Software, attention_slowdown, biased, software_of

__all__ = ["Unpriced", "expert_replicas", "held_values", "parts_of", "schedule_of", "stage_layers"]

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp8": "bfloat16", "float8": "bfloat16", "fp16": "float16",
          "float16": "float16"}
"""Beginning of the precision -> dtype of activations."""


SCHEDULES = {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-2p": "zb-h2", "zb-h2": "zb-h2", "gpipe": "gpipe"}
"""Beginning of a schedule's name -> as `schedules.generate` reads it; others are one-forward-one-backward."""


class Unpriced(Exception):
    """Why a run has no price."""


def shape_of(run: Run, software: Software, microbatch: int) -> Shape:
    """The layer of a run; experts see the microbatches of all ranks that share them."""
    if not run.precision:
        raise Unpriced("the precision is not stated")
    dtype = next((DTYPES[name] for name in DTYPES if run.precision.startswith(name)), None)
    if dtype is None:
        raise Unpriced(f"the precision {run.precision!r} has no price")
    if "MLA" in run.workload:
        raise Unpriced("multi-head latent attention is no layer of this table")
    pad = 128 * run.tp
    together = outer_experts(run)
    if run.experts and (run.seq * run.top) % run.experts:
        raise Unpriced(f"{run.seq} tokens do not go evenly to {run.experts} experts")
    return Shape(run.hidden, run.heads, run.groups, run.ffn, -(-run.vocab // pad) * pad, microbatch * together, run.seq,
                 run.gated or run.experts > 0, software.attention != "products", software.dropout, not run.gated,
                 run.experts, run.top, "relu" if "ReLU" in run.workload else "gelu",
                 head=run.head, dtype=dtype)


def outer_experts(run: Run) -> int:
    """Replicas among which experts are cut."""
    return gcd(run.ep, run.dp) if run.experts else 1


def inner_experts(run: Run) -> str:
    """The axes that cut experts besides: what is beyond the replicas is cp, tp, or both."""
    beyond = run.ep // outer_experts(run) if run.experts else 1
    ways = {run.cp * run.tp: "cp tp", run.tp: "tp", run.cp: "cp", 1: ""}
    if beyond not in ways:
        raise Unpriced(f"ep {run.ep} is no product of a divisor of dp {run.dp} with cp {run.cp}, tp {run.tp} or both")
    return ways[beyond]


def expert_replicas(run: Run) -> tuple[int, int]:
    """How often every expert is there, and the stride between two of these ranks."""
    cut = outer_experts(run) * (run.cp if "cp" in inner_experts(run) else 1)
    return run.dp * run.cp // cut, run.tp * cut


def parts_of(run: Run, microbatch: int) -> dict[str, Part]:
    """Prices of layer, embedding and head."""
    software, shape = software_of(run), shape_of(run, software_of(run), microbatch)
    cluster = cluster_of(run, outer_experts(run) * run.cp * run.tp)
    plain = replace(shape, batch=microbatch, experts=0, top=0)
    low = "float8_e4m3fn" if run.precision.startswith(("fp8", "float8")) else ""
    inner, mesh = _mesh(run, 1), _mesh(run, outer_experts(run))
    layer = Asked("layer", shape, mesh, run.sequence, low, software.fuses, attention_slowdown(run, software),
                  inner_experts(run), software.unpads, biased(run, software))
    return {"layer": part(layer, cluster),
            "embedding": part(Asked("embedding", plain, inner, run.sequence, "", software.fuses), cluster),
            "head": part(Asked("head", plain, inner, run.sequence, "", software.fuses), cluster)}


def _mesh(run: Run, experts: int) -> str:
    """The ranks that a layer is cut among, as text."""
    axes = [f"{name}={size}" for name, size in (("ep", experts), ("cp", run.cp), ("tp", run.tp)) if size > 1]
    return ",".join(axes) or "tp=1"


def schedule_of(run: Run) -> tuple[str, int]:
    """The schedule's name as `schedules.generate` reads it, and chunks per rank."""
    text = run.schedule.lower()
    if run.pp == 1:
        return "1f1b", 1
    known = next((SCHEDULES[name] for name in SCHEDULES if text.startswith(name)), "")
    if known:
        return known, 1
    if text and not text.startswith(("1f1b", "interleaved")):
        raise Unpriced(f"the schedule {run.schedule!r} has no price")
    chunks = run.chunks or max(1, -(-run.layers // run.pp))
    if chunks > 1:
        return f"interleaved:{chunks}", chunks
    return "1f1b", 1


def stage_layers(run: Run) -> tuple[int, ...]:
    """Layers per stage; where they do not divide, embedding and head count as a layer each."""
    stages = run.pp * schedule_of(run)[1]
    if run.layers % stages == 0:
        return (run.layers // stages,) * stages
    if (run.layers + 2) % stages == 0:
        each = (run.layers + 2) // stages
        return tuple(each - (s == 0) - (s == stages - 1) for s in range(stages))
    low, more = divmod(run.layers, stages)
    return tuple(low + (s < more) for s in range(stages))


def held_values(run: Run, parts: dict[str, Part]) -> tuple[float, float]:
    """Parameters of the rank that has most: (replicated over dp, cut among experts' ranks)."""
    layers, one = stage_layers(run), parts["layer"]
    ends = [0.0] * run.pp
    ends[0] += parts["embedding"].values
    ends[-1] += parts["head"].values
    _, most, end = max((count * one.values + end, count, end) for count, end in
                       ((sum(layers[rank::run.pp]), ends[rank]) for rank in range(run.pp)))
    return most * (one.values - one.expert_values) + end, most * one.expert_values
