"""Says by which degree of parallelism other programs know the message that an edge needs: of tp, cp or ep.

A plan's mesh axes have any names, and one axis may serve several ends. What a program sends beside its computation goes
by what makes or reads the tensor, looking through views and hubs:

    cp    attention that reads keys or values
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

KEYS = (1, 2)
"""The inputs of attention that are keys and values."""


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
        for k, t in enumerate(op.inputs):
            readers, makers = ends.readers(i, k), ends.makers(t)
            cp = [j for j, slot in readers if is_attention(graph.ops[j]) and slot in KEYS]
            near = [("cp", j) for j in cp] + [(name, j) for name in ("ep", "tp") for j in
                                              (*(j for j, _ in readers), *makers) if own[j] == name]
            if near:
                found[graph.tensors[t].name, op.name] = Role(near[0][0], graph.ops[near[0][1]].name)
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

    def readers(self, i: int, k: int) -> list[tuple[int, int]]:
        """Op i with its input k, or the ops behind it with theirs if it is a view or a hub."""
        if not self._passes(i):
            return [(i, k)]
        return [at for o in self.graph.ops[i].outputs for reader in self._readers[o] for at in self.readers(*reader)]


def _roles(graph: Graph) -> list[str]:
    """The role of every product, "" of any other op."""
    experts, weights = expert_products(graph), weights_of(graph)
    return ["ep" if op.name in experts else "tp" if is_weighted(op, weights) else "" for op in graph.ops]
