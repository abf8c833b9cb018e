"""Takes branches that only raise the other way: `if labels.max() >= size: raise ValueError(...)`.

A graph has no branches, and what a tensor holds is not known when it is traced. One side of an `if` may do nothing but
raise, as an `assert` does. Then the program goes on as if nothing were wrong, and checks the condition in every step:

    trace       bool(condition) is decided by the source; autoddl::holds(condition, value, text) is written down
    program     x = checked(x, condition, value, text), an operator that raises where the condition does not hold. x are
                the whole numbers that the condition is of, for all that read them later, else the loss

In torch's constraints of distributions a side that returns what is wrong counts as one that raises: whoever asks does.

A side that only warns is left out, without a check. One that clamps infinite values at the largest number of their
dtype is always taken (`finite_clamps`): finite values stay as they are. So is one that only writes where the mask of
its condition is set, and a mask that hides nothing stays (`mask_branches`).

A condition is read in the source. Every part of an `and` or an `or` is to be false, or true for an `assert`, and behind
`not` the opposite.

`x.max().item()` stays a tensor where only such conditions read it: in a condition itself, or by the name that a line
gives it.
"""

import ast
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import has_side_effect

from autoddl.capture.fx_tools import insert
from autoddl.capture.rewrites.finite_clamps import called, is_finite_clamp
from autoddl.capture.rewrites.mask_branches import drops_idle_mask, writes_under_mask
from autoddl.operators.kernels import custom_ops

__all__ = ["asked_number", "check_conditions", "decided"]

TORCH = str(Path(torch.__file__).parent)
MODELS = (f"{TORCH}/nn/", f"{TORCH}/distributions/")
"""Where torch has code of models, which checks what it gets."""
CONSTRAINTS = f"{TORCH}/distributions/constraints.py"
OURS = str(Path(__file__).parents[1])
WARNS = ("warn", "warning", "warning_once", "info", "debug", "error", "print")

torch.library.define("autoddl::holds", "(Tensor condition, bool value, str text) -> ()")


@torch.library.register_fake("autoddl::holds")  # type: ignore[untyped-decorator]
def _holds(condition: Tensor, value: bool, text: str) -> None:
    return None


has_side_effect(torch.ops.autoddl.holds.default)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A statement with one side that only raises or warns, or that may always or never be taken.

        value     what its tensors are to be for the other side
        raises    whether the side raises
        text      its condition, as written
        masked    whether that is so of a condition on a mask alone, a tensor of bool
    """

    value: bool
    raises: bool
    text: str
    masked: bool


def decided(condition: Tensor) -> bool | None:
    """The answer to bool(condition) in a trace; None where its value is known, or where a branch really decides."""
    if not isinstance(condition, FakeTensor) or condition.constant is not None:
        return None
    frame = _asking(sys._getframe(1))
    branch = None if frame is None else _branch(frame.f_code.co_filename, frame.f_lineno)
    if frame is None or branch is None or (branch.masked and not _is_of_mask(condition)):
        return None
    if branch.raises:
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        torch.ops.autoddl.holds(condition, branch.value, f"{where}: {branch.text}")
    return branch.value


def _is_of_mask(condition: Tensor) -> bool:
    """Whether a condition of a trace is made of one tensor of bool; numbers that index rows are none."""
    mode: Any = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(condition, mode.tracer, None)
    given = [] if slot is None else (slot.node if isinstance(slot, Proxy) else slot.proxy.node).all_input_nodes
    return [x.meta["val"].dtype for x in given] == [torch.bool]


def asked_number(x: Tensor) -> Tensor | None:
    """Returns x.item() of a trace as a tensor, where only conditions that raise read it; None elsewhere."""
    if not isinstance(x, FakeTensor) or x.constant is not None or x.numel() != 1:
        return None
    frame = _asking(sys._getframe(1))
    if frame is None:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    return x.reshape(()) if _branch(file, line) is not None or _is_asked_only(file, line) else None


@lru_cache(maxsize=1000)
def _is_asked_only(file: str, line: int) -> bool:
    """Whether the line gives a name to a number that conditions of branches which only raise, and these, read alone."""
    function = next((node for node in reversed(_nodes(file)) if isinstance(node, ast.FunctionDef)
                     and node.lineno <= line <= (node.end_lineno or line)), None)
    inside = [] if function is None else list(ast.walk(function))
    names = [node.targets[0].id for node in inside if isinstance(node, ast.Assign) and len(node.targets) == 1
             and node.lineno <= line <= (node.end_lineno or line) and isinstance(node.targets[0], ast.Name)
             and isinstance(node.value, ast.Call) and called(node.value.func) == "item"]
    branches = [node for node in inside if isinstance(node, ast.If | ast.Assert)
                and _branch(file, node.test.lineno) is not None]
    spared = {id(part) for one in branches for side in (one.test, *_sides(one)) for part in ast.walk(side)}
    reads = [node for node in inside if isinstance(node, ast.Name) and node.id in names]
    stored = [node for node in reads if isinstance(node.ctx, ast.Store)]
    return len(names) == 1 and len(stored) == 1 and all(node in stored or id(node) in spared for node in reads)


def _sides(branch: ast.If | ast.Assert) -> Sequence[ast.AST]:
    """Returns what runs only where the branch raises or warns."""
    if isinstance(branch, ast.Assert):
        return [branch.msg] if branch.msg is not None else []
    return branch.body if _is_refusal(branch.body) else branch.orelse


def _asking(frame: FrameType | None) -> FrameType | None:
    """The frame of the model, of torch.nn or of torch.distributions that asks; those of the trace lie in front."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((TORCH, OURS)) or file.startswith(MODELS):
            return frame
        frame = frame.f_back
    return None


