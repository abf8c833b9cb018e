"""Makes a model that trains from a module and a plan: the user's own module, whose step runs as the plan says.

    model = parallelize(module, plan)
    loss = model.step(batch)                  forward and backward; gradients are in .grad of model.parameters()
    loss = model(batch)                       forward alone, nothing dropped, no buffer updated
    found = model(batch, outputs=("loss", "logits"))     the same, with other outputs of the module's forward

A batch is the global one, the same on every rank, or this rank's pieces of it, from `local_batch`. All ranks make the
same calls.

A plan of m microbatches runs them one after the other, each a contiguous m-th of the batch's rows:

    loss = mean of the m losses        gradient = sum of the m gradients / m

This equals one pass over the whole batch if the loss is a mean over the rows. A loss that sums over the rows comes out
m times too small. A mean over other counts (tokens that are not ignored) becomes a mean of means, as wherever gradients
are accumulated. Every microbatch updates the buffers (batch norm).

In a plan with stages each rank has the parameters of its own stages, and runs microbatches in the order of the plan's
schedule (`pipeline_model`). Loss and gradients are those of microbatches one after the other.
"""

from datetime import timedelta

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import materialise
from autoddl.capture.same_model import check_captured
from autoddl.capture.sample import as_sample, from_spec, parted
from autoddl.capture.trace import check_held
from autoddl.capture.tried_rules import planned_by
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import VERSION, Plan
from autoddl.core.precision import Precision
from autoddl.cost_models import parse_cluster
from autoddl.runtime.batches import LocalBatch, digest
from autoddl.runtime.collectives.process_groups import Groups
from autoddl.runtime.compiled import Compile, compiler
from autoddl.runtime.lowering import communication_axes
from autoddl.runtime.mesh_model import MeshModel
from autoddl.runtime.parallel_model import ParallelModel, Planner
from autoddl.runtime.pipeline_model import PipelineModel
from autoddl.runtime.stage_setup import connected, stage_rows
from autoddl.runtime.switches.offered import Switches, offered_switches
from autoddl.runtime.world import check_agreement, device_of, join_processes
from autoddl.schedule.traffic import traffic

__all__ = ["LocalBatch", "MeshModel", "ParallelModel", "PipelineModel", "parallelize"]

def parallelize(model: nn.Module, plan: Plan, sample: object = None, *, device: torch.device | str | None = None,
                seed: int = 0, timeout: float = 600.0, captured: Captured | None = None,
                compile: bool | str | None = None, graph: bool = False, planner: Planner | None = None,
                fill: bool = True) -> ParallelModel:
    """The model that runs `model` as `plan` says, on this rank. Every rank calls it, with equal arguments.

        sample      a global batch, only needed where the sample of the plan does not fit the module
        device      by default that of the plan's backend (`device_of`)
        seed        seed of dropout, and of weights that are not there yet
        timeout     seconds that a collective may take
        captured    the model captured with one microbatch, so that it is not captured again
        compile     whether what runs between two messages is compiled by torch.compile (`compiled`), or its backend.
                    By default it is where the plan was priced so (`plan --compiled`)
        graph       whether the steps are one CUDA graph (`step_graph`), which spares the host's time per kernel
        planner     plans programs for other batches and for evaluation; None: there are none
        fill        whether parameters without values get their initial ones; else their pieces wait to be loaded

    Raises MismatchError where the plan does not fit the model, the ranks or this version, or ranks disagree. Raises
    InputError for a model that is parallel already, MachineError where processes cannot reach each other.
    """
    place, limit = device_of(plan.backend, device), timedelta(seconds=timeout)
    if plan.version != VERSION:
        raise MismatchError(f"the plan is of version {plan.version}, this AutoDDL runs version {VERSION}: plan again")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise InputError("the model's parameters are DTensors already; give parallelize the plain module")
    join_processes(plan.mesh, place, limit)
    if captured is None:
        captured = capture(model, from_spec(plan.sample, "meta") if sample is None
                           else parted(as_sample(sample), plan.microbatches), Precision.parse(plan.precision))
    check_captured(plan, model, captured)
    captured = planned_by(captured, plan)
    check_held(captured.graph, captured.constants)
    planned = add_hubs(captured.graph)
    rows = traffic(plan, planned) if plan.pipeline is None else stage_rows(plan, captured.graph)
    switches = offered_switches() or Switches(b"")
    check_agreement({"plan": (plan.fingerprint(), plan.source.get("cluster"), *rows), "seed": [seed],
                     "list of switches that reduce": [(one.name, one.ranks) for one in switches.levels]})
    if fill:
        materialise(model, seed)
    else:
        _check_buffers(model)
    check_agreement({"value of the weights": [digest(p) for p in model.parameters() if not p.is_meta],
                     "value of the buffers": map(digest, model.buffers()),
                     "value of the constants": map(digest, captured.constants.values())})
    if plan.pipeline is not None:
        if graph:
            raise InputError("a plan with stages runs no CUDA graphs: its ranks wait for each other's messages; leave "
                             "out graph=True")
        return PipelineModel(model, plan, captured, connected(plan, captured.graph, limit), place, seed,
                             _compiler(plan, compile), planner)
    groups = Groups(plan.mesh, communication_axes(plan, planned), limit, plan.source.get("cluster"))
    return MeshModel(model, plan, captured, planned, groups, place, seed, _compiler(plan, compile), graph,
                     planner)


def _compiler(plan: Plan, choice: bool | str | None) -> Compile | None:
    """Compiles the program by the caller's choice, else as the plan was priced."""
    if choice is None:
        text = plan.source.get("cluster")
        choice = text is not None and parse_cluster(text, "the plan's cluster").device.compiled
    return None if choice is False else compiler("inductor" if choice is True else choice)


def _check_buffers(model: nn.Module) -> None:
    """Raises InputError for a buffer without values."""
    empty = next((name for name, buffer in model.named_buffers() if buffer.is_meta), None)
    if empty is not None:
        raise InputError(f"buffer {empty} has no value, and files of weights do not hold all buffers: build the module "
                         "with real buffers, and only its parameters on the meta device")
