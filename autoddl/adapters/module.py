"""Lets a user's own module run its plan when it is called, as loops of other libraries call it.

    loss = module(**batch).loss          in training: forward and backward of the plan run here
    loss.backward()                      adds the gradients, times that of the loss, to .grad of the parameters
    module(**batch).logits               under no_grad: evaluation, with every output, whole on every rank

A planned step runs forward and backward of its microbatches in an order of its own. So both run in the call, and their
gradients wait for `backward`, which may scale them, as loops that accumulate or scale do. They are the shards of this
rank: a second set of gradients, between the two calls alone.

The module stays itself: its class, names, configuration and methods. Its parameters are the pieces of this rank.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.capture.returned import LOSS
from autoddl.capture.sample import Sample
from autoddl.core.errors import InputError
from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["WithLoss", "parallel_behind", "parallel_of", "planned_module"]

_MODEL = "_autoddl_parallel"
"""The attribute under which a planned module has its model."""


def planned_module(parallel: ParallelModel) -> nn.Module:
    """The user's module of `parallel`; a call of it runs the plan, with the global batch on every rank."""
    module = parallel.module
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        batch = Sample(args, kwargs)
        with _no_autocast(parallel):
            if torch.is_grad_enabled() and module.training:
                trigger = torch.zeros((), device=parallel.device, requires_grad=True)
                loss = _PlannedStep.apply(trigger, parallel, batch)  # type: ignore[no-untyped-call]
                return parallel.returned.build({LOSS: loss})
            if parallel.training != module.training:
                parallel.train(module.training)
            return parallel.returned.build(parallel(batch, outputs="all"))

    object.__setattr__(module, _MODEL, parallel)
    module.forward = run
    return module


def parallel_of(module: nn.Module) -> ParallelModel | None:
    """The model whose plan `module` runs; None for a module that runs no plan."""
    found = module.__dict__.get(_MODEL)
    assert found is None or isinstance(found, ParallelModel)
    return found


def parallel_behind(model: ParallelModel | nn.Module) -> ParallelModel:
    """The model itself, or that whose plan a planned module runs. Raises InputError for any other module."""
    found = parallel_of(model) if isinstance(model, nn.Module) else model
    if found is None:
        raise InputError(f"this {type(model).__name__} runs no plan: give the model that autoddl.parallelize returned, "
                         "or its planned_module")
    return found


def _no_autocast(parallel: ParallelModel) -> AbstractContextManager[Any]:
    """Switches a loop's autocast off: the plan has the casts of its own recipe."""
    return torch.autocast(parallel.device.type, enabled=False)


class WithLoss(nn.Module):
    """A module that returns (loss, output): `criterion(model(*inputs), target)`, of a batch (*inputs, target).

    It makes a module of what loops compute in two lines, so that both are in the plan.
    """

    def __init__(self, model: nn.Module, criterion: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.criterion = model, criterion

    def forward(self, *batch: Any) -> tuple[Tensor, Any]:
        *inputs, target = batch
        output = self.model(*inputs)
        return self.criterion(output, target), output


class _PlannedStep(torch.autograd.Function):
    """The loss of a step, whose gradients wait until backward says by what to scale them."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, parallel: ParallelModel, batch: Sample) -> Tensor:
        parameters = list(parallel.parameters())
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with torch.enable_grad():
            loss = parallel.step(batch).as_subclass(Tensor)
        ctx.waiting = parallel, [(p, p.grad) for p in parameters if p.grad is not None]
        for p, gradient in zip(parameters, before, strict=True):
            p.grad = gradient
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (scale,), (parallel, waiting), ctx.waiting = gradients, ctx.waiting, (ctx.waiting[0], None)
        if waiting is None:
            raise InputError("backward of this loss was called before, and its gradients are used up: call the module "
                             "again")
        for p, gradient in waiting:
            _local(gradient).mul_(scale)
            if p.grad is None:
                p.grad = gradient
            else:
                _local(p.grad).add_(_local(gradient))
        parallel.gradients_are_done()
        return None, None, None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
