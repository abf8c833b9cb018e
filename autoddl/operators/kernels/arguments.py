"""Names the arguments of a call, by the schema of a torch operator or the signature of a function."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bound", "defaults", "parameters"]


def parameters(target: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments, in order."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    return tuple(inspect.signature(target).parameters)


def defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """Returns the default values of the arguments that have one."""
    if isinstance(target, torch._ops.OpOverload):
        return {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    found = inspect.signature(target).parameters.items()
    return {name: p.default for name, p in found if p.default is not inspect.Parameter.empty}


def bound(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the given arguments by name, without defaults."""
    return dict(zip(parameters(target), args, strict=False)) | kwargs