@lru_cache(maxsize=100)
def _nodes(file: str) -> tuple[ast.AST, ...]:
    """The syntax of a file, an outer part before what is in it."""
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()


@lru_cache(maxsize=100)
def _statements(file: str) -> tuple[ast.If | ast.Assert, ...]:
    return tuple(node for node in _nodes(file) if isinstance(node, ast.If | ast.Assert))


def _branch(file: str, line: int) -> _Branch | None:
    """The statement whose condition stands at the line, if one side of it only raises or warns."""
    for node in _statements(file):
        if not node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno):
            continue
        side: list[ast.stmt] = []
        masked = isinstance(node, ast.If) and writes_under_mask(node)
        if masked or isinstance(node, ast.Assert) or is_finite_clamp(node):
            wanted = True
        elif drops_idle_mask(node):
            wanted = False
        elif _is_refusal(node.body) or (file == CONSTRAINTS and isinstance(node.body[0], ast.Return)):
            wanted, side = False, node.body
        elif node.orelse and _is_refusal(node.orelse):
            wanted, side = True, node.orelse
        else:
            return None
        values = set(_values(node.test, wanted))
        raises = isinstance(node, ast.Assert) or any(isinstance(one, ast.Raise | ast.Return) for one in side)
        return _Branch(values.pop(), raises, ast.unparse(node.test), masked) if len(values) == 1 else None
    return None


def _is_refusal(body: Sequence[ast.stmt]) -> bool:
    """Whether statements only warn, or end with a raise that a few assignments prepare."""
    if isinstance(body[-1], ast.Raise):
        body = [one for one in body if not isinstance(one, ast.Assign)]
    return all(isinstance(one, ast.Raise) or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and
                                              called(one.value.func) in WARNS) for one in body)


def _values(test: ast.expr, wanted: bool) -> Iterator[bool]:
    """The answers that the parts of a condition are to get; `x is None`, which no tensor decides, is left out."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from _values(inner, not wanted)
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _values(part, wanted)
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
            return
        case _:
            yield wanted


def check_conditions(graph: Graph, loss: Node) -> Node:
    """Lets the program check every condition that the trace has written down, in place; returns the node of the loss.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in [node for node in graph.nodes if node.target is torch.ops.autoddl.holds.default]:
        found = next((x for x in _behind(node.args[0]) if _later(x, place[node], place)), None)
        if found is None:
            last = next(one for one in graph.nodes if one.op == "output")
            loss = _checked(last, loss, node)
        else:
            checked = _checked(node, found, node)
            for user in _later(found, place[node], place):
                user.replace_input_with(found, checked)
            place[checked] = place[node]
        graph.erase_node(node)
    return loss


def _behind(condition: Any) -> Iterator[Node]:
    """The tensors of whole numbers that a condition is made of, the nearest first."""
    front, seen = [condition], {condition}
    while front:
        node = front.pop(0)
        if node is not condition and isinstance(node.meta.get("val"), Tensor) and \
                not node.meta["val"].is_floating_point():
            yield node
        new = [x for x in node.all_input_nodes if x not in seen]
        seen.update(new)
        front += new


def _later(x: Node, place: int, places: Mapping[Node, int]) -> list[Node]:
    """The readers of x behind a place, but for the output."""
    return [user for user in x.users if places.get(user, -1) > place and user.op == "call_function"]


def _checked(before: Node, x: Node, holds: Node) -> Node:
    made = insert(before, custom_ops.checked, (x, *holds.args), x.meta["val"])
    made.meta = {**x.meta, **{key: holds.meta[key] for key in ("stack_trace", "nn_module_stack") if key in holds.meta}}
    return made
