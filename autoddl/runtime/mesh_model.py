"""A model whose plan has no stages: one mesh of all ranks, microbatches one after the other."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.capture import Captured
from autoddl.capture.returned import LOSS
from autoddl.capture.sample import Sample
from autoddl.capture.tried_rules import planned_by
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.runtime.batches import Batches, LocalBatch
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.collectives.recorder import Recorder
from autoddl.runtime.compiled import Compile
from autoddl.runtime.lowering import communication_axes
from autoddl.runtime.outputs import joined
from autoddl.runtime.parallel_model import ParallelModel, Planner, batches_of, mean
from autoddl.runtime.program_runner import Asked, ProgramRunner, place_buffers
from autoddl.runtime.step_graph import StepGraph, check_graph
from autoddl.runtime.world import check_agreement
from autoddl.schedule.traffic import PlannedCollective, traffic

__all__ = ["MeshModel"]


class MeshModel(ParallelModel):
    """One rank of a model whose plan has no stages.

        planner    plans other programs of the module; None: there are none
        shared     the model whose pieces this one reads and updates too, under the name `program`
    """

    def __init__(self, module: nn.Module, plan: Plan, captured: Captured, graph: Graph, groups: Groups,
                 device: torch.device, seed: int, compile_stretch: Compile | None = None,
                 graphed: bool = False, planner: Planner | None = None, shared: "MeshModel | None" = None,
                 program: str = "") -> None:
        self._first, self._compile = seed, compile_stretch
        recorder = Recorder() if shared is None else shared.recorder
        if graphed:
            check_graph(graph, device, plan.codecs, bool(plan.sparse_sums))
        place_buffers(device, module, graph)
        self.runner: ProgramRunner = ProgramRunner(
            module, plan, captured, graph, groups, device, recorder, compile_stretch,
            here={} if shared is None else shared.runner.stored)
        self._batches = batches_of(module, captured, self.runner, device, program)
        super().__init__(module, plan, graph, groups, recorder, device, captured.returned, planner)
        self._graphed = StepGraph(self._run, self.parameters(), recorder, device) if graphed else None

    def _other(self, planner: Planner, batch: Sample, training: bool, name: str) -> "MeshModel":
        captured, plan = planner(batch, training)
        plan = plan.without_codecs(sparse_alone=True)
        graph = add_hubs(captured.graph)
        check_agreement({f"plan for {name}": (plan.fingerprint(), *traffic(plan, graph))})
        groups = Groups(plan.mesh, communication_axes(plan, graph), self.groups.timeout, plan.source.get("cluster"))
        return MeshModel(self.module, plan, captured, graph, groups, self.device, self._first, self._compile,
                         shared=self, program=name)

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

    def _evaluate(self, batch: LocalBatch, asked: Asked) -> dict[str, Tensor]:
        self.runner.clear()
        found = [self.runner.evaluate(pieces, {}, part == len(batch.parts) - 1, asked)
                 for part, pieces in enumerate(batch.parts)]
        outputs = {name: joined([one.outputs[name] for one in found]) for name in asked.names}
        return {LOSS: mean([one.loss for one in found if one.loss is not None]), **outputs}

    def computed(self) -> Collection[str]:
        return self.runner.outputs.keys()

    def _cut(self, batch: object) -> LocalBatch:
        return self._batches.local(batch)

    def batches(self) -> Sequence[Batches]:
        return [self._batches]

    def runners(self) -> Sequence[ProgramRunner]:
        return [self.runner]

    def planned(self) -> tuple[PlannedCollective, ...]:
        return traffic(self.plan, self.graph, self.groups.coordinate)

    def like(self, module: nn.Module, captured: Captured) -> "MeshModel":
        captured = planned_by(captured, self.plan)
        return MeshModel(module, self.plan.without_codecs(), captured, add_hubs(captured.graph), self.groups,
                         self.device, 0)
