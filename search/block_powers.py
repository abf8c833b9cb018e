"""Makes the factors of a run's middle blocks from those of one block.

    T(a, b)       the factors of a block with everything but its border eliminated: a the border of the block before,
                  b its own. A border is the variables that a block shares with the next one.
    T^(m + n)     = min over the border c between them of T^m(a, c) + T^n(c, b)
    T^times       by squaring: about 2 log2(times) products, and equal recipes wherever they come again

The variables behind T^n are those behind T^m moved by m periods.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoddl.search.elimination_program import Ids
from autoddl.search.repeated_blocks import Fold

if TYPE_CHECKING:
    from autoddl.search.elimination_order import FactorGraph

__all__ = ["raise_to_power"]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A factor of a power: over variables of the first block's border, of the last one's, and shared ones."""

    slot: int
    scope: tuple[int, ...]
    ids: Ids


@dataclass(frozen=True, slots=True)
class _Power:
    """The factors that stand for `length` blocks."""

    pieces: tuple[_Piece, ...]
    length: int


def raise_to_power(network: "FactorGraph", fold: Fold) -> None:
    """Replaces the factors of block 1 by their power; its border becomes that of the last block for which it stands."""
    left, right = _borders(network, fold)
    made = network.finish(v for v in fold.blocks[1] if v not in right)
    base = _lifted(network, [i for i in (*fold.factors, *made) if network.alive(i)], 1)
    result, left_over = None, fold.times
    while left_over:
        if left_over & 1:
            result = base if result is None else _product(network, fold, left, right, result, base)
        left_over >>= 1
        if left_over:
            base = _product(network, fold, left, right, base, base)
    assert result is not None
    for piece in result.pieces:
        network.lay(piece.slot, piece.scope, piece.ids)
    for v in right:
        network.positions[v] += (fold.times - 1) * fold.period


def _borders(network: "FactorGraph", fold: Fold) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The variables of block 1 that outside factors know, and their counterparts in block 0, which come first."""
    known = {v for v in fold.blocks[1] if any(i not in fold.factors for i in network.incident[v])}
    places = [k for k, v in enumerate(fold.blocks[1]) if v in known]
    return tuple(fold.blocks[0][k] for k in places), tuple(fold.blocks[1][k] for k in places)


def _lifted(network: "FactorGraph", factors: list[int], length: int) -> _Power:
    """A power made of factors that are taken out of the network."""
    pieces = tuple(_Piece(network.slots[i], network.scopes[i], network.ids[i]) for i in sorted(factors))
    for i in factors:
        network.lift(i)
    return _Power(pieces, length)


def _product(network: "FactorGraph", fold: Fold, left: tuple[int, ...], right: tuple[int, ...], first: _Power,
             second: _Power) -> _Power:
    """T^(m + n)"""
    shift = first.length * fold.period
    middle = tuple(network.add(network.sizes[v], network.positions[v] + shift - fold.period) for v in right)
    ends, starts = dict(zip(right, middle, strict=True)), dict(zip(left, middle, strict=True))
    laid = [network.lay(p.slot, tuple(ends.get(v, v) for v in p.scope), p.ids) for p in first.pieces]
    laid += [network.lay(p.slot, tuple(starts.get(v, v) for v in p.scope), p.ids + shift) for p in second.pieces]
    laid += network.finish(middle)
    return replace(_lifted(network, [i for i in laid if network.alive(i)], 0), length=first.length + second.length)
