"""Runs the program of one graph on this rank, a forward or a backward at a time: a whole model, or a stage of one.

Each microbatch between its forward and its backward has a *slot*. That is a lowered program with its own seed of
dropout, and its own notes of what autograd saved. So backward computes again with the random numbers of its own
forward. Parameters, their gathers and their gradients are those of one store for all slots.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.plan import Plan
from autoddl.core.stages import SEND
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.collectives.redistribute import run_moves, start_moves
from autoddl.runtime.compiled import Compile
from autoddl.runtime.lowering import LoweredProgram, lower_plan
from autoddl.runtime.outputs import OutputRoute, computed_outputs, output_route
from autoddl.runtime.parameter_store import Store
from autoddl.runtime.parameters import StoredParameter, shard_parameters
from autoddl.runtime.recompute import SavedTensors
from autoddl.runtime.weight_gradients import WaitingGradients

__all__ = ["Asked", "Evaluated", "ProgramRunner", "place_buffers"]


class Asked(NamedTuple):
    """Other outputs that are asked for, by name, and whether whole, or split as a DTensor."""

    names: tuple[str, ...] = ()
    whole: bool = True


class Evaluated(NamedTuple):
    """The loss of a microbatch, where the program has one, the other outputs by name, and what its stage sends."""

    loss: Tensor | None
    outputs: dict[str, Tensor]
    sent: list[Tensor]


class _Evaluation(NamedTuple):
    """The program of evaluation for some outputs, and the ways of these."""

    lowered: LoweredProgram
    routes: dict[str, OutputRoute]


def place_buffers(device: torch.device, module: nn.Module, graph: Graph) -> None:
    """Moves the buffers to the device, in the dtypes of the graph; one that several modules share stays shared."""
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    dtypes = {id(module.get_buffer(t.fqn)): getattr(torch, t.dtype) for t in graph.tensors if t.kind is Kind.BUFFER}
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                new = buffer.to(device, dtypes.get(id(buffer), buffer.dtype))
                part._buffers[name] = moved.setdefault(id(buffer), (buffer, new))[1]


class _Slot:
    """A microbatch in flight: its program, what autograd saves of it, its seed, its results and what ends them.

    `waiting` are the gradients of its weights, where these are computed apart.
    """

    def __init__(self, lowered: LoweredProgram, saved: SavedTensors, seed: Tensor, waiting: WaitingGradients | None
                 ) -> None:
        self.lowered, self.saved, self.seed, self.waiting = lowered, saved, seed, waiting
        self.results: Sequence[Tensor] = ()
        self.ends: list[Any] = []


class ProgramRunner:
    """The program of `graph`, planned by `plan`, on this rank of `groups`.

        module       the user's module, whose parameters are replaced by pieces
        captured     the captured program; its numbers of tensors are those of the graph
        stored       this rank's pieces of the parameters
        store        brings them to the program, and gradients back
        free         slots without a microbatch
        outputs      the outputs besides the loss that it can return, by name
        evaluations  the programs of evaluation so far, by the outputs that they return
        splits       whether gradients of weights are computed apart (`backward_of_weights`)
        here         parameters that other programs of this rank store already
        parts        microbatches of a step, of which other ranks may run some (`core.pipeline`); those of the plan
        compile_stretch    compiles what is computed between two messages, if anything does

    Where several microbatches are in flight, buffers get their new values at the end of a forward, else of a backward.
    """

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, graph: Graph, groups: Groups,
                 device: torch.device, recorder: Recorder, compile_stretch: Compile | None = None,
                 splits: bool = False, here: Mapping[str, StoredParameter] = MappingProxyType({}), parts: int = 0
                 ) -> None:
        if splits and any(s.regather for s in plan.stored):
            raise InputError("a schedule that splits backward gathers no weight again: plan with more microbatches, or "
                             "take 1f1b")
        self.splits, self._compile = splits, compile_stretch
        self.module, self.plan, self.graph, self.groups, self.recorder = module, plan, graph, groups, recorder
        self._captured, self._device, self.parts = captured, device, parts or plan.microbatches
        self._constants = {t: value.to(device) for t, value in captured.constants.items()}
        self._updated = {old for old, _ in graph.updates}
        self._in_flight = plan.in_flight + plan.waiting > 1
        self._token = any(op.target == SEND and graph.outputs[0] in op.outputs for op in graph.ops)
        self.stored = shard_parameters(module, captured.graph, plan, groups, device, here)
        self.outputs = computed_outputs(graph, captured.returned.names[1:], captured.outputs[1:])
        self.store = Store(plan, graph, self.stored, groups, recorder)
        self.free, self._flying = [self._slot()], dict[int, _Slot]()
        self.evaluations: dict[tuple[str, ...], _Evaluation] = {}

    def _slot(self) -> _Slot:
        saved, seed = SavedTensors(self.store.gathers, self.recorder), torch.tensor(0)
        waiting = WaitingGradients() if self.splits else None
        return _Slot(self._lower(saved, seed, waiting), saved, seed, waiting)

    def _lower(self, saved: SavedTensors | None, seed: Tensor | None, waiting: WaitingGradients | None,
               others: tuple[int, ...] = ()) -> LoweredProgram:
        return lower_plan(self._captured, self.graph, self.plan, self.groups, self.store.parameters, self.recorder,
                          self._device, seed, saved, waiting, self._compile, others)

    def arguments(self, lowered: LoweredProgram, pieces: Mapping[str, Tensor], received: Mapping[int, Tensor]
                  ) -> list[Tensor]:
        """The arguments of the program, in order: pieces of a microbatch, leaves, buffers, constants, received."""
        found = []
        for t in lowered.reads:
            tensor = self.graph.tensors[t]
            if tensor.kind is Kind.INPUT:
                found.append(pieces[tensor.fqn])
            elif tensor.kind is Kind.PARAMETER:
                found.append(self.stored[tensor.fqn].leaf)
            elif tensor.kind is Kind.BUFFER:
                buffer = self.module.get_buffer(tensor.fqn)
                found.append(buffer.clone() if self._in_flight and t in self._updated else buffer)
            elif tensor.kind is Kind.RESULT:
                found.append(received[t])
            else:
                found.append(self._constants[t])
        return found

    def clear(self) -> None:
        """Called before a step: forgets everything that a failed step left."""
        self.store.clear()
        self.free += self._flying.values()
        self._flying.clear()

    def forward(self, part: int, pieces: Mapping[str, Tensor], received: Mapping[int, Tensor], seed: int, last: bool
                ) -> list[Tensor]:
        """Runs forward of microbatch `part`, the `last` of the step or not; returns what the stage sends, in order."""
        slot = self.free.pop() if self.free else self._slot()
        self._flying[part] = slot
        self.store.begin_forward(last)
        slot.saved.clear()
        if slot.waiting is not None:
            slot.waiting.clear()
        slot.seed.fill_(seed)
        self._enter("forward")
        with slot.saved.notes():
            slot.results = slot.lowered.program.forward(*self.arguments(slot.lowered, pieces, received))
        slot.ends = [start_moves(route.forward, x)
                     for route, x in zip(slot.lowered.ends, slot.results, strict=False)]
        if self._in_flight:
            self._update(slot)
        return [x.detach() for x in slot.results[len(slot.lowered.ends):]]

    def backward(self, part: int, gradients: Sequence[Tensor | None], last: bool, waits: bool = True
                 ) -> Tensor | None:
        """Runs backward of microbatch `part`, the `last` of the step or not; returns its loss if the stage has one.

        `gradients` are those of what the stage sent, None where none comes back. Where gradients of weights are
        computed apart, `backward_of_weights` ends it. One of the two `waits` for reductions, or `ended` does later.
        """
        slot = self._flying[part]
        if not self.splits:
            self.store.begin_backward(last)
        self._enter("backward")
        roots, seeds = self._roots(slot, gradients)
        slot.results = ()
        if roots:
            torch.autograd.backward(roots, seeds)
        if not self.splits:
            self._finish(part, last, waits)
        loss = None if self._token else slot.ends[0]().clone()  # it may lie where the losses of all elements were
        if not self._in_flight:
            self._update(slot)
        slot.ends = []
        return loss

    def backward_of_weights(self, part: int, last: bool, waits: bool = True) -> None:
        """Computes the gradients of the weights of microbatch `part`, whose W is the `last` of the step or not."""
        waiting = self._flying[part].waiting
        assert waiting is not None
        self.store.begin_backward(last)
        self._enter("backward")
        waiting.backward()
        self._finish(part, last, waits)

    def _finish(self, part: int, last: bool, waits: bool) -> None:
        """Ends microbatch `part`: nothing of it is in flight any more, but for reductions where it does not wait."""
        slot = self._flying.pop(part)
        slot.saved.clear()
        self.store.finish(last, waits)
        self.free.append(slot)

    def ended(self) -> None:
        """Waits for the reductions of the last backward, if that did not."""
        self.store.reducer.finish()

    def _roots(self, slot: _Slot, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        """The results from which backward starts, with their gradients."""
        sent = slot.results[len(slot.lowered.ends):]
        pairs = [(x, gradient) for x, gradient in zip(sent, gradients, strict=True) if gradient is not None]
        if not self._token:
            loss = slot.results[0]
            path = slot.lowered.ends[0].backward
            pairs.append((loss, run_moves(path, torch.full_like(loss, 1 / self.parts))))
        return [x for x, _ in pairs], [gradient for _, gradient in pairs]

    def _enter(self, direction: str) -> None:
        if self.recorder.direction != direction:
            self.recorder.direction = direction

    def _update(self, slot: _Slot) -> None:
        """Gives the buffers their new values."""
        with torch.no_grad():
            new_values = [end().clone() for end in slot.ends[1:]]  # one may be what another buffer was
            for (old, _), new in zip(self.graph.updates, new_values, strict=True):
                self.module.get_buffer(self.graph.tensors[old].fqn).copy_(new)

    def evaluate(self, pieces: Mapping[str, Tensor], received: Mapping[int, Tensor], last: bool,
                 asked: Asked) -> Evaluated:
        """Runs a microbatch; nothing is dropped. Of the outputs that are asked for, it has those of this program."""
        names = tuple(name for name in asked.names if name in self.outputs)
        if names not in self.evaluations:
            self.evaluations[names] = _Evaluation(
                self._lower(None, None, None, tuple(self.outputs[name] for name in names)),
                {name: output_route(self.outputs[name], self.graph, self.plan, self.groups, self.recorder)
                 for name in names})
        lowered, routes = self.evaluations[names]
        self.store.begin_forward(last)
        results = list(lowered.program.forward(*self.arguments(lowered, pieces, received)))
        loss = None if self._token else run_moves(lowered.ends[0].forward, results[0])
        end = len(results) - len(names)
        others = {name: route.whole(x) if asked.whole else route.split(x, self.groups)
                  for (name, route), x in zip(routes.items(), results[end:], strict=True)}
        return Evaluated(loss, others, results[len(lowered.ends):end])


