"""Turns what is known of the stages of one candidate into the problem over its cuts (`search.pipeline_cuts`).

A stage s of n blocks may begin at several places a. A block is a unit, or a part of one where units differ
(`StageUnits.lengths`). The problem has the least of what is known of them:

    seconds[s, n] = min over a of  what is known of the stage of n blocks from place a on

That bounds all cuts. Blocks take about as long, so that the least is near what others of n blocks take. Stages end
with units, and what crosses a boundary is told by its place (`_sent_at`). Where units differ, as those of an encoder
and a decoder do, a cut may take more all the same. So cuts to be solved are found by what is known of their stages
where these lie (`PlacedStages`). The first is that of the least sum of T^8, T the seconds of a stage: nearly that whose
slowest stage is fastest. Where stages share ranks, it is also known how much memory they lack, and about what that
costs.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise
from math import comb, inf

import numpy as np

from autoddl.core.cost_table import Array
from autoddl.core.pipeline import Flight, Schedule
from autoddl.core.pipeline_cuts import (
    CutNode,
    CutProblem,
    CutProof,
    CutSolution,
    ListedPlans,
    PathBound,
    PricedStages,
    StageSeconds,
)
from autoddl.core.pipeline_proofs import Window, WindowProof, ends_in
from autoddl.cost_models.timelines.pipeline_bounds import critical_path
from autoddl.planner.pipelines.joint_stages import SharedPrice
from autoddl.planner.pipelines.stage_parts import SINGLES, StageParts
from autoddl.planner.pipelines.stage_units import Stretches
from autoddl.planner.pipelines.staged_steps import TriedCut

__all__ = ["CutWindow", "KnownStages", "PlacedStages", "beside", "cut_problem", "likely_problem", "other_cuts"]

FEW = 32
"""Cuts of a chain that are all looked at."""

OTHERS = 4
"""Cuts beside the best that may be better, at most."""

CLOSE = 0.01
"""The part by which a cut may take more than is claimed of it."""

MOVES = 12
"""Moves of a unit from one stage to another without a better cut, after which none is looked for."""

SAME = 1e-9
"""Relative differences of sums of seconds that are none."""

LOOKS = 2**21
"""Actions of all cuts that are looked at by then, at most."""


class _Tables:
    """Holds the tables [a, b] of what is known of stages on some number of ranks."""

    def __init__(self, part: StageParts, flights: Sequence[Flight], extra: Iterable[tuple[float, ...]],
                 directions: Iterable[tuple[float, ...]]) -> None:
        every = set(flights)
        self.repeats, self.passes = part.least(part.repeated), part.floor_passes()
        self.least = {weights: part.least(weights) for weights in (*SINGLES, *part.pieces)}
        self.wholes, self.behinds = part.wholes(every), part.behinds(every)
        self.directions = {weights: part.least(weights) for weights in directions}
        self.counted = {(flight, weights): part.counted(flight, weights) for flight in every for weights in extra}


class KnownStages:
    """What is known of all stages of a candidate, where they lie: it makes the problem of any window of cuts."""

    def __init__(self, part: StageParts, schedule: Schedule, flights: Sequence[Flight],
                 prices: Sequence[SharedPrice] = (), listed: Sequence[ListedPlans] = ()) -> None:
        """`listed` are cuts whose plans are."""
        self.part, self.schedule, self.listed, m = part, schedule, listed, float(part.each)
        tables_of = {one: _Tables(one, flights, part.weights, part.directions) for one in part.every}
        own = [tables_of[part.on(s)] for s in range(part.stages)]
        every = list(zip(own, flights, strict=True))
        behinds = [one.behinds[flight] for one, flight in every]
        self.wholes = [np.maximum(one.wholes[flight], behind) for (one, flight), behind in zip(
            every, behinds, strict=True)]
        self.passes, self.repeats = [*zip(*(one.passes for one in own), strict=True)], [one.repeats for one in own]
        extra = [(weights, [np.maximum(one.counted[flight, weights] - _sent(part, s, weights), 0)
                            for s, (one, flight) in enumerate(every)]) for weights in part.weights]
        self.terms = [((m, m, m, 1.0, 1.0, 1.0), self.wholes), ((m, m, m, 0.0, 1.0, 1.0), behinds),
                      *((weights, [one.least[weights] for one in own]) for weights in (*SINGLES, *part.pieces)), *extra]
        self.directions = [(weights, [one.directions[weights] for one in own]) for weights in part.directions]
        self.priced = [(one, [part.priced(flights[s], weights, one.price) - _sent(part, s, weights)
                              for s, weights in zip(one.stages, one.weights, strict=True)])
                       for one in dict.fromkeys(prices)]
        self.sent, self.ends = _sent_at(part), np.isin(np.arange(part.ends[-1] + 1), part.ends)

    def problem(self, window: Window = ()) -> CutProblem:
        """The least seconds of every stage with every number of blocks, wherever it may lie in a window."""
        part, stretches = self.part, self.part.stretches(window)
        by_stage = partial(_by_stage, part, stretches)
        known, passes = by_stage(self.wholes), np.stack([*map(by_stage, self.passes)], axis=2)
        seconds = np.concatenate([passes, np.zeros_like(passes)], axis=2)
        seconds[~np.isfinite(known)] = inf
        terms, directions = ([(weights, _once(part, weights, by_stage(values))) for weights, values in some]
                             for some in (self.terms, self.directions))
        found = CutProblem(self.schedule, seconds, part.transfers, by_stage(self.repeats) / part.each, tuple(terms),
                           tuple(_priced(part, stretches, *one) for one in self.priced), tuple(directions), (),
                           self.sent, ends_in(self.ends, window, part.stages))
        return replace(found, listed=tuple(one for one in self.listed if found.allows(one.cut)))

    def halves(self, window: Window, cut: Sequence[int]) -> tuple[Window, Window] | None:
        """Divides a window in two, so that a cut and the places where least is known of its stages fall apart.

        That is at the boundary of the stage that takes most more than the least of as many blocks elsewhere. Returns
        None where the window has one place for each boundary.
        """
        part, ends = self.part, self.part.ends
        sides = [*(window or ((0, ends[-1]),) * (part.stages - 1))]
        inside = [[k for k, end in enumerate(ends) if low <= end <= high] for low, high in sides]
        best: tuple[float, int, int, int] = (0.0, 0, 0, 0)
        for s, (a, b) in enumerate(pairwise((0, *cut, part.units))):
            known = self.wholes[s]
            there = part.least_place(s, ends[b] - ends[a], known, window)
            more = float(known[a, b] - known[there])
            for k, here, other in ((s - 1, a, there[0]), (s, b, there[1])):
                if 0 <= k < len(inside) and here != other and more > best[0]:
                    best = more, k, min(here, other), max(here, other)
        _, k, low, high = best
        at = [one for one in inside[k][:-1] if low <= one < high]
        if not at:
            k = max(range(len(inside)), key=lambda k: len(inside[k]))
            at = inside[k][:-1]
        if not at:
            return None
        end = ends[at[len(at) // 2]]
        first, last = sides[k]
        return (*sides[:k], (first, end), *sides[k + 1:]), (*sides[:k], (end + 1, last), *sides[k + 1:])


@dataclass(slots=True, eq=False)
class CutWindow:
    """The cuts of a candidate whose boundaries lie in a window, and what was proved of them.

        ends      the window
        bound     seconds that no cut in it is below
        proof     of the bound; of this window or of one around it
        answer    what was found there last
    """

    ends: Window = ()
    bound: float = 0.0
    proof: WindowProof | None = None
    answer: CutSolution | None = None

    def learn(self, bound: float, problem: CutProblem, proof: CutProof, ends: Window) -> None:
        """Takes over a bound that is greater, with its proof, of this window or of one around it with other ends."""
        if bound > self.bound:
            self.bound, self.proof = bound, WindowProof(ends, problem, proof)

    def end(self, problem: CutProblem, path: PathBound) -> None:
        """Takes over that no cut of the window is possible: any path proves it, for no numbers of blocks are left."""
        mixture = ((0, 1.0),)
        self.learn(inf, problem, CutProof((path.path,), (mixture,), tuple((s,) for s in range(len(problem.seconds))),
                                          CutNode((mixture,))), self.ends)
        self.answer = None


def cut_problem(part: StageParts, schedule: Schedule, flights: Sequence[Flight], prices: Sequence[SharedPrice] = ()
                ) -> CutProblem:
    """The least seconds of every stage with every number of blocks, wherever it may begin."""
    return KnownStages(part, schedule, flights, prices).problem()


def _sent(part: StageParts, s: int, weights: Sequence[float]) -> Array:
    """[a, b]: the least seconds of messages of a stage that count so, of which each side has a half.

    They are those of what the units next to it read.
    """
    before, behind = (np.zeros(part.units + 1) for _ in range(2))
    before[1:-1] = part.transfers_at[s - 1] if s else 0.0
    behind[1:-1] = part.transfers_at[s] if s < part.stages - 1 else 0.0
    found: Array = (weights[6] * before[:, None] + weights[7] * behind) / 2
    return found


def _sent_at(part: StageParts) -> Array | None:
    """[boundary, blocks before it, blocks of the stage behind it]: least seconds of a transfer there.

    Inside a unit they are those at its nearer end, into a stage that ends with the unit before. None where they do not
    depend on the place.
    """
    least, every = np.array(part.transfers), part.transfers_to
    first, last = np.arange(1, part.units), np.arange(part.units + 1)
    real = (last > first[:, None]) & (last <= part.units)
    if all(row[real].max() <= one * (1 + SAME) for row, one in zip(every, least, strict=True)):
        return None
    ends, blocks = np.array(part.ends), np.arange(part.ends[-1] + 1)
    before = np.clip(np.searchsorted(ends, blocks, side="right") - 1, 1, part.units - 1)
    behind = np.clip(np.searchsorted(ends, blocks), 1, part.units - 1)
    until = np.searchsorted(ends, np.minimum(blocks[:, None] + blocks, ends[-1]), side="right") - 1
    ways = (every[:, at[:, None] - 1, np.maximum(until, at[:, None] + 1)] for at in (before, behind))
    found: Array = np.maximum(np.minimum(*ways), least[:, None, None])
    return found


def _once(part: StageParts, weights: Sequence[float], values: Array) -> Array:
    """[s, n]: what is known, less what a stage before on the same ranks may have counted of it."""
    twice = np.array([one.seconds(weights) for one in part.twice])
    found: Array = np.maximum(values - twice[:, None], 0.0)
    return found


def _by_stage(part: StageParts, stretches: Sequence[Stretches], values: Sequence[Array]) -> Array:
    """[s, n - 1]: the least of values[s][a, b] over the places a and b between which stage s may have n blocks.

    It is infinite where that cannot be.
    """
    found = np.full((len(values), part.ends[-1]), inf)
    for row, each, (blocks, at, first) in zip(found, values, stretches, strict=True):
        if len(blocks):
            row[blocks - 1] = np.minimum.reduceat(each.ravel()[at], first)
    return found


def _priced(part: StageParts, stretches: Sequence[Stretches], one: SharedPrice, known: Sequence[Array]
            ) -> PricedStages:
    """Tells what is known of stages of a part under a price, with every number of blocks, wherever they may begin."""
    values = np.zeros((len(one.stages), part.ends[-1]))
    for i, (s, weights, own) in enumerate(zip(one.stages, one.weights, known, strict=True)):
        [least] = _by_stage(part, [stretches[s]], [own])
        values[i] = np.where(np.isfinite(least), np.maximum(least - part.twice[s].seconds(weights), 0.0), 0.0)
    budget = part.task.budget + sum(part.twice[s].nbytes for s in one.stages)
    return PricedStages(one.stages, one.weights, one.price, budget, values)


class PlacedStages:
    """What stages likely take where they lie: their forward and backward add up to what is known of both."""

    def __init__(self, part: StageParts, schedule: Schedule, flights: Sequence[Flight],
                 lost: Callable[[tuple[int, ...]], Sequence[float]] | None = None,
                 taken: Mapping[tuple[int, int, int], StageSeconds] | None = None,
                 like: TriedCut | None = None) -> None:
        """`lost` tells, by stage of a cut, the seconds of a step that the budget costs; by default none.

        `taken` tells what a stage takes, by its number and its places, where that was found. What others take in every
        microbatch, and once, is divided as in the stage of their number of a cut `like` theirs.
        Transfers take so many times their least as there.
        """
        self.part, self.schedule, self.lost, self.taken, m = part, schedule, lost, taken or {}, part.each
        known = {one: (np.stack(one.floor_passes(), axis=2), one.least(one.repeated) / m, one.wholes(set(flights)))
                 for one in part.every}
        self._seconds, self._totals = list[Array](), list[Array]()
        for s, flight in enumerate(flights):
            passes, both, wholes = known[part.on(s)]
            seconds = _likely(np.concatenate([passes, np.zeros_like(passes)], axis=2), both, wholes[flight], m)
            total = m * seconds[:, :, :3].sum(axis=2) + seconds[:, :, 4]
            self._seconds.append(_divided(seconds, like.stages[s]) if like else seconds)
            self._totals.append(np.where(np.isfinite(wholes[flight]), total, inf))
        sent = zip(like.transfers, self._least_sent(like.cut), strict=True) if like else ()
        self._times = [now / least if least else 1.0 for now, least in sent] or [1.0] * (len(flights) - 1)

    def _least_sent(self, cut: Sequence[int]) -> list[float]:
        return [self.part.transfers_at[b][k - 1] for b, k in enumerate(cut)]

    def seconds(self, cut: Sequence[int]) -> float:
        """The seconds of the pipeline; infinite where a stage has no plan."""
        ends = list(pairwise((0, *cut, self.part.units)))
        if any(a >= b or self._totals[s][a, b] == inf for s, (a, b) in enumerate(ends)):
            return inf
        lost = self.lost(tuple(cut)) if self.lost else (0.0,) * len(ends)
        more = [(0.0, seconds / self.part.each, 0.0, 0.0, 0.0, 0.0) for seconds in lost]
        stages = [self.taken.get((s, *at)) or StageSeconds(*(self._seconds[s][at] + more[s]).tolist())
                  for s, at in enumerate(ends)]
        sent = [times * least for times, least in zip(self._times, self._least_sent(cut), strict=True)]
        return critical_path(self.schedule, stages, sent)[0]

    def balanced(self) -> tuple[int, ...] | None:
        """The cut of the least sum of T^8; None where every cut has a stage without a plan."""
        units, scale = self.part.units, max(float(one[np.isfinite(one)].max()) for one in self._totals) or 1.0
        best, before = np.full(units + 1, inf), list[Array]()
        best[0] = 0.0
        for total in self._totals:
            sums = best[:, None] + np.where(np.triu(np.ones_like(total), 1) > 0, (total / scale) ** 8, inf)
            before.append(sums.argmin(axis=0))
            best = sums.min(axis=0)
        if best[-1] == inf:
            return None
        cut = [units]
        for row in reversed(before[1:]):
            cut.append(int(row[cut[-1]]))
        return tuple(cut[:0:-1])

    def near(self, cut: tuple[int, ...], claimed: float) -> tuple[int, ...]:
        """The cut, if it takes what is claimed of it; else the one that takes least of those met by moves from it.

        A move is to the least of the cuts beside that were not met before, though that may take more.
        """
        best = self.seconds(cut)
        if best <= claimed * (1 + CLOSE):
            return cut
        other = self.balanced()
        if other is not None and self.seconds(other) < best:
            cut, best = other, self.seconds(other)
        at, met, stale, looks = cut, {cut}, 0, LOOKS // sum(map(len, self.schedule.actions))
        while stale < MOVES and looks > 0:
            found = {one: self.seconds(one) for one in beside(at) if one not in met}
            at = min(found, key=found.__getitem__, default=at)
            if found.get(at, inf) == inf:
                break
            met.add(at)
            stale, looks = stale + 1, looks - len(found)
            if found[at] < best:
                cut, best, stale = at, found[at], 0
        return cut


def _divided(seconds: Array, like: StageSeconds) -> Array:
    """[.., term]: the seconds of every microbatch, and those of a step, in the proportions of a stage."""
    found, parts = seconds.copy(), np.array(like)
    for terms in (slice(0, 3), slice(3, 6)):
        if parts[terms].any():
            found[..., terms] = seconds[..., terms].sum(axis=-1)[..., None] * parts[terms] / parts[terms].sum()
    return found


def beside(cut: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The cuts in which a stage has a unit more and another one less, and all between begin a unit beside."""
    return [(*cut[:s], *(k + step for k in cut[s:t]), *cut[t:])
            for s, t in combinations(range(len(cut) + 1), 2) for step in (-1, 1)]


