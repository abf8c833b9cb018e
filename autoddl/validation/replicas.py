"""What replicas of a published run exchange, and what they do to their parameters.

    replicas    gradients reduced (and parameters gathered) once, beside the last backward where the program does that
    ZeRO-3      two gathers and a reduce-scatter of every layer and microbatch beside its computation, and what the
                program copies on the device for them
    update      bytes that clipping and the optimizer move; those that adding up microbatches' gradients moves
    overlap     max(a, b) + (SLOWDOWN - 1) min(a, b): what runs at once slows both (Miao et al. 2022, Galvatron, 3.4)
"""

from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.validation.priced_part import Part
from autoddl.validation.run_parts import expert_replicas, held_values
from autoddl.validation.runs import Run
from autoddl.validation.software import Software

__all__ = ["SLOWDOWN", "accumulated", "gathered", "overlapped", "replica_seconds", "update_seconds"]

SLOWDOWN = 1.2
"""What computation and communication at once lose to each other: within the 1.1 to 1.3 of Galvatron (section 3.4),
chosen with the published runs in view."""


def overlapped(a: float, b: float) -> float:
    """Seconds of two at once."""
    return max(a, b) + (SLOWDOWN - 1) * min(a, b)


def accumulated(run: Run, software: Software, one: Part) -> float:
    """Bytes that adding a microbatch's gradients of a layer to the others' moves: both read, the sum written."""
    return one.values * (2 + 2 * software.gradient) / (run.dp if run.zero == 3 else 1)


def gathered(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part], one: tuple[float, ...],
             ends: list[tuple[float, float, float]]
             ) -> tuple[tuple[float, float, float], list[tuple[float, float, float]]]:
    """ZeRO-3: the gather beside the forward, a gather and the reduce-scatter beside the backward, per layer."""
    group = Group(((run.dp * run.cp, run.tp),))

    def with_(times: tuple[float, ...], values: float) -> tuple[float, float, float]:
        forward, backward, weight = times
        gather = collective(cluster, "all-gather", group, 2 * values).seconds
        scatter = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
        if run.recompute.startswith("full") and not backward:
            gather = 0.0
        there, back = software.unpacked * values, (software.unpacked + software.packed) * values
        forward += elementwise_seconds(cluster.device, there) if there else 0.0
        backward += elementwise_seconds(cluster.device, back) if back else 0.0
        return (overlapped(forward, gather), overlapped(backward + weight, gather + scatter) - weight, weight)

    found = [with_(times, parts[name].values) for name, times in zip(("embedding", "head"), ends, strict=True)]
    return with_(one, parts["layer"].values), found


def replica_seconds(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part], backward: float,
                    forward: float) -> float:
    """Seconds of gradients and parameters among replicas that nothing hides."""
    dense, expert = held_values(run, parts)
    exposed = 0.0
    for values, ways, stride in ((dense, run.dp * run.cp, run.tp), (expert, *expert_replicas(run))):
        if ways < 2 or not values:
            continue
        group = Group(((ways, stride),))
        if run.zero:
            reduce = collective(cluster, "reduce-scatter", group, software.gradient * values).seconds
            gather = collective(cluster, "all-gather", group, 2 * values).seconds
        else:
            reduce, gather = collective(cluster, "all-reduce", group, software.gradient * values).seconds, 0.0
        if "dp" in software.overlaps:
            reduce = overlapped(backward, reduce) - backward
            gather = overlapped(forward, gather) - forward
        exposed += reduce + gather
    return exposed


def update_seconds(run: Run, software: Software, cluster: Cluster, parts: dict[str, Part]) -> float:
    """Bytes of clipping and optimizer over the bandwidth."""
    dense, expert = held_values(run, parts)
    shard = run.dp * run.cp if run.zero else 1
    part_of = expert_replicas(run)[0] if run.zero else 1
    return elementwise_seconds(cluster.device, software.update * (dense / shard + expert / part_of))
