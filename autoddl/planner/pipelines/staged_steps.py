"""Predicts the step of a pipeline from the plans of its stages: their seconds, those of transfers, and the time line.

    makespan of the schedule with the seconds of stages and of transfers               (`timelines.pipelines`)

Where messages may be coded (`core.codecs`), each tensor and each gradient is sent as what is fastest. The seconds in
which ranks code and decode then count as the transfer's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import NamedTuple

from autoddl.core.codecs import CODECS, codecs_of
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, Transfer, cut_graph, readers_of, transfers_of
from autoddl.cost_models import Cluster, Group, collective, elementwise_seconds
from autoddl.cost_models.timelines.pipelines import simulate_pipeline
from autoddl.cost_models.timelines.timeline import Timeline
from autoddl.planner.pipelines.part_ranks import Ranks, part_clusters, ranks_of_parts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.stored_once import update_twice
from autoddl.schedule.stage_messages import busiest
from autoddl.schedule.stage_seconds import stage_seconds

__all__ = ["StagedStep", "TriedCut", "alone_seconds", "boundary_seconds", "simulated", "simulated_cut", "stage_times",
           "staged_step", "transfer_ends", "transfer_passes", "transfer_seconds"]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """The predicted step of a pipeline: seconds of its stages and transfers, and the time line.

    `sizes` are the ranks of every part of the cluster; none: all have as many.
    """

    stages: tuple[StageSeconds, ...]
    transfers: tuple[float, ...]
    timeline: Timeline
    sizes: tuple[int, ...] = ()

    @property
    def idle(self) -> float:
        """The part of the step in which ranks compute nothing, in the mean over all ranks."""
        if not self.sizes:
            return self.timeline.bubble
        busy = sum(n * self.timeline.busy(part) for part, n in enumerate(self.sizes))
        return 1 - busy / (sum(self.sizes) * self.timeline.makespan)


@dataclass(frozen=True, slots=True)
class TriedCut:
    """A cut that was solved: the plans of its stages, the seconds of the pipeline, of its stages and transfers.

    Stages that share ranks are planned again under a part of the budget, where they do not fit together.
    """

    cut: tuple[int, ...]
    plans: tuple[Plan, ...]
    seconds: float
    stages: tuple[StageSeconds, ...]
    transfers: tuple[float, ...]


class Sent(NamedTuple):
    """How messages are sent: the seconds, and the codec, which is empty where values are sent as they are."""

    seconds: float
    codec: str


def transfer_seconds(cluster: Cluster, ranks: Sequence[Ranks], source: int, target: int, nbytes: float) -> float:
    """Seconds in which every rank of one part of the cluster sends `nbytes` to one of another, all at once.

    `ranks` are those of every part. Where the two have different numbers of them, the bytes are those of the busiest
    rank. All ranks of the units that hold the two then count as sending so many.
    """
    if not nbytes or source == target:
        return 0.0
    here, there = ranks[source], ranks[target]
    size = here[1] - here[0] if here[1] - here[0] == there[1] - there[0] else 1
    level = next(i for i, unit in enumerate(cluster.units[1:]) if here[0] // unit == there[0] // unit)
    stride = max(size, cluster.units[level])
    children = cluster.units[level + 1] // stride
    evenly = next(n for n in range(2, children + 1) if children % n == 0)  # a message takes as long among 2 as among 3
    return collective(cluster, "send", Group(((evenly, stride),)), float(nbytes)).seconds


def boundary_seconds(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph) -> list[float]:
    """Seconds of the transfers of a microbatch over every boundary, those of gradients where these take longer.

    A tensor that skips stages counts at the boundary before its reader.
    """
    found = [[0.0, 0.0] for _ in plans[1:]]
    for one in transfers_of(graph, staged.cuts):
        for way, sent in enumerate(transfer_passes(cluster, staged, graph, one, *transfer_ends(one, plans))):
            found[one.target - 1][way] += sent.seconds
    return [max(both) for both in found]


def transfer_ends(one: Transfer, plans: Sequence[Plan]) -> tuple[tuple[Layout, Mesh], tuple[Layout, Mesh]]:
    """The layout in which a tensor is sent with the sender's mesh, and that in which it is received."""
    sender, receiver = (next(d for d in plans[stage].decisions if d.name == name) for stage, name in
                        ((one.source, one.sender), (one.target, one.receiver)))
    return (sender.inputs[0], plans[one.source].mesh), (receiver.outputs[0], plans[one.target].mesh)


def transfer_passes(cluster: Cluster, staged: Staged, graph: Graph, one: Transfer, here: tuple[Layout, Mesh],
                    there: tuple[Layout, Mesh]) -> tuple[Sent, Sent]:
    """How a tensor of a microbatch is sent, and its gradient, in 0 seconds where it has none."""
    tensor = next(tensor for tensor in graph.tensors if tensor.name == one.tensor)
    forth, back = (_as_sent(cluster, staged, tensor, lane, ends, (one.source, one.target)) for lane, ends in
                   zip(one.lanes, ((*here, *there), (*there, *here)), strict=True))
    return forth, back if one.gradient else Sent(0.0, "")


