"""Runs a plan with stages on one rank: its stages' programs, in the order of the rank's list of actions.

    step        the list of `schedule.stage_actions`; then gradients of parameters that several stages have are added
                up, and the loss goes to all ranks
    evaluation  the list of the forwards alone

A stage is a graph of its own (`core.stages`), so a `ProgramRunner` runs it. Forward takes what other stages sent as
arguments, and returns what this stage sends. Backward starts from the gradients that come back for these, and leaves
the gradients of what was received in their leaves.

The module keeps the parameters of this rank's stages. Those of other stages are taken out of it: they have no memory,
and `parameters`, optimizers and states do not see them. A buffer that another stage updates is taken out too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import RECEIVE, Graph, Kind
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Schedule
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, cut_graph, shared_parameters
from autoddl.runtime.batches import LocalBatch
from autoddl.runtime.lowering import communication_axes
from autoddl.runtime.parallel_model import ParallelModel, batches_of, mean
from autoddl.runtime.process_groups import Groups, StageRanks, connect_stages
from autoddl.runtime.program_runner import ProgramRunner, place_buffers
from autoddl.runtime.recorder import Recorder
from autoddl.runtime.shared_gradients import SharedGradients
from autoddl.runtime.stage_transport import Arrival, StageTransport
from autoddl.schedule.stage_actions import StageAction, forwards, posted_early, stage_actions
from autoddl.schedule.stage_lanes import Lane, lanes_of, links_of, stage_traffic
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = ["PipelineModel", "Stages", "connected", "stage_rows"]


@dataclass(frozen=True, slots=True)
class Stages:
    """What joins the ranks of a plan with stages: this rank, the group of all, and the groups of its own stages."""

    rank: int
    world: dist.ProcessGroup | None
    groups: dict[int, Groups]
    timeout: timedelta


def connected(plan: Plan, graph: Graph, timeout: timedelta) -> Stages:
    """Makes the groups of all stages; every rank calls it. `graph` is the captured one."""
    assert plan.pipeline is not None
    ready = dist.is_available() and dist.is_initialized()
    rank, wanted = dist.get_rank() if ready else 0, []
    for stage, part in zip(plan.pipeline.stages, cut_graph(graph, plan.pipeline.cuts), strict=True):
        axes = communication_axes(stage.plan, add_hubs(part.graph))
        wanted.append(StageRanks(stage.plan.mesh, stage.ranks[0], tuple(sorted(axes))))
    world, made = connect_stages(wanted, timeout) if ready else (None, wanted)
    own = {s: Groups(one.mesh, one.subsets, timeout, plan.pipeline.stages[s].plan.source.get("cluster"), one)
           for s, one in enumerate(made) if rank in range(*plan.pipeline.stages[s].ranks)}
    return Stages(rank, world, own, timeout)


def stage_rows(plan: Plan, graph: Graph) -> Iterator[object]:
    """What all ranks must agree on before the first step: actions, lanes, and each stage's collectives."""
    assert plan.pipeline is not None
    lanes, stages = lanes_of(plan, graph), plan.pipeline.stages
    for lane in lanes:
        if lane.way == "shared" and stages[lane.source.stage].ranks == stages[lane.target.stage].ranks:
            raise InputError(f"stages {lane.source.stage} and {lane.target.stage} share the parameter {lane.name} and "
                             "run on the same ranks, which cannot be run yet: cut elsewhere, or take gpipe or 1f1b")
    yield stage_actions(Schedule.parse(plan.pipeline.schedule), links_of(lanes))
    yield from lanes
    for stage, part in zip(stages, cut_graph(graph, plan.pipeline.cuts), strict=True):
        yield from traffic(stage.plan, add_hubs(part.graph))


def captured_stage(captured: Captured, stage: StageGraph) -> Captured:
    """The captured model as that of one stage: the same program, whose tensors have the stage's numbers."""
    place = {t: k for k, t in enumerate(stage.origin) if t >= 0}
    return replace(captured, graph=stage.graph,
                   tensors=MappingProxyType({key: place[t] for key, t in captured.tensors.items() if t in place}),
                   constants=MappingProxyType({place[t]: x for t, x in captured.constants.items() if t in place}))


class _Stage:
    """A stage of this rank: its runner, the lanes of what it receives by tensor, those of what it sends in order.

    `received` are the leaves of the microbatches in flight, by microbatch and lane.
    """

    def __init__(self, runner: ProgramRunner, takes: dict[int, Lane], gives: list[tuple[Lane, Lane | None]],
                 back: dict[Lane, Lane]) -> None:
        self.runner, self.takes, self.gives, self.back = runner, takes, gives, back
        self.forwards = self.backwards = 0
        self.received: dict[int, dict[Lane, Tensor]] = {}


