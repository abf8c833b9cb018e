"""Lists what the stages of a plan send each other in a step, and predicts the messages of a rank.

A *lane* is one tensor on its way from a stage to another, in the layouts that both have it in:

    forward     a tensor that a later stage reads                   in every microbatch
    backward    the gradient of one, the other way                  in every microbatch
    shared      the gradient of a parameter that both stages have   once a step, between other ranks
    loss        the loss, from the last stage to any other          once a step

A stage has a copy in every pipe of the schedule. A tensor then has a lane in every pipe. All parameters are shared with
the copies of their stage, and every pipe tells its part of the loss.

A lane is messages between the ranks of both stages (`stage_messages`). Ranks are those of the whole plan. A rank that
belongs to both stages keeps its own part. Each message of forward or backward may be coded (`core.codecs`). Stages
on the same ranks store a parameter that they share once, so the first of them has the lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple

from autoddl.core.codecs import CODECS
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Layout, Mesh, extents
from autoddl.core.pipeline import Schedule
from autoddl.core.plan import Pipeline, Plan, Stage
from autoddl.core.stages import StageGraph, cut_graph, readers_of, shared_here, transfers_of
from autoddl.schedule.stage_actions import Link
from autoddl.schedule.stage_messages import Box, Message, messages
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = ["Copy", "End", "Lane", "StoredApart", "copies_of", "lanes_of", "links_of", "stage_traffic", "stored_apart"]

Way = Literal["forward", "backward", "shared", "loss"]


@dataclass(frozen=True, slots=True)
class End:
    """One end of a lane: a stage, the layout of the tensor there, the stage's mesh and its first rank."""

    stage: int
    layout: Layout
    mesh: Mesh
    first: int

    def has(self, rank: int) -> bool:
        """Whether `rank` is one of these."""
        return self.first <= rank < self.first + self.mesh.size

    def local(self, shape: tuple[int, ...], rank: int) -> Box:
        """(offset, size) along every dim of the piece of `rank`, which belongs to the stage."""
        return extents(shape, self.layout, self.mesh, self.mesh.coordinate(rank - self.first))


@dataclass(frozen=True, slots=True)
class Lane:
    """A tensor on its way from stage to stage.

        way       what is sent, see above
        name      of the tensor in the graph, or of the parameter
        tensor    what is sent of a microbatch, or of the step
        source    the end that sends
        target    the end that receives
        times     how often it is sent in a step
        pipe      of the schedule; 0 of shared gradients
        codec     as what messages to other ranks are sent; empty: as they are
    """

    way: Way
    name: str
    tensor: Tensor
    source: End
    target: End
    times: int = 1
    pipe: int = 0
    codec: str = ""

    def messages(self) -> list[Message]:
        """All of its messages, between ranks of the plan."""
        found = messages(self.tensor.shape, self.source.layout, self.source.mesh, self.target.layout, self.target.mesh)
        return [Message(self.source.first + one.sender, self.target.first + one.receiver, one.box) for one in found]

    def __str__(self) -> str:
        return f"{self.way} {self.name} {self.source.stage} -> {self.target.stage}"


class Copy(NamedTuple):
    """A stage in a pipe of the schedule, on the ranks from `first` on."""

    stage: int
    pipe: int
    first: int


def copies_of(pipeline: Pipeline) -> list[Copy]:
    """The copies of all stages, pipe after pipe."""
    placement, ranks = Schedule.parse(pipeline.schedule).placement, pipeline.ranks
    return [Copy(s, pipe, ranks[where[s]][0]) for pipe, where in enumerate(placement)
            for s in range(len(pipeline.stages))]


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
    pipes = [list(copies) for _, copies in groupby(copies_of(plan.pipeline), key=lambda copy: copy.pipe)]
    loss = graph.tensors[graph.outputs[0]]
    return (*_transfers(plan, graph, pipes), *_shared(stages, graphs, pipes),
            *(lane for copies in pipes for lane in _loss(stages, loss, copies)))