def _as_sent(cluster: Cluster, staged: Staged, tensor: Tensor, lane: str, ends: tuple[Layout, Mesh, Layout, Mesh],
             stages: tuple[int, int]) -> Sent:
    """The fastest way to send a tensor between two stages by a lane, or that of its codec if it is known.

    With several pipes it counts as in the one where it takes longest: those of `chimera:3` may lie over other levels.
    """
    ways = {(pipe[stages[0]], pipe[stages[1]]) for pipe in staged.pipes}
    ranks = ranks_of_parts(cluster, staged.parts, staged.sizes)

    def seconds(codec: str) -> float:
        nbytes = busiest(tensor.shape, *ends, tensor.itemsize, codec)
        wire = max(transfer_seconds(cluster, ranks, here, there, nbytes) for here, there in ways)
        passes, values = CODECS[codec].passes if codec and wire else (), 4.0 * busiest(tensor.shape, *ends)
        return wire + sum(elementwise_seconds(cluster.device, times * values) for times in passes)

    codecs = ("", *codecs_of(staged.compress, "pipeline", tensor.dtype)) if staged.codecs is None else (
        staged.codecs.get(lane, ""),)
    return min((Sent(seconds(codec), codec) for codec in codecs), key=lambda way: way.seconds)


def _shared_seconds(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graphs: Sequence[StageGraph]
                    ) -> list[float]:
    """By stage, seconds in which gradients of parameters that several parts have are exchanged, once a step.

    Each part sends its own pieces to every other one, behind its reductions. Stages of one part have the same pieces,
    and the first of them sends. Copies of a stage do so at once.
    """
    found, pipes = [0.0] * len(plans), staged.pipes
    ranks = ranks_of_parts(cluster, staged.parts, staged.sizes)
    stored = [plan.index().stored for plan in plans]
    for fqn, stages in readers_of(graphs).items():
        tensor = next(t for t in graphs[stages[0]].graph.tensors if t.fqn == fqn and t.kind is Kind.PARAMETER)
        firsts = {pipe[s]: s for s in reversed(stages) for pipe in pipes}
        each = dict.fromkeys(firsts, 0.0)
        for (at, a), (to, b) in permutations(firsts.items() if tensor.trained else (), 2):
            sent = busiest(tensor.shape, stored[a][fqn].layout, plans[a].mesh, stored[b][fqn].layout, plans[b].mesh)
            seconds = transfer_seconds(cluster, ranks, at, to, sent * tensor.stored.itemsize)
            each[at], each[to] = each[at] + seconds / 2, each[to] + seconds / 2
        for stage in set(firsts.values()):
            found[stage] += max(each[at] for at, s in firsts.items() if s == stage)
    return found


def alone_seconds(cluster: Cluster, plan: Plan, staged: Staged, stage: StageGraph, s: int) -> StageSeconds:
    """The seconds of the s-th stage, without what it exchanges with others."""
    part = part_clusters(cluster, staged.parts, staged.sizes)[staged.placement[s]]
    return stage_seconds(plan, add_hubs(stage.graph), part, staged.splits)


def stage_times(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph,
                known: Sequence[StageSeconds] = ()) -> tuple[tuple[StageSeconds, ...], tuple[float, ...]]:
    """(the seconds of every stage, those of a transfer over every boundary); `graph` is the captured one.

    What stages exchange once a step counts as part of their reductions. Both ways of an exchange run at once. The
    seconds of stages alone may be `known`.
    """
    parts, graphs = part_clusters(cluster, staged.parts, staged.sizes), cut_graph(graph, staged.cuts)
    alone = known or [alone_seconds(cluster, plan, staged, graphs[s], s) for s, plan in enumerate(plans)]
    shared = _shared_seconds(cluster, plans, staged, graphs)
    twice = update_twice(plans, graphs, staged.placement, parts)
    seconds = tuple(one._replace(reduce=one.reduce + more, update=max(0.0, one.update - less))
                    for one, more, less in zip(alone, shared, twice, strict=True))
    return seconds, tuple(boundary_seconds(cluster, plans, staged, graph))


def staged_step(plan: Plan, graph: Graph, cluster: Cluster) -> StagedStep:
    """The predicted step of a plan with stages; `graph` is the captured one, of one microbatch."""
    assert plan.pipeline is not None
    pipeline = plan.pipeline
    staged = Staged(pipeline.cuts, pipeline.name, plan.microbatches, codecs=pipeline.codecs, sizes=pipeline.sizes)
    seconds, between = stage_times(cluster, [stage.plan for stage in pipeline.stages], staged, graph)
    line = simulated(Schedule.parse(pipeline.schedule), seconds, between)
    return StagedStep(seconds, between, line, pipeline.sizes)


def simulated(schedule: Schedule, stages: Sequence[StageSeconds], transfers: Sequence[float]) -> Timeline:
    """The time line of a schedule with these seconds."""
    columns = list(zip(*stages, strict=True))
    return simulate_pipeline(schedule, columns[0], columns[1], columns[2], transfers, columns[4],
                             gather_seconds=columns[3], update_seconds=columns[5])


def simulated_cut(cluster: Cluster, plans: Sequence[Plan], staged: Staged, graph: Graph, cut: tuple[int, ...]
                  ) -> TriedCut:
    """The pipeline of these plans of its stages, whose places in the chain of units are those of the cut."""
    seconds, between = stage_times(cluster, plans, staged, graph)
    makespan = simulated(staged.schedule(), seconds, between).makespan
    return TriedCut(cut, tuple(plans), makespan, tuple(seconds), tuple(between))
