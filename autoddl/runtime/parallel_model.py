"""A model that trains as a plan says, on one rank: what every kind of plan has in common, and plans without stages.

    ParallelModel    the interface: step, evaluation, parameters, state, norm of the gradients
    MeshModel        one mesh of all ranks, microbatches one after the other
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Extent, Layout, extents
from autoddl.core.plan import Plan
from autoddl.runtime.batches import Batches, LocalBatch
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.compiled import Compile
from autoddl.runtime.gradients_together import clip_gradients
from autoddl.runtime.optimizer_guard import guard_optimizers
from autoddl.runtime.program_runner import ProgramRunner, place_buffers
from autoddl.runtime.step_graph import StepGraph, check_graph
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = ["MeshModel", "ParallelModel", "batches_of", "mean"]


class ParallelModel:
    """One rank of a planned model, made by `parallelize`; `recorder` has the collectives of the last step.

        module    the user's module, whose parameters are the pieces of this rank
        plan      the plan
        graph     the planned graph, of one microbatch; the captured one, without hubs, where the plan has stages
        groups    the groups of this rank's mesh, that of its stage where the plan has stages
        steps     number of steps so far
        copies    names of parameters that an earlier stage has too: it saves them, and they count there
    """

    def __init__(self, module: nn.Module, plan: Plan, graph: Graph, groups: Groups, recorder: Recorder) -> None:
        self.module, self.plan, self.graph, self.groups, self.recorder = module, plan, graph, groups, recorder
        self.steps, self.copies = 0, frozenset[str]()
        guard_optimizers(self, module.parameters())

    def step(self, batch: object) -> Tensor:
        """Runs forward and backward of one batch; returns its loss on every rank, the mean over the microbatches.

        Gradients add up in .grad until they are zeroed.
        """
        pieces = self.local_batch(batch)
        self.recorder.clear()
        loss = self._train(pieces)
        self.steps += 1
        return loss

    def __call__(self, batch: object) -> Tensor:
        """The loss of one batch, by the training program without dropout; gradients and buffers stay unchanged."""
        with torch.inference_mode(False), torch.no_grad():  # tensors of that mode cannot be sent from another thread
            pieces = self.local_batch(batch)
            self.recorder.clear()
            return self._evaluate(pieces)

    def _train(self, batch: LocalBatch) -> Tensor:
        raise NotImplementedError

    def _evaluate(self, batch: LocalBatch) -> Tensor:
        raise NotImplementedError

    def local_batch(self, batch: object) -> LocalBatch:
        """This rank's pieces of a global batch: for loaders that keep only these."""
        raise NotImplementedError

    def runners(self) -> Sequence[ProgramRunner]:
        """The programs that this rank runs."""
        raise NotImplementedError

    def planned(self) -> tuple[PlannedCollective, ...]:
        """The collectives and messages of a step on this rank, as planned."""
        raise NotImplementedError

    def like(self, module: nn.Module, captured: Captured) -> "ParallelModel":
        """A model by the same plan on the same groups, of another module, captured; nothing is sent coded."""
        raise NotImplementedError

    def piece(self, name: str) -> tuple[Extent, ...]:
        """(offset, size) along every dim of this rank's piece of a parameter."""
        runner = next(one for one in self.runners() if name in one.stored)
        found = runner.stored[name]
        return extents(found.tensor.shape, found.layout, runner.groups.mesh, runner.groups.coordinate)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the module that this rank has a part of, DTensors if any is stored in pieces."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """These parameters by name."""
        return self.module.named_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers of this rank by name, sharded ones as DTensors."""
        return get_model_state_dict(self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict` of this plan, or whole tensors, the same on every rank."""
        whole = not any(isinstance(value, DTensor) for value in state.values())
        set_model_state_dict(self.module, dict(state), options=StateDictOptions(full_state_dict=whole))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their norm is at most `max_norm`; returns the norm before, on every rank.

        It is that of the whole model: every element counts once, whatever is split, copied or on another stage.
        """
        return clip_gradients([(one, runner.groups) for runner in self.runners() for fqn, one in runner.stored.items()
                               if fqn not in self.copies], list(self.parameters()), max_norm)


def batches_of(module: nn.Module, captured: Captured, runner: ProgramRunner, device: torch.device) -> Batches:
    """The batches of a runner: inputs of the whole program are checked, those that its graph reads are cut."""
    inputs = tuple(t for t in captured.graph.tensors if t.kind is Kind.INPUT)
    whole = Layout.broadcast(runner.plan.mesh)
    layouts = {t.fqn: runner.plan.inputs.get(t.fqn, whole) for t in runner.graph.tensors if t.kind is Kind.INPUT}
    return Batches(module.forward, inputs, captured.spec, layouts, runner.groups, device, runner.plan.microbatches)


def mean(losses: Sequence[Tensor]) -> Tensor:
    """The mean of the losses of the microbatches."""
    return torch.stack(list(losses)).mean() if len(losses) > 1 else losses[0]


class MeshModel(ParallelModel):
    """One rank of a model whose plan has no stages."""

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, graph: Graph, groups: Groups,
                 device: torch.device, seed: int, compile_stretch: Compile | None = None,
                 graphed: bool = False) -> None:
        self._device, self._first, recorder = device, seed, Recorder()
        if graphed:
            check_graph(graph, device)
        place_buffers(device, module, graph)
        self.runner = ProgramRunner(module, plan, captured, graph, groups, device, recorder, compile_stretch)
        self._batches = batches_of(module, captured, self.runner, device)
        super().__init__(module, plan, graph, groups, recorder)
        self._graphed = StepGraph(self._run, self.parameters(), recorder, device) if graphed else None

    def _train(self, batch: LocalBatch) -> Tensor:
        return self._run(batch) if self._graphed is None else self._graphed.step(batch)

    def _run(self, batch: LocalBatch) -> Tensor:
        self.runner.clear()
        return mean([self._microbatch(part, pieces) for part, pieces in enumerate(batch.parts)])

    def _microbatch(self, part: int, pieces: Any) -> Tensor:
        """Runs forward and backward of microbatch `part`; returns its loss."""
        parts = self.plan.microbatches
        self.runner.forward(part, pieces, {}, self._first + self.steps * parts + part, part == parts - 1)
        loss = self.runner.backward(part, (), part == parts - 1)
        assert loss is not None, "a model without stages has a loss"
        return loss

    def _evaluate(self, batch: LocalBatch) -> Tensor:
        self.runner.clear()
        found = [self.runner.evaluate(pieces, {}, part == len(batch.parts) - 1)[0]
                 for part, pieces in enumerate(batch.parts)]
        return mean([loss for loss in found if loss is not None])

    def local_batch(self, batch: object) -> LocalBatch:
        return self._batches.local(batch)

    def runners(self) -> Sequence[ProgramRunner]:
        return [self.runner]

    def planned(self) -> tuple[PlannedCollective, ...]:
        return traffic(self.plan, self.graph, self.groups.coordinate)

    def like(self, module: nn.Module, captured: Captured) -> "MeshModel":
        return MeshModel(module, self.plan.without_codecs(), captured, add_hubs(captured.graph), self.groups,
                         self._device, 0)
