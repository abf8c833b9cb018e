"""Refuses what a planned model cannot do, with the way out: in place of errors from inside of torch, or wrong numbers.

    guard_optimizers    optimizers of torch whose update is not made for parameters in pieces, or whose momentum sparse
                        sums have already, before their first step
    guard_placement     `.to`, `.double` and the like, which would give the module's parameters other memory
    OwnGradients        warns where gradients of a stage were changed before an optimizer's step, as by a norm of these
                        alone
    check_state_dict    states that are not this model's: names, shapes, forms
    StepLoss            `backward` of the loss of a step, which has run already; CallLoss: that of a call

Most optimizers of torch.optim update DTensors as they would whole tensors. These do not:

    Rprop                     writes by a mask, which DTensor does not do in place
    Adafactor                 means over rows and columns, in place
    LBFGS                     joins all gradients to one vector
    SGD, Adagrad with fused   fused kernels that know no DTensor

An optimizer that is none of torch.optim is let through. If it reads a number of a DTensor, as `p.grad.norm().item()`,
it gets that of this rank's piece: `p.grad.norm().full_tensor()` is that of the whole.

The program reads the memory of the pieces itself, and an optimizer updates that of the parameters. They are the same
until `nn.Module._apply` makes new tensors, which it does for DTensors even where nothing changes. So a call that
changes nothing does nothing, and any other raises InputError.
"""

import copy
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoddl.capture.arguments import said_kind
from autoddl.core.errors import InputError, MismatchError

__all__ = ["CallLoss", "OwnGradients", "StepLoss", "check_state_dict", "guard_optimizers", "guard_placement"]

WHOLE = (torch.optim.Rprop, torch.optim.Adafactor, torch.optim.LBFGS)
UNFUSED = (torch.optim.SGD, torch.optim.Adagrad)


def guard_optimizers(owner: object, parameters: Iterable[Tensor], momentum: float = 0.0) -> None:
    """While `owner` lives, an optimizer that cannot update one of its `parameters` raises InputError as it steps.

    With the `momentum` of sparse sums, so does one that has a momentum of its own.
    """
    pieces, mine = set[int](), set[int]()
    for parameter in parameters:
        (pieces if isinstance(parameter, DTensor) else mine).add(id(parameter))
    mine |= pieces
    if not (pieces or momentum):
        return
    seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in seen:
            for group in optimizer.param_groups:
                here = {id(p) for p in group["params"]}
                if here & pieces:
                    _check(optimizer, bool(group.get("fused")))
                if here & mine and momentum and group.get("momentum"):
                    raise InputError(f"the plan's sparse sums have a momentum of {momentum:g}, and "
                                     f"{type(optimizer).__name__} one of {group['momentum']:g} besides: give it "
                                     "momentum=0, or plan with --sparse without momentum")
            seen.add(optimizer)

    weakref.finalize(owner, register_optimizer_step_pre_hook(check).remove)


def _check(optimizer: torch.optim.Optimizer, fused: bool) -> None:
    """Raises InputError where the optimizer does not update DTensors."""
    name = type(optimizer).__name__
    if isinstance(optimizer, WHOLE):
        raise InputError(f"torch.optim.{name} needs whole parameters, and the plan stores some in pieces: take another "
                         "optimizer, or pin every parameter, as --pin '*.weight: AXIS=B'")
    if fused and isinstance(optimizer, UNFUSED):
        raise InputError(f"torch.optim.{name} with fused=True does not know parameters in pieces, which the plan has: "
                         "leave fused=True out")


class OwnGradients:
    """The gradients of a rank's stages as the model left them: an optimizer's step warns once if others changed them.

    A rank has the parameters of its stages alone. So `torch.nn.utils.clip_grad_norm_`, which knows no others, clips
    each stage by a norm of its own, and nothing tells. Every change in place raises a tensor's version.
    """

    def __init__(self, owner: object, parameters: Iterable[Tensor]) -> None:
        self._parameters, self._versions = list(parameters), dict[int, tuple[int, int]]()
        self._warned = False
        weakref.finalize(owner, register_optimizer_step_pre_hook(self._check).remove)

    def note(self) -> None:
        """Notes the gradients as they are now."""
        self._versions = {id(p): own for p in self._parameters if (own := _version(p))}

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not self._warned and any(id(p) in theirs and _is_changed(self._versions.get(id(p)), _version(p))
                                    for p in self._parameters):
            self._warned = True
            warnings.warn("gradients were changed between the step of the model and that of the optimizer. This rank "
                          "has the parameters of its stages alone, so that torch.nn.utils.clip_grad_norm_ takes the "
                          "norm of these, not of the model: clip by model.clip_grad_norm_(max_norm). Changes of each "
                          "gradient by itself are right", stacklevel=2)


