"""Runs a plan with stages on one rank: its stages' programs, in the order of the rank's list of actions.

    step        the list of `schedule.stage_actions`; then gradients of parameters that several stages have are added
                up, and the loss goes to all ranks
    evaluation  the list of the forwards alone

A stage is a graph of its own (`core.stages`), so a `ProgramRunner` runs it. Forward takes what other stages sent as
arguments, and returns what this stage sends. Backward starts from the gradients that come back for these, and leaves
the gradients of what was received in their leaves.

What is sent goes behind its action, and receives are posted an action ahead where tags tell messages apart. A tensor
that was sent is let go where the schedule says that it has arrived.

With several pipes a rank has a stage of each, none of them twice. It runs the microbatches of the pipe through it. So
what a rank does with a stage follows from the lanes that begin or end on this rank.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.capture.returned import LOSS
from autoddl.capture.sample import Sample
from autoddl.capture.tried_rules import planned_by
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import RECEIVE
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Action, Schedule, begun_stages
from autoddl.core.plan import Plan
from autoddl.core.stages import cut_graph, readers_of
from autoddl.runtime.batches import Batches, LocalBatch
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.compiled import Compile
from autoddl.runtime.gradients_together import SharedGradients
from autoddl.runtime.guards import OwnGradients
from autoddl.runtime.outputs import computed_outputs, joined
from autoddl.runtime.parallel_model import ParallelModel, Planner, batches_of, mean
from autoddl.runtime.program_runner import Asked, ProgramRunner, place_buffers
from autoddl.runtime.stage_setup import Stages, captured_stage, connected, names_of, stage_rows, take_out
from autoddl.runtime.stage_transport import Arrival, StageTransport
from autoddl.runtime.world import check_agreement
from autoddl.schedule.stage_actions import StageAction, StageActions, arrived, forwards, posted_early, stage_actions
from autoddl.schedule.stage_lanes import Lane, copies_of, lanes_of, links_of, stage_traffic
from autoddl.schedule.traffic import PlannedCollective

__all__ = ["PipelineModel"]


_Pieces = Mapping[str, Tensor]
_Sent = Sequence[tuple[Lane, int]]
_Forward = Callable[["_Stage", int, _Pieces, _Sent], Tensor | None]


class _List(NamedTuple):
    """The actions of this rank, in order; by action of the schedule, what has been sent and has arrived before it."""

    actions: tuple[StageAction, ...]
    done: Mapping[Action, _Sent]


class _Stage:
    """A stage of this rank: its runner, the lanes of what it receives by tensor, those of what it sends in order.

    `received` are the leaves of the microbatches in flight, by microbatch and lane. One that `waits` does so for the
    reductions of its last backward before anything else runs; others do at the end of the step.
    """

    def __init__(self, runner: ProgramRunner, takes: dict[int, Lane], gives: list[tuple[Lane, Lane | None]],
                 back: dict[Lane, Lane], waits: bool) -> None:
        self.runner, self.takes, self.gives, self.back, self.waits = runner, takes, gives, back, waits
        self.forwards = self.backwards = self.weights = 0
        self.received: dict[int, dict[Lane, Tensor]] = {}

    def has_ended(self, parts: int) -> bool:
        """Whether the last backward of so many microbatches has run."""
        return (self.weights if self.runner.splits else self.backwards) == parts


class PipelineModel(ParallelModel):
    """One rank of a model whose plan has stages."""

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, stages: Stages, device: torch.device,
                 seed: int, compile_stretch: Compile | None = None, planner: Planner | None = None,
                 shared: "PipelineModel | None" = None, program: str = "") -> None:
        assert plan.pipeline is not None
        self._joined, self._first, self._compile, self._name = stages, seed, compile_stretch, program
        recorder, cuts, graph = Recorder() if shared is None else shared.recorder, plan.pipeline.cuts, captured.graph
        parts = cut_graph(graph, cuts)
        own = tuple(stages.groups)
        self._elsewhere = names_of(parts, range(len(parts))) - names_of(parts, own)
        self._lanes = lanes_of(plan, graph)
        place_buffers(device, module, graph)
        schedule = Schedule.parse(plan.pipeline.schedule)
        self._apart = {(one.stage, one.microbatch) for one in schedule if one.kind == "W"}
        runners = dict[int, ProgramRunner]()
        here = {} if shared is None else {n: one for runner in shared.runners() for n, one in runner.stored.items()}
        for s, groups in stages.groups.items():
            runners[s] = ProgramRunner(module, plan.pipeline.stages[s].plan, captured_stage(captured, parts[s]),
                                       add_hubs(parts[s].graph), groups, device, recorder, compile_stretch,
                                       any(stage == s for stage, _ in self._apart), here, plan.microbatches)
            here = runners[s].stored | here
        take_out(module, self._elsewhere)
        self._transport = StageTransport(stages.world, stages.rank, self._lanes, plan.microbatches, plan.mesh.names[0],
                                         device, recorder, stages.timeout)
        self._shared = SharedGradients([one for one in self._lanes if one.way == "shared"], runners, self._transport)
        self._stages = {s: self._stage(s, runner) for s, runner in runners.items()}
        self._begun = [s for s in begun_stages(schedule) if s in runners]
        self._each = plan.microbatches // schedule.pipes
        self._batches = {s: batches_of(module, captured, runner, device, program) for s, runner in runners.items()}
        links, row = links_of(self._lanes), plan.pipeline.part_of(stages.rank)
        self._steps, self._forwards = (self._listed(stage_actions(one, links), row)
                                       for one in (schedule, forwards(schedule)))
        super().__init__(module, plan, graph, next(iter(stages.groups.values())), recorder, device, captured.returned,
                         planner)
        self._gradients: OwnGradients = shared._gradients if shared else OwnGradients(self, module.parameters())
        self._returned = dict(zip(captured.returned.names, captured.outputs, strict=True))
        self._parts = [sorted({one.microbatch for one in schedule if one.pipe == pipe})
                       for pipe in range(schedule.pipes)]
        self._homes: dict[str, int] = {}
        for s, part in enumerate(parts):
            outputs = captured_stage(captured, part).outputs[1:]
            for name in computed_outputs(part.graph, captured.returned.names[1:], outputs):
                self._homes.setdefault(name, s)
        theirs = [fqn for fqn, where in readers_of(parts).items() if schedule.placement[0][where[0]] != row]
        self.copies = frozenset(name for part in parts for one in part.graph.tensors if one.fqn in theirs
                                for name in (one.fqn, *one.aliases))

    def _stage(self, s: int, runner: ProgramRunner) -> _Stage:
        """The lanes of a stage: by received tensor, and in the order of what it sends with those of the gradients."""
        rank, takes = self._joined.rank, dict[int, Lane]()
        here = {(one.way, one.name, one.source.stage): one for one in self._lanes
                if one.target.stage == s and one.target.has(rank)}
        there = {(one.way, one.name, one.target.stage): one for one in self._lanes
                 if one.source.stage == s and one.source.has(rank)}
        for op in runner.graph.ops:
            if op.target == RECEIVE:
                t, source = op.outputs[0], op.arg("stage")
                takes[t] = here["forward", runner.graph.tensors[t].name, int(source)]  # type: ignore[arg-type]
        back = {lane: there["backward", lane.name, lane.source.stage] for lane in takes.values()
                if ("backward", lane.name, lane.source.stage) in there}
        gives = [(one, here.get(("backward", one.name, one.target.stage))) for one in there.values()
                 if one.way == "forward"]
        return _Stage(runner, takes, gives, back, self._shared.reads(s))

    def _listed(self, made: StageActions, row: int) -> _List:
        """The list of this rank, and by action what has been sent and has arrived once the action can run."""
        done: dict[Action, list[tuple[Lane, int]]] = {}
        for receive, sends in arrived(made, row).items():
            done.setdefault(receive.action, []).extend(
                (lane, one.action.microbatch) for one in sends for lane in self._between(one))
        return _List(posted_early(made.lists[row]) if self._transport.is_tagged else made.lists[row], done)

    def _between(self, one: StageAction) -> list[Lane]:
        """The lanes of what an action sends or receives."""
        way, s = "forward" if one.action.kind == "F" else "backward", one.action.stage
        ends = (s, one.other) if one.way == ">" else (one.other, s)
        return [lane for lane in self._lanes if lane.way == way and (lane.source.stage, lane.target.stage) == ends
                and (lane.source if one.way == ">" else lane.target).has(self._joined.rank)]

    def _train(self, batch: LocalBatch) -> Tensor:
        self._shared.begin()
        losses = self._run(self._steps, batch, self._forward)
        for stage in (one for one in self._stages.values() if not one.waits):
            stage.runner.ended()
        self._shared.finish()
        self.gradients_are_done()
        return self._told(losses)

    def gradients_are_done(self) -> None:
        self._gradients.note()

    def _evaluate(self, batch: LocalBatch, asked: Asked) -> dict[str, Tensor]:
        if not asked.whole:
            raise InputError("a plan with stages gives outputs whole: leave out whole=False")
        found: dict[str, dict[int, Tensor]] = {name: {} for name in asked.names}
        losses = self._run(self._forwards, batch, partial(self._forward_alone, asked, found))
        loss = self._told(losses)
        return {LOSS: loss, **{name: self._shown(name, parts) for name, parts in found.items()}}

    def _shown(self, name: str, parts: Mapping[int, Tensor]) -> Tensor:
        """An output on every rank: the first rank of its stage tells the others, in every pipe."""
        assert self.plan.pipeline is not None
        t, told = self.graph.tensors[self._returned[name]], dict[int, Tensor]()
        for copy in (one for one in copies_of(self.plan.pipeline) if one.stage == self._homes[name]):
            numbers = self._parts[copy.pipe]
            own = [parts[part] for part in numbers if part in parts]
            value = torch.stack(own) if own else torch.empty(
                (len(numbers), *t.shape), dtype=getattr(torch, t.dtype), device=self.device)
            if self._joined.world is not None:
                try:
                    torch.distributed.broadcast(value, copy.first, group=self._joined.world)
                except RuntimeError as error:
                    raise peer_error(f"telling the output {name}", error) from error
            told |= dict(zip(numbers, value, strict=True))
        return joined([told[part] for part in sorted(told)])

    def computed(self) -> Collection[str]:
        return self._homes.keys()

    def _other(self, planner: Planner, batch: Sample, training: bool, name: str) -> "PipelineModel":
        captured, plan = planner(batch, training)
        check_agreement({f"plan for {name}": (plan.fingerprint(), *stage_rows(plan, captured.graph))})
        stages = connected(plan, captured.graph, self._joined.timeout)
        return PipelineModel(self.module, plan, captured, stages, self.device, self._first, self._compile, shared=self,
                             program=name)

    def _run(self, every: _List, batch: LocalBatch, forward: _Forward) -> dict[int, Tensor]:
        """Runs a list; returns the losses by microbatch, where this rank has them."""
        pieces, losses = self._pieces(batch), dict[int, Tensor]()
        self._clear()
        for s in self._begun:
            self._stages[s].runner.store.gathers.ahead()
        for one in every.actions:
            (s, kind, part, _), loss = one.action, None
            if one.way == ">":
                for lane in self._between(one):
                    self._transport.send(lane, part, self._outgoing.pop((lane, part)))
            elif one.way == "<":
                for lane in self._between(one):
                    self._arrivals[lane, part] = self._transport.receive(lane, part)
            elif kind == "F":
                loss = forward(self._stages[s], part, pieces[s][part], every.done.get(one.action, ()))
            elif kind == "W":
                self._backward_of_weights(self._stages[s], part)
            else:
                loss = self._backward(self._stages[s], part, every.done.get(one.action, ()))
                if self._stages[s].runner.splits and (s, part) not in self._apart:
                    self._backward_of_weights(self._stages[s], part)
            if self._stages[s].has_ended(self._each) and not one.way:
                self._shared.ended(s)
            if loss is not None:
                losses[part] = loss
        return losses

    def _clear(self) -> None:
        """Called before a step: forgets everything that a failed step left."""
        self._arrivals: dict[tuple[Lane, int], Arrival] = {}
        self._outgoing: dict[tuple[Lane, int], Tensor] = {}
        self._transport.clear()
        for stage in self._stages.values():
            stage.runner.clear()
            stage.forwards = stage.backwards = stage.weights = 0
            stage.received.clear()

    def _forward(self, stage: _Stage, part: int, pieces: _Pieces, done: _Sent) -> None:
        """Runs the forward of a microbatch through a stage, and leaves what it sends."""
        stage.forwards += 1
        leaves = {lane: self._arrived(lane, part).requires_grad_(lane in stage.back) for lane in stage.takes.values()}
        self._transport.release(done)
        stage.received[part] = leaves
        sent = stage.runner.forward(part, pieces, {t: leaves[lane] for t, lane in stage.takes.items()},
                                    self._first + self.steps * self.plan.microbatches + part,
                                    stage.forwards == self._each)
        self._leave(part, [lane for lane, _ in stage.gives], sent)

    def _forward_alone(self, asked: Asked, outputs: dict[str, dict[int, Tensor]], stage: _Stage, part: int,
                       pieces: _Pieces, done: _Sent) -> Tensor | None:
        """Runs the forward of evaluation, and adds its outputs; returns the loss if the stage has one."""
        stage.forwards += 1
        received = {t: self._arrived(lane, part) for t, lane in stage.takes.items()}
        self._transport.release(done)
        here = Asked(tuple(name for name in asked.names if self._stages.get(self._homes[name]) is stage))
        found = stage.runner.evaluate(pieces, received, stage.forwards == self._each, here)
        for name, value in found.outputs.items():
            outputs[name][part] = value
        self._leave(part, [lane for lane, _ in stage.gives], found.sent)
        return found.loss

    def _backward(self, stage: _Stage, part: int, done: _Sent) -> Tensor | None:
        """Runs the backward of a microbatch, and leaves the gradients of what was received; returns the loss."""
        stage.backwards += 1
        gradients = [None if back is None else self._arrived(back, part) for _, back in stage.gives]
        self._transport.release(done)
        loss = stage.runner.backward(part, gradients, stage.backwards == self._each, stage.waits)
        leaves = {stage.back[lane]: x for lane, x in stage.received.pop(part).items() if lane in stage.back}
        self._leave(part, list(leaves), [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()])
        return loss

    def _backward_of_weights(self, stage: _Stage, part: int) -> None:
        """Computes the gradients of the weights of a stage for a microbatch, whose backward ran before."""
        stage.weights += 1
        stage.runner.backward_of_weights(part, stage.weights == self._each, stage.waits)

    def _leave(self, part: int, lanes: Sequence[Lane], made: Sequence[Tensor]) -> None:
        """Keeps what an action made until it is sent; what stays on this rank goes at once."""
        for lane, x in zip(lanes, made, strict=True):
            if lane.target.has(self._joined.rank):
                self._transport.send(lane, part, x)
            else:
                self._outgoing[lane, part] = x

    def _arrived(self, lane: Lane, part: int) -> Tensor:
        """This rank's piece of a lane's tensor, of microbatch `part`."""
        found = self._arrivals.pop((lane, part), None)
        return (self._transport.receive(lane, part) if found is None else found).wait()

    def _told(self, losses: dict[int, Tensor]) -> Tensor:
        """The mean of the losses on every rank: every pipe's last stage tells the others. All sends are complete then.
        """
        own = mean([losses[part] for part in sorted(losses)]) if losses else None
        pipes, rank = dict[int, Tensor](), self._joined.rank
        if own is not None:
            pipes[next(pipe for pipe, parts in enumerate(self._parts) if parts[0] in losses)] = own
        for lane in (one for one in self._lanes if one.way == "loss"):
            if lane.source.has(rank):
                self._transport.send(lane, 0, pipes[lane.pipe])
            elif lane.target.has(rank):
                pipes[lane.pipe] = self._transport.receive(lane, 0).wait()
        self._transport.release()
        return mean([pipes[pipe] for pipe in sorted(pipes)])

    def _pieces(self, batch: LocalBatch) -> dict[int, Sequence[Any]]:
        """By stage, the pieces of every microbatch."""
        parts = self.plan.microbatches
        if len(batch.parts) != parts * len(self._stages):
            raise MismatchError(f"the local batch has {len(batch.parts)} parts, this rank runs {len(self._stages)} "
                                f"stages on {parts} microbatches: make it by local_batch of this model")
        return {s: batch.parts[k * parts:(k + 1) * parts] for k, s in enumerate(self._stages)}

    def _cut(self, batch: object) -> LocalBatch:
        if isinstance(batch, LocalBatch):
            return batch
        return LocalBatch(tuple(part for one in self._batches.values() for part in one.local(batch).parts), self._name)

    def batches(self) -> Sequence[Batches]:
        return [*self._batches.values()]

    def runners(self) -> Sequence[ProgramRunner]:
        return [stage.runner for stage in self._stages.values()]

    def planned(self) -> tuple[PlannedCollective, ...]:
        return stage_traffic(self.plan, self.graph, self._joined.rank)

    def like(self, module: nn.Module, captured: Captured) -> "PipelineModel":
        return PipelineModel(module, self.plan.without_codecs(), planned_by(captured, self.plan), self._joined,
                             self.device, 0)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Loads a `state_dict` of this rank, or whole tensors of any stages; those of others are left out."""
        mine = {name: value for name, value in state.items() if name not in self._elsewhere} \
            if isinstance(state, Mapping) else state
        super().load_state_dict(mine, strict)
