"""Keeps what a user puts into the state of an optimizer, as `optimizer.state[p]["ema"] = p.detach().clone()`.

torch saves such a key like the optimizer's own. It loads only those that an optimizer has by then, and a new one makes
its own alone. So what else a checkpoint has of a parameter is read beside them, and put into the state afterwards. A
tensor of the parameter's shape is read in its pieces, any other whole.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoddl.core.errors import InputError

if TYPE_CHECKING:
    from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["check_own_keys", "restore_keys", "wanted_keys"]

PART = "optimizer.state."


def check_own_keys(model: "ParallelModel", optimizer: torch.optim.Optimizer | None) -> None:
    """Raises InputError where the state holds what a checkpoint cannot: objects, or pieces as plain tensors."""
    for name, parameter in model.module.named_parameters() if optimizer is not None else ():
        for key, value in _leaves(optimizer.state.get(parameter, {})):  # type: ignore[union-attr]
            if not isinstance(value, Tensor | int | float):
                raise InputError(f"the optimizer's state of {name} has {key!r}, a {type(value).__name__}: a checkpoint "
                                 "keeps tensors and numbers of it; keep this in an object of your own, given by name")
            if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and isinstance(value, Tensor) \
                    and value.shape == parameter.to_local().shape != parameter.shape:
                raise InputError(f"the optimizer's state of {name} has {key!r} with this rank's piece as a plain "
                                 "tensor, of which a checkpoint would keep one rank's for all: make it a DTensor, as "
                                 "p.detach().clone() is")
            if isinstance(key, str) and "." in key:
                raise InputError(f"the optimizer's state of {name} has the key {key!r}, and dots part the names in a "
                                 "checkpoint: take a key without")


def _leaves(state: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The keys and values of a state and of dicts in it."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield key, value


def wanted_keys(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, known: Mapping[str, Any],
                saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint has of the parameters beside the `known` state of the optimizer, by name, without values."""
    found: dict[str, Any] = {}
    if optimizer is None:
        return found
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in model.module.named_parameters() if id(p) in mine}
    for name, there in saved.items():
        if name.startswith(PART) and name.removeprefix("optimizer.") not in known \
                and (parameter := parameters.get(_parted(name, parameters)[0])) is not None:
            found[name] = _room(parameter, there) if hasattr(there, "size") else b""
    return found


def _room(parameter: nn.Parameter, there: Any) -> Tensor:
    """A tensor without values for what was saved."""
    dtype = there.properties.dtype
    if there.size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    return torch.empty(there.size, dtype=dtype, device=parameter.device if there.size else "cpu")


def _parted(name: str, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """The parameter and the key of a value's name; ("", "") for a parameter that this rank does not have."""
    words = name.removeprefix(PART).split(".")
    return next(((start, ".".join(words[n:])) for n in range(len(words) - 1, 0, -1)
                 if (start := ".".join(words[:n])) in parameters), ("", ""))


def restore_keys(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, read: Mapping[str, Any]) -> None:
    """Puts what was `read` of `wanted_keys` into the state of the optimizer, in dicts where it was in dicts."""
    parameters = dict(model.module.named_parameters())
    for name, value in read.items():
        assert optimizer is not None
        parameter, keys = _parted(name, parameters)
        into, (*above, last) = optimizer.state[parameters[parameter]], keys.split(".")
        for key in above:
            into = into.setdefault(_key(key), {})
        into[_key(last)] = value


def _key(word: str) -> str | int:
    """A key as it was: numbers are written as texts."""
    return int(word) if word.isdecimal() else word
