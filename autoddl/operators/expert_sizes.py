"""Counts the rows that a mixture of experts (`autoddl.experts`) multiplies on one rank.

    rows = tokens * choices * experts here / experts * load

Tokens are sorted by expert, and a rank multiplies those rows alone whose expert it has. How many these are is known
only when a step runs. Planned is the mean times a load, which is 1 where experts are chosen equally often.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.core.graph import Op

__all__ = ["BALANCED", "ExpertSizes", "expert_sizes"]

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


def expert_sizes(op: Op, shapes: Sequence[tuple[int, ...]], sent: bool = False, load: float = BALANCED) -> ExpertSizes:
    """The sizes of `op` on shards of `shapes`, which are those of its inputs.

    Where tokens are `sent` to the ranks of their experts, as many rows come as go, times the load."""
    (tokens, wide), (_, choices), up, down = shapes[0], shapes[1], shapes[3], shapes[4]
    arguments = dict(op.args)
    (out, inner), written = ((down[2], down[1]), up[2]) if arguments["transposed"] else ((down[1], down[2]), up[1])
    whole = int(str(arguments["count"])) or down[0]
    share = load if sent else min(1.0, down[0] / whole * load)
    return ExpertSizes(tokens * choices * share, down[0], wide, inner * int(str(arguments["halves"])),
                       written, inner, out)
