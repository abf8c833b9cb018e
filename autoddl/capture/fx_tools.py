"""Provides small tools for rewriting fx graphs in place."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from autoddl.operators.kernels.arguments import parameters

__all__ = ["call_arguments", "dtype_of", "insert", "name_of", "operators", "replace", "with_inputs", "written_by"]


def name_of(target: Any) -> str:
    """`linear.default` for an aten operator, else the text of the target."""
    return str(target).removeprefix("aten.")


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of the tensor that a node yields."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def call_arguments(node: Node) -> dict[str, Any]:
    """Every argument of an operator call by name, defaults included."""
    values = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        default = argument.default_value if argument.has_default_value() else None
        values[argument.name] = (node.args[position] if position < len(node.args)
                                 else node.kwargs.get(argument.name, default))
    return values


def operators(module: GraphModule) -> list[Node]:
    """The nodes of a program that call an operator of torch.ops, in order."""
    return [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


def insert(before: Node, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> Node:
    """A new call in front of `before`, at its source line, with `value` the fake tensor that it yields."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args)
    node.meta = {**before.meta, "val": value}
    return node


def replace(node: Node, new: Any) -> None:
    """Replaces a node by a value at all its readers, and erases it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def with_inputs(node: Node, inputs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with its tensors replaced by `inputs`, slot by slot: `NAME`, or `NAME.k` in a list."""
    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, Node):
            return inputs[name]
        if isinstance(value, list | tuple) and any(isinstance(part, Node) for part in value):
            return [inputs[f"{name}.{k}"] if isinstance(part, Node) else part for k, part in enumerate(value)]
        return value

    names = parameters(node.target)  # type: ignore[arg-type]
    return (tuple(replaced(name, value) for name, value in zip(names, node.args, strict=False)),
            {name: replaced(name, value) for name, value in node.kwargs.items()})


def written_by(node: Node) -> list[Node]:
    """The nodes that an operator writes into."""
    names = [one.name for one in node.target._schema.arguments  # type: ignore[union-attr]
             if one.alias_info is not None and one.alias_info.is_write]
    places = [i for i, one in enumerate(node.target._schema.arguments)  # type: ignore[union-attr]
              if one.name in names]
    given = [node.args[i] for i in places if i < len(node.args)] + [node.kwargs[name] for name in names
                                                                   if name in node.kwargs]
    return [one for one in given if isinstance(one, Node)]
