"""Calls by argument name: what a schema or a signature calls the values of args and kwargs."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["bound", "defaults", "parameters"]


def parameters(target: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the arguments, in order."""
    if isinstance(target, torch._ops.OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    return tuple(inspect.signature(target).parameters)


def defaults(target: Callable[..., Any]) -> dict[str, Any]:
    """The values that arguments have when not given."""
    if isinstance(target, torch._ops.OpOverload):
        return {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    found = inspect.signature(target).parameters.items()
    return {name: p.default for name, p in found if p.default is not inspect.Parameter.empty}


def bound(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The given arguments by name, without defaults."""
    return dict(zip(parameters(target), args, strict=False)) | kwargs