def _transfers(plan: Plan, graph: Graph, pipes: Sequence[Sequence[Copy]]) -> list[Lane]:
    assert plan.pipeline is not None
    stages, tensors = plan.pipeline.stages, {tensor.name: tensor for tensor in graph.tensors}
    decisions, times = [{one.name: one for one in stage.plan.decisions} for stage in stages], \
        plan.microbatches // len(pipes)
    found = []
    for pipe, copies in enumerate(pipes):
        for one in transfers_of(graph, plan.pipeline.cuts):
            source = _end(stages, copies[one.source], decisions[one.source][one.sender].inputs[0])
            target = _end(stages, copies[one.target], decisions[one.target][one.receiver].outputs[0])
            found.append(Lane("forward", one.tensor, tensors[one.tensor], source, target, times, pipe))
            if one.gradient:
                found.append(Lane("backward", one.tensor, tensors[one.tensor], target, source, times, pipe))
    codecs = plan.pipeline.codecs
    for lane, codec in codecs.items():
        if lane not in map(str, found) or codec not in CODECS or CODECS[codec].lossless:
            raise InputError(f"the plan sends {lane!r} as {codec!r}, and has no such lane or codec; plan again instead "
                             "of editing the file")
    return [replace(lane, codec=codecs.get(str(lane), "")) for lane in found]


def _shared(stages: Sequence[Stage], graphs: Sequence[StageGraph], pipes: Sequence[Sequence[Copy]]) -> list[Lane]:
    stored = [{one.fqn: one.layout for one in stage.plan.stored} for stage in stages]
    found = []
    for fqn, where in readers_of(graphs).items():
        tensor = next(one for one in graphs[where[0]].graph.tensors if one.kind is Kind.PARAMETER and one.fqn == fqn)
        every = [copies[s] for copies in pipes for s in where]
        firsts = {copy.first: copy for copy in sorted(every, reverse=True)}
        ends = [_end(stages, copy, stored[copy.stage].get(fqn, Layout.broadcast(stages[copy.stage].plan.mesh)))
                for copy in every if firsts[copy.first] == copy]
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


def _loss(stages: Sequence[Stage], loss: Tensor, copies: Sequence[Copy]) -> list[Lane]:
    """The lanes of the loss of one pipe."""
    ends = [_end(stages, copy, Layout.broadcast(stages[copy.stage].plan.mesh)) for copy in copies]
    firsts = {ends[-1].first}
    found = []
    for end in ends[:-1]:
        if end.first not in firsts:
            firsts.add(end.first)
            found.append(Lane("loss", loss.name, loss, ends[-1], end, pipe=copies[0].pipe))
    return found


def _end(stages: Sequence[Stage], copy: Copy, layout: Layout) -> End:
    return End(copy.stage, layout, stages[copy.stage].plan.mesh, copy.first)


def stage_traffic(plan: Plan, graph: Graph, rank: int) -> tuple[PlannedCollective, ...]:
    """The collectives of one step on a rank of a plan with stages, and its messages, of kind `send` or `receive`.

    `graph` is the captured one, of one microbatch. A message goes over the axis along which the stages lie.
    """
    assert plan.pipeline is not None
    found, parts = list[PlannedCollective](), cut_graph(graph, plan.pipeline.cuts)
    for copy in sorted(copies_of(plan.pipeline)):
        own = plan.pipeline.stages[copy.stage].plan
        if 0 <= rank - copy.first < own.mesh.size:
            found += traffic(own, add_hubs(parts[copy.stage].graph), own.mesh.coordinate(rank - copy.first))
    for lane in lanes_of(plan, graph):
        direction = "forward" if lane.way == "forward" else "backward"
        for one in lane.messages():
            if rank in (one.sender, one.receiver) and one.sender != one.receiver:
                kind = "send" if rank == one.sender else "receive"
                nbytes = one.nbytes(lane.tensor.itemsize, lane.codec)
                found += [PlannedCollective(direction, kind, plan.mesh.names[0], nbytes, str(lane))] * lane.times
    return tuple(found)
