"""Makes a model that plans what its first plan does not hold: evaluation, and batches of other shapes.

    the plan       module, its sample             stored pieces, and a program of training
    evaluation     module.eval(), no gradients    the same stored pieces, and a program of all outputs
    other rows     module, a shorter batch        the same stored pieces, and a program of training
    samples        module, batches by length      the same stored pieces, and a program of training for each shape

Each is the search of `autoddl.plan` on the plan's mesh, with the stored layout of every parameter pinned. So weights
and the optimizer's state stay where they are. Rank 0 plans and tells the others. A plan with stages keeps its stages
(`sampled_stages`).
"""

import copy
import gc
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoddl.api import plan_without_stages
from autoddl.capture.arguments import check_arguments, said_kind
from autoddl.capture.capture import Captured
from autoddl.capture.sample import Sample, from_spec
from autoddl.capture.wrappers import check_wrappers
from autoddl.core.errors import AutoDDLError, InputError
from autoddl.core.plan import Plan, parse_plan
from autoddl.core.precision import Precision
from autoddl.runtime.batches import LocalBatch
from autoddl.runtime.collectives.told_values import first_value
from autoddl.runtime.parallelize import ParallelModel
from autoddl.runtime.parallelize import parallelize as run_plan
from autoddl.sampled import capturing, check_no_momentum, residual_bytes, variant, variant_options
from autoddl.sampled_stages import divides

__all__ = ["LocalBatch", "ParallelModel", "parallelize", "with_variants"]

_Captures = Callable[[int], Captured]
"""The module captured with one of so many microbatches, once for each number."""


def parallelize(model: nn.Module, plan: Plan, sample: object = None, *, device: torch.device | str | None = None,
                seed: int = 0, timeout: float = 600.0, captured: Captured | None = None,
                compile: bool | str | None = None, graph: bool = False, weights: str | Path | None = None,
                samples: Sequence[object] = ()) -> ParallelModel:
    """The model that runs `model` as `plan` says, on this rank. Every rank calls it, with equal arguments.

    It plans evaluation and batches of other rows when they first come.

        sample      a global batch, only needed where the sample of the plan does not fit the module
        device      by default that of the plan's backend: the CPU for gloo, this process' GPU for nccl
        seed        seed of dropout, and of weights that are not there yet
        timeout     seconds that a collective may take
        captured    the model captured with one microbatch, so that it is not captured again
        compile     whether what runs between two messages is compiled by torch.compile, or its backend. By default it
                    is where the plan was priced so (`plan --compiled`)
        graph       whether the steps are one CUDA graph, which spares the host's time per kernel
        weights     a folder of safetensors, read straight into the pieces: the module's parameters may be on the meta
                    device, and no rank ever holds all of them
        samples     batches of other shapes that will come, such as one of every length: each gets a program now

    Raises MismatchError where the plan does not fit the model, the ranks or this version, or ranks disagree. Raises
    InputError for a model that is parallel already or whose parameters an optimizer holds, MachineError where processes
    cannot reach each other.
    """
    if isinstance(model, ParallelModel):
        raise InputError("the model is what parallelize returned, parallel already: give the plain module, or use it")
    check_arguments("parallelize(model, plan)", ("the model", model, nn.Module, "a torch.nn.Module"),
                    ("the plan", plan, Plan, "a Plan, as autoddl.plan or autoddl.load_plan return it"))
    check_no_optimizer(model)
    return with_variants(model, plan, sample, device=device, seed=seed, timeout=timeout, captured=captured,
                         compile=compile, graph=graph, weights=weights, samples=samples)


def with_variants(model: nn.Module, plan: Plan, sample: object = None, *, weights: str | Path | None = None,
                  samples: Sequence[object] = (), **how: Any) -> ParallelModel:
    """Returns what `parallelize` does, for loops that give an optimizer made before the new parameters."""
    check_wrappers(model)
    planner = _Planner(_without_values(model), plan)
    parallel = run_plan(model, plan, sample, planner=planner, fill=weights is None, **how)
    for said in plan.source.get("samples", ()):
        parallel.expect(from_spec(said["sample"], "meta"))
    for one in samples:
        parallel.prepare(one)
    if weights is not None:
        from autoddl.adapters.safetensors import load_safetensors

        load_safetensors(parallel, weights)
    return parallel


def check_no_optimizer(model: nn.Module) -> None:
    """Raises InputError where an optimizer holds the parameters, which are replaced: it would train nothing."""
    mine = {id(p) for p in model.parameters()}
    if not _optimizers(mine):
        return
    gc.collect()  # those that nothing else holds any more
    for name in _optimizers(mine):
        raise InputError(f"{name} was made of the parameters of this model, and would train nothing: parallelize "
                         "replaces them; make the optimizer afterwards, of model.parameters() of what it returns")


def _optimizers(parameters: Collection[int]) -> list[str]:
    """Names the optimizers that there are of parameters with these ids."""
    return [said_kind(one) for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)
            and any(id(p) in parameters for group in getattr(one, "param_groups", ()) for p in group["params"])]


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of the module whose parameters take no memory, with ties kept."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
                            for p in model.parameters()}
    return copy.deepcopy(model, memo)


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """Captures and plans `module`, whose parameters have no values, for other batches than those of `plan`."""

    module: nn.Module
    plan: Plan

    def __call__(self, batch: Sample, training: bool) -> tuple[Captured, Plan]:
        module = self.module if training else copy.deepcopy(self.module).eval().requires_grad_(False)
        captures = capturing(module, batch, Precision.parse(self.plan.precision))
        plan = self._planned(module, batch, captures, training)
        return captures(plan.microbatches), plan

    def _planned(self, module: nn.Module, batch: Sample, captures: _Captures, training: bool) -> Plan:
        """The plan of rank 0, on every rank. Raises InputError with its words where it has none."""
        alone = not (dist.is_available() and dist.is_initialized())
        found: dict[str, Any] = {}
        if alone or dist.get_rank() == 0:
            try:
                found = {"plan": self._search(module, batch, captures, training).to_json()}
            except AutoDDLError as error:
                found = {"error": str(error)}
        else:
            with suppress(AutoDDLError):  # of which rank 0 tells; it plans meanwhile
                captures(self.plan.microbatches if divides(batch, self.plan.microbatches) else 1)
        found = found if alone else first_value(found)
        if "error" in found:
            what = "a batch of this shape" if training else "evaluation"
            raise InputError(f"no plan for {what} that stores parameters as this plan does: {found['error']}")
        return parse_plan(found["plan"], "the plan of rank 0")

    def _search(self, module: nn.Module, batch: Sample, captures: _Captures, training: bool) -> Plan:
        plan, options = self.plan, variant_options(self.plan)
        if training:
            check_no_momentum(plan.sparse_sums.values())
        else:
            budget = plan.budget - residual_bytes(plan) - plan.predicted.nbytes.get("optimizer", 0)
            options |= {"budget": budget, "recompute": ("none",), "compress": ()}
        return variant(plan, module, batch, captures, options, plan_without_stages)
