"""Prices the exchange between replicas of a published run, and the update of their parameters.

    replicas    gradients reduced (and parameters gathered) once, beside the last backward where the program does that
    ZeRO-3      two gathers and a reduce-scatter of every layer and microbatch beside its computation, and what the
                program copies on the device for them
    update      bytes that clipping and the optimizer move, and those that adding up microbatches' gradients moves
"""

from collections.abc import Mapping

from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.software import Software
from autoddl.validation.layer_seconds import LayerSeconds, overlap_seconds
from autoddl.validation.part import Part
from autoddl.validation.run_parts import expert_replicas, rank_values
from autoddl.validation.runs import Run

__all__ = ["accumulation_bytes", "optimizer_seconds", "replica_seconds", "zero3_seconds"]


def accumulation_bytes(run: Run, software: Software, part: Part) -> float:
    """Returns the bytes that adding a microbatch's gradients of a part to the others' moves: two read, one written."""
    return part.values * (2 + 2 * software.gradient) / (run.dp if run.zero_stage == 3 else 1)


def zero3_seconds(run: Run, software: Software, cluster: Cluster, part: Part, times: LayerSeconds) -> LayerSeconds:
    """Returns F, B and W of a part under ZeRO-3: a gather beside forward, a gather and a reduce-scatter beside
    backward."""
    group, values = Group(((run.dp * run.cp, run.tp),)), part.values
    gather = collective(cluster, "all-gather", group, 2 * values).seconds
    scatter = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
    if run.recompute.startswith("full") and not times.backward:
        gather = 0.0
    unpacked, packed = software.unpacked * values, (software.unpacked + software.packed) * values
    forward = times.forward + (elementwise_seconds(cluster.device, unpacked) if unpacked else 0.0)
    backward = times.backward + (elementwise_seconds(cluster.device, packed) if packed else 0.0)
    return LayerSeconds(overlap_seconds(forward, gather),
                        overlap_seconds(backward + times.weight, gather + scatter) - times.weight, times.weight)


def replica_seconds(run: Run, software: Software, cluster: Cluster, parts: Mapping[str, Part], forward: float,
                    backward: float) -> float:
    """Returns the seconds of gradients and parameters among replicas that `forward` and `backward` do not hide."""
    dense, expert = rank_values(run, parts)
    exposed = 0.0
    for values, ways, stride in ((dense, run.dp * run.cp, run.tp), (expert, *expert_replicas(run))):
        if ways < 2 or not values:
            continue
        group = Group(((ways, stride),))
        if run.zero_stage:
            reduce = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
            gather = collective(cluster, "all-gather", group, 2 * values).seconds
        else:
            reduce, gather = collective(cluster, "all-reduce", group, software.gradient * values).seconds, 0.0
        if "dp" in software.overlaps:
            reduce = overlap_seconds(backward, reduce) - backward
            gather = overlap_seconds(forward, gather) - forward
        exposed += reduce + gather
    return exposed


def optimizer_seconds(run: Run, software: Software, cluster: Cluster, parts: Mapping[str, Part]) -> float:
    """Returns the seconds in which clipping and the optimizer move their bytes."""
    dense, expert = rank_values(run, parts)
    dense_ways = run.dp * run.cp if run.zero_stage else 1
    expert_ways = expert_replicas(run)[0] if run.zero_stage else 1
    return elementwise_seconds(cluster.device, software.update * (dense / dense_ways + expert / expert_ways))
