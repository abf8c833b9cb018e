"""Peak bytes of a published run on the rank that holds most.

    state        parameters 2 B, gradients g B, optimizer 12 B (master, two moments) each divided among replicas as the
                 ZeRO stage says: 1 the optimizer, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020)
    activations  microbatches in flight by the schedule * what backward reads of the rank's layers; recomputation keeps
                 the inputs of the layers, and one layer whole while it runs again
    head         logits in half and single precision, and their gradients
    Published peaks are those of PyTorch's allocator: what CUDA and NCCL take beside is not in them.
"""

from autoddl.schedule import peaks
from autoddl.schedules import generate
from autoddl.validate_parts import held_values, parts_of, schedule_of, stage_layers
from autoddl.validate_places import software_of
from autoddl.validate_runs import Run

__all__ = ["peak_bytes"]


def peak_bytes(run: Run, microbatch: int) -> float:
    """Bytes on the fullest rank."""
    software, parts = software_of(run), parts_of(run, microbatch)
    dense, expert = held_values(run, parts)
    values, ways = dense + expert, run.dp * run.cp
    shard = [ways if run.zero >= stage else 1 for stage in (3, 2, 1)]
    gradient = 4 if run.zero == 3 else software.gradient
    state = values * (2 / shard[0] + gradient / shard[1] + 12 / shard[2])
    if run.zero == 3:
        state = values * 16 / ways + 2 * 3 * parts["layer"].values
    one, x = parts["layer"], 2.0 * microbatch * run.seq * run.hidden / (run.cp * (run.tp if run.sequence else 1))
    kept, again = one.saved + x, 0.0
    if run.recompute.startswith("full"):
        kept, again = kept - run.again * (kept - x), one.saved
    elif "core" in run.recompute:
        kept, again = kept - one.core_saved, one.core_saved
    elif run.recompute.startswith("selective"):
        kept, again = kept / 2, one.saved / 2
    logits = microbatch * run.seq * run.vocab / (run.tp * run.cp) * (2 + 4 + 4)
    name, _ = schedule_of(run)
    layers = stage_layers(run)
    if run.pp == 1:
        return state + run.layers * kept + again + logits
    count = run.batch // (run.dp * microbatch)
    schedule = generate(name, run.pp, count)
    held = peaks(schedule, [n * kept for n in layers])
    ends = [0.0] * run.pp
    ends[schedule.placement[0][-1]] = logits
    most = max(h + e for h, e in zip(held, ends, strict=True))
    return state + most + again

