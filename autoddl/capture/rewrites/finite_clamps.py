"""Recognises a clamp behind a branch that leaves finite values as they are, so that it may always be taken.

    if not torch.isfinite(x).all():
        bound = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-bound, max=bound)

Such a branch is taken by whoever has an infinity in x, and a clamp at the largest number of its dtype changes nothing
else. So three things are to be seen in the source:

    condition    `not isfinite(x).all()` or `isinf(x).any()`, perhaps `or isnan(x).any()`. `and` may add a comparison
                 of x.dtype, and nothing else
    bounds       at least `finfo(x.dtype).max - 1000` above and at most its negative below, written in the call or in
                 lines of the body that give them a name
    body         nothing but these lines and the clamp of x

To subtract up to 1000 changes no bound of bfloat16, float32 or float64. In float16, finite values between 64504 and
65504 are clamped too.
"""

import ast
from collections.abc import Mapping

__all__ = ["called", "is_finite_clamp"]

LEAST = 1000
"""How far below the largest number a bound may lie."""


def is_finite_clamp(node: ast.If) -> bool:
    """Whether the branch does nothing but clamp, at the largest numbers of its dtype, a tensor that has an infinity."""
    *lines, last = node.body
    match last:
        case ast.Assign(targets=[target], value=ast.Call(func=function, args=[clamped, *places], keywords=words)):
            x, names = ast.unparse(clamped), _names(lines)
        case _:
            return False
    limits = {**dict(zip(("min", "max"), places, strict=False)), **{str(word.arg): word.value for word in words}}
    own = {part.id for part in ast.walk(clamped) if isinstance(part, ast.Name)}
    return (not node.orelse and called(function) == "clamp" and ast.unparse(target) == x and len(places) <= 2
            and set(limits) <= {"min", "max"} and len(names) == len(lines) and not own & set(names)
            and all(_is_bound(value, x, {}, False) or _is_bound(value, x, {}, True) for value in names.values())
            and all(_is_bound(limit, x, names, name == "min") for name, limit in limits.items())
            and _is_infinite(node.test, x))


def called(function: ast.expr) -> str:
    """The last name of what is called, as `clamp` of `torch.clamp`; nothing for what has no name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _names(lines: list[ast.stmt]) -> Mapping[str, ast.expr]:
    """The names that lines give and their values, of lines that do nothing else."""
    return {line.targets[0].id: line.value for line in lines
            if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name)}


def _is_bound(limit: ast.expr, x: str, names: Mapping[str, ast.expr], below: bool) -> bool:
    """Whether an expression is the largest number of x's dtype, less at most LEAST, or its negative for one `below`."""
    match limit:
        case ast.Name(id=name) if name in names:
            return _is_bound(names[name], x, {}, below)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return below and _is_bound(inner, x, names, False)
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant(value=int() | float() as less)):
            return not below and 0 <= less <= LEAST and _is_bound(left, x, names, False)
        case ast.Attribute(value=ast.Call(func=function, args=[ast.Attribute(value=of, attr="dtype")]), attr=end):
            return called(function) == "finfo" and ast.unparse(of) == x and end == ("min" if below else "max")
        case _:
            return False


def _is_infinite(test: ast.expr, x: str) -> bool:
    """Whether a condition holds for every x with an infinity, of the dtypes that it asks for."""
    match test:
        case ast.BoolOp(op=ast.And(), values=[*first, last]):
            return _is_infinite(last, x) and all(_is_of_dtype(part, x) for part in first)
        case ast.BoolOp(op=ast.Or(), values=parts):
            asked = [_asked(part, x) for part in parts]
            return "" not in asked and set(asked) != {"isnan"}
        case _:
            return _asked(test, x) in ("isinf", "isfinite")


def _is_of_dtype(part: ast.expr, x: str) -> bool:
    return isinstance(part, ast.Compare) and ast.unparse(part.left) == f"{x}.dtype"


def _asked(part: ast.expr, x: str) -> str:
    """`isinf` or `isnan` for any of x, `isfinite` for not all of x, as a function or a method; else nothing."""
    known: tuple[tuple[str, str], ...] = (("isinf", "any"), ("isnan", "any"))
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        part, known = part.operand, (("isfinite", "all"),)
    match part:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=function, args=args), attr=end), args=[], keywords=[]):
            of = args[0] if args else getattr(function, "value", function)
            return called(function) if (called(function), end) in known and ast.unparse(of) == x else ""
        case _:
            return ""