class PipelineModel(ParallelModel):
    """One rank of a model whose plan has stages."""

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, stages: Stages, device: torch.device,
                 seed: int) -> None:
        assert plan.pipeline is not None
        self._joined, self._device, self._first, self._captured = stages, device, seed, captured
        recorder, cuts, graph = Recorder(), plan.pipeline.cuts, captured.graph
        parts = cut_graph(graph, cuts)
        own = tuple(stages.groups)
        self._elsewhere = _names(parts, range(len(parts))) - _names(parts, own)
        self._lanes = lanes_of(plan, graph)
        place_buffers(device, module, graph)
        runners = {s: ProgramRunner(module, plan.pipeline.stages[s].plan, captured_stage(captured, parts[s]),
                                    add_hubs(parts[s].graph), groups, device, recorder)
                   for s, groups in stages.groups.items()}
        _take_out(module, self._elsewhere)
        self._transport = StageTransport(stages.world, stages.rank, self._lanes, plan.microbatches, plan.mesh.names[0],
                                         device, recorder, stages.timeout)
        self._stages = {s: self._stage(s, runner) for s, runner in runners.items()}
        self._batches = {s: batches_of(module, captured, runner, device) for s, runner in runners.items()}
        schedule, links = Schedule.parse(plan.pipeline.schedule), links_of(self._lanes)
        row = schedule.placement[0][next(iter(runners))]
        self.actions = stage_actions(schedule, links)
        self._steps, self._forwards = (posted_early(stage_actions(one, links).lists[row])
                                       for one in (schedule, forwards(schedule)))
        self._shared = SharedGradients([one for one in self._lanes if one.way == "shared"], runners, self._transport)
        super().__init__(module, plan, add_hubs(graph), next(iter(stages.groups.values())), recorder)
        theirs = [fqn for fqn, where in shared_parameters(parts).items() if where[0] not in runners]
        self.copies = frozenset(name for part in parts for one in part.graph.tensors if one.fqn in theirs
                                for name in (one.fqn, *one.aliases))

    def _stage(self, s: int, runner: ProgramRunner) -> _Stage:
        """The lanes of a stage: by received tensor, and in the order of what it sends with those of the gradients."""
        ways = {(one.way, one.name, one.source.stage, one.target.stage): one for one in self._lanes}
        takes = {}
        for op in runner.graph.ops:
            if op.target == RECEIVE:
                t, source = op.outputs[0], op.arg("stage")
                takes[t] = ways["forward", runner.graph.tensors[t].name, int(source), s]  # type: ignore[arg-type]
        back = {lane: ways["backward", lane.name, s, lane.source.stage] for lane in takes.values()
                if ("backward", lane.name, s, lane.source.stage) in ways}
        gives = [(one, ways.get(("backward", one.name, one.target.stage, s))) for one in self._lanes
                 if one.way == "forward" and one.source.stage == s]
        return _Stage(runner, takes, gives, back)

    def _train(self, batch: LocalBatch) -> Tensor:
        self._clear()
        self._shared.begin()
        pieces, losses = self._pieces(batch), dict[int, Tensor]()
        for one in self._steps:
            if one.way:
                self._exchange(one)
            elif one.action.kind == "F":
                self._forward(self._stages[one.action.stage], one, pieces)
            else:
                loss = self._backward(self._stages[one.action.stage], one)
                if loss is not None:
                    losses[one.action.microbatch] = loss
        self._shared.finish()
        return self._told(losses)

    def _evaluate(self, batch: LocalBatch) -> Tensor:
        self._clear()
        pieces, losses = self._pieces(batch), dict[int, Tensor]()
        for one in self._forwards:
            if one.way:
                self._exchange(one)
                continue
            (s, _, part, _), stage = one.action, self._stages[one.action.stage]
            stage.forwards += 1
            received = {t: self._arrived(lane, part) for t, lane in stage.takes.items()}
            loss, sent = stage.runner.evaluate(pieces[s][part], received, stage.forwards == self.plan.microbatches)
            self._leave(one, [(lane, x) for (lane, _), x in zip(stage.gives, sent, strict=True)])
            if loss is not None:
                losses[part] = loss
        return self._told(losses)

    def _clear(self) -> None:
        """Called before a step: forgets everything that a failed step left."""
        self._arrivals: dict[tuple[Lane, int], Arrival] = {}
        self._outgoing: dict[tuple[Lane, int], Tensor] = {}
        self._transport.clear()
        for stage in self._stages.values():
            stage.runner.clear()
            stage.forwards = stage.backwards = 0
            stage.received.clear()

    def _forward(self, stage: _Stage, one: StageAction, pieces: dict[int, Sequence[Any]]) -> None:
        """Runs the forward of a microbatch through a stage, and leaves what it sends."""
        s, _, part, _ = one.action
        parts = self.plan.microbatches
        stage.forwards += 1
        stage.received[part] = {lane: self._arrived(lane, part).requires_grad_(lane in stage.back)
                                for lane in stage.takes.values()}
        received = {t: stage.received[part][lane] for t, lane in stage.takes.items()}
        sent = stage.runner.forward(part, pieces[s][part], received, self._first + self.steps * parts + part,
                                    stage.forwards == parts)
        self._leave(one, [(lane, x) for (lane, _), x in zip(stage.gives, sent, strict=True)])

    def _backward(self, stage: _Stage, one: StageAction) -> Tensor | None:
        """Runs the backward of a microbatch, and leaves the gradients of what was received; returns the loss."""
        part = one.action.microbatch
        stage.backwards += 1
        gradients = [None if back is None else self._arrived(back, part) for _, back in stage.gives]
        loss = stage.runner.backward(part, gradients, stage.backwards == self.plan.microbatches)
        found = []
        for lane, leaf in stage.received.pop(part).items():
            if lane in stage.back:
                found.append((stage.back[lane], torch.zeros_like(leaf) if leaf.grad is None else leaf.grad))
        self._leave(one, found)
        return loss

    def _leave(self, one: StageAction, made: Sequence[tuple[Lane, Tensor]]) -> None:
        """Keeps what an action made until it is sent; what stays on this rank goes at once."""
        for lane, x in made:
            if lane.target.stage in self._stages:
                self._transport.send(lane, one.action.microbatch, x)
            else:
                self._outgoing[lane, one.action.microbatch] = x

    def _exchange(self, one: StageAction) -> None:
        """Sends what the action made for another stage, or posts the receives of what that sends."""
        s, part, way = one.action.stage, one.action.microbatch, "forward" if one.action.kind == "F" else "backward"
        for lane in self._lanes:
            ends = (lane.source.stage, lane.target.stage)
            if lane.way == way and ends == ((s, one.other) if one.way == ">" else (one.other, s)):
                if one.way == ">":
                    self._transport.send(lane, part, self._outgoing.pop((lane, part)))
                else:
                    self._arrivals[lane, part] = self._transport.receive(lane, part)

    def _arrived(self, lane: Lane, part: int) -> Tensor:
        """This rank's piece of a lane's tensor, of microbatch `part`."""
        found = self._arrivals.pop((lane, part), None)
        return (self._transport.receive(lane, part) if found is None else found).wait()

    def _told(self, losses: dict[int, Tensor]) -> Tensor:
        """The mean of the losses on every rank: the last stage tells the others. All sends are complete then."""
        loss = mean([losses[part] for part in sorted(losses)]) if losses else None
        for lane in (one for one in self._lanes if one.way == "loss"):
            if loss is not None:
                self._transport.send(lane, 0, loss)
            elif lane.target.stage in self._stages:
                loss = self._transport.receive(lane, 0).wait()
        self._transport.release()
        assert loss is not None, "the last stage tells its loss to every rank"
        return loss

    def _pieces(self, batch: LocalBatch) -> dict[int, Sequence[Any]]:
        """By stage, the pieces of every microbatch."""
        parts = self.plan.microbatches
        if len(batch.parts) != parts * len(self._stages):
            raise MismatchError(f"the local batch has {len(batch.parts)} parts, this rank runs {len(self._stages)} "
                                f"stages on {parts} microbatches: make it by local_batch of this model")
        return {s: batch.parts[k * parts:(k + 1) * parts] for k, s in enumerate(self._stages)}

    def local_batch(self, batch: object) -> LocalBatch:
        if isinstance(batch, LocalBatch):
            return batch
        return LocalBatch(tuple(part for one in self._batches.values() for part in one.local(batch).parts))

    def runners(self) -> Sequence[ProgramRunner]:
        return [stage.runner for stage in self._stages.values()]

    def planned(self) -> tuple[PlannedCollective, ...]:
        return stage_traffic(self.plan, self._captured.graph, self._joined.rank)

    def like(self, module: nn.Module, captured: Captured) -> "PipelineModel":
        return PipelineModel(module, self.plan, captured, self._joined, self._device, 0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of this rank, or whole tensors of any stages; those of others are left out."""
        super().load_state_dict({name: value for name, value in state.items() if name not in self._elsewhere})


def _names(parts: Sequence[StageGraph], stages: Sequence[int]) -> set[str]:
    """The names of the parameters of some stages, and of the buffers that they update."""
    found = set[str]()
    for graph in (parts[s].graph for s in stages):
        updated = {old for old, _ in graph.updates}
        for t, tensor in enumerate(graph.tensors):
            if tensor.kind is Kind.PARAMETER or t in updated:
                found.update((tensor.fqn, *tensor.aliases))
    return found


def _take_out(module: nn.Module, names: set[str]) -> None:
    """Takes parameters and buffers out of a module, which is left with None in their places."""
    for path, part in module.named_modules(remove_duplicate=False):
        for table in (part._parameters, part._buffers):
            for name in table:
                if f"{path}.{name}".removeprefix(".") in names:
                    table[name] = None
