"""Boxes of cuts, and the least of linear functions over them.

A box is a set of options for each group of stages (`core.pipeline_cuts`). A function of cuts is here a table w[s, n],
the seconds of stage s with n blocks. A cut of a box has L blocks in all. Let H[g, n] be the least sum of the groups
from g on with n blocks left. Let P[g, n] be that of the groups before g with n blocks taken:

    H[G, 0] = 0     H[g, n] = min over options o of g:  w(o) + H[g + 1, n - blocks(o)]
    least with the option o of g  =  w(o) + min over n:  P[g, n] + H[g + 1, L - n - blocks(o)]

Arrays have a leading axis of functions, so that one pass serves them all. Options with equal blocks share their work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array

__all__ = ["Box", "Mask", "count_cuts", "enumerate_cuts", "group_stages", "least_cut", "least_with_options",
           "single_stages"]

Mask = NDArray[np.bool_]

Options = NDArray[np.intp]
"""[option, stage of the group] -> blocks."""

MOST_OPTIONS = 2048
"""Most options of a group of several stages."""


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """All cuts of `blocks` blocks whose groups of stages have one of their options."""

    groups: tuple[tuple[int, ...], ...]
    options: tuple[Options, ...]
    blocks: int

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

    def holds(self, cut: Sequence[int]) -> bool:
        """Whether the cut is in the box."""
        return all((options == [cut[s] for s in group]).all(axis=1).any()
                   for group, options in zip(self.groups, self.options, strict=True))


def single_stages(possible: Mask) -> Box:
    """The box of all cuts with possible[stage, blocks], every stage a group."""
    stages, sizes = possible.shape
    return Box(tuple((s,) for s in range(stages)), tuple(np.flatnonzero(row)[:, None] for row in possible), sizes - 1)


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
    return Box(tuple(groups), tuple(found), box.blocks)


def _option_seconds(box: Box, functions: Array) -> list[Array]:
    """[function, option] for each group; `functions` are [function, stage, blocks]."""
    return [np.sum([functions[:, s, options[:, i]] for i, s in enumerate(group)], axis=0)
            for group, options in zip(box.groups, box.options, strict=True)]


def _by_total(box: Box, seconds: Sequence[Array]) -> list[dict[int, Array]]:
    """For each group, blocks -> [function], the least of its options with so many."""
    return [{int(n): own[:, total == n].min(axis=1) for n in np.unique(total)}
            for total, own in zip(box.totals, seconds, strict=True)]


def _least_left(least: Sequence[dict[int, Array]], blocks: int, count: int) -> list[Array]:
    """H[g][function, blocks left] of the text above."""
    found = [np.full((count, blocks + 1), np.inf)]
    found[0][:, 0] = 0.0
    for row in reversed(least):
        new = np.full((count, blocks + 1), np.inf)
        for n, seconds in row.items():
            np.minimum(new[:, n:], seconds[:, None] + found[-1][:, :blocks + 1 - n], out=new[:, n:])
        found.append(new)
    return found[::-1]


def least_with_options(box: Box, functions: Array) -> list[Array]:
    """[function, option] for each group: the least over the cuts of the box with that option, inf where none has it."""
    seconds, count, blocks = _option_seconds(box, functions), len(functions), box.blocks
    least = _by_total(box, seconds)
    left = _least_left(least, blocks, count)
    taken = _least_left(least[::-1], blocks, count)[::-1]
    found = []
    for g, (total, own) in enumerate(zip(box.totals, seconds, strict=True)):
        rest = np.full((count, blocks + 1), np.inf)
        for n in least[g]:
            rest[:, n] = (taken[g][:, :blocks - n + 1] + left[g + 1][:, blocks - n::-1]).min(axis=1)
        found.append(own + rest[:, total])
    return found


def least_cut(box: Box, function: Array) -> tuple[float, tuple[int, ...]]:
    """(least of one function [stage, blocks] over the box, a cut that has it); the box is not empty."""
    seconds = _option_seconds(box, function[None])
    left = _least_left(_by_total(box, seconds), box.blocks, 1)
    cut, n = [0] * sum(map(len, box.groups)), box.blocks
    for g, total in enumerate(box.totals):
        values = np.where(total <= n, seconds[g][0] + left[g + 1][0, np.maximum(n - total, 0)], np.inf)
        best = int(values.argmin())
        for stage, blocks in zip(box.groups[g], box.options[g][best], strict=True):
            cut[stage] = int(blocks)
        n -= int(total[best])
    return float(left[0][0, box.blocks]), tuple(cut)


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
    """[cut, stage] -> blocks, every cut of the box."""
    ways = _ways(box)
    cuts, taken = np.zeros((1, sum(map(len, box.groups))), dtype=np.intp), np.zeros(1, dtype=np.intp)
    for g, (group, options, total) in enumerate(zip(box.groups, box.options, box.totals, strict=True)):
        left = box.blocks - taken[:, None] - total
        at, option = np.nonzero((left >= 0) & (ways[g + 1][np.maximum(left, 0)] > 0))
        cuts, taken = cuts[at], taken[at] + total[option]
        cuts[:, list(group)] = options[option]
    return cuts
