"""Seconds of a published run's step, from the prices of its parts.

    stage      F = layers max(forward + sent, host * operators + begun),  B, W likewise; full recomputation adds F to B,
               selective the attention core or, by operators, every other product, or by modules the second norm and
               the experts' activation
    waits      where the host waits for the experts' activation it is ahead of the device only since the last wait: what
               the device has to do between the tokens' order and that comes behind what the host did before
    context    keys and values go round beside attention where the program does that: what lasts longer is exposed
    experts    what brings tokens to them and back runs beside computation where the program does that, which needs
               another microbatch or chunk of layers at hand
    pipeline   the schedule's time line with embedding and head at its ends (`validate_pipeline`)
    replicas   what is exposed of their gradients and parameters, and the update (`validate_replicas`)
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.pipelines import pipeline
from autoddl.validation.clusters import cluster_of
from autoddl.validation.priced_part import Part
from autoddl.validation.replicas import accumulated, gathered, overlapped, replica_seconds, update_seconds
from autoddl.validation.run_parts import Unpriced, parts_of, schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.software import Software, recomputed, software_of

__all__ = ["Step", "Unpriced", "pipeline_seconds", "step"]

BACKWARD_CORE = 2.5
"""Backward of fused attention beside its forward (Dao 2023): five products instead of two."""


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of a step and its parts."""

    seconds: float
    computed: float
    pipeline: float
    replicas: float
    update: float


def _behind_host(software: Software, one: Part, there: float) -> float:
    """Forward of device and host: the longer, or what the device does before a wait behind the rest of the host's."""
    started = software.host * one.calls + one.begun
    return max(there, started, started - software.host * one.awaited_calls + one.awaited)


def _layer(run: Run, software: Software, one: Part) -> tuple[float, float, float]:
    """F, B and W of one layer with what it sends."""
    def beside(compute: float, sent: float) -> float:
        return overlapped(compute, sent) if "tp" in software.overlaps and run.sequence else compute + sent

    def among_experts(compute: float, sent: float) -> float:
        beneath = "ep" in software.overlaps and (run.pp == 1 or run.chunks != 1)
        return overlapped(compute, sent) if beneath else compute + sent

    def around(attention: float, sent: float) -> float:
        return overlapped(attention, sent) - attention if "cp" in software.overlaps else sent

    there = among_experts(beside(one.forward, one.sent_forward), one.dispatch_forward)
    back = among_experts(beside(one.backward + one.weight, one.sent_backward), one.dispatch_backward)
    there += around(one.core, one.context / 3)
    back += around(BACKWARD_CORE * one.core, one.context * 2 / 3)
    forward = _behind_host(software, one, there)
    backward = max(software.host * one.backward_calls + one.backward_begun, back) - one.weight
    how = recomputed(run)
    if how == "full":
        backward += run.again * forward
    elif how == "core":
        backward += one.core
    elif how == "operators":
        backward += one.repeated + one.sent_forward / 2
    elif how == "modules":
        backward += one.modules
    return forward, backward, one.weight


def step(run: Run, microbatch: int) -> Step:
    """Seconds of one step with this microbatch."""
    software, cluster, parts = software_of(run), cluster_of(run), parts_of(run, microbatch)
    count = run.batch // (run.dp * microbatch)
    ends = [_layer(replace(run, recompute=""), software, parts[name]) for name in ("embedding", "head")]
    one = _layer(run, software, parts["layer"])
    if run.zero == 3 and run.dp > 1:
        one, ends = gathered(run, software, cluster, parts, one, ends)
    if count > 1:
        one = (*one[:2], one[2] + elementwise_seconds(cluster.device, accumulated(run, software, parts["layer"])))
    layers = stage_layers(run)
    stages = [[n * seconds for n in layers] for seconds in one]
    for times, first, last in zip(stages, *ends, strict=True):
        times[0] += first
        times[-1] += last
    line = pipeline_seconds(run, cluster, tuple(map(tuple, stages)), count, microbatch)
    window = (sum(stages[1]) + sum(stages[2])) / run.pp
    replicas = 0.0 if run.zero == 3 else replica_seconds(run, software, cluster, parts, window, sum(stages[0]) / run.pp)
    update = update_seconds(run, software, cluster, parts)
    computed = count * sum(map(sum, stages)) / run.pp
    return Step(line + replicas + update, computed, line, replicas, update)


def _boundaries(run: Run, cluster: Cluster, microbatch: int, chunks: int) -> tuple[float, ...]:
    """Seconds to send x from each stage to the next."""
    width = run.tp if run.sequence or run.tp > 1 else 1
    nbytes = 2.0 * microbatch * run.seq * run.hidden / (run.cp * width)
    stride, node = run.dp * run.tp * run.cp, min(run.node, run.gpus)
    far = collective(cluster, "send", Group(((run.pp, stride),)), nbytes).seconds
    near = collective(cluster, "send", Group(((2, stride),)), nbytes).seconds if 2 * stride <= node else far
    stages = run.pp * chunks
    return tuple(near if (s % run.pp) * stride // node == ((s + 1) % run.pp) * stride // node else far
                 for s in range(stages - 1))


def pipeline_seconds(run: Run, cluster: Cluster, stages: tuple[tuple[float, ...], ...], count: int, microbatch: int
                     ) -> float:
    """The time line's end; where the optimizer of a zero-bubble schedule does not wait, the longest rank's."""
    forward, backward, weight = stages
    if run.pp == 1:
        return count * sum(map(sum, stages))
    name, chunks = schedule_of(run)
    if chunks > 1 and count % run.pp:
        raise Unpriced(f"{count} microbatches are no multiple of {run.pp} stages, which interleaving needs")
    return _line(name, run.pp, count, forward, backward, weight, _boundaries(run, cluster, microbatch, chunks))


@lru_cache(maxsize=4_000)
def _line(name: str, ranks: int, count: int, forward: tuple[float, ...], backward: tuple[float, ...],
          weight: tuple[float, ...], between: tuple[float, ...]) -> float:
    try:
        line = pipeline(generate(name, ranks, count), forward, backward, weight, between)
    except InputError as error:
        raise Unpriced(str(error)) from None
    if not name.startswith("zb"):
        return line.makespan
    spans = [[at for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
              if task.ranks == (rank,) for at in (start, end)] for rank in range(ranks)]
    return max(max(span) - min(span) for span in spans)
