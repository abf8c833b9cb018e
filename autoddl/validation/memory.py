"""Peak bytes of a published run on the rank that holds most.

    state        parameters 2 B, gradients g B, optimizer 12 B (master, two moments) each divided among replicas as the
                 ZeRO stage says: 1 the optimizer, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020);
                 experts among the replicas that have the same ones
    activations  microbatches in flight by the schedule * what backward reads of the rank's layers; recomputation keeps
                 the inputs of the layers, and one layer whole while it runs again
    head         logits in half and single precision, and their gradients
    Published peaks are those of PyTorch's allocator: what CUDA and NCCL take beside is not in them.
"""

from autoddl.core.errors import InputError
from autoddl.core.pipeline import peaks
from autoddl.core.pipeline_schedules import generate
from autoddl.validation.priced_part import Part
from autoddl.validation.run_parts import Unpriced, expert_replicas, held_values, parts_of, schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.software import Software, recomputed, software_of

__all__ = ["peak_bytes"]


def _state(run: Run, software: Software, parts: dict[str, Part]) -> float:
    """Parameters, gradients and optimizer of the fullest rank."""
    held = tuple(zip(held_values(run, parts), (run.dp * run.cp, expert_replicas(run)[0]), strict=True))
    if run.zero == 3:
        return sum(values * 16 / ways for values, ways in held) + 2 * 3 * parts["layer"].values
    return sum(values * (2 + software.gradient / (ways if run.zero > 1 else 1) + 12 / (ways if run.zero else 1))
               for values, ways in held)


def peak_bytes(run: Run, microbatch: int) -> float:
    """Bytes on the fullest rank."""
    parts = parts_of(run, microbatch)
    state = _state(run, software_of(run), parts)
    one, x = parts["layer"], 2.0 * microbatch * run.seq * run.hidden / (run.cp * (run.tp if run.sequence else 1))
    kept, again = one.saved + x, 0.0
    how = recomputed(run)
    if how == "full":
        kept, again = kept - run.again * (kept - x), one.saved
    elif how == "core":
        kept, again = kept - one.core_saved, one.core_saved
    elif how == "operators":
        kept, again = kept / 2, one.saved / 2
    elif how == "modules":
        kept, again = kept - one.modules_saved, one.modules_saved
    logits = microbatch * run.seq * run.vocab / (run.tp * run.cp) * (2 + 4 + 4)
    name, _ = schedule_of(run)
    layers = stage_layers(run)
    if run.pp == 1:
        return state + run.layers * kept + again + logits
    count = run.batch // (run.dp * microbatch)
    try:
        schedule = generate(name, run.pp, count)
    except InputError as error:
        raise Unpriced(str(error)) from None
    held = peaks(schedule, [n * kept for n in layers])
    ends = [0.0] * run.pp
    ends[schedule.placement[0][-1]] = logits
    most = max(h + e for h, e in zip(held, ends, strict=True))
    return state + most + again
