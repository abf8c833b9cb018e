"""Linear bounds of the cuts of a chain into pipeline stages: paths, their mixtures, and the options that they rule out.

The goal is the best cut's seconds * (1 - tolerance), or the ceiling if that is less. A mixture of paths rules out an
option with which it is nowhere below the goal. The best weights for a set of cuts are a linear program:

    maximise z  subject to  z <= sum over paths of weight * path(cut)  for each cut,  weights >= 0, their sum 1

Its dual values are shares of the cuts, of sum 1: the mean of each path over them is at most z. A path that is critical
where every stage takes its mean seconds has the greatest mean of all. Where that is above z, the path is added. These
are the generated columns of Gilmore and Gomory (A linear programming approach to the cutting-stock problem, 1961). A
path that is critical at no cut may be the best to mix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array
from autoddl.core.pipeline_cuts import (
    BlockLimit,
    BoxPart,
    CutProblem,
    Mixture,
    PathBound,
    PricedPath,
    PricedStages,
    Trail,
    WeighedPath,
)
from autoddl.search.cut_boxes import Box, Mask, Places, least_cut, least_with_options
from autoddl.search.path_tables import (
    Blend,
    KnownTerms,
    PricedRows,
    TraceStages,
    add_row,
    best_blend,
    counts_of,
    linear_program,
    path_tables,
    priced_rows,
    priced_table,
    solve_program,
    told_anew,
    weighed_table,
)

__all__ = ["CutPlanes", "Evaluate", "Trace", "TraceMean", "best_mixture", "blended"]

SAME = 1e-9
"""Relative differences of sums in another order."""

TOP = 10
"""Paths that may be mixed for each cut."""

MEANS = 6
"""Paths of mean seconds that are sought for one mixture."""

MOST_MEANS = 60
"""Paths of mean seconds that are kept, at most: more take longer than they bring."""

RISES = 1e-4
"""The part of a mixture by which a path of mean seconds must be above it."""

COLUMNS = 40
"""Options of a group among which a blend is sought, at first, and cuts whose paths it begins with."""

MORE = 3
"""Times that a blend is sought, with more options each time."""

CLOSE = 1e-3
"""The part by which a blend of some options may say less of all."""

DEAREST = 4
"""Paths that are priced at each cut, but for blends, which all are."""

Evaluate = Callable[[tuple[int, ...]], float]
"""A cut -> its exact seconds."""

Trace = Callable[[tuple[int, ...]], tuple[float, PathBound]]
"""A cut -> (its seconds if its stages take their least seconds, a path that takes as long)."""

TraceMean = Callable[[Sequence[tuple[int, ...]], Sequence[float]], tuple[float, PathBound]]
"""Cuts and their shares -> the same where each stage takes the mean of its seconds in these cuts."""


class BoxBlend(NamedTuple):
    """The blend that says most of a box.

        mixtures    it and it as it is priced, each by itself, and those sought before it; the best last
        parts       by blend its paths with their weights, and its prices at limits
        mean        the fractional cut of which it says least
    """

    mixtures: list[Mixture]
    parts: tuple[BoxPart, ...]
    mean: tuple[float, ...]


@dataclass
class CutPlanes:
    """The cuts that were traced, and the paths that are known.

        problem      the chain
        trace        finds a critical path of a cut
        exact        finds the exact seconds of a cut, if those of `trace` are not
        tolerance    relative gap that need not be closed
        ceiling      seconds that a bound need not exceed, whatever the best cut
        mean         finds a critical path of the mean of cuts
        stages       finds a critical path of any seconds of stages; with it boxes are bounded by blends, without by
                     mixtures
        paths        the paths and blends, also as they are priced
        trails       for each its tasks, the numbers and weights of its parts, or what it is with a price
        known        by its counts, the number of each
        bare         numbers of those whose tables have the seconds of their terms alone
        tables       for each path [stage, blocks] seconds
        priced       for those that were to be priced, what is known of stages together
        counting     of a path and stages that are known together, whether it counts all of that
        fixed        for each path the seconds of its transfers, wherever its boundaries lie
        seen         cut -> exact seconds
        traced       cut -> seconds as traced
        stacked      numbers, tables, fixed seconds and transfers of those that are not bare, as arrays
        means        numbers of the paths of mean seconds
        closely      cuts of which a blend was found
        told         what is known of the terms of stages
    """

    problem: CutProblem
    trace: Trace
    exact: Evaluate | None
    tolerance: float
    ceiling: float = np.inf
    mean: TraceMean | None = None
    stages: TraceStages | None = None
    paths: list[PathBound] = field(default_factory=list)
    trails: list[Trail] = field(default_factory=list)
    known: dict[tuple[object, ...], int] = field(default_factory=dict)
    bare: set[int] = field(default_factory=set)
    tables: list[Array] = field(default_factory=list)
    priced: dict[int, tuple[PricedRows, ...]] = field(default_factory=dict)
    counting: dict[tuple[object, ...], bool] = field(default_factory=dict)
    fixed: list[float] = field(default_factory=list)
    seen: dict[tuple[int, ...], float] = field(default_factory=dict)
    traced: dict[tuple[int, ...], float] = field(default_factory=dict)
    stacked: tuple[NDArray[np.intp], Array, Array, Array] | None = None
    means: list[int] = field(default_factory=list)
    closely: set[tuple[int, ...]] = field(default_factory=set)
    told: KnownTerms = field(init=False)

    def __post_init__(self) -> None:
        self.told = KnownTerms(self.problem)

    def look_within(self, box: Box) -> None:
        """Tells that no other cuts count from now on: of other sizes of stages little is said by what is added."""
        left = np.zeros(self.problem.seconds.shape[:2], dtype=np.bool_)
        for group, own in zip(box.groups, box.options, strict=True):
            for i, s in enumerate(group):
                left[s, own[:, i] - 1] = True
        self.told = KnownTerms(self.problem, left)

    @property
    def possible(self) -> Mask:
        """[stage, blocks] whether the stage can have so many blocks."""
        fits: Mask = np.logical_and.reduce(np.isfinite(self.problem.seconds), axis=2)
        return np.pad(fits, ((0, 0), (1, 0)))

    @property
    def best(self) -> tuple[int, ...]:
        """The cut of least seconds, of those evaluated."""
        return min(self.seen, key=lambda cut: (self.seen[cut], cut))

    @property
    def goal(self) -> float:
        """Seconds that a bound need not exceed."""
        return min(self.seen[self.best] * (1 - self.tolerance), self.ceiling)

    @property
    def all(self) -> tuple[NDArray[np.intp], Array, Array, Array]:
        """(numbers, tables, fixed seconds, [path, boundary] transfers) of all paths that are not bare."""
        if self.stacked is None or len(self.stacked[0]) < len(self.paths) - len(self.bare):
            rows = np.array([q for q in range(len(self.paths)) if q not in self.bare], dtype=np.intp)
            self.stacked = rows, np.stack([self.tables[q] for q in rows]), np.array(
                [self.fixed[q] for q in rows], dtype=float), np.array([self.paths[q].transfers for q in rows],
                                                                      dtype=float)
        return self.stacked

    @cached_property
    def places(self) -> Places | None:
        """Where stages may end, and what crosses boundaries there; None where it does not matter."""
        problem = self.problem
        if problem.ends is None and problem.sent is None:
            return None
        ends = np.ones((len(problem.seconds), problem.blocks + 1), dtype=np.bool_) if problem.ends is None else \
            problem.ends
        least = np.array(problem.transfers)[:, None, None]
        return Places(ends, np.zeros((len(least), *(problem.blocks + 1,) * 2)) if problem.sent is None else
                      problem.sent - least)

    def add_all(self, paths: Sequence[PathBound], parts: Mixture = (), *, bare: bool = False) -> None:
        """Adds the paths of which none with the same counts is known; `parts` are those of a blend.

        A `bare` path has the seconds of its terms alone until it is added otherwise: parts of a blend need no more.
        """
        new = dict[tuple[object, ...], PathBound]()
        for path in paths:
            number = self.known.get((path.stages, path.transfers))
            if number is None or (not bare and number in self.bare):
                new.setdefault((path.stages, path.transfers), path if number is None else self.paths[number])
        for (key, path), table in zip(new.items(), path_tables(self.told, [*new.values()], bare), strict=True):
            sent = sum(n * x for n, x in zip(path.transfers, self.problem.transfers, strict=True))
            if key in self.known:
                self.bare.remove(self.known[key])
                self.tables[self.known[key]], self.stacked = table, None
                continue
            if bare:
                self.bare.add(len(self.paths))
            self._append(key, path, parts or path.path, table, sent)

    def add(self, path: PathBound, parts: Mixture = (), *, bare: bool = False) -> int:
        """Adds a path, or a blend of some, unless one with its counts is known; returns its number."""
        self.add_all([path], parts, bare=bare)
        return self.known[path.stages, path.transfers]

    def _append(self, key: tuple[object, ...], path: PathBound, trail: Trail, table: Array, fixed: float) -> None:
        self.known[key] = len(self.paths)
        self.paths.append(path)
        self.trails.append(trail)
        self.tables.append(table)
        self.fixed.append(fixed)

    def add_priced(self, cut: tuple[int, ...]) -> None:
        """Adds the greatest paths at a cut, and all blends, with the prices of bytes that say most there.

        So does the greatest path that counts all that is known of stages together, for each group of these.
        """
        if not self.problem.priced:
            return
        values = self.at([cut])[:, 0]
        order = [q for q in np.argsort(-values, kind="stable").tolist()
                 if q not in self.bare and not isinstance(self.trails[q], PricedPath | WeighedPath)]
        paths = [q for q in order if self.paths[q].path]
        chosen = [*(q for q in order if not self.paths[q].path), *paths[:DEAREST], *self._counting(paths)]
        for q in dict.fromkeys(chosen):
            if q not in self.priced:
                self.priced[q] = priced_rows(self.told, self.paths[q], self.tables[q])
            table, more, prices = priced_table(self.problem, self.priced[q], self.tables[q], cut)
            key = q, prices
            if prices and key not in self.known:
                counts = PathBound((), self.paths[q].stages, self.paths[q].transfers)
                self._append(key, counts, PricedPath(q, prices), table, self.fixed[q] + more)

    def _counting(self, paths: Sequence[int]) -> list[int]:
        """For each group of stages of which something is known together, the first path that counts all of that."""
        every = {(one.stages, one.weights): one for one in self.problem.priced}
        firsts = (next((q for q in paths if self._counts(q, key, one)), None) for key, one in every.items())
        return [q for q in firsts if q is not None]

    def _counts(self, q: int, key: tuple[object, ...], one: PricedStages) -> bool:
        """Whether a path counts all that is known of stages together."""
        if (q, *key) not in self.counting:
            self.counting[q, *key] = counts_of(one, self.paths[q])
        return self.counting[q, *key]

    def add_blend(self, blend: Blend) -> int:
        """Adds the paths of a blend, and the blend; returns its number."""
        return self.add(blended(blend), tuple((self.add(path, bare=True), weight) for path, weight in blend))

    def add_part(self, part: BoxPart) -> tuple[int, int]:
        """Adds the blend of a part, and it with what is known by the part's dual values; returns the numbers of both.
        """
        number = self.add_blend(part.blend)
        key = "weighed", number, part.known, part.together
        if key not in self.known:
            path = self.paths[number]
            table, more, known, together = weighed_table(self.told, path, self.tables[number], part)
            self._append(key, PathBound((), path.stages, path.transfers), WeighedPath(number, known, together), table,
                         self.fixed[number] + more)
        return number, self.known[key]

    def add_limit(self, limit: BlockLimit) -> int:
        """Adds a limit of blocks, which mixtures may count where it holds; returns its number. It is no path."""
        if (limit,) not in self.known:
            table = np.zeros((len(self.problem.seconds), self.problem.blocks + 1))
            table[list(limit.stages)] = limit.sign * np.arange(self.problem.blocks + 1)
            self.bare.add(len(self.paths))
            self._append((limit,), PathBound(("limit",), (), ()), limit, table, -float(limit.sign * limit.blocks))
        return self.known[limit,]

    def blend(self, box: Box, least: Sequence[Array], begun: Sequence[PathBound] = (),
              limits: Sequence[BlockLimit] = ()) -> BoxBlend:
        """Adds the blend that says most of a box, and it as it is priced; begins with some paths.

        `least` are, for each group and option, seconds that no cut of the box with that option is below. The linear
        program has the options of the least. Where the blend is least with others, it has these too.
        """
        assert self.stages is not None
        paths, parts = begun or self.begun(), list[BoxPart]()
        chosen, found, cut = [set(np.argsort(one, kind="stable")[:COLUMNS].tolist()) for one in least], list[
            Mixture](), self.even(box)
        for k in range(MORE):
            before = sum(map(len, chosen))
            for rows, group, own in zip(chosen, box.groups, box.options, strict=True):
                rows |= set(np.flatnonzero((own == [cut[s] for s in group]).all(axis=1)).tolist())
            if k and sum(map(len, chosen)) == before:
                break
            options = [own[sorted(rows)] for own, rows in zip(box.options, chosen, strict=True)]
            most, made, mean = best_blend(self.problem, box.groups, options, paths, self.stages, limits, self.goal,
                                          sent=(self.problem.transfers + box.sent_more).tolist())
            paths = [path for path, _ in made.blend]
            parts.append(made)
            value, mixtures, cut = self._blended(box, made, limits)
            found += mixtures
            if value >= most * (1 - CLOSE):
                break
        return BoxBlend(found, tuple(parts), mean)

    def blend_again(self, box: Box, parts: Sequence[BoxPart], limits: Sequence[BlockLimit] = ()) -> list[Mixture]:
        """Adds blends that were found before, and each as it is priced where it is least in a box; each by itself."""
        return [mixture for part in parts for mixture in self._blended(box, part, limits)[1]]

    def tell_anew(self, box: Box, part: BoxPart, limits: Sequence[BlockLimit] = ()) -> tuple[BoxPart, list[Mixture]]:
        """The blend of a part with what is known now, as often as says most where it is least in a box; adds these.
        """
        best, (value, found, cut) = part, self._blended(box, part, limits)
        for _ in range(MORE):
            made = told_anew(self.told, blended(part.blend), part, cut)
            now, mixtures, cut = self._blended(box, made, limits)
            found += mixtures[-1:]
            if now <= value:
                break
            best, value = made, now
        return best, found

    def _blended(self, box: Box, part: BoxPart, limits: Sequence[BlockLimit]
                 ) -> tuple[float, list[Mixture], tuple[int, ...]]:
        """Adds a blend, and it as it is priced where it is least in a box: (that least, each by itself, the cut there).

        Each pays the blend's prices at the limits of the box.
        """
        known, (number, weighed) = len(self.paths), self.add_part(part)
        paid = tuple((self.add_limit(one), price) for one, price in zip(limits, part.limits, strict=False) if price > 0)
        table, fixed, sent = self.mixed(((weighed, 1.0), *paid))
        value, cut = least_cut(box, table, sent)
        self.add_priced(cut)
        new = (q for q in range(known, len(self.paths)) if q not in (number, weighed) and not self.paths[q].path)
        return value + fixed, [((q, 1.0), *paid) for q in (number, *new, weighed)], cut

    def sent_more(self, cuts: NDArray[np.intp]) -> Array:
        """[boundary, cut] the seconds that a transfer takes at least, above the least of any place."""
        if self.places is None:
            return np.zeros((len(self.problem.transfers), len(cuts)))
        before = np.cumsum(cuts[:, :-1], axis=1)
        found: Array = self.places.sent[np.arange(before.shape[1]), before, cuts[:, 1:]].T
        return found

    def blend_at(self, cut: tuple[int, ...], begun: Sequence[PathBound] = ()) -> bool:
        """Adds the blend that says most of one cut, once, and it as it is priced; whether it was not there.

        It begins with some paths, and those that are greatest there.
        """
        if self.stages is None or cut in self.closely:
            return False
        self.closely.add(cut)
        options = [np.array([[n]]) for n in cut]
        groups = [(s,) for s in range(len(cut))]
        paths = [*dict.fromkeys([*begun, *self.begun([cut])])]
        self.add_part(best_blend(self.problem, groups, options, paths, self.stages, sent=self.problem.sent_at(cut))[1])
        self.add_priced(cut)
        return True

    def begun(self, cuts: Sequence[tuple[int, ...]] = ()) -> list[PathBound]:
        """The paths with which a blend begins: the greatest at each of some cuts, or of the least that were traced."""
        plain = np.array([q for q, path in enumerate(self.paths) if path.path and q not in self.bare], dtype=np.intp)
        cuts = cuts or sorted(self.traced, key=self.traced.__getitem__)[:COLUMNS]
        order = plain[np.argsort(-self.at(cuts)[plain], axis=0, kind="stable")] if cuts else plain[:, None]
        return [self.paths[q] for q in dict.fromkeys(order[:TOP].T.ravel().tolist())]

    def look_near(self, cut: tuple[int, ...], most: int) -> None:
        """Evaluates a cut, or one near it whose stages end where they may, and goes on from there; see `improve`."""
        if self.problem.ends is not None and not self.problem.allows(cut):
            at = [0]
            for row, last, n in zip(self.problem.ends[:-1], self._last_ends, np.cumsum(cut)[:-1], strict=True):
                own = np.flatnonzero(row)
                own = own[(own > at[-1]) & (own <= last)]
                at.append(int(own[np.abs(own - n).argmin()]) if len(own) else at[-1])
            cut = tuple(np.diff([*at, self.problem.blocks]).tolist())
            if not self.problem.allows(cut) or not self.possible[np.arange(len(cut)), cut].all():
                return
        self.evaluate(cut)
        if most:
            self.improve(cut, most)

    @cached_property
    def _last_ends(self) -> list[int]:
        """For each stage but the last, the last place where it may end, so that the others may; -1 where none is."""
        found, last = list[int](), self.problem.blocks
        for row in self.problem.ends[-2::-1] if self.problem.ends is not None else ():
            last = max(np.flatnonzero(row[:max(0, last)]).tolist(), default=-1)
            found.append(last)
        return found[::-1]

    def evaluate(self, cut: tuple[int, ...]) -> None:
        """Traces the cut, once, and finds its exact seconds where it may be the best; none that ends inside a unit."""
        if not self.problem.allows(cut):
            return
        if cut not in self.traced:
            self.traced[cut], path = self.trace(cut)
            self.add(path)
            self.add_priced(cut)
        if cut not in self.seen and (not self.seen or self._likely(cut) < self.seen[self.best]):
            if self.closely and self._is_doubtful:
                self.blend_at(cut)
            self.seen[cut] = self.exact(cut) if self.exact else self._likely(cut)

    def settle(self, late: Callable[[], bool]) -> None:
        """Finds the blend of the best cut, if paths may say too little of it, until that is still the best.

        From then on each that seems best is looked at so before it counts: the goal never rises.
        """
        while self._is_doubtful and not late() and self.blend_at(self.best):
            self.seen[self.best] = self._likely(self.best)

    @property
    def _is_doubtful(self) -> bool:
        """Whether a cut may take more than paths say: where bytes have prices, and nothing tells its exact seconds."""
        return bool(self.problem.priced) and self.exact is None

    @cached_property
    def listed(self) -> dict[tuple[int, ...], float]:
        """By cut whose plans are listed, the least seconds."""
        return {one.cut: one.seconds for one in self.problem.listed}

    def _likely(self, cut: tuple[int, ...]) -> float:
        """Seconds of a cut as traced, or of a path with all that is known, where these are clearly more.

        Where its plans are listed, those of the fastest of them.
        """
        if cut in self.listed:
            return self.listed[cut]
        most = float(self.at([cut]).max())
        return most if most > self.traced[cut] * (1 + SAME) else self.traced[cut]

    def even(self, box: Box) -> tuple[int, ...]:
        """The cut whose stages' F + B + W have the least sum of squares."""
        whole = np.nan_to_num(self.problem.seconds[:, :, :3].sum(axis=2), posinf=0.0)
        return least_cut(box, np.concatenate([np.zeros((len(whole), 1)), whole ** 2], axis=1),
                         np.zeros(len(self.problem.transfers)))[1]

    def at(self, cuts: Sequence[Sequence[int]] | NDArray[np.intp]) -> Array:
        """[path, cut] seconds of every path at these cuts; of bare ones nothing is known: they are below all."""
        rows, tables, fixed, sent = self.all
        chosen = np.asarray(cuts)
        total = np.repeat(fixed[:, None], len(chosen), axis=1)
        total += sent @ self.sent_more(chosen)
        for stage in range(chosen.shape[1]):
            total += tables[:, stage, chosen[:, stage]]
        found = np.full((len(self.paths), len(chosen)), -np.inf)
        found[rows] = total
        return found

    def improve(self, cut: tuple[int, ...], most: int = 60) -> None:
        """Moves a block from one stage to another, where no path says that this takes longer or is above the goal.

        Each of at most `most` steps is evaluated. It begins at a cut that was.
        """
        for _ in range(most):
            value, other = self._neighbour(cut)
            if other in self.traced or value >= max(self.goal, self._likely(cut)):
                return
            self.evaluate(other)
            if self._likely(other) < self._likely(cut):
                cut = other

    def _neighbour(self, cut: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """(greatest path there, the neighbour of a cut where that is least), of those not traced."""
        if self.problem.ends is not None:
            others = [one for one in self._beside(cut) if one not in self.traced]
            values = self.at(others).max(axis=0) if others else np.array([np.inf])
            return float(values.min()), others[int(values.argmin())] if others else cut
        _, tables, fixed, _ = self.all
        stages, at, possible = np.arange(len(cut)), np.array(cut), self.possible
        here = tables[:, stages, at]
        above, below = np.minimum(at + 1, self.problem.blocks), at - 1
        more = np.where(possible[stages, above] & (above > at), tables[:, stages, above] - here, np.inf)
        less = np.where(possible[stages, below], tables[:, stages, below] - here, np.inf)
        values = ((fixed + here.sum(axis=1))[:, None, None] + more[:, :, None] + less[:, None, :]).max(axis=0)
        values[stages, stages] = np.inf
        for flat in np.argsort(values, axis=None, kind="stable")[:2 * len(cut)].tolist():
            to, of = divmod(flat, len(cut))
            other = tuple(n + (s == to) - (s == of) for s, n in enumerate(cut))
            if other not in self.traced:
                return float(values[to, of]), other
        return np.inf, cut

    def _beside(self, cut: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The cuts in which some boundaries in a row lie at the next place where a stage may end, or at the one before.
        """
        assert self.problem.ends is not None
        found, ends = list[tuple[int, ...]](), np.cumsum(cut)
        marks = [np.flatnonzero(row) for row in self.problem.ends]
        at = [int(np.searchsorted(own, end)) for own, end in zip(marks, ends, strict=True)]
        for first, end in combinations(range(len(cut)), 2):
            for step in (-1, 1):
                if all(0 <= at[s] + step < len(marks[s]) for s in range(first, end)):
                    moved = [int(marks[s][at[s] + step]) if first <= s < end else int(ends[s]) for s in range(len(cut))]
                    sizes = np.diff(moved, prepend=0)
                    if (sizes > 0).all() and self.possible[np.arange(len(cut)), sizes].all():
                        found.append(tuple(sizes.tolist()))
        return found

    def rule_out(self, box: Box) -> tuple[list[Array], list[Mixture]]:
        """(for each group and option the greatest least seconds of some paths, these paths).

        They are few that rule out what any path rules out, and the best for each option of the group that bounds best.
        """
        rows, tables, fixed, sent = self.all
        least = [one + fixed[:, None] for one in least_with_options(box, tables, sent)]
        left, used = np.concatenate(least, axis=1) >= self.goal, set()
        while (counts := left.sum(axis=1)).any():
            used.add(path := int(counts.argmax()))
            left = left & ~left[path]
        bounding = max(least, key=lambda one: float(one.max(axis=0).min()))
        used |= set(bounding.argmax(axis=0).tolist())
        chosen = sorted(used)
        return [one[chosen].max(axis=0) for one in least], [((int(rows[path]), 1.0),) for path in chosen]

    def mix(self, cuts: Sequence[tuple[int, ...]], used: Mixture = ()) -> tuple[Mixture, float]:
        """(the mixture whose least over these cuts is greatest, that least).

        It is of the TOP paths at each cut, those `used` before, and those of mean seconds.
        """
        for _ in range(MEANS):
            values = self.at(cuts)
            top = np.argsort(-values, axis=0, kind="stable")[:TOP].ravel()
            rows = np.unique(np.concatenate([top, np.array([*(q for q, _ in used), *self.means], dtype=np.intp)]))
            found, shares = best_mixture(values[rows])
            used = tuple((int(rows[q]), weight) for q, weight in found)
            least = float(sum(weight * values[q] for q, weight in used).min())
            if not self._learn_mean(cuts, shares, least):
                break
        return used, least

    def _learn_mean(self, cuts: Sequence[tuple[int, ...]], shares: Sequence[float], least: float) -> bool:
        """Adds the critical path of the mean of cuts; whether it is new and its mean is above `least` seconds."""
        if self.mean is None or not shares or len(self.means) >= MOST_MEANS:
            return False
        known, number = len(self.paths), self.add(self.mean(cuts, shares)[1])
        if number < known or self.at(cuts)[number] @ np.array(shares) <= least * (1 + RISES):
            return False
        self.means.append(number)
        return True

    def mixed(self, mixture: Mixture) -> tuple[Array, float, Array]:
        """(table, fixed seconds, how often each transfer counts) of a mixture."""
        sent = np.zeros(len(self.problem.transfers))
        for q, weight in mixture:
            sent[:len(self.paths[q].transfers)] += weight * np.array(self.paths[q].transfers)
        return (sum((weight * self.tables[q] for q, weight in mixture), np.zeros_like(self.tables[0])),
                sum(weight * self.fixed[q] for q, weight in mixture), sent)


def blended(blend: Blend) -> PathBound:
    """The counts of a blend."""
    def mean(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(sum(weight * row[i] for row, (_, weight) in zip(rows, blend, strict=True))
                     for i in range(len(rows[0])))

    stages = tuple(mean(rows) for rows in zip(*(path.stages for path, _ in blend), strict=True))
    return PathBound((), stages, mean([path.transfers for path, _ in blend]))


def best_mixture(values: Array) -> tuple[Mixture, tuple[float, ...]]:
    """(weights of the rows whose least mixed column is greatest, shares of the columns, of sum 1).

    Weights maximise z with z <= weights . column for each column. Shares are dual values; there are none where there is
    no optimum.
    """
    scale = float(values.max()) or 1.0
    solver = linear_program()
    weights = [solver.NumVar(0.0, 1.0, "") for _ in values]
    least = solver.NumVar(-solver.infinity(), solver.infinity(), "")
    add_row(solver, [(weight, 1.0) for weight in weights], 1.0, 1.0)
    rows = [add_row(solver, [(least, -1.0), *zip(weights, column, strict=True)], 0.0)
            for column in (values / scale).T.tolist()]
    solver.Maximize(least)
    if not solve_program(solver):
        return ((int(values.min(axis=1).argmax()), 1.0),), ()
    found = [(q, max(0.0, weight.solution_value())) for q, weight in enumerate(weights)]
    total, duals = sum(weight for _, weight in found), [abs(row.dual_value()) for row in rows]
    return (tuple((q, weight / total) for q, weight in found if weight > 1e-9 * total),
            tuple(dual / sum(duals) for dual in duals) if sum(duals) else ())
