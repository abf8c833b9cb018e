"""Says by which degree of parallelism other programs know the message that an edge needs: of tp, cp or ep.

A plan's mesh axes have any names, and one axis may serve several ends. What a program sends beside its computation goes
by what makes or reads the tensor, looking through views and hubs:

    cp    attention
    ep    a product of experts (`operators.expert_rows`)
    tp    a product with a weight

The first of these counts that is met at either end. Other messages, as those of an embedding, have no role.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB
from autoddl.core.split_backward import weights_of
from autoddl.operators.expert_rows import expert_products, is_weighted
from autoddl.operators.ring import is_attention
from autoddl.operators.work import VIEWS, base

__all__ = ["Role", "message_roles"]

ROLES = ("cp", "ep", "tp")


class Role(NamedTuple):
    """The role of a message, and the op at one of its ends that gives it: the reader, or else the maker."""

    name: str
    op: str


@lru_cache(maxsize=64)
def message_roles(graph: Graph) -> Mapping[tuple[str, str], Role]:
    """By (name of a tensor, name of an op that reads it), the role of the messages of that edge, if it has one."""
    own, ends = _roles(graph), _Ends(graph)
    found = {}
    for i, op in enumerate(graph.ops):
        for t in op.inputs:
            near = [*ends.readers(i), *ends.makers(t)]
            role = next((Role(name, graph.ops[j].name) for name in ROLES for j in near if own[j] == name), None)
            if role is not None:
                found[graph.tensors[t].name, op.name] = role
    return MappingProxyType(found)


class _Ends:
    """What makes and reads the tensors of a graph, looking through views and hubs."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self._makers, self._readers = graph, graph.producers(), graph.consumers()

    def _passes(self, i: int) -> bool:
        return self.graph.ops[i].target == HUB or base(self.graph.ops[i]) in VIEWS

    def makers(self, t: int) -> list[int]:
        """The op that makes tensor t, none of an input."""
        i = self._makers.get(t)
        return [] if i is None else self.makers(self.graph.ops[i].inputs[0]) if self._passes(i) else [i]

    def readers(self, i: int) -> list[int]:
        """Op i, or the ops behind it if it is a view or a hub."""
        if not self._passes(i):
            return [i]
        return [j for o in self.graph.ops[i].outputs for reader, _ in self._readers[o] for j in self.readers(reader)]


def _roles(graph: Graph) -> list[str]:
    """The role of every op by itself, "" of one that has none."""
    experts, weights = expert_products(graph), weights_of(graph)
    return ["cp" if is_attention(op) else "ep" if op.name in experts else "tp" if is_weighted(op, weights) else ""
            for op in graph.ops]
