"""Recognises branches on a mask of which one side is right for every mask, so that a graph has that side alone.

    if mask.any():                       taken always: where nothing is set, nothing is written
        x[mask] = 0
    if not padding_mask.any():           never taken: padding that is nowhere hides as much as none
        padding_mask = None
    if (attention_mask == 1).all():      never taken: a mask that keeps all hides as much as none
        attention_mask = None

Writes are `x[mask] = y` and `x.masked_fill_(mask, y)` with the mask of the condition, and nothing else: `x.masked_fill`
and `where` may give x another shape or dtype.
What a mask marks is read in its name: one with `pad` in it what is hidden, another with `mask` in it what is kept.
"""

import ast

__all__ = ["drops_idle_mask", "writes_under_mask"]

LIKE = ("zeros_like", "ones_like", "full_like", "new_tensor")
"""Functions that read of a tensor its shape and dtype alone."""
PURE = (*LIKE, "finfo", "to", "tensor")
"""Functions that may stand in what is written."""
SETTINGS = ("dtype", "device")
"""Attributes of a tensor that are no values."""


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
    """Whether a line writes in place where the mask is set, and nowhere else, what no earlier value decides."""
    match line:
        case ast.Assign(targets=[ast.Subscript(slice=index)], value=value):
            return ast.unparse(index) == mask and _is_given(value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=of, attr="masked_fill_"), args=[first, value])):
            return ast.unparse(first) == mask != ast.unparse(of) and _is_given(value)
        case _:
            return False


def _is_given(value: ast.expr) -> bool:
    """Whether a value follows from numbers in the source, attributes of the module, and dtypes alone.

    What forward has computed may have a gradient that is not finite, though none of it is written.
    """
    match value:
        case ast.Constant():
            return True
        case ast.Attribute(value=of, attr=attr):
            return attr in SETTINGS or _root(value) in ("self", "torch") or _is_given(of)
        case ast.UnaryOp(operand=of):
            return _is_given(of)
        case ast.Call(func=ast.Attribute(value=of, attr=attr) as function, args=args, keywords=named):
            own = attr in LIKE or _root(function) == "torch" or _is_given(of)
            rest = [*args[attr.endswith("_like"):], *(one.value for one in named)]
            return attr in PURE and own and all(map(_is_given, rest))
        case ast.Call(func=ast.Name(id="float"), args=args):
            return all(map(_is_given, args))
        case _:
            return False


def _root(value: ast.expr) -> str:
    """The name at the beginning of a chain of attributes."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else ""
