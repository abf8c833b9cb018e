"""Which blocks the search may compute again in backward, and what of their bytes depends on which of them.

Every block of the model has one *policy*, a variable of the cost network. Its options are levels of recomputation
(`core.recompute`), level 0 the least: that nothing is computed again, or `light`. Seconds and bytes of an op, and of
the edges into it, depend on the level of its block alone. An output may live longer because a block that is computed
again reads it: these bytes depend on the level of that block too. So a cost is over at most two policies:

    own      that of the block in which the op is
    later    that of the block which keeps the op's outputs, the next one in most models

What lives when is asked for blocks of even and of odd number apart: blocks that follow each other then have any two
levels. Where an output is kept for several blocks, or for one of the same parity, those bytes are left out of the rows.
A row is below the memory line then, never above it. So is the copy of a tied weight that some block reads; where all
who read it are outside of blocks, it counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import HUB
from autoddl.core.recompute import FULL, LIGHT, NO_RECOMPUTE, blocks_of, recompute_entry, select_blocks
from autoddl.operators.work import VIEWS, base, read_back
from autoddl.pricing.lifetimes import Lifetimes, Owner, Term
from autoddl.pricing.price import Pricing

__all__ = ["NO_POLICIES", "Deciders", "Policies", "at_levels", "deciders_of", "policies_of", "separable"]


@dataclass(frozen=True, slots=True)
class Policies:
    """The blocks that have a policy, in order, by name, and the levels that each may take, the least first.

    Without blocks there is one level.
    """

    blocks: tuple[str, ...] = ()
    levels: tuple[str, ...] = (NO_RECOMPUTE,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Levels of every block."""
        return (len(self.levels),) * len(self.blocks)

    def alternating(self, even: int, odd: int) -> tuple[int, ...]:
        """The levels at which blocks of even and of odd number have these."""
        return tuple(odd if k % 2 else even for k in range(len(self.blocks)))

    def numbers(self, graph: Graph) -> tuple[int, ...]:
        """For every op of a graph with hubs the number of the policy of its block, -1 for none."""
        found = [-1] * len(graph.ops)
        for k, block in enumerate(select_blocks(graph, self.blocks)):
            found[block.start:block.end] = [k] * (block.end - block.start)
        return tuple(found)


NO_POLICIES = Policies()


def policies_of(graph: Graph, levels: Sequence[str] = (FULL,)) -> Policies:
    """The policies of all blocks of a graph with hubs, each of none and these levels; no policies without levels.

    Where light is one of them, it stands in the place of none: programs by hand keep no more.
    """
    names = tuple(block.name for block in blocks_of(graph))
    every = levels if LIGHT in levels else (NO_RECOMPUTE, *levels)
    return Policies(names, tuple(every)) if names and levels else NO_POLICIES


def at_levels(pricing: Pricing, policies: Policies, levels: Sequence[int]) -> Pricing:
    """The prices where every block is at its level; those given where there are no policies."""
    if not policies.blocks:
        return pricing
    entries = tuple(recompute_entry(name, policies.levels[level])
                    for name, level in zip(policies.blocks, levels, strict=True)
                    if policies.levels[level] != NO_RECOMPUTE)
    return pricing if entries == pricing.recompute else replace(pricing, recompute=entries)


def separable(pricing: Pricing, policies: Policies) -> Policies:
    """The policies without those of blocks that share a parameter which backward reads for their sake alone.

    Whether that is gathered again would depend on all of them.
    """
    graph, where = pricing.graph, policies.numbers(pricing.graph)
    uses, flows, shared = graph.consumers(), graph.differentiable(), set[int]()
    every = frozenset(op.name for op in graph.ops)
    for t, tensor in enumerate(graph.tensors):
        if tensor.kind is Kind.PARAMETER and not read_back(t, graph, uses, flows):
            met = {where[i] for i in _readers(t, graph)}
            if len(met) > 1 and read_back(t, graph, uses, flows, every):
                shared |= met
    if shared <= {-1}:
        return policies
    left = tuple(name for k, name in enumerate(policies.blocks) if k not in shared)
    return replace(policies, blocks=left) if left else NO_POLICIES


def _readers(t: int, graph: Graph) -> set[int]:
    """The ops that read tensor t, itself or behind hubs and views, with these."""
    found = set[int]()
    for i, _ in graph.consumers()[t]:
        found.add(i)
        if graph.ops[i].target == HUB or base(graph.ops[i]) in VIEWS:
            for o in graph.ops[i].outputs:
                found |= _readers(o, graph)
    return found


@dataclass(frozen=True, slots=True)
class Deciders:
    """Which policies decide how long the bytes of an owner live, by number: `own` and `later`."""

    blocks: tuple[str, ...]
    own: Mapping[Owner, int]
    later: Mapping[Owner, int]

    def counts(self, term: Term) -> bool:
        """Whether a term is counted: it lives for no block, or for one of the two that decide."""
        if not term.block or not self.blocks:
            return True
        known = self.own.get(term.owner, -1), self.later.get(term.owner, -1)
        return any(k >= 0 and self.blocks[k] == term.block for k in known)


def deciders_of(graph: Graph, policies: Policies, lifetimes: Iterable[Lifetimes]) -> Deciders:
    """The deciders of all owners, from the lifetimes under several levels."""
    where, number = policies.numbers(graph), {name: k for k, name in enumerate(policies.blocks)}
    own = {(kind, i, k): where[i] for kind, i, k in _owners(graph) if where[i] >= 0}
    kept = defaultdict[Owner, set[int]](set)
    for one in lifetimes:
        for term in one.terms:
            if term.block in number and number[term.block] != own.get(term.owner, -1):
                kept[term.owner].add(number[term.block])
    later = {owner: min(blocks) for owner, blocks in kept.items()
             if len(blocks) == 1 and (owner not in own or (own[owner] - min(blocks)) % 2)}
    return Deciders(policies.blocks, own, later)


def _owners(graph: Graph) -> Iterable[Owner]:
    """Every owner that is an op or an edge."""
    for i, op in enumerate(graph.ops):
        yield "op", i, 0
        for k in range(len(op.inputs)):
            yield "edge", i, k
