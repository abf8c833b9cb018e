"""Seconds of a published run's step, from the prices of its parts.

    stage      layers * (F, B, W of one layer), embedding and head at the ends (`layer_seconds`)
    pipeline   the time line of the schedule over stages and microbatches
    replicas   what is exposed of their gradients and parameters, and the update (`replicas`)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from autoddl.core.errors import InputError
from autoddl.core.pipeline_schedules import generate
from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.pipelines import simulate_pipeline
from autoddl.cost_models.software import Software
from autoddl.validation.clusters import cluster_of
from autoddl.validation.layer_seconds import LayerSeconds, layer_seconds
from autoddl.validation.part import Part
from autoddl.validation.replicas import accumulation_bytes, optimizer_seconds, replica_seconds, zero3_seconds
from autoddl.validation.run_parts import Unpriced, price_parts, schedule_of, stage_layers
from autoddl.validation.runs import Run
from autoddl.validation.software import software_of

__all__ = ["StepSeconds", "pipeline_seconds", "price_step"]


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step, and what they are made of: seconds = pipeline + replicas + update."""

    seconds: float
    computed: float
    """Seconds of a rank's forward and backward, on the mean of ranks, without waiting for others."""
    pipeline: float
    """Seconds of forward and backward of all microbatches."""
    replicas: float
    """Seconds of gradients and parameters among replicas that nothing hides."""
    update: float
    """Seconds of clipping and the optimizer."""


def price_step(run: Run, microbatch: int) -> StepSeconds:
    """Returns the seconds of one step with `microbatch` sequences per rank; raises Unpriced with the reason."""
    software, cluster, parts = software_of(run), cluster_of(run), price_parts(run, microbatch)
    count = run.batch // (run.dp * microbatch)
    stages = _stages(run, _part_seconds(run, software, cluster, parts, count))
    forward, backward, weight = (sum(times) for times in stages)
    line = pipeline_seconds(run, cluster, stages, count, microbatch)
    exposed = 0.0
    if run.zero_stage != 3:
        exposed = replica_seconds(run, software, cluster, parts, forward / run.pp, (backward + weight) / run.pp)
    update = optimizer_seconds(run, software, cluster, parts)
    computed = count * sum(map(sum, stages)) / run.pp
    return StepSeconds(line + exposed + update, computed, line, exposed, update)


def _part_seconds(run: Run, software: Software, cluster: Cluster, parts: Mapping[str, Part], count: int
                  ) -> dict[str, LayerSeconds]:
    """F, B and W of layer, embedding and head, where `count` microbatches add up their gradients."""
    found = {}
    for name, part in parts.items():
        times = layer_seconds(run if name == "layer" else replace(run, recompute=""), software, part)
        if run.zero_stage == 3 and run.dp > 1:
            times = zero3_seconds(run, software, cluster, part, times)
        if count > 1 and name == "layer":
            added = elementwise_seconds(cluster.device, accumulation_bytes(run, software, part))
            times = times._replace(weight=times.weight + added)
        found[name] = times
    return found


def _stages(run: Run, times: Mapping[str, LayerSeconds]) -> tuple[tuple[float, ...], ...]:
    """F, B and W of every stage: its layers, with the embedding in the first and the head in the last."""
    stages = [[layers * seconds for layers in stage_layers(run)] for seconds in times["layer"]]
    for line, first, last in zip(stages, times["embedding"], times["head"], strict=True):
        line[0] += first
        line[-1] += last
    return tuple(map(tuple, stages))


def pipeline_seconds(run: Run, cluster: Cluster, stages: tuple[tuple[float, ...], ...], count: int, microbatch: int
                     ) -> float:
    """Returns the end of the time line of F, B and W of all stages over `count` microbatches.

    Where the optimizer of a zero-bubble schedule does not wait for other ranks, it is the longest rank's span. Raises
    Unpriced for a schedule that cannot run so.
    """
    forward, backward, weight = stages
    if run.pp == 1:
        return count * sum(map(sum, stages))
    name, chunks = schedule_of(run)
    if chunks > 1 and count % run.pp:
        raise Unpriced(f"{count} microbatches are no multiple of {run.pp} stages, which interleaving needs")
    return _line(name, run.pp, count, forward, backward, weight, _boundaries(run, cluster, microbatch, chunks))


def _boundaries(run: Run, cluster: Cluster, microbatch: int, chunks: int) -> tuple[float, ...]:
    """Seconds to send x from each stage to the next."""
    nbytes = 2.0 * microbatch * run.seq * run.hidden / (run.cp * run.tp)
    stride, node = run.dp * run.tp * run.cp, min(run.gpus_per_node, run.gpus)
    far = collective(cluster, "send", Group(((run.pp, stride),)), nbytes).seconds
    near = collective(cluster, "send", Group(((2, stride),)), nbytes).seconds if 2 * stride <= node else far
    stages = run.pp * chunks
    return tuple(near if (s % run.pp) * stride // node == ((s + 1) % run.pp) * stride // node else far
                 for s in range(stages - 1))


@lru_cache(maxsize=4_000)
def _line(name: str, ranks: int, count: int, forward: tuple[float, ...], backward: tuple[float, ...],
          weight: tuple[float, ...], between: tuple[float, ...]) -> float:
    try:
        line = simulate_pipeline(generate(name, ranks, count), forward, backward, weight, between)
    except InputError as error:
        raise Unpriced(str(error)) from None
    if not name.startswith("zb"):
        return line.makespan
    spans = [[at for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
              if task.ranks == (rank,) for at in (start, end)] for rank in range(ranks)]
    return max(max(span) - min(span) for span in spans)
