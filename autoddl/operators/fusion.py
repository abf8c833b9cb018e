"""Chains of elementwise ops of which a compiler makes one kernel (torch.compile; Ansel et al. 2024, "PyTorch 2").

    inside   the share of an op's bytes that never leave the kernel: an input that another op of the chain makes for it
             alone, an output that only another op of the chain reads
    joins    whether there is such an input: then the op launches nothing of its own

    seconds(memory-bound kernel of an op in a chain) = seconds((1 - inside) bytes) - launch if it joins

Backward runs the chain in reverse, so it saves the same share. Two approximations:

    * Neighbours are assumed to have the same layout. A conversion between them breaks the chain, and the price is then
      too low by the bytes that were counted as inside.
    * Values that a compiler recomputes instead of keeping them are not counted as saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoddl.core.graph import Graph, Op
from autoddl.cost_models import Cluster
from autoddl.operators.families import flagged
from autoddl.operators.work import base

__all__ = ["ALONE", "Chained", "as_compiled", "chains", "inside"]

FUSED = flagged("fuses")


@dataclass(frozen=True, slots=True)
class Chained:
    """The saving of one op of a chain: the share of its bytes, and whether it saves its launch."""

    inside: float = 0.0
    joins: bool = False


ALONE = Chained()


def as_compiled(cluster: Cluster) -> Cluster:
    """Returns `cluster` with every device set to run compiled programs."""
    return replace(cluster, device=replace(cluster.device, compiled=True),
                   parts=tuple((replace(device, compiled=True), ranks) for device, ranks in cluster.parts))


def chains(graph: Graph) -> Mapping[str, Chained]:
    """Maps the name of every op that a compiler fuses with others to its saving."""
    found, makers, users = {}, graph.producers(), graph.consumers()
    for op in graph.ops:
        one = _chained(graph, op, makers, users)
        if one != ALONE:
            found[op.name] = one
    return MappingProxyType(found)


def inside(graph: Graph, op: Op) -> float:
    """Returns the share of one op's bytes that never leave the kernel of its chain."""
    return _chained(graph, op, graph.producers(), graph.consumers()).inside


def _chained(graph: Graph, op: Op, makers: Mapping[int, int], users: Mapping[int, tuple[tuple[int, int], ...]]
             ) -> Chained:
    if base(op) not in FUSED:
        return ALONE
    tensors = graph.tensors
    given = [t for t in op.inputs if t in makers and base(graph.ops[makers[t]]) in FUSED and len(users[t]) == 1]
    taken = [t for t in op.outputs if len(users[t]) == 1 and base(graph.ops[users[t][0][0]]) in FUSED]
    moved = sum(tensors[t].nbytes for t in (*op.inputs, *op.outputs))
    stays = sum(tensors[t].nbytes for t in (*given, *taken))
    return Chained(stays / moved if moved else 0.0, bool(given))
