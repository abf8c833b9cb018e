"""Says what is wrapped around a module that its graph does not hold: refuses it, or says it in a line of the plan.

    hooks on gradients of parameters     refused: they would not run on split gradients
    backward hooks on modules            refused: a graph has no place for them
    DataParallel, DDP, FSDP              refused: a plan does their work itself
    ScriptModule                         refused: its inside cannot be traced
    a forward put on an instance         refused where it calls the module before it was put there
    torch.compile                        a line: operators run one by one
    torch.utils.checkpoint               a line: a plan chooses what backward computes again

Forward hooks are traced with the forward, and so are parametrizations. `docs/capture.md` has the whole table.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autoddl.core.errors import CaptureError

__all__ = ["check_constants", "check_wrappers", "wrapper_notes"]


SHARDED = ("FSDP", "FullyShardedDataParallel")
"""How the names of modules begin that FSDP has wrapped."""


def check_wrappers(model: nn.Module) -> None:
    """Raises CaptureError for what is around a module, would not run under a plan, and would change its results."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(f"{name} has a hook on its gradient, which would not run under a plan: remove it, and "
                               "do its work between step() and the optimizer's step")
    for name, module in model.named_modules():
        kind, place = type(module).__name__, name or "the model"
        if isinstance(module, DataParallel | DistributedDataParallel) or kind.startswith(SHARDED):
            raise CaptureError(f"{place} is wrapped in {kind}, whose work a plan does itself: give the module inside")
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(f"{place} is a ScriptModule, whose inside cannot be traced: give the module that it was "
                               "made from")
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(f"{place} has a backward hook, which a graph does not show: write what it does to the "
                               "value, as x * s + (x - x * s).detach() for a gradient s times as large")


def check_constants(model: nn.Module, constants: Mapping[str, Any]) -> None:
    """Raises CaptureError where a traced program holds weights of the model as constants, which would never train."""
    weights = {p.data_ptr(): name for name, p in model.named_parameters() if not p.is_meta and p.numel()}
    for name, value in constants.items():
        if isinstance(value, Tensor) and (isinstance(value, nn.Parameter) or (
                type(value) is Tensor and not value.is_meta and value.numel() and value.data_ptr() in weights)):
            place = name.rpartition(".")[0] or "the model"
            raise CaptureError(f"the forward of {place} reads weights of another copy of the module: it was put on the "
                               "instance and calls the forward from before; write it as a class, or as a forward hook")


def wrapper_notes(model: nn.Module, traced: nn.Module, checkpointed: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """A line for each kind of wrapper that a plan leaves out.

    `checkpointed` are the functions that the copy `traced` of the model gave to torch.utils.checkpoint.
    """
    names = {id(module): name for name, module in traced.named_modules()}
    compiled = [name or "the model" for name, module in model.named_modules()
                if "_orig_mod" in module._modules or module._compiled_call_impl is not None]
    owners = dict.fromkeys(names.get(id(_owner(one)), "") or getattr(one, "__name__", "a function")
                           for one in checkpointed)
    found = []
    if compiled:
        found.append(f"{_few(compiled)} {_is(compiled)} compiled by torch.compile, which a plan leaves out: operators "
                     "run one by one; --compiled prices chains of them as one kernel")
    if owners:
        found.append(f"{_few(list(owners))} {_is(owners)} in torch.utils.checkpoint, which a plan leaves out: it "
                     "chooses itself what backward computes again; --recompute full (or search) asks for it")
    return tuple(found)


def _owner(function: Callable[..., Any]) -> object:
    """The module that a checkpointed function runs: itself, that of a method, or the first argument that is bound."""
    while isinstance(function, partial):
        if function.args and isinstance(function.args[0], nn.Module):
            return function.args[0]
        function = function.func
    return getattr(function, "__self__", function)


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _is(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"
