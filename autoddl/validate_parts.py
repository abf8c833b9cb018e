"""The parts of a published run: shapes and meshes of layer, embedding and head, and how layers stand in stages.

Experts are cut among replicas first, and what is beyond these over tp; a layer's graph has the microbatches of all
ranks that share its experts. Vocabularies are padded to a multiple of 128 tp, as Megatron-LM does.
"""

from dataclasses import replace
from math import gcd

from autoddl.validate_layer import Asked, Part, part
from autoddl.validate_model import Shape
from autoddl.validate_places import Software, attention_slowdown, cluster_of, software_of
from autoddl.validate_runs import Run

__all__ = ["Unpriced", "held_values", "outer_experts", "parts_of", "schedule_of", "stage_layers"]


class Unpriced(Exception):
    """Why a run has no price."""


def shape_of(run: Run, software: Software, microbatch: int) -> Shape:
    """The layer of a run; experts see the microbatches of all ranks that share them."""
    if not run.precision:
        raise Unpriced("the precision is not stated")
    if "MLA" in run.workload:
        raise Unpriced("multi-head latent attention is no layer of this table")
    pad = 128 * run.tp
    together = outer_experts(run)
    if run.experts and (run.seq * run.top) % run.experts:
        raise Unpriced(f"{run.seq} tokens do not go evenly to {run.experts} experts")
    return Shape(run.hidden, run.heads, run.groups, run.ffn, -(-run.vocab // pad) * pad, microbatch * together, run.seq,
                 run.gated or run.experts > 0, software.attention != "products", software.dropout, not run.gated,
                 run.experts, run.top, "relu" if "ReLU" in run.workload else "gelu",
                 head=run.head, dtype="float16" if run.precision.startswith("fp16") else "bfloat16")


def outer_experts(run: Run) -> int:
    """Replicas among which experts are cut; what is beyond them is cut over tp."""
    return gcd(run.ep, run.dp) if run.experts else 1


def parts_of(run: Run, microbatch: int) -> dict[str, Part]:
    """Prices of layer, embedding and head."""
    software, shape = software_of(run), shape_of(run, software_of(run), microbatch)
    cluster = cluster_of(run, outer_experts(run) * run.cp * run.tp)
    plain = replace(shape, batch=microbatch, experts=0, top=0)
    low = "float8_e4m3fn" if run.precision.startswith("fp8") else ""
    inner, mesh = _mesh(run, 1), _mesh(run, outer_experts(run))
    ends = "tp" if run.experts and run.ep > run.dp else ""
    layer = Asked("layer", shape, mesh, run.sequence, low, software.fuses, attention_slowdown(run, software), ends)
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
    if text.startswith("zb-1p"):
        return "zb-h1", 1
    if text.startswith("zb-2p"):
        return "zb-h2", 1
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