def _version(parameter: Tensor) -> tuple[int, int] | None:
    """Which tensor a gradient is, and how often it was changed; None without any."""
    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    return None if own is None else (own.data_ptr(), own._version)


def _is_changed(before: tuple[int, int] | None, now: tuple[int, int] | None) -> bool:
    return before is not None and now is not None and before[0] == now[0] and before[1] != now[1]


def guard_placement(module: nn.Module, device: torch.device) -> None:
    """From now on, `module` refuses to be moved from `device`, or to other dtypes."""
    dtypes = {p.dtype for p in module.parameters()}

    def stay(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for dtype in dtypes:
            before = torch.empty(0, dtype=dtype, device=device)
            after = function(before)
            if (after.device.type, after.dtype) != (device.type, dtype) or (
                    before.device.index is not None and after.device.index != before.device.index):
                raise InputError(f"the module runs a plan on {device} in {dtype}, and this would make it "
                                 f"{after.dtype} on {after.device}: give parallelize the device, and plan with a "
                                 "precision")
        return module

    kept: Any = module
    kept._apply = stay


class CallLoss(Tensor):
    """The loss of a call, of which there are no gradients. Nothing but `backward` differs from a tensor.

    Raises InputError where `backward` is called of it, or of what is computed of it and needs no gradient.
    """

    WAY_OUT = ("a call of the model computes a loss without gradients: write model.step(batch) in place of "
               "model(batch), which runs backward too")

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if not self.requires_grad:
            raise InputError(self.WAY_OUT)
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __format__(self, form: str) -> str:
        """Written as the tensor that it is: torch formats no number of a class of its own."""
        return format(self.as_subclass(Tensor), form)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """Copied as the tensor that it is."""
        return copy.deepcopy(self.as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the tensor that it is, which reads anywhere."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


class StepLoss(CallLoss):
    """The loss of a step, whose backward has run."""

    WAY_OUT = ("model.step has run backward already, and the gradients are in .grad of model.parameters(): leave "
               ".backward() out; a loop that calls it itself takes autoddl.planned_module(model)")


def check_state_dict(state: object, own: Mapping[str, Any], ties: Collection[Sequence[str]], strict: bool) -> None:
    """Raises InputError for what is no state, MismatchError for one whose names or shapes are not those of `own`.

    Of tied parameters, whose names `ties` has, one name is enough. Unless `strict`, names may differ.
    """
    if not isinstance(state, Mapping):
        raise InputError(f"a state is a dict of tensors by name, not {said_kind(state)}: give that of state_dict()")
    nested = next((name for name, value in state.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise InputError(f"{nested!r} of this state is a dict, not a tensor: give the state of the model alone, "
                         f"state[{nested!r}]")
    missing = [name for name in own if name not in state and not any(
        name in names and any(one in state for one in names) for names in ties)]
    unknown = [name for name in state if name not in own]
    if strict and (missing or unknown):
        raise MismatchError(f"this state is of another model: it {_said(missing, unknown)}; {_way_out(unknown, own)}")
    for name, value in own.items():
        if name in state and isinstance(value, Tensor) and getattr(state[name], "shape", None) != value.shape:
            raise MismatchError(f"{name} is {said_shape(state[name])} in this state, and {said_shape(value)} in the "
                                "model: give the state of a model of this size; pieces are given as DTensors, or whole")


def _said(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """The first names that lack, and that are too many."""
    found = [f"{word} {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
             for word, names in (("lacks", missing), ("has", unknown)) if names]
    return " and ".join(found)


def _way_out(unknown: Sequence[str], own: Collection[str]) -> str:
    """Says what to do about such names; wrappers put words before them."""
    before = next((name.removesuffix(mine) for name in unknown[:1] for mine in own if name.endswith(f".{mine}")), "")
    if before:
        return f"take {before!r} off its names, which a wrapper has put there"
    return "give one of this model, or strict=False to load the names that both have"


def said_shape(value: object) -> str:
    """The shape of a tensor, or the kind of what is none."""
    return str(list(value.shape)) if isinstance(value, Tensor) else said_kind(value)
