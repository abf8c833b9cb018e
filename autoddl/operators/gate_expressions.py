"""Reads the function between the two products of an expert, which is written as text:

    mul(silu(a), b)        a is the first input, b the second; names are those of torch's elementwise operators

`calls` lists the calls in the order in which they run; equal ones run once. `kept` are those whose values backward
reads, by the table of families. `gate_passes` counts what the kernels of all calls read and write.
"""

import ast
from functools import lru_cache

from autoddl.core.errors import InputError
from autoddl.operators.families import family_of

__all__ = ["calls", "gate_passes", "is_elementwise", "kept", "parsed"]


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


def gate_passes(text: str) -> tuple[int, int]:
    """Counts the values that are read and written for one value of the gate, forward and backward.

    A call reads its inputs and writes one. Backward of a call has a kernel for each input: it reads a gradient and what
    was kept, and writes. A sum passes its gradient on. Gradients of an input that is used twice are added up.
    """
    forward = backward = 0
    uses = dict[str, int]()
    for one in calls(text):
        node = parsed(one)
        assert isinstance(node, ast.Call)
        read = [ast.unparse(x) for x in node.args if not isinstance(x, ast.Constant | ast.UnaryOp)]
        forward += len(read) + 1
        backward += 0 if family_of(f"aten.{ast.unparse(node.func)}").reads == "nothing" else 3 * len(read)
        for each in read:
            uses[each] = uses.get(each, 0) + 1
    return forward, backward + sum(3 * (count - 1) for count in uses.values())
