"""Builds the Graph of an fx program: every call becomes an Op, every tensor that it yields a Tensor."""

import inspect
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from autoddl.capture.fx_tools import call_arguments
from autoddl.capture.own_rules import own_arguments
from autoddl.capture.rewrites.own_backward import OwnBackward
from autoddl.capture.source_lines import line_of
from autoddl.core.errors import CaptureError
from autoddl.core.graph import Graph, Kind, Op, Tensor, Value
from autoddl.operators.kernels import custom_ops

__all__ = ["Key", "Leaf", "check_shapes", "tabulate"]

Key = str | tuple[str, int]
"""An fx node, or one result of a node that yields several."""

BOUND_LATER = {"seed", "index"}
"""Arguments of our own functions that only a run can know."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placeholder of the program, with what the Graph says of its tensor (`core.graph.Tensor`)."""

    node: str
    """Name of the placeholder."""
    fqn: str
    """Name of the parameter or buffer in the module, or of the input in the call."""
    kind: Kind
    """Whether it is a parameter, a buffer, a constant or an input."""
    aliases: tuple[str, ...] = ()
    """Its other names in the module."""
    trained: bool = False
    """Whether it requires a gradient."""
    tied: tuple[str, ...] = ()
    """Placeholders of the aliases."""
    master: str = ""
    """dtype of the master copy, where that is another."""
    reduced: str = ""
    """dtype in which its gradients are reduced, where that is another."""
    infinite: bool = False
    """Whether it has infinite values."""


def tabulate(program: GraphModule, leaves: tuple[Leaf, ...], updates: tuple[str, ...]
             ) -> tuple[Graph, tuple[str, ...], dict[Key, int]]:
    """(the Graph, the name of the fx node of each op, the position of the tensor of each fx node).

    `updates` names the buffers whose new values are the program's last outputs. Raises CaptureError for a call of no
    operator, or one that yields anything but tensors of known shape.
    """
    by_name = {leaf.node: leaf for leaf in leaves}
    tensors: list[Tensor] = []
    ids: dict[Key, int] = {}
    ops: list[Op] = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            leaf = by_name[node.name]
            ids[node.name] = len(tensors)
            made = _tensor(node.name, node.meta["val"], leaf.kind, leaf.fqn, leaf.aliases, leaf.trained)
            tensors.append(replace(made, master=leaf.master, reduced=leaf.reduced, infinite=leaf.infinite))
        elif node.target is operator.getitem:
            ids[node.name] = ids[(node.args[0].name, node.args[1])]
        elif node.op == "call_function":
            inputs = tuple(_inputs(node))
            outputs = tuple(_results(node, tensors, ids))
            reads, slots = tuple(ids[value.name] for _, value in inputs), tuple(slot for slot, _ in inputs)
            line = line_of(node.meta.get("stack_trace"))
            said = own_arguments(node.target, slots, [tensors[t] for t in reads], [tensors[t] for t in outputs], line)
            ops.append(Op(node.name, _target(node), reads, slots, outputs, (*_plain(node), *said), _module(node), line))
    last = next(node for node in program.graph.nodes if node.op == "output")
    returned = tuple(ids[node.name] for node in last.args[0])
    buffers = {name: ids[leaf.node] for leaf in leaves if leaf.kind is Kind.BUFFER
               for name in (leaf.fqn, *leaf.aliases)}
    split = len(returned) - len(updates)
    pairs = tuple(zip((buffers[name] for name in updates), returned[split:], strict=True))
    graph = Graph(tuple(tensors), tuple(ops), returned[:split], pairs)
    return graph, tuple(op.name for op in ops), ids


def _tensor(name: str, value: torch.Tensor, kind: Kind, fqn: str = "", aliases: tuple[str, ...] = (),
            trained: bool = False) -> Tensor:
    return Tensor(name, tuple(value.shape), _text(value.dtype), kind, fqn, aliases, trained)


def _results(node: Node, tensors: list[Tensor], ids: dict[Key, int]) -> Iterator[int]:
    """Adds the tensors that the node yields, and yields their positions."""
    value = node.meta.get("val")
    several = isinstance(value, tuple | list)
    for k, result in enumerate(value if several else (value,)):  # type: ignore[arg-type]
        if result is None and several:
            continue
        _check(node, result)
        ids[(node.name, k) if several else node.name] = len(tensors)
        yield len(tensors)
        tensors.append(_tensor(f"{node.name}.{k}" if several else node.name, result, Kind.RESULT))


def check_shapes(module: GraphModule) -> None:
    """Raises CaptureError at the first operator with a result whose shape values decide."""
    for node in module.graph.nodes:
        for result in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(result, torch.Tensor):
                _check(node, result)


def _check(node: Node, result: Any) -> None:
    """Raises CaptureError where a result is no tensor of known shape."""
    tensor = isinstance(result, torch.Tensor)
    if not tensor or not all(isinstance(size, int) for size in result.shape):
        raise CaptureError(f"{_target(node)} at {line_of(node.meta.get('stack_trace'))} makes a "
                           f"{'shape' if tensor else 'number'} of the values of a tensor; a plan needs one graph for "
                           "all inputs: keep tensors, of fixed shape, or hold in a buffer what no batch changes, as "
                           "edges of one graph")


def _target(node: Node) -> str:
    """`aten.linear.default`, `autoddl.dropout`, or `function.GeLU` of an autograd Function."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    if isinstance(node.target, OwnBackward):
        return node.target.target
    name = getattr(node.target, "__name__", str(node.target))
    if name.startswith("auto_functionalized"):
        raise CaptureError(f"{node.args[0]} at {line_of(node.meta.get('stack_trace'))} writes into its arguments, "
                           "which a graph does not show: write it so that it returns a new tensor")
    if getattr(node.target, "__module__", "") != custom_ops.__name__:
        raise CaptureError(f"{name} at {line_of(node.meta.get('stack_trace'))} is no operator of torch.ops, and none "
                           "but these run as planned: write it with operators")
    return f"autoddl.{name}"


def _arguments(node: Node) -> dict[str, Any]:
    """Every argument in schema order by name, defaults included."""
    if isinstance(node.target, torch._ops.OpOverload):
        return call_arguments(node)
    assert callable(node.target)
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in BOUND_LATER}


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(isinstance(part, Node) for part in value)


def _inputs(node: Node) -> Iterator[tuple[str, Node]]:
    for name, value in _arguments(node).items():
        if isinstance(value, Node):
            yield name, value
        elif _is_list(value):
            yield from ((f"{name}.{k}", part) for k, part in enumerate(value) if isinstance(part, Node))


def _plain(node: Node) -> Iterator[tuple[str, Value]]:
    """Yields all arguments but tensors, by name; for a list with gaps, `NAME_none` says which members are missing."""
    for name, value in _arguments(node).items():
        if _is_list(value):
            if any(part is None for part in value):
                yield f"{name}_none", tuple(part is None for part in value)
        elif not isinstance(value, Node) and name not in ("device", "pin_memory", "non_blocking"):
            yield name, _text(value)


def _text(value: Any) -> Any:
    """The value in frozen and plain form: tuples for lists, text for dtypes, layouts and memory formats."""
    if isinstance(value, tuple | list):
        return tuple(_text(part) for part in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")


def _module(node: Node) -> str:
    """Path of the innermost module whose forward called the operator."""
    stack = node.meta.get("nn_module_stack")
    return str(list(stack.values())[-1][0]).split("@")[0] if stack else ""
