"""Lists what the stages of a plan send each other in a step, and predicts the messages of a rank.

A *lane* is one tensor on its way from a stage to another, in the layouts that both have it in:

    forward     a tensor that a later stage reads                   in every microbatch
    backward    the gradient of one, the other way                  in every microbatch
    shared      the gradient of a parameter that both stages have   once a step, between other ranks
    loss        the loss, from the last stage to any other          once a step

A lane is messages between the ranks of both stages (`stage_messages`). Ranks are those of the whole plan. A rank that
belongs to both stages keeps its own part. Each message of forward or backward may be coded (`core.codecs`). Stages
on the same ranks store a parameter that they share once, so the first of them has the lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from autoddl.core.codecs import CODECS
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh, extents
from autoddl.core.plan import Plan, Stage
from autoddl.core.stages import StageGraph, cut_graph, shared_here, shared_parameters, transfers_of
from autoddl.schedule.stage_actions import Link
from autoddl.schedule.stage_messages import Box, Message, messages
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = ["End", "Lane", "StoredApart", "lanes_of", "links_of", "stage_traffic", "stored_apart"]

Way = Literal["forward", "backward", "shared", "loss"]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a lane: a stage, the layout of the tensor there, the stage's mesh and its first rank."""

    stage: int
    layout: Layout
    mesh: Mesh
    first: int

    def local(self, shape: tuple[int, ...], rank: int) -> Box:
        """(offset, size) along every dim of the piece of `rank`, which belongs to the stage."""
        return extents(shape, self.layout, self.mesh, self.mesh.coordinate(rank - self.first))


@dataclass(frozen=True, slots=True)
class Lane:
    """A tensor on its way from stage to stage; `name` is that of the tensor in the graph, or of the parameter.

    Its messages to other ranks are sent as `codec`, if it has one.
    """

    way: Way
    name: str
    tensor: Tensor
    source: End
    target: End
    codec: str = ""

    def messages(self) -> list[Message]:
        """All of its messages, between ranks of the plan."""
        found = messages(self.tensor.shape, self.source.layout, self.source.mesh, self.target.layout, self.target.mesh)
        return [Message(self.source.first + one.sender, self.target.first + one.receiver, one.box) for one in found]

    def __str__(self) -> str:
        return f"{self.way} {self.name} {self.source.stage} -> {self.target.stage}"


def links_of(lanes: Sequence[Lane]) -> list[Link]:
    """Which stages send each other something in every microbatch."""
    pairs = sorted({(one.source.stage, one.target.stage) for one in lanes if one.way == "forward"})
    back = {(one.target.stage, one.source.stage) for one in lanes if one.way == "backward"}
    return [Link(source, target, (source, target) in back) for source, target in pairs]


def lanes_of(plan: Plan, graph: Graph) -> tuple[Lane, ...]:
    """All lanes of a plan with stages, in one order for all ranks; `graph` is the captured one, of one microbatch.

    Raises InputError where the plan codes a lane that it has not, or as no codec that can.
    """
    assert plan.pipeline is not None
    stages, graphs = plan.pipeline.stages, cut_graph(graph, plan.pipeline.cuts)
    return (*_transfers(plan, graph), *_shared(stages, graphs), *_loss(stages, graph.tensors[graph.outputs[0]]))


def _transfers(plan: Plan, graph: Graph) -> list[Lane]:
    assert plan.pipeline is not None
    stages, tensors = plan.pipeline.stages, {tensor.name: tensor for tensor in graph.tensors}
    decisions = [{one.name: one for one in stage.plan.decisions} for stage in stages]
    found = []
    for one in transfers_of(graph, plan.pipeline.cuts):
        source = _end(stages, one.source, decisions[one.source][one.sender].inputs[0])
        target = _end(stages, one.target, decisions[one.target][one.receiver].outputs[0])
        found.append(Lane("forward", one.tensor, tensors[one.tensor], source, target))
        if one.gradient:
            found.append(Lane("backward", one.tensor, tensors[one.tensor], target, source))
    codecs = plan.pipeline.codecs
    for lane, codec in codecs.items():
        if lane not in map(str, found) or codec not in CODECS or CODECS[codec].lossless:
            raise InputError(f"the plan sends {lane!r} as {codec!r}, and has no such lane or codec; plan again instead "
                             "of editing the file")
    return [replace(lane, codec=codecs.get(str(lane), "")) for lane in found]


