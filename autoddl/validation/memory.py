"""Peak bytes of a published run on the rank that has most.

    state        parameters 2 B, gradients g B, optimizer 12 B (master, two moments). Each is divided among replicas as
                 the ZeRO stage says: 1 the optimizer, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020).
                 Experts are divided among the replicas that have the same ones.
    activations  microbatches in flight by the schedule * what backward reads of the rank's layers; recomputation keeps
                 the inputs of the layers, and one layer whole while it runs again
    head         logits in half and single precision, and their gradients

Published peaks are those of PyTorch's allocator: they do not count what CUDA and NCCL take.
"""

from collections.abc import Mapping

from autoddl.core.errors import InputError
from autoddl.core.pipeline import peak_activations
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models.software import Software
from autoddl.validation.part import Part
from autoddl.validation.run_parts import Unpriced, expert_replicas, price_parts, rank_values, schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.software import recomputation_of, software_of

__all__ = ["peak_bytes"]


def peak_bytes(run: Run, microbatch: int) -> float:
    """Returns the bytes of the fullest rank with `microbatch` sequences per rank; raises Unpriced with the reason."""
    parts = price_parts(run, microbatch)
    state = _state(run, software_of(run), parts)
    kept, again = _layer_bytes(run, parts["layer"], microbatch)
    logits = microbatch * run.seq * run.vocab / (run.tp * run.cp) * (2 + 4 + 4)
    if run.pp == 1:
        return state + run.layers * kept + again + logits
    return state + _fullest_stage(run, microbatch, kept, logits) + again


def _state(run: Run, software: Software, parts: Mapping[str, Part]) -> float:
    """Parameters, gradients and optimizer of the fullest rank."""
    values = tuple(zip(rank_values(run, parts), (run.dp * run.cp, expert_replicas(run)[0]), strict=True))
    if run.zero_stage == 3:
        return sum(count * 16 / ways for count, ways in values) + 2 * 3 * parts["layer"].values
    return sum(count * (2 + software.gradient / (ways if run.zero_stage > 1 else 1)
                        + 12 / (ways if run.zero_stage else 1)) for count, ways in values)


def _layer_bytes(run: Run, part: Part, microbatch: int) -> tuple[float, float]:
    """Bytes that a layer keeps for backward, and bytes of the one layer that is computed again."""
    ranks = run.cp * (run.tp if run.sequence_parallel else 1)
    x = 2.0 * microbatch * run.seq * run.hidden / ranks
    kept = part.saved + x
    match recomputation_of(run):
        case "full":
            return kept - run.recomputed_share * (kept - x), part.saved
        case "core":
            return kept - part.core_saved, part.core_saved
        case "operators":
            return kept / 2, part.saved / 2
        case "modules":
            return kept - part.modules_saved, part.modules_saved
    return kept, 0.0


def _fullest_stage(run: Run, microbatch: int, kept: float, logits: float) -> float:
    """Bytes of activations on the pipeline rank that has most."""
    try:
        schedule = generate(schedule_of(run)[0], run.pp, run.batch // (run.dp * microbatch))
    except InputError as error:
        raise Unpriced(str(error)) from None
    activations = peak_activations(schedule, [layers * kept for layers in stage_layers(run)])
    ends = [0.0] * run.pp
    ends[schedule.placement[0][-1]] = logits
    return max(nbytes + end for nbytes, end in zip(activations, ends, strict=True))
