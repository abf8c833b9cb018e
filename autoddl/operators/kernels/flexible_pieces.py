"""Calls FlexAttention on the pieces of one rank: of batch, heads and queries, and of a split sequence (`ring`).

    queries split alone         the same text, whose indices begin elsewhere
    a ring                      a block of scores for the keys of each rank, which are merged
    halves of queries traded    the numbers of a rank's queries are those of two chunks

In the last two the other tensors are whole along queries and keys: a text reads them at any number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from autoddl.operators.kernels.arguments import bound
from autoddl.operators.kernels.attention_blocks import Gradients
from autoddl.operators.kernels.flexible import Elements, Grid, Places, attended, flexible_attention, gradients
from autoddl.operators.kernels.grouped import is_traced
from autoddl.operators.kernels.halves import Ranks, traded, traded_back
from autoddl.operators.kernels.ring import Optional, Pair, Read, Turns, has_all_keys, ring_of_blocks
from autoddl.operators.kernels.site import Kernel, Site, TorchCall
from autoddl.operators.ring import trades_halves

__all__ = ["KERNELS"]


def _flex_attention(site: Site, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    """The call with the places of the pieces; a tensor that is read lies where its layout says."""
    values = bound(target, args, kwargs)
    batch, head, query, _ = (first for first, _ in site.output_extents())
    read = tuple(tuple(first for first, _ in site.input_extents(k)) for k in range(3, len(site.inputs)))
    places = (batch, head, query), read

    def placed_attention(**k: Any) -> Any:
        return target(**k, index=places)

    def split_attention(**k: Any) -> Any:
        return _split_attention(site, places, **k)

    return split_attention if site.option.inner else placed_attention, (), values


def _split_attention(site: Site, places: Places, query: Tensor, key: Tensor, value: Tensor, read: Sequence[Tensor] = (),
                     score: str = "", mask: str = "", scale: float | None = None, lse: bool = False) -> Any:
    part = Elements(score, mask, query.shape[-1] ** -0.5 if scale is None else scale, places)
    if is_traced(query):
        found: tuple[Tensor, ...] = flexible_attention(part, query, key, value, read)
    elif has_all_keys(site):
        ranks = Ranks.of(site)
        own = replace(part, queries=ranks.firsts(ranks.place, query.shape[-2], halves=True))
        found = flexible_attention(own, traded(ranks, query), key, value, read)
        found = traded_back(ranks, *found[:1 + lse])
    else:
        turns = Turns(Ranks.of(site), trades_halves(site.op))
        found = ring_of_blocks(turns, _Flexible(part, lse), query, key, value, tuple(read))
    return found[:2] if lse else found[0]


@dataclass(frozen=True, slots=True)
class _Flexible:
    """Blocks of FlexAttention in a ring."""

    part: Elements
    told: bool

    def forward(self, turns: Turns, turn: int, q: Tensor, k: Tensor, v: Tensor, read: Read) -> tuple[slice, Pair]:
        return slice(None), attended(self._grid(turns, turn, q, k), q, k, v, _tensors(read))

    def backward(self, turns: Turns, turn: int, upstream: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor,
                 out: Tensor, sums: Tensor, read: Read, of_read: list[Optional]) -> tuple[slice, slice, Gradients]:
        found = gradients(self._grid(turns, turn, q, k), upstream, q, k, v, out, sums, _tensors(read), of_read)
        return slice(None), slice(None), Gradients(*found)

    def _grid(self, turns: Turns, turn: int, q: Tensor, k: Tensor) -> Grid:
        ranks = turns.ranks
        queries = ranks.firsts(ranks.place, q.shape[-2], turns.halves)
        return Grid.of(replace(self.part, queries=queries), q, k,
                       ranks.firsts(turns.source(turn), k.shape[-2], turns.halves))


def _tensors(read: Read) -> list[Tensor]:
    return [x for x in read if x is not None]


KERNELS: dict[str, Kernel] = {"autoddl.flex_attention": _flex_attention}