def likely_problem(problem: CutProblem) -> CutProblem:
    """The problem with seconds that a stage may have: its forward and backward add up to what is known of both."""
    weights, total = problem.known[0]
    assert problem.whole is not None
    seconds = _likely(problem.seconds, problem.whole, total, weights[0])
    return replace(problem, seconds=np.where(np.isfinite(problem.seconds), seconds, inf))


def _likely(seconds: Array, both: Array, total: Array, microbatches: float) -> Array:
    """[.., term]: least seconds whose forward and backward add up to `both`; what is left of `total` is reduction."""
    with np.errstate(invalid="ignore", divide="ignore"):
        times = np.nan_to_num(np.maximum(both / seconds[..., :3].sum(axis=-1), 1.0), nan=1.0, posinf=1.0)
        found: Array = seconds * times[..., None]
        left = np.maximum(total - microbatches * found[..., :3].sum(axis=-1), 0.0)
    found[..., 4] += np.nan_to_num(left, posinf=0.0)
    return found


def other_cuts(placed: PlacedStages, tried: Container[tuple[int, ...]], cut: tuple[int, ...], most: float,
               also: Iterable[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Cuts that were not tried and that likely take less than `most` seconds, those first that likely take least.

    Of a chain that has few cuts these are all. Else they are beside `cut`, and `also` others.
    """
    stages, units = placed.schedule.stages, placed.part.units
    every = comb(units - 1, stages - 1) <= FEW
    near = list(combinations(range(1, units), stages - 1)) if every else [
        *beside(cut), *also]
    found = {other: placed.seconds(other) for other in near if other not in tried}
    return sorted((one for one in found if found[one] < most), key=found.__getitem__)[:OTHERS]
