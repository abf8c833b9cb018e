"""Reads the function between the two products of an expert, which is written as text:

    mul(silu(a), b)        a is the first input, b the second; names are those of torch's elementwise operators

`calls` lists the calls in the order in which they run; equal ones run once. `kept` are those whose values backward
reads, by the table of families.
"""

import ast
from functools import lru_cache

from autoddl.core.errors import InputError
from autoddl.operators.families import family_of

__all__ = ["calls", "is_elementwise", "kept", "parsed"]


@lru_cache(maxsize=1000)
def parsed(text: str, of: str = "a and b", like: str = "mul(silu(a), b)") -> ast.expr:
    """The expression. Raises InputError for a text that is none, of these names, as in the example `like`."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        raise InputError(f"{text!r} is no function of {of}; write one like {like}") from None


def is_elementwise(name: str) -> bool:
    """Whether torch has an elementwise operator of the name."""
    return "elementwise" in family_of(f"aten.{name}").rule


def calls(text: str) -> tuple[str, ...]:
    """The calls, inner ones first."""
    found = [ast.unparse(node) for node in ast.walk(parsed(text)) if isinstance(node, ast.Call)]
    return tuple(dict.fromkeys(reversed(found)))


def kept(text: str) -> frozenset[str]:
    """The calls whose values backward reads."""
    found = set[str]()
    for one in calls(text):
        node = parsed(one)
        assert isinstance(node, ast.Call)
        read = [ast.unparse(x) for x in node.args if not isinstance(x, ast.Constant | ast.UnaryOp)]
        match family_of(f"aten.{ast.unparse(node.func)}").reads:
            case "nothing":
                continue
            case "output":
                found.add(one)
            case "factors" if len(read) < 2:
                continue
            case _:
                found.update(read)
    return frozenset(found) & frozenset(calls(text))
