"""Finds mixtures of at most three kinds of blocks that fill a memory budget as well as many kinds do.

Blocks that are alike, n of them, have options. An option is what a kind of the found plan decides in a block, perhaps
with the choices of other kinds in some places. An option o changes the seconds of a step by t(o) and the peak by m(o),
against the kind of most blocks. Both are measured by pricing a plan with one block changed, and add up nearly:

    t(o)   measured of a kind; else the sum over the places that differ, each measured alone
    T(a^i c b^(n-i-1))   T of all blocks of the largest kind + i t(a) + t(c) + (n-i-1) t(b), and M likewise

With two options the seconds miss the best by up to what one block costs; the one block c makes up for it. Options that
others are better than in both are left out. The estimates only order what is priced as a plan afterwards.

A block may be alike and stand in another place, like the last one, before the head. Taking its option back then costs
more than giving it to another block saves. Where that is more than a plan may be slower, such blocks keep what they
have. The others then mix fewer kinds.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import inf, prod

__all__ = ["MANY_KINDS", "Measure", "mixtures"]

Measure = Callable[[tuple[int, ...]], tuple[float, float]]
"""(seconds, peak) of the plan of a choice."""

Block = tuple[int, ...]
Option = tuple[int, ...]
Pair = tuple[float, float]

MOST_PLACES = 16
"""Places at which blocks may differ, at most."""

MOST_OPTIONS = 4096
"""Options that are weighed, at most."""

ROOM = 2e-3
"""Part of the budget by which an estimated peak may be above it."""

MANY_KINDS = 3
"""Kinds of alike blocks at most, with those of other places."""

MOST_PAIRS = 48
"""Options of which all pairs are weighed; of more, those that no mixture of others is as good as."""


def mixtures(kinds: Sequence[Sequence[Block]], choice: tuple[int, ...], measure: Measure, limit: float, budget: float
             ) -> Iterator[tuple[int, ...]]:
    """Yields choices with at most three kinds of these blocks, the fewest kinds and the fastest first.

    `kinds` has, by kind, for each block the positions in the choice of what it decides. Only mixtures are yielded whose
    estimates are within `limit` seconds and near `budget` bytes.
    """
    base, (seconds, peak) = max(kinds, key=len), measure(choice)
    block = base[len(base) // 2]

    def changed(new: tuple[int, ...]) -> Pair:
        return _change(measure(new), (seconds, peak))

    mixed = [kind for kind in kinds if kind is base or not _stands_apart(kind, block, choice, changed, limit - seconds)]
    named = {tuple(choice[p] for p in blocks[0]): len(blocks) for blocks in mixed}
    values = [sorted({option[k] for option in named}) for k in range(len(block))]
    differ = [k for k, found in enumerate(values) if len(found) > 1]
    if len(differ) > MOST_PLACES:
        return
    options = _options(block, named, values, differ, choice, changed)
    seconds -= sum(count * options[option][0] for option, count in named.items())
    peak -= sum(count * options[option][1] for option, count in named.items())
    blocks = sorted(one for kind in mixed for one in kind)
    found = [(row, seconds + t, peak + m) for row, t, m in _rows(_front(options), len(blocks), budget - peak)]
    good = [one for one in found if one[1] <= limit and one[2] <= budget * (1 + ROOM)
            and len(set(one[0])) <= max(1, MANY_KINDS - len(kinds) + len(mixed))]
    for row, _, _ in sorted(good, key=lambda one: (len(set(one[0])), one[2] > budget, one[1])):
        new = list(choice)
        for block, option in zip(blocks, row, strict=True):
            for position, value in zip(block, option, strict=True):
                new[position] = value
        yield tuple(new)


def _stands_apart(kind: Sequence[Block], block: Block, choice: tuple[int, ...], changed: Measure, slack: float) -> bool:
    """Whether giving the blocks of a kind what `block` has costs more than the other way round saves, by `slack`."""
    forth, back = list(choice), list(choice)
    for one in kind:
        for to, at in zip(one, block, strict=True):
            forth[to] = choice[at]
    for to, at in zip(block, kind[0], strict=True):
        back[to] = choice[at]
    total = changed(tuple(forth))[0] + len(kind) * changed(tuple(back))[0]
    return not total <= slack


def _options(block: Block, named: Mapping[Option, int], values: Sequence[Sequence[int]], differ: Sequence[int],
             choice: tuple[int, ...], changed: Measure) -> dict[Option, Pair]:
    """By option, what it changes in seconds and bytes where `block`, of the largest kind, has it.

    `changed` tells it of a whole choice.
    """
    base = tuple(choice[p] for p in block)

    def change(option: Option) -> Pair:
        new = list(choice)
        for position, value in zip(block, option, strict=True):
            new[position] = value
        return changed(tuple(new))

    alone = {(k, v): change((*base[:k], v, *base[k + 1:])) if v != base[k] else (0.0, 0.0)
             for k in differ for v in values[k]}
    found = {option: change(option) if option != base else (0.0, 0.0) for option in named}
    if prod(len(values[k]) for k in differ) <= MOST_OPTIONS:
        for mix in product(*(values[k] for k in differ)):
            option = list(base)
            for k, v in zip(differ, mix, strict=True):
                option[k] = v
            parts = [alone[k, v] for k, v in zip(differ, mix, strict=True)]
            found.setdefault(tuple(option), (sum(t for t, _ in parts), sum(m for _, m in parts)))
    return {option: pair for option, pair in found.items() if pair[0] < inf or option in named}


def _change(after: Pair, before: Pair) -> Pair:
    return after[0] - before[0], after[1] - before[1]


def _front(options: Mapping[Option, Pair]) -> list[tuple[Option, float, float]]:
    """The options that no other is as good as in both, by rising bytes and falling seconds."""
    front: list[tuple[Option, float, float]] = []
    for option, (t, m) in sorted(options.items(), key=lambda one: (one[1][1], one[1][0])):
        if not front or t < front[-1][1]:
            front.append((option, t, m))
    return front


def _hull(front: Sequence[tuple[Option, float, float]]) -> list[tuple[Option, float, float]]:
    """The options of a front that mixtures of others are not as good as."""
    hull: list[tuple[Option, float, float]] = []
    for one in front:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (one[2] - hull[-2][2]) >= (
                one[1] - hull[-2][1]) * (hull[-1][2] - hull[-2][2]):
            hull.pop()
        hull.append(one)
    return hull


def _rows(front: Sequence[tuple[Option, float, float]], count: int, room: float
          ) -> Iterator[tuple[tuple[Option, ...], float, float]]:
    """Yields (option by block, seconds, bytes) of mixtures of `count` blocks that take about `room` bytes or less."""
    hull, bytes_of = _hull(front), [m for _, _, m in front]
    pairs = front if len(front) <= MOST_PAIRS else hull
    for option, t, m in front:
        yield (option,) * count, count * t, count * m
    for (a, t, m), (b, u, w) in combinations(pairs, 2):
        for i in range(1, count):
            yield (*(a,) * i, *(b,) * (count - i)), i * t + (count - i) * u, i * m + (count - i) * w
    for (a, t, m), (b, u, w) in combinations(hull, 2):
        for i in range(count):
            left = room - i * m - (count - i - 1) * w
            at = bisect_right(bytes_of, left) - 1
            if at >= 0:
                c, v, x = front[at]
                yield ((*(a,) * i, c, *(b,) * (count - i - 1)), i * t + v + (count - i - 1) * u,
                       i * m + x + (count - i - 1) * w)
