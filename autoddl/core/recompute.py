"""Names the blocks of a model that backward computes again instead of keeping what their forward saved.

A *block* is a repeated part of the user's module: the ops of one member of a list of modules, like `h.3` or `layer1.0`.
It reaches from the first of them to the last in the order in which they run. Its *level* says what is computed again of
it (`operators.recomputed`):

    full         all but what others read: the block keeps the tensors that it reads from outside
    selective    what needs no product, convolution or attention; the results of these are kept
    light        elementwise ops inside a row of such ops, as kernels by hand do of SwiGLU

At the last two, copies that conversions made of factors of products which do not run again are made again. So a rank
keeps its shard of a sequence, and gathers the whole twice (Korthikanti et al. 2022, section 4.2.2).

A plan names a block as `h.3`, which is full, or as `h.3:selective`. A *policy* says which blocks are recomputed, as
text:

    none               no block
    full               every block; `selective` and `light`: every block, at this level
    every-K            every K-th block, the first, the (K+1)-th and so on
    first-N            the first N blocks: their backward comes last, so what the others saved is gone by then
    h.0+h.2            the blocks of these names
    search             whichever the search finds best, at levels of its choice (`pricing.policies`)

Behind `every-K`, `first-N` and each name may stand `:selective` or `:light`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import HUB

__all__ = [
    "FULL",
    "LIGHT",
    "NO_RECOMPUTE",
    "SEARCH",
    "SELECTIVE",
    "Block",
    "blocks_of",
    "check_policy",
    "counted",
    "is_per_block",
    "leveled_blocks",
    "member_of",
    "named_blocks",
    "policy_blocks",
    "policy_of_part",
    "policy_text",
    "recompute_entry",
    "recomputes_more",
    "renamed_policy",
    "select_blocks",
    "without_light",
]

NO_RECOMPUTE, LIGHT, SELECTIVE, FULL = "none", "light", "selective", "full"

_LEVELS = (LIGHT, SELECTIVE, FULL)

SEARCH = "search"
"""The policy that leaves the level of every block to the search."""

_POLICY = re.compile(r"(none|search)|(full|selective|light)|(every|first)-([1-9][0-9]*)(?::(selective|light))?")

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
        if name := member_of(op.module):
            places.setdefault(name, []).append(i)
    found = [Block(name, at[0], at[-1] + 1) for name, at in places.items()
             if sum(graph.ops[i].target != HUB for i in at) >= _LEAST_OPS]
    return tuple(one for one in found if not any(
        other is not one and other.start < one.end and one.start < other.end for other in found))


def member_of(module: str) -> str:
    """The outermost member of a list of modules that `module` is in, or "": `h.3` for `h.3.attn.c_proj`."""
    parts = module.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return "" if at is None else ".".join(parts[:at + 1])


class _Policy(NamedTuple):
    """A policy: every block ("every" with number 1), each `number`-th, the first ones, or those of `entries`."""

    kind: str
    number: int
    level: str
    entries: tuple[tuple[str, str], ...] = ()


def _parse(text: str) -> _Policy:
    """The policy of `text`. Raises InputError where there is no such."""
    found = _POLICY.fullmatch(text)
    if found is not None:
        none, whole, kind, number, level = found.groups()
        return _Policy("named", 0, FULL) if none else _Policy(kind or "every", int(number or 1), whole or level or FULL)
    entries = tuple(map(_entry, text.split("+")))
    if any(level not in _LEVELS or not name or member_of(name) != name for name, level in entries):
        raise InputError(f"there is no recomputation {text!r}; there are none, full, selective, light, search, every-K "
                         "and first-N, like 'every-2' or 'first-8:selective', and names, like 'h.0+h.2:selective'")
    return _Policy("named", 0, FULL, entries)


def _entry(text: str) -> tuple[str, str]:
    """(name, level) of a block as a plan names it: `h.0` or `h.0:selective`."""
    name, colon, level = text.partition(":")
    return name, level if colon else FULL


def recompute_entry(name: str, level: str) -> str:
    """The name of a block with a level as a plan has it: `h.0`, or `h.0:selective`."""
    return name if level == FULL else f"{name}:{level}"


def check_policy(text: str) -> str:
    """The policy as it is written. Raises InputError for one that there is not."""
    _parse(text)
    return text


def policy_text(names: Sequence[str]) -> str:
    """The policy that recomputes the blocks that a plan names."""
    return "+".join(names) or NO_RECOMPUTE


def named_blocks(policy: str) -> tuple[str, ...]:
    """Returns the blocks that a policy names."""
    return tuple(name for name, _ in _parse(policy).entries)


def policy_of_part(policy: str, graph: Graph) -> str:
    """Returns what a policy asks of a part of a model: of blocks that it names, those that the part has.

    Any other policy is as it is, and none where the part has no block.
    """
    known, entries = {block.name for block in blocks_of(graph)}, _parse(policy).entries
    if not known:
        return NO_RECOMPUTE
    left = tuple(recompute_entry(name, level) for name, level in entries if name in known)
    return policy_text(left) if entries else policy


def without_light(policy: str) -> str:
    """Returns the policy without what it recomputes at the level light."""
    asked = _parse(policy)
    if asked.entries:
        return policy_text([recompute_entry(name, level) for name, level in asked.entries if level != LIGHT])
    return NO_RECOMPUTE if asked.level == LIGHT else policy


def counted(policy: str) -> int:
    """Returns the number of blocks that a policy names by counting them: 8 for `first-8` and `every-8`, else 0."""
    asked = _parse(policy)
    return asked.number if asked.kind == "first" or asked.number > 1 else 0


def renamed_policy(policy: str, names: Mapping[str, str]) -> str:
    """Returns the policy with other names for the blocks that it names; `names` has one for each of these."""
    entries = _parse(policy).entries
    return policy_text([recompute_entry(names[name], level) for name, level in entries]) if entries else policy


def is_per_block(policy: str) -> bool:
    """Whether a policy recomputes a block or not wherever it is, which those that count blocks do not."""
    asked = _parse(policy)
    return asked.kind == "named" or (asked.kind == "every" and asked.number == 1)


def recomputes_more(more: str, less: str) -> bool:
    """Whether without a budget no plan under a policy is faster than the best under another, on every model.

    It recomputes all that the other does, no fewer blocks and none at a lower level, or the other may recompute none.
    """
    if less in (NO_RECOMPUTE, SEARCH, more) or more == FULL:
        return True
    one, other = _parse(more), _parse(less)
    every, mine = one.kind == "every" and one.number == 1, dict(one.entries)
    if other.kind == "named":
        return all((one.level if every else mine.get(name)) in (level, FULL) for name, level in other.entries)
    if one.level not in (other.level, FULL) or not (every or one.kind == other.kind):
        return False
    return every or (one.number >= other.number if one.kind == "first" else other.number % one.number == 0)


def policy_blocks(graph: Graph, policy: str) -> tuple[str, ...]:
    """The blocks of a graph with hubs that a policy recomputes in any case, as a plan names them.

    Raises InputError where the policy asks for blocks and the model has none.
    """
    asked = _parse(policy)
    if policy in (NO_RECOMPUTE, SEARCH):
        return ()
    names = [block.name for block in blocks_of(graph)]
    if not names:
        raise InputError(f"recomputation {policy} asks for the blocks of a model, and this one has no list of modules: "
                         "plan with recompute='none'")
    if asked.kind == "named":
        return tuple(recompute_entry(block.name, level) for block, level in leveled_blocks(graph, policy.split("+")))
    found = names[:asked.number] if asked.kind == "first" else names[::asked.number]
    return tuple(recompute_entry(name, asked.level) for name in found)


def leveled_blocks(graph: Graph, names: Sequence[str]) -> tuple[tuple[Block, str], ...]:
    """The blocks that a plan names, with their levels, in order.

    Raises InputError for a name that no block of the graph has, a level that there is not, or a block of two levels.
    """
    if not names:
        return ()
    known, found = {block.name: block for block in blocks_of(graph)}, dict[str, str]()
    for name, level in map(_entry, names):
        if name not in known:
            raise InputError(f"{name} is no block of this model that can be recomputed; its blocks are "
                             f"{', '.join(known) or 'none'}")
        if level not in _LEVELS or found.setdefault(name, level) != level:
            raise InputError(f"block {name} is recomputed at one level, full, selective or light: name it as {name}, "
                             f"{name}:selective or {name}:light, once")
    return tuple(sorted(((known[name], level) for name, level in found.items()), key=lambda one: one[0].start))


def select_blocks(graph: Graph, names: Sequence[str]) -> tuple[Block, ...]:
    """The blocks that a plan names, in order. Raises InputError as `leveled_blocks`."""
    return tuple(block for block, _ in leveled_blocks(graph, names))
