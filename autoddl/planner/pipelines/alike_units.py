"""Tells which units and stages are alike in all but names, so that they are searched once.

    structure         a hash of the graph of a stage
    signature         a name of some ops in a row of the whole graph, equal for units of which graphs are alike
    computed_again    numbers of what a stage computes for itself: units that read other such work are not alike
"""

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence

from autoddl.core.graph import Graph, Kind, Op

__all__ = ["computed_again", "signature", "structure"]


def structure(graph: Graph) -> str:
    """A hash of a graph without its names: equal for stages that are alike in all but names."""
    rows = [[t.shape, t.dtype, t.kind, bool(t.fqn), t.trained, t.master, t.reduced] for t in graph.tensors]
    rows += [[op.target, op.inputs, op.slots, op.outputs, [pair for pair in op.args if pair[0] not in ("key", "stage")]]
             for op in graph.ops]
    text = json.dumps([rows, graph.outputs, graph.updates], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def computed_again(graph: Graph, ops: Sequence[Op]) -> dict[int, int]:
    """Numbers of the tensors that depend on no parameter, above 0: equal where equal ops make them."""
    dependent, known, found = graph.dependent(), dict[Hashable, int](), dict[int, int]()
    for op in ops:
        if dependent.isdisjoint(op.outputs):
            read = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, found.get(t, 0)) for t in op.inputs)
            made = op.target, op.slots, tuple(pair for pair in op.args if pair[0] != "key"), read
            found |= {t: known.setdefault((made, n), len(known) + 1) for n, t in enumerate(op.outputs)}
    return found


def signature(graph: Graph, ops: Sequence[Op], first: int, end: int, before: Sequence[int], behind: Sequence[int],
              again: Mapping[int, int]) -> Hashable:
    """A name of the ops [first, end): each with its arguments, tensors, and where it reads from.

    They read the tensors `before` from earlier ops, and later ones read those `behind`. Of tensors that are computed
    `again`, their numbers tell how (`computed_again`).
    """
    made = {t: (i - first, n) for i, op in enumerate(ops[first:end], start=first) for n, t in enumerate(op.outputs)}
    given = {t: k for k, t in enumerate(before)}
    leaves: dict[int, int] = {}

    def source(t: int) -> tuple[object, ...]:
        tensor = graph.tensors[t]
        about = (tensor.shape, tensor.dtype, tensor.trained, tensor.master, tensor.reduced)
        if t in made:
            return (*about, made[t])
        if t in given:
            return (*about, "given", given[t])
        return (*about, tensor.kind is Kind.PARAMETER, again.get(t, 0), leaves.setdefault(t, len(leaves)))

    rows = tuple((op.target, op.slots, tuple(pair for pair in op.args if pair[0] != "key"),
                  tuple(map(source, op.inputs)), tuple(map(source, op.outputs))) for op in ops[first:end])
    return rows, tuple(made.get(t, ("given", given.get(t))) for t in behind)
