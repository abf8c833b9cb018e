"""Runs the function between the two products of an expert, whose text `gate_expressions` reads."""

import ast
from typing import Any

import torch
from torch import Tensor

from autoddl.core.errors import InputError
from autoddl.operators.gate_expressions import is_elementwise, parsed

__all__ = ["apply_gate"]


def apply_gate(text: str, a: Tensor, b: Tensor | None = None) -> Tensor:
    """The function `text` of the elements of `a` and `b`. Raises InputError for a text that is none."""
    found = _value(parsed(text), {"a": a, "b": b})
    assert isinstance(found, Tensor)
    return found


def _value(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of an expression; `known` are those of its names, and of the expressions met before."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id="a" | "b" as name):
            return known[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if is_elementwise(name):
            text = ast.unparse(node)
            if text not in known:
                call = getattr(torch.ops.aten, name)
                known[text] = call(*(_value(x, known) for x in args),
                                   **{str(k.arg): _value(k.value, known) for k in keywords})
            return known[text]
    raise InputError(f"{ast.unparse(node)!r} is no function of a and b; write one of torch's elementwise operators")
