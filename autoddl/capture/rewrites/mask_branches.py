"""Recognises branches on a mask of which one side is right for every mask, so that a graph has that side alone.

    if mask.any():                       taken always: where nothing is set, nothing is written
        x = x.masked_fill(mask, 0)
    if not padding_mask.any():           never taken: padding that is nowhere hides as much as none
        padding_mask = None
    if (attention_mask == 1).all():      never taken: a mask that keeps all hides as much as none
        attention_mask = None

Writes are `x[mask] = y`, `masked_fill`, `masked_fill_` and `where` with the mask of the condition, and nothing else.
What a mask marks is read in its name: one with `pad` in it what is hidden, another with `mask` in it what is kept.
"""

import ast

from autoddl.capture.rewrites.finite_clamps import called

__all__ = ["drops_idle_mask", "writes_under_mask"]

PURE = ("float", "finfo", "to", "type_as", "tensor", "zeros_like", "ones_like", "full_like", "new_tensor")
"""Functions that may stand in what is written."""


def writes_under_mask(node: ast.If) -> bool:
    """Whether the branch is taken where any element of a mask is set, and only writes where that mask is set."""
    mask = _of(node.test, "any")
    return bool(mask) and not node.orelse and all(_writes(line, mask) for line in node.body)


def drops_idle_mask(node: ast.If) -> bool:
    """Whether the branch does nothing but to replace by None a mask that hides nothing."""
    match node:
        case ast.If(body=[ast.Assign(targets=[target], value=ast.Constant(value=None))], orelse=[]):
            name = ast.unparse(target)
        case _:
            return False
    last = name.rpartition(".")[2]
    test = _asked(node.test, name)
    if "pad" in last:
        return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and _of(test.operand, "any") == name
    kept = _of(test, "all")
    return "mask" in last and kept in (name, f"{name} == 1", f"{name} != 0", f"{name}.bool()")


def _asked(test: ast.expr, name: str) -> ast.expr:
    """The condition without `name is not None and`."""
    match test:
        case ast.BoolOp(op=ast.And(), values=[first, last]) if ast.unparse(first) == f"{name} is not None":
            return last
        case _:
            return test


def _of(test: ast.expr, end: str) -> str:
    """Of what a condition asks `any` or `all`, as `mask` of mask.any() and torch.any(mask); else nothing."""
    match test:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=attr), args=[of], keywords=[]) if attr == end:
            return ast.unparse(of)
        case ast.Call(func=ast.Attribute(value=of, attr=attr), args=[], keywords=[]) if attr == end:
            return ast.unparse(of)
        case _:
            return ""


def _writes(line: ast.stmt, mask: str) -> bool:
    """Whether a line writes where the mask is set, and nowhere else, what no call changes anything for."""
    match line:
        case ast.Assign(targets=[ast.Subscript(slice=index)], value=value):
            return ast.unparse(index) == mask and _is_pure(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="masked_fill_"), args=[first, value])):
            return ast.unparse(first) == mask != ast.unparse(of) and _is_pure(value)
        case ast.Assign(targets=[target], value=ast.Call(func=ast.Attribute(value=of, attr="masked_fill"),
                                                         args=[first, value])):
            return ast.unparse(first) == mask and ast.unparse(of) == ast.unparse(target) and _is_pure(value)
        case ast.Assign(targets=[target], value=ast.Call(func=function, args=[first, value, last])):
            return (ast.unparse(function) == "torch.where" and ast.unparse(first) == mask
                    and ast.unparse(last) == ast.unparse(target) and _is_pure(value))
        case _:
            return False


def _is_pure(value: ast.expr) -> bool:
    return all(called(part.func) in PURE for part in ast.walk(value) if isinstance(part, ast.Call))
