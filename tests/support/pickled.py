"""Pickle by value, for what ranks are sent: tensors, and captured models with their programs.

    pickle.loads(pickled(captured))      the same graph, and the same program under the same names
"""

import io
import pickle
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

__all__ = ["pickled"]

Row = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""A node: its name, op, target, args, kwargs, and the line that it comes from."""


@dataclass(frozen=True)
class _Place:
    """Node k of a program, where another one reads it."""

    k: int


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, MappingProxyType):
            return _frozen, (dict(value),)
        if isinstance(value, torch._ops.OpOverload):
            return _operator, (value.namespace, value._opname, value._overloadname)
        return (_program, (_rows(value.graph),)) if isinstance(value, fx.GraphModule) else NotImplemented


def _frozen(value: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(value)


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _rows(graph: fx.Graph) -> list[Row]:
    places = {node: _Place(k) for k, node in enumerate(graph.nodes)}

    def read(value: Any) -> Any:
        return places[value] if isinstance(value, fx.Node) else value

    return [(node.name, node.op, node.target, *fx.node.map_aggregate((node.args, node.kwargs), read),
             {"stack_trace": node.meta.get("stack_trace")}) for node in graph.nodes]


def _program(rows: list[Row]) -> fx.GraphModule:
    graph, nodes = fx.Graph(), list[fx.Node]()
    for name, op, target, args, kwargs, meta in rows:
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda x: nodes[x.k] if isinstance(x, _Place) else x)
        nodes.append(graph.create_node(op, target, args, kwargs, name=name))
        nodes[-1].meta = meta
    return fx.GraphModule(torch.nn.Module(), graph)


def pickled(value: object) -> bytes:
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()
