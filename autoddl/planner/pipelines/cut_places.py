"""Finds where the graph of a model may be cut into stages: at the ends of blocks, or before modules that are named."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import needed_ops
from autoddl.core.recompute import blocks_of
from autoddl.core.stages import crossing

__all__ = ["places_of"]

PLACES = 16
"""Places at which a model without blocks may be cut, at most."""


def places_of(graph: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """The positions at which a captured graph may be cut: where blocks begin and end, or where `cuts` name a module.

    A model without blocks may be cut wherever least is sent, at no more than PLACES. Of places between which nothing is
    made that is sent, such as a count of batches, it is the first. Of places between which no parameter is read it is
    the one where least is sent, since ranks need some (`core.stages.check_parameters`). Raises InputError for a module
    that runs no op, or before which nothing runs. Raises it for modules that are not in the order in which they run.
    """
    ops = needed_ops(graph)
    if cuts:
        named = tuple(_begin(graph, name) for name in cuts)
        for (a, before), (b, after) in pairwise(zip(named, cuts, strict=True)):
            if a >= b:
                raise InputError(f"cut names {before!r} before {after!r}, which does not run after it: name the "
                                 "modules with which stages begin in the order in which they run, each once")
        return named
    alive = replace(graph, ops=ops, outputs=graph.outputs[:1])
    sent = crossing(graph)
    blocks = blocks_of(alive)
    found = sorted({at for block in blocks for at in (block.start, block.end) if 0 < at < len(ops) and sent[at - 1]})
    if found:
        return _apart(alive, found, sent)
    least = min((len(one) for one in sent if one), default=0)
    narrow = [i + 1 for i, one in enumerate(sent) if len(one) == least and one and (i == 0 or one != sent[i - 1])]
    narrow = list(_apart(alive, narrow, sent))
    return tuple(narrow[::max(1, -(-len(narrow) // PLACES))])


def _apart(graph: Graph, places: Sequence[int], sent: Sequence[frozenset[int]]) -> tuple[int, ...]:
    """Keeps one of the places with as many readers of parameters before them: that where least is sent.

    Places without one before them, or behind, are left out.
    """
    reads = [any(graph.tensors[t].kind is Kind.PARAMETER for t in op.inputs) for op in graph.ops]
    before = [0, *accumulate(reads)]
    groups = groupby(places, key=before.__getitem__)
    return tuple(min(group, key=lambda at: sum(graph.tensors[t].nbytes for t in sent[at - 1]))
                 for count, group in groups if 0 < count < before[-1])


def _begin(graph: Graph, name: str) -> int:
    """The position of the first op of a module."""
    ops = needed_ops(graph)
    found = next((i for i, op in enumerate(ops) if op.module == name or op.module.startswith(f"{name}.")
                  or op.module.endswith(f".{name}") or f".{name}." in op.module), None)
    if not found:
        modules = ", ".join(list(dict.fromkeys(op.module for op in ops if op.module))[:6])
        raise InputError(f"there is no cut at {name!r}: it names a module before which others run, like {modules}")
    return found
