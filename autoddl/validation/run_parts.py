"""The model of a published run in sizes, its precision, and how its layers stand in stages.

Vocabularies are padded to a multiple of 128 tp, as Megatron-LM does.
"""

from math import gcd, lcm

from autoddl.cost_models.software import Software
from autoddl.planner.pipelines.uniform_pipelines import blocks_of_stages
from autoddl.validation.facts import find_beginning, read_words
from autoddl.validation.layers import Shape
from autoddl.validation.runs import Run

__all__ = ["Unpriced", "check_degrees", "even_length", "is_encoder", "model_shape", "narrow_dtype", "schedule_of",
           "single_dtype", "stage_layers"]

NEAR = 0.02
"""Part of a sequence by which it may be longer or shorter, so that its tokens go evenly to the experts."""
SINGLE = {"fp32": "float32", "float32": "float32", "tf32": "tf32"}
"""Beginning of the precision -> dtype at whose peak products are, where everything is stored and summed in float32."""

PRECISIONS = ("bf16", "bfloat16", "fp8", "float8", "fp16", "float16", *SINGLE)
"""Beginnings of the precisions that have a price."""

NARROW = {"fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}
"""Beginning of the precision -> dtype of linear layers, where it is narrower."""

ENCODERS, OTHERS = read_words("workloads.yaml", "encoders"), read_words("workloads.yaml", "others")
"""Words of a workload whose queries see all keys, and of one that has other layers than these."""

ENDS = 2
"""Stages that may have no layer: that of the embedding and that of the head."""

SCHEDULES = {"zb-1p": "zb-h1", "zb-h1": "zb-h1", "zb-2p": "zb-h2", "zb-h2": "zb-h2", "gpipe": "gpipe"}
"""Beginning of a schedule's name -> as `pipeline_schedules.generate` reads it; others are one-forward-one-backward."""


class Unpriced(Exception):
    """Why a run has no price."""


def check_degrees(run: Run) -> None:
    """Raises Unpriced where the model cannot be split into as many parts as the degrees say."""
    kv, stages = run.heads if run.kv_rank else run.kv_heads, run.pp * schedule_of(run)[1]
    if run.heads % run.tp:
        raise Unpriced(f"tp {run.tp} does not divide {run.heads} heads, and each rank of tp has equally many: write a "
                       "tp that divides them")
    if kv % run.tp and run.tp % kv:
        raise Unpriced(f"tp {run.tp} neither divides {kv} kv_heads nor is a multiple of them, and ranks of tp share or "
                       "copy them evenly: write such a tp")
    if not run.experts and run.ffn % run.tp:
        raise Unpriced(f"tp {run.tp} does not divide ffn {run.ffn}, and each rank of tp has equally many columns of "
                       "it: write a tp that divides it")
    if stages > run.layers + ENDS:
        parts = f"pp {run.pp}" + f" x interleave_vp {stages // run.pp}" * (stages > run.pp)
        raise Unpriced(f"{parts} makes {stages} stages of {run.layers} layers, and only embedding and head may "
                       f"stand without a layer: write at most {run.layers + ENDS} stages")


def model_shape(run: Run, software: Software, microbatch: int) -> Shape:
    """Returns the sizes of a run's model, with one microbatch of all ranks.

    Where tp is above the key and value heads, each rank has a copy of one: so there are tp of them. Raises Unpriced
    for a layer that is none of this room's, and for a precision without a price.
    """
    pad = 128 * run.tp
    if not run.precision:
        raise Unpriced("the precision is not stated; write one of " + ", ".join(PRECISIONS))
    if not find_beginning(run.precision, PRECISIONS):
        raise Unpriced(f"the precision {run.precision!r} has no price; those that have one begin with "
                       + ", ".join(PRECISIONS))
    if "MLA" in run.workload and not run.kv_rank:
        raise Unpriced(f"the workload {run.workload!r} says MLA, and the ranks of its latent attention are not "
                       "known by the model's name: fill q_rank, kv_rank, rope_dim, v_dim and head_dim")
    if other := OTHERS.search(run.workload):
        raise Unpriced(f"the workload {run.workload!r} names {other[0]}, and rows are of decoders or encoders alone: "
                       "plan the model itself, with `autoddl plan MODEL.py:FACTORY CLUSTER --mine DEGREES`")
    return Shape(
        width=run.hidden, heads=run.heads, kv_heads=run.heads if run.kv_rank else max(run.kv_heads, run.tp),
        hidden=run.ffn,
        vocab=-(-run.vocab // pad) * pad, batch=microbatch * run.dp, length=even_length(run),
        gated=run.gated or run.experts > 0,
        fused=software.attention != "products", dropout=software.dropout,
        masks_apart=software.masks_apart and software.attention == "products", bias=not run.gated, experts=run.experts,
        top_k=run.top_k, expert_bias=run.expert_bias, clamped=run.clamped, qk_norm=run.qk_norm,
        row_dtype=_row_dtype(run, software),
        activation="relu" if "ReLU" in run.workload else "gelu", head_dim=run.head_dim,
        q_rank=run.q_rank, kv_rank=run.kv_rank, rope_dim=run.rope_dim, v_dim=run.v_dim, shared=run.shared_ffn,
        low_norms=software.low_norms, written_out=software.norms_in_rows and not software.fuses,
        causal=not is_encoder(run), dtype="float32")


def even_length(run: Run) -> int:
    """Tokens of a sequence that go evenly to the experts: those of the run, or the nearest number that does.

    Raises Unpriced where that is not near.
    """
    if (run.seq * run.top_k) % max(1, run.experts) == 0:
        return run.seq
    step = lcm(run.experts // gcd(run.experts, run.top_k), 2 * run.cp, run.tp)
    near = round(run.seq / step) * step
    if abs(near - run.seq) > NEAR * run.seq:
        raise Unpriced(f"{run.seq} tokens do not go evenly to {run.experts} experts, and no multiple of {step} is "
                       f"within {NEAR:.0%}: write one as seq, with global_batch for as many tokens")
    return near


def _row_dtype(run: Run, software: Software) -> str:
    """Dtype of rows of experts and of latent attention's rotation, where the stream has another one; else empty."""
    low = (run.experts or run.kv_rank) and not software.trains_in_half and not single_dtype(run)
    return "bfloat16" if low else ""


def is_encoder(run: Run) -> bool:
    """Whether every query of a run sees all keys."""
    return ENCODERS.search(run.workload) is not None


def single_dtype(run: Run) -> str:
    """Dtype at whose peak products are, where a run stores everything in float32; else empty."""
    return SINGLE.get(find_beginning(run.precision, SINGLE), "")


def narrow_dtype(run: Run) -> str:
    """Dtype of linear layers where it is narrower than that of activations; else empty."""
    return NARROW.get(find_beginning(run.precision, NARROW), "")


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
        raise Unpriced(f"the schedule {run.schedule!r} has no price; those that have one begin with 1F1B, interleaved, "
                       f"{', '.join(SCHEDULES)}")
    chunks = run.chunks or max(1, (run.layers + ENDS) // run.pp)
    if chunks > 1:
        return f"interleaved:{chunks}", chunks
    return "1f1b", 1


def stage_layers(run: Run) -> tuple[int, ...]:
    """Returns the layers of each stage; where they do not divide, embedding and head count as a layer each."""
    stages = run.pp * schedule_of(run)[1]
    if even := blocks_of_stages(run.layers, stages):
        return even
    low, more = divmod(run.layers, stages)
    return tuple(low + (s < more) for s in range(stages))
