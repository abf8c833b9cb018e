"""Boxes of cuts, and the least of linear functions over them.

A box is a set of options for each group of stages (`core.pipeline_cuts`). A function of cuts is here a table w[s, n],
the seconds of stage s with n blocks. It has counts d[b] too: so often the transfer over boundary b counts. A cut has L
blocks in all. Where the groups before g have n blocks, let P[g, n] be their least sum, and H[g, n] that of the others:

    P[0, 0] = 0     P[g + 1, n] = min over options o of g:  w(o) + P[g, n - blocks(o)]
    H[G, L] = 0         H[g, n] = min over options o of g:  w(o) + H[g + 1, n + blocks(o)]
    least with the option o of g  =  w(o) + min over n:  P[g, n] + H[g + 1, n + blocks(o)]

Where each stage is a group, the blocks before it are known. So w(o) has what the transfer before it takes there above
the least of any place, and no stage ends inside a unit. Of other groups it has the least of all places that a boundary
may have in the box. Arrays have a leading axis of functions, so that one pass serves them all. Options with equal
blocks share their work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array

__all__ = ["Box", "Mask", "Places", "count_cuts", "enumerate_cuts", "group_stages", "least_cut", "least_with_options",
           "single_stages"]

Mask = NDArray[np.bool_]

Options = NDArray[np.intp]
"""[option, stage of the group] -> blocks."""

MOST_OPTIONS = 2048
"""Most options of a group of several stages."""


class Places(NamedTuple):
    """Says where stages may end, and what crosses boundaries there.

        ends    [stage, blocks], whether it may end behind so many
        sent    [boundary, blocks before it, blocks of the stage behind it], the seconds of a transfer above the least
                of any place
    """

    ends: Mask
    sent: Array


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """All cuts of `blocks` blocks whose groups of stages have one of their options.

    It does not matter where boundaries lie unless there are `places`.
    """

    groups: tuple[tuple[int, ...], ...]
    options: tuple[Options, ...]
    blocks: int
    places: Places | None = None

    @property
    def totals(self) -> tuple[NDArray[np.intp], ...]:
        """For each group, the blocks of each option."""
        return tuple(options.sum(axis=1) for options in self.options)

    @property
    def empty(self) -> bool:
        """Whether there is no cut, as far as the least and most blocks of the groups tell."""
        totals = self.totals
        if not all(map(len, totals)):
            return True
        return not sum(int(t.min()) for t in totals) <= self.blocks <= sum(int(t.max()) for t in totals)

    def keep(self, masks: Sequence[Mask]) -> "Box":
        """The box with these options of each group alone."""
        return replace(self, options=tuple(o[mask] for o, mask in zip(self.options, masks, strict=True)))

    @property
    def sent_more(self) -> Array:
        """For each boundary, the seconds that a transfer takes at least in these cuts, above the least of any place."""
        sizes = {s: own[:, i] for group, own in zip(self.groups, self.options, strict=True)
                 for i, s in enumerate(group)}
        if self.places is None:
            return np.zeros(len(sizes) - 1)
        low, high = (np.array([int(end(sizes[s])) for s in range(len(sizes))]) for end in (np.min, np.max))
        before = [slice(max(int(low[:b].sum()), self.blocks - int(high[b:].sum())),
                        min(int(high[:b].sum()), self.blocks - int(low[b:].sum())) + 1) for b in range(1, len(low))]
        return np.array([row[at, n].min() for row, at, n in zip(self.places.sent, before, low[1:], strict=True)])

    @property
    def _in_a_row(self) -> Places | None:
        """The places where each stage is a group, in their order; else None."""
        return self.places if all(group == (g,) for g, group in enumerate(self.groups)) else None

    def holds(self, cut: Sequence[int]) -> bool:
        """Whether the cut is in the box."""
        return all((options == [cut[s] for s in group]).all(axis=1).any()
                   for group, options in zip(self.groups, self.options, strict=True))


def single_stages(possible: Mask, places: Places | None = None) -> Box:
    """The box of all cuts with possible[stage, blocks], every stage a group."""
    stages, sizes = possible.shape
    return Box(tuple((s,) for s in range(stages)), tuple(np.flatnonzero(row)[:, None] for row in possible), sizes - 1,
               places)


def group_stages(box: Box, together: Sequence[Sequence[int]]) -> Box:
    """The box with stages in these groups, some of them divided so that no group has too many options."""
    sizes = {group[0]: options[:, 0] for group, options in zip(box.groups, box.options, strict=True)}
    groups: list[tuple[int, ...]] = []
    found: list[Options] = []
    for stages in together:
        for i, stage in enumerate(stages):
            own = sizes[stage][:, None]
            if i == 0 or len(found[-1]) * len(own) > MOST_OPTIONS:
                groups.append((stage,))
                found.append(own)
                continue
            joined = np.concatenate([np.repeat(found[-1], len(own), axis=0), np.tile(own, (len(found[-1]), 1))], axis=1)
            groups[-1] += (stage,)
            found[-1] = joined[joined.sum(axis=1) <= box.blocks]
    return Box(tuple(groups), tuple(found), box.blocks, box.places)


def _option_seconds(box: Box, functions: Array) -> list[Array]:
    """[function, option] for each group; `functions` are [function, stage, blocks]."""
    return [np.sum([functions[:, s, options[:, i]] for i, s in enumerate(group)], axis=0)
            for group, options in zip(box.groups, box.options, strict=True)]


def _by_total(box: Box, seconds: Sequence[Array]) -> list[dict[int, Array]]:
    """For each group, blocks -> [function], the least of its options with so many."""
    return [{int(n): own[:, total == n].min(axis=1) for n in np.unique(total)}
            for total, own in zip(box.totals, seconds, strict=True)]


def _sent(box: Box, g: int, n: int, counts: Array) -> Array | float:
    """[function, blocks before]: what the transfer before stage g takes more if it has n blocks; 0 if not in a row."""
    row = box._in_a_row
    return counts[:, g - 1, None] * row.sent[g - 1, :box.blocks + 1 - n, n] if row and g else 0.0


def _least_sums(box: Box, least: Sequence[dict[int, Array]], counts: Array, behind: bool) -> list[Array]:
    """P[g][function, blocks before], or H[g] if `behind`, of the text above; `counts` are d[function, boundary]."""
    end, row = box.blocks + 1, box._in_a_row
    found = [np.full((len(counts), end), np.inf)]
    found[0][:, -1 if behind else 0] = 0.0
    for g, own in reversed([*enumerate(least)]) if behind else enumerate(least):
        new = np.full((len(counts), end), np.inf)
        for n, seconds in own.items():
            before, after = slice(0, end - n), slice(n, end)
            to, of = (before, after) if behind else (after, before)
            np.minimum(new[:, to], seconds[:, None] + _sent(box, g, n, counts) + found[-1][:, of], out=new[:, to])
        end_of = g - behind
        if row and end_of >= 0:
            new[:, ~row.ends[end_of]] = np.inf
        found.append(new)
    return found[::-1] if behind else found


def least_with_options(box: Box, functions: Array, counts: Array) -> list[Array]:
    """[function, option] for each group: the least over the cuts of the box with that option, inf where none has it.

    `functions` are [function, stage, blocks], `counts` how often each counts a transfer, [function, boundary].
    """
    seconds = _option_seconds(box, functions)
    least = _by_total(box, seconds)
    before, behind = (_least_sums(box, least, counts, way) for way in (False, True))
    found, more = [], (counts @ _sent_anywhere(box))[:, None]
    for g, (total, own) in enumerate(zip(box.totals, seconds, strict=True)):
        rest = np.full((len(functions), box.blocks + 1), np.inf)
        for n in least[g]:
            rest[:, n] = (before[g][:, :box.blocks + 1 - n] + _sent(box, g, n, counts) + behind[g + 1][:, n:]
                          ).min(axis=1)
        found.append(own + more + rest[:, total])
    return found


def least_cut(box: Box, function: Array, counts: Array) -> tuple[float, tuple[int, ...]]:
    """(least of one function [stage, blocks] over the box, a cut that has it); the box is not empty.

    It is infinite where stages would end inside units.
    """
    seconds, row = _option_seconds(box, function[None]), box._in_a_row
    behind = _least_sums(box, _by_total(box, seconds), counts[None], behind=True)
    cut, taken = [0] * sum(map(len, box.groups)), 0
    for g, total in enumerate(box.totals):
        reached = np.minimum(taken + total, box.blocks)
        values = np.where(taken + total <= box.blocks, seconds[g][0] + behind[g + 1][0, reached], np.inf)
        if row and g:
            values += counts[g - 1] * row.sent[g - 1, taken, total]
        best = int(values.argmin())
        for stage, blocks in zip(box.groups[g], box.options[g][best], strict=True):
            cut[stage] = int(blocks)
        taken += int(total[best])
    return float(behind[0][0, 0]) + float(counts @ _sent_anywhere(box)), tuple(cut)


def _sent_anywhere(box: Box) -> Array:
    """For each boundary, what a transfer takes more wherever it lies in a box, where its place is not known."""
    return box.sent_more if box._in_a_row is None else np.zeros(len(box.groups) - 1)


def _ways(box: Box) -> list[Array]:
    """For each group, blocks left -> number of cuts of the groups from it on."""
    found = [np.eye(1, box.blocks + 1)[0]]
    for total in reversed(box.totals):
        new = np.zeros(box.blocks + 1)
        for n, times in zip(*np.unique(total, return_counts=True), strict=True):
            new[n:] += times * found[-1][:box.blocks + 1 - n]
        found.append(new)
    return found[::-1]


def count_cuts(box: Box) -> float:
    """The number of cuts in the box."""
    return float(_ways(box)[0][box.blocks])


def enumerate_cuts(box: Box) -> NDArray[np.intp]:
    """[cut, stage] -> blocks, every cut of the box whose stages end where they may."""
    ways = _ways(box)
    cuts, taken = np.zeros((1, sum(map(len, box.groups))), dtype=np.intp), np.zeros(1, dtype=np.intp)
    for g, (group, options, total) in enumerate(zip(box.groups, box.options, box.totals, strict=True)):
        left = box.blocks - taken[:, None] - total
        at, option = np.nonzero((left >= 0) & (ways[g + 1][np.maximum(left, 0)] > 0))
        cuts, taken = cuts[at], taken[at] + total[option]
        cuts[:, list(group)] = options[option]
    if box.places is None:
        return cuts
    return cuts[box.places.ends[np.arange(cuts.shape[1]), np.cumsum(cuts, axis=1)].all(axis=1)]
