"""Prices the messages of a stage to its neighbours, by the layouts in which it gives and takes tensors.

A boundary's transfer takes as long as all tensors that cross it, or their gradients where these take longer. While the
neighbours stay, this is known (`StageMessages`). Whatever they do, each rank receives its own piece of a tensor, and of
the gradient of a tensor that it gave (`PieceMessages`). So the transfer is at least the mean of both.

Copies of a stage, one in every pipe, exchange gradients of parameters by the layout that they are stored in
(`CopyMessages`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.graph import Graph, Tensor
from autoddl.core.hubs import needed_ops
from autoddl.core.layout import Layout, Mesh, local_shape
from autoddl.core.plan import Plan
from autoddl.core.stages import Transfer, transfers_of
from autoddl.cost_models import Cluster
from autoddl.planner.pipelines.part_ranks import Ranks, ranks_of_parts
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import transfer_ends, transfer_passes, transfer_seconds

__all__ = ["CopyMessages", "PieceMessages", "Port", "StageMessages", "ports_of"]


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor that crosses one boundary of a stage alone, made or first read in the unit beyond.

        op          that gives or takes it
        number      among all tensors that the stage gives or takes
        sends       whether the stage gives it
        shape       of the tensor
        itemsize    least bytes that an element is sent in
    """

    op: str
    number: int
    sends: bool
    shape: tuple[int, ...]
    itemsize: float


def ports_of(graph: Graph, places: Sequence[int], a: int, b: int, compress: Sequence[str] = ()) -> tuple[Port, ...]:
    """The ports of the stage from place a to place b of a captured graph, by the names of `StageParts.alone`.

    `compress` are the messages that may be coded.
    """
    ops, found = needed_ops(graph), []
    ends = [0, *places, len(ops)]
    tensors = {t.name: (i, t) for i, t in enumerate(graph.tensors)}
    made = {t: i for i, op in enumerate(ops) for t in op.outputs}
    every = transfers_of(graph, [ends[k] for k in (a, b) if 0 < k <= len(places)])
    for n, one in enumerate(one for one in every if bool(a) in (one.source, one.target)):
        at, tensor = tensors[one.tensor]
        size = tensor.itemsize * part_in_flight(codecs_of(compress, "pipeline", tensor.dtype), tensor.itemsize)
        if one.target == bool(a) and a and made[at] >= ends[a - 1]:
            found.append(Port(one.receiver, n, False, tensor.shape, size))
        elif one.source == bool(a) and one.gradient and any(at in op.inputs for op in ops[ends[b]:ends[b + 1]]):
            found.append(Port(one.sender, n, True, tensor.shape, size))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class PieceMessages:
    """Half of the least seconds of the messages of a stage, whatever its neighbours do, as often as they count.

        ports      of the stage
        cluster    the whole cluster
        ranks      of its parts
        placement  by stage of the pipeline, its part
        counts     how often the transfers before the stage count, and those behind it
    """

    ports: tuple[Port, ...]
    cluster: Cluster
    ranks: tuple[Ranks, ...]
    placement: tuple[int, ...]
    counts: tuple[float, float]

    def seconds(self, op: str, layout: Layout, mesh: Mesh) -> float:
        """Half of the seconds in which each rank gets its piece, over the boundary where that is quickest.

        Paths count no transfer between stages of one part, so that boundary is none of these.
        """
        port = next((port for port in self.ports if port.op == op), None)
        if port is None:
            return 0.0
        nbytes = prod(local_shape(port.shape, layout, mesh)) * port.itemsize
        least = min((transfer_seconds(self.cluster, self.ranks, here, there, nbytes)
                     for here, there in set(pairwise(self.placement)) if here != there), default=0.0)
        return self.counts[port.sends] * least / 2


@dataclass(frozen=True, slots=True)
class CopyMessages:
    """Least seconds in which the copies of a stage send each other the gradients of a parameter.

        cluster    the whole cluster
        pipes      by pipe and stage, the part of it that has the stage; each part has one
    """

    cluster: Cluster
    pipes: tuple[tuple[int, ...], ...]

    def seconds(self, tensor: Tensor, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the stage whose copies are nearest, where each part sends its piece to every other one."""
        if not tensor.trained:
            return 0.0
        nbytes = prod(local_shape(tensor.shape, layout, mesh)) * tensor.stored.itemsize
        ranks = ranks_of_parts(self.cluster, self.cluster.size // mesh.size)
        return min(max(sum(transfer_seconds(self.cluster, ranks, at, to, nbytes) for to in parts)
                       for at in parts) for parts in zip(*self.pipes, strict=True))


@dataclass(frozen=True, slots=True)
class StageMessages:
    """Seconds of the messages of one stage, by the layout that it gives or takes, while its neighbours stay.

        cluster   the whole cluster
        graph     the captured graph
        staged    the pipeline
        plans     the plans of all stages
        at        the stage
        counts    for each boundary, how often one transfer counts
        sent      the tensors that the stage gives or takes
    """

    cluster: Cluster
    graph: Graph
    staged: Staged
    plans: tuple[Plan, ...]
    at: int
    counts: tuple[float, ...]
    sent: tuple[Transfer, ...]

    @classmethod
    def of(cls, cluster: Cluster, graph: Graph, staged: Staged, plans: tuple[Plan, ...], at: int,
           counts: tuple[float, ...]) -> "StageMessages":
        """The messages of stage `at`, which are looked up once."""
        every = transfers_of(graph, staged.cuts)
        return cls(cluster, graph, staged, plans, at, counts,
                   tuple(one for one in every if at in (one.source, one.target)))

    def seconds(self, op: str, layout: Layout, mesh: Mesh) -> float:
        """Seconds of the messages of one op, as often as they count."""
        mine = next(one for one in self.sent if op == (one.sender if one.source == self.at else one.receiver))
        here, there = transfer_ends(mine, self.plans)
        ends = ((layout, mesh), there) if mine.source == self.at else (here, (layout, mesh))
        forth, back = transfer_passes(self.cluster, self.staged, self.graph, mine, *ends)
        ways = forth.seconds, back.seconds
        return self.counts[mine.target - 1] * (max(ways) + sum(ways) / 2) / 2
