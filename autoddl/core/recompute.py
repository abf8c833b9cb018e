"""Names the blocks of a model that backward computes again instead of keeping what their forward saved.

A *block* is a repeated part of the user's module: the ops of one member of a list of modules, like `h.3` or `layer1.0`,
from the first to the last in the order in which they run. A block that is recomputed keeps the tensors that it reads
from outside, until its backward has run its forward a second time.

A *policy* says which blocks are recomputed, as text:

    none       no block
    full       every block
    every-K    every K-th block, the first, the (K+1)-th and so on
    first-N    the first N blocks: their backward comes last, so what the others saved is gone by then
    h.0+h.2    the blocks of these names
    search     whichever the search finds best, block by block (`pricing.policies`)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB

__all__ = ["FULL", "NO_RECOMPUTE", "SEARCH", "Block", "RecomputedPart", "blocks_of", "check_policy", "policy_blocks",
           "policy_text", "recompute_entry", "recomputed_ops", "recomputed_parts", "recomputes_more", "select_blocks"]

NO_RECOMPUTE = "none"

FULL = "full"

SEARCH = "search"
"""The policy that leaves the level of every block to the search."""

_POLICY = re.compile(r"none|full|search|(every|first)-([1-9][0-9]*)")

_LEAST_OPS = 2
"""Ops of a block, hubs not counted: keeping the input of a single op saves nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    """The ops [start, end) of a graph with hubs; `name` is that of the user's submodule."""

    name: str
    start: int
    end: int


def blocks_of(graph: Graph) -> tuple[Block, ...]:
    """The blocks of a graph with hubs, in order. Parts of a model that run interleaved are none."""
    places: dict[str, list[int]] = {}
    for i, op in enumerate(graph.ops):
        if name := _member(op.module):
            places.setdefault(name, []).append(i)
    found = [Block(name, at[0], at[-1] + 1) for name, at in places.items()
             if sum(graph.ops[i].target != HUB for i in at) >= _LEAST_OPS]
    return tuple(one for one in found if not any(
        other is not one and other.start < one.end and one.start < other.end for other in found))


def _member(module: str) -> str:
    """The outermost member of a list of modules that `module` is in, or "": `h.3` for `h.3.attn.c_proj`."""
    parts = module.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[:at + 1])


def check_policy(text: str) -> str:
    """The policy as it is written. Raises InputError for one that there is not."""
    if _POLICY.fullmatch(text) is None and not all(_member(name) == name != "" for name in text.split("+")):
        raise InputError(f"there is no recomputation {text!r}; there are none, full, search, every-K and first-N, "
                         "like 'every-2' or 'first-8', and names of blocks, like 'h.0+h.2'")
    return text


def recompute_entry(name: str, level: str) -> str:
    """The entry of a plan that says that the block `name` is computed again at this level: `h.3` at level full."""
    return name if level == FULL else f"{name}:{level}"


def policy_text(names: Sequence[str]) -> str:
    """The policy that recomputes the blocks of these names."""
    return "+".join(names) or NO_RECOMPUTE


def recomputes_more(more: str, less: str) -> bool:
    """Whether without a budget no plan under a policy is faster than the best under another, on every model: it
    recomputes all blocks that the other does, or the other may recompute none."""
    if less in (NO_RECOMPUTE, SEARCH, more) or more == FULL:
        return True
    one, other = _POLICY.fullmatch(more), _POLICY.fullmatch(less)
    if one is None or other is None or one[1] != other[1] or one[1] is None:
        return False
    return int(one[2]) >= int(other[2]) if one[1] == "first" else int(other[2]) % int(one[2]) == 0


def policy_blocks(graph: Graph, policy: str) -> tuple[str, ...]:
    """Names of the blocks of a graph with hubs that a policy recomputes in any case.

    Raises InputError where the policy asks for blocks and the model has none.
    """
    if check_policy(policy) in (NO_RECOMPUTE, SEARCH):
        return ()
    names = [block.name for block in blocks_of(graph)]
    if not names:
        raise InputError(f"recomputation {policy} asks for the blocks of a model, and this one has no list of modules: "
                         "plan with recompute='none'")
    found = _POLICY.fullmatch(policy)
    if found is None:
        return tuple(block.name for block in select_blocks(graph, policy.split("+")))
    kind, number = found[1], int(found[2] or 1)
    return tuple(names[:number] if kind == "first" else names[::number])


def select_blocks(graph: Graph, names: Sequence[str]) -> tuple[Block, ...]:
    """The blocks of these names, in order. Raises InputError for a name that no block of the graph has."""
    if not names:
        return ()
    known = {block.name: block for block in blocks_of(graph)}
    for name in names:
        if name not in known:
            raise InputError(f"{name} is no block of this model that can be recomputed; its blocks are "
                             f"{', '.join(known) or 'none'}")
    return tuple(sorted((known[name] for name in set(names)), key=lambda block: block.start))


@dataclass(frozen=True, slots=True)
class RecomputedPart:
    """What backward runs again of a block: the places of its `ops`, and the tensors that these read from outside, in
    the order of first use, and write for others."""

    block: Block
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]


def recomputed_parts(graph: Graph, blocks: Sequence[Block]) -> tuple[RecomputedPart, ...]:
    """What is computed again of some blocks of a graph with hubs.

    Ops of the cone are not: they run before the block, and their results stay.
    """
    if not blocks:
        return ()
    dependent = graph.dependent()
    readers, ends = graph.consumers(), {graph.outputs[0], *(new for _, new in graph.updates)}
    found = []
    for block in blocks:
        ops = [i for i in range(block.start, block.end) if not dependent.isdisjoint(graph.ops[i].inputs)]
        made = [t for i in ops for t in graph.ops[i].outputs]
        own = set(made)
        reads = dict.fromkeys(t for i in ops for t in graph.ops[i].inputs if t not in own)
        writes = [t for t in made if t in ends or not {i for i, _ in readers[t]} <= set(ops)]
        if ops:
            found.append(RecomputedPart(block, tuple(ops), tuple(reads), tuple(writes)))
    return tuple(found)


def recomputed_ops(graph: Graph, blocks: Sequence[Block]) -> frozenset[str]:
    """Names of the ops that are computed again of some blocks."""
    return frozenset(graph.ops[i].name for part in recomputed_parts(graph, blocks) for i in part.ops)
