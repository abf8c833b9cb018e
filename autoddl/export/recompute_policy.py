"""Finds the short policy of recomputation that names the blocks which a plan recomputes.

Among none, full, selective, first-N and every-K, with levels. Where none does, the policy names every block.
"""

from collections.abc import Sequence

from autoddl.core.graph import Graph
from autoddl.core.recompute import NO_RECOMPUTE, blocks_of, policy_blocks, policy_text

__all__ = ["short_policy"]


def short_policy(graph: Graph, names: Sequence[str]) -> str:
    """The shortest policy that recomputes just the blocks `names` of a graph with hubs."""
    if not names:
        return NO_RECOMPUTE
    count, wanted = len(blocks_of(graph)), frozenset(names)
    some = [f"first-{len(names)}", *(f"every-{k}" for k in range(2, count + 1) if -(-count // k) == len(names))]
    leveled = (f"{one}:{level}" for level in ("selective", "light") for one in some)
    for policy in ("full", "selective", "light", *some, *leveled):
        if frozenset(policy_blocks(graph, policy)) == wanted:
            return policy
    return policy_text(names)