def _shared(stages: Sequence[Stage], graphs: Sequence[StageGraph]) -> list[Lane]:
    stored = [{one.fqn: one.layout for one in stage.plan.stored} for stage in stages]
    found = []
    for fqn, where in shared_parameters(graphs).items():
        tensor = next(one for one in graphs[where[0]].graph.tensors if one.kind is Kind.PARAMETER and one.fqn == fqn)
        firsts = {stages[s].ranks: s for s in reversed(where)}
        ends = [_end(stages, s, stored[s].get(fqn, Layout.broadcast(stages[s].plan.mesh)))
                for s in where if firsts[stages[s].ranks] == s]
        if tensor.trained:
            found += [Lane("shared", fqn, tensor.stored, a, b) for a in ends for b in ends if a is not b]
    return found


class StoredApart(NamedTuple):
    """A parameter of which two stages on the same ranks store other pieces."""

    fqn: str
    first: int
    second: int


def stored_apart(plans: Sequence[Plan], graphs: Sequence[StageGraph], placement: Sequence[int]
                 ) -> StoredApart | None:
    """The first parameter of which stages of one part of the cluster store other pieces; None where all agree.

    Ranks store such a parameter once. `placement` has the part of every stage.
    """
    for fqn, parts in shared_here(graphs, placement).items():
        for first, *others in parts:
            pieces = _pieces(plans[first], graphs[first], fqn)
            for other in others:
                if _pieces(plans[other], graphs[other], fqn) != pieces:
                    return StoredApart(fqn, first, other)
    return None


def _pieces(plan: Plan, graph: StageGraph, fqn: str) -> list[Box]:
    """By rank of a stage, its piece of a parameter."""
    shape = next(one.shape for one in graph.graph.tensors if one.kind is Kind.PARAMETER and one.fqn == fqn)
    layout = next((one.layout for one in plan.stored if one.fqn == fqn), Layout.broadcast(plan.mesh))
    return [extents(shape, layout, plan.mesh, plan.mesh.coordinate(rank)) for rank in range(plan.mesh.size)]


def _loss(stages: Sequence[Stage], loss: Tensor) -> list[Lane]:
    ends = [_end(stages, s, Layout.broadcast(stage.plan.mesh)) for s, stage in enumerate(stages)]
    firsts = {ends[-1].first}
    found = []
    for end in ends[:-1]:
        if end.first not in firsts:
            firsts.add(end.first)
            found.append(Lane("loss", loss.name, loss, ends[-1], end))
    return found


def _end(stages: Sequence[Stage], s: int, layout: Layout) -> End:
    return End(s, layout, stages[s].plan.mesh, stages[s].ranks[0])


def stage_traffic(plan: Plan, graph: Graph, rank: int) -> tuple[PlannedCollective, ...]:
    """The collectives of one step on a rank of a plan with stages, and its messages, of kind `send` or `receive`.

    `graph` is the captured one, of one microbatch. A message goes over the axis along which the stages lie.
    """
    assert plan.pipeline is not None
    found = list[PlannedCollective]()
    for stage, part in zip(plan.pipeline.stages, cut_graph(graph, plan.pipeline.cuts), strict=True):
        if rank in range(*stage.ranks):
            found += traffic(stage.plan, add_hubs(part.graph), stage.plan.mesh.coordinate(rank - stage.ranks[0]))
    for lane in lanes_of(plan, graph):
        times = plan.microbatches if lane.way in ("forward", "backward") else 1
        direction = "forward" if lane.way == "forward" else "backward"
        for one in lane.messages():
            if rank in (one.sender, one.receiver) and one.sender != one.receiver:
                kind = "send" if rank == one.sender else "receive"
                nbytes = one.nbytes(lane.tensor.itemsize, lane.codec)
                found += [PlannedCollective(direction, kind, plan.mesh.names[0], nbytes, str(lane))] * times
    return tuple(found)
