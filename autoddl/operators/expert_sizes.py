"""Counts the rows that a mixture of experts (`autoddl.experts`) multiplies on one rank.

    rows = tokens * choices * experts here / experts * load

Tokens are sorted by expert, and a rank multiplies those rows alone whose expert it has. How many these are is known
only when a step runs. Planned is the mean times a load, which is 1 where experts are chosen equally often. Another load
is an argument of the op (`with_expert_load`), so that prices, memory and every later answer have it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoddl.core.graph import ASSUMED_LOAD, Graph, Op

__all__ = ["BALANCED", "EXCHANGE", "ExpertSizes", "expert_load", "expert_sizes", "with_expert_load"]

EXPERTS = "autoddl.experts"
EXCHANGE = "exchange"
"""The kind of an all-to-all whose parts have sizes of their own."""

BALANCED = 1.0
"""The most rows of a rank over the mean, where some experts are elsewhere: routers are trained to balance."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The sizes of a mixture on one rank."""

    rows: float
    """Rows that are multiplied, one per token and chosen expert."""
    experts: int
    """Experts here."""
    wide: int
    """Elements of a token."""
    upper: int
    """Elements of a row of the upper product, which has one or two halves of the inner width."""
    written: int
    """The same of the upper matrix: more where it holds all of the inner width, and a part is used."""
    inner: int
    """Elements of the inner width here."""
    out: int
    """Elements of a row of the result."""


def with_expert_load(graph: Graph, load: float) -> Graph:
    """The graph whose layers of experts are planned for a load; itself where that is balanced."""
    if load == BALANCED:
        return graph
    return replace(graph, ops=tuple(replace(op, args=(*op.args, (ASSUMED_LOAD, load))) if op.target == EXPERTS else op
                                    for op in graph.ops))


def expert_load(graph: Graph) -> float | None:
    """The load that layers of experts are planned for; None where there are none."""
    found = next((dict(op.args) for op in graph.ops if op.target == EXPERTS), None)
    return None if found is None else float(str(found.get(ASSUMED_LOAD, BALANCED)))


def expert_sizes(op: Op, shapes: Sequence[tuple[int, ...]], sent: bool = False) -> ExpertSizes:
    """The sizes of `op` on shards of `shapes`, which are those of its inputs.

    Where tokens are `sent` to the ranks of their experts, as many rows come as go, times the load."""
    (tokens, wide), (_, choices), up, down = shapes[0], shapes[1], shapes[3], shapes[4]
    arguments = dict(op.args)
    (out, inner), written = ((down[2], down[1]), up[2]) if arguments["transposed"] else ((down[1], down[2]), up[1])
    whole, load = int(str(arguments["count"])) or down[0], float(str(arguments.get(ASSUMED_LOAD, BALANCED)))
    share = load if sent else min(1.0, down[0] / whole * load)
    return ExpertSizes(tokens * choices * share, down[0], wide, inner * int(str(arguments["halves"])),
                       written, inner, out)
