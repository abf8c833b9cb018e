"""Checks the proof that no cut of a chain into pipeline stages is below a bound (`core.pipeline_cuts`).

The check shares no code with the search, and redoes its arithmetic from the seconds of the stages alone:

    paths       each is walked again; how often a term is on it is counted again; blends have the means of these
    prices      what is known of stages of a rank together is taken off these counts; the whole budget is paid for
    weighed     what is known counts so often that no term counts more often than on the path
    mixtures    weights are at least 0 and are divided by their sum, if that is above 1
    boxes       the least of a mixture with each option is found again, over (group, blocks left)
    transfers   where they depend on the blocks before a boundary, and each stage is a group, these are known; else they
                lie between the sums of what is left of stages, and the stage behind has as few as are left of it
    ends        where each stage is a group, and of each cut that is tried, stages end where they may
    children    they must hold every cut that is left
    limits      a mixture counts one only in boxes inside the part of which it is said
    every       each cut that is left is tried; where the plans of its stages are listed, those pipelines are run that
                no path rules out

Sums of floats differ by their order: SLACK is granted.
"""

from collections.abc import Collection, Sequence
from functools import reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array
from autoddl.core.pipeline import check_schedule
from autoddl.core.pipeline_cuts import (
    BlockLimit,
    CutNode,
    CutProblem,
    CutProof,
    ListedPlans,
    Mixture,
    PricedPath,
    Trail,
    WeighedPath,
    stage_load,
)
from autoddl.search.certify.pipeline_paths import PathWalk
from autoddl.search.certify.pipeline_runs import run_pipeline

__all__ = ["check_pipeline_bound"]

SLACK = 1e-10
"""Relative differences of sums that are no matter."""

MOST_CUTS = 1_000_000
"""Cuts of a box that are tried one by one, at most."""

Options = list[NDArray[np.intp]]
"""For each group [option, stage of the group] -> blocks."""

Known = tuple[Array, Array]
"""[term] weights, the last two of messages, and [stage, blocks - 1] the least of terms weighted so."""

Counts = tuple[list[list[float]], list[float]]
"""([stage][term] how often the terms of a path count, how often the transfer of each boundary does)."""

Terms = tuple[Array, float]
"""([stage, blocks - 1] seconds, seconds that every cut takes)."""


def check_pipeline_bound(problem: CutProblem, proof: CutProof, bound: float) -> None:
    """Raise AssertionError unless the proof shows that no cut takes less than `bound` seconds.

    Raises InputError where the schedule cannot run.
    """
    check_schedule(problem.schedule)
    check = _Check(problem, proof, bound - SLACK * abs(bound))
    stages = range(problem.schedule.stages)
    assert sorted(stage for group in proof.groups for stage in group) == list(stages), "a stage has no one group"
    sizes: Options = [1 + np.flatnonzero(row)[:, None] for row in check.possible]
    for mixture in proof.singles:
        sizes = check.drop([(s,) for s in stages], sizes, mixture)
    if all(map(len, sizes)):
        check.prove([_product([sizes[s] for s in group], problem.blocks) for group in proof.groups], proof.root, "all")


def _counts(paths: Sequence[Trail], walk: PathWalk) -> list[Counts]:
    """The counts of all paths: those of a blend are means, those of a priced path are those of its path, limits none.
    """
    found: list[Counts | None] = [None] * len(paths)

    def plain(q: int) -> Counts:
        names = paths[q]
        assert isinstance(names, tuple) and all(isinstance(name, str) for name in names), f"{q} is no path"
        if found[q] is None:
            stages, sent = walk.count([name for name in names if isinstance(name, str)])
            found[q] = [[float(n) for n in row] for row in stages], [float(n) for n in sent]
        return found[q]  # type: ignore[return-value]

    def counts(q: int) -> Counts:
        trail = paths[q]
        if isinstance(trail, BlockLimit):
            return [[0.0] * 6 for _ in range(walk.schedule.stages)], [0.0] * (walk.schedule.stages - 1)
        if isinstance(trail, PricedPath | WeighedPath):
            assert isinstance(paths[trail.path], tuple), f"{q} prices what is no path, or is priced already"
            return counts(trail.path)
        parts = [one for one in trail if not isinstance(one, str)]
        return _mean(parts, [plain(k) for k, _ in parts]) if parts else plain(q)

    return [counts(q) for q in range(len(paths))]


def _mean(blend: Sequence[tuple[int, float]], counts: Sequence[Counts]) -> Counts:
    """The counts of a blend. Weights are at least 0 and are divided by their sum, if above 1."""
    assert all(0 <= weight < np.inf for _, weight in blend), \
        f"{blend}: it blends paths with weights of at least 0, all finite"
    divisor = max(1.0, sum(weight for _, weight in blend))
    weights = [weight / divisor for _, weight in blend]
    stages = [[sum(w * one[0][s][i] for w, one in zip(weights, counts, strict=True)) for i in range(len(row))]
              for s, row in enumerate(counts[0][0])]
    return stages, [sum(w * one[1][b] for w, one in zip(weights, counts, strict=True))
                    for b in range(len(counts[0][1]))]


def _product(sizes: Sequence[NDArray[np.intp]], blocks: int) -> NDArray[np.intp]:
    """[option, stage of the group] -> blocks, all of these sizes [size, 1] that have so many together at most."""
    found = sizes[0]
    for own in sizes[1:]:
        found = np.concatenate([np.repeat(found, len(own), axis=0), np.tile(own, (len(found), 1))], axis=1)
        found = found[found.sum(axis=1) <= blocks]
    return found


class _Check:
    """The paths as tables of seconds, and the rules of a proof of `bound` seconds."""

    def __init__(self, problem: CutProblem, proof: CutProof, bound: float) -> None:
        self.bound, self.blocks, self.groups = bound, problem.blocks, proof.groups
        self.possible: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(problem.seconds), axis=2)
        self.terms = np.pad(np.where(self.possible[:, :, None], problem.seconds, 0.0), ((0, 0), (0, 0), (0, 2)))
        stated = [*problem.known, *([((1, 1, 1), problem.whole)] if problem.whole is not None else [])]
        self.alone = [k for k, (weights, _) in enumerate(stated) if len(weights) <= 6]
        self.known: list[Known] = [(np.array([*weights, *(0.0,) * (8 - len(weights))]),
                                    np.where(self.possible, values, 0.0)) for weights, values in
                                   (*stated, *problem.directions)]
        self.paths = len(stated)
        reduces = bool((problem.seconds[:, :, 4] > 0).any()) or any(weights[4] for weights, _ in self.known)
        every = _counts(proof.paths, PathWalk(problem.schedule, reduces))
        counts = np.array([[[*row, *sides] for row, sides in zip(stages, zip([0.0, *sent], [*sent, 0.0], strict=True),
                                                                 strict=True)] for stages, sent in every]
                          ).reshape(len(every), *self.terms.shape[::2])
        self.sent, self.counts = np.array([sent for _, sent in every]), counts[:, :, :6]
        self.schedule, self.listed, self.least_sent = problem.schedule, problem.listed, np.array(problem.transfers)
        self.fixed = self.sent @ self.least_sent
        self.sent_more = np.zeros((len(self.least_sent), *(self.blocks + 1,) * 2)) if problem.sent is None else (
            problem.sent - self.least_sent[:, None, None])
        self.ends = np.ones((len(self.terms), self.blocks + 1), dtype=np.bool_) if problem.ends is None else \
            problem.ends
        assert self.sent_more.shape == (len(self.least_sent), *(self.blocks + 1,) * 2), "transfers are of other stages"
        assert self.sent_more.min(initial=0.0) >= 0 and np.diff(self.sent_more, axis=2).min(initial=0.0) >= 0, \
            "a transfer somewhere is said to take less than it does anywhere, or with fewer blocks behind it"
        self.tables = np.stack([self._rows(s, counts[:, s]) for s in range(len(self.terms))], axis=1)
        for q, path in enumerate(proof.paths):
            if isinstance(path, PricedPath):
                self.tables[q], self.fixed[q] = self._priced(problem, q, counts[q], path.prices)
            if isinstance(path, WeighedPath):
                self.tables[q], self.fixed[q] = self._weighed(problem, q, counts[q], path)
            if isinstance(path, BlockLimit):
                self._check_stages(path.stages, str(path))
                assert path.sign in (1, -1), f"{path}: its sign is 1 or -1"
                self.tables[q], self.fixed[q] = 0.0, -float(path.sign * path.blocks)
                self.tables[q, list(path.stages)] = path.sign * np.arange(1, self.blocks + 1)
        self.limits = {q: path for q, path in enumerate(proof.paths) if isinstance(path, BlockLimit)}

    def _rows(self, s: int, counts: Array) -> Array:
        """[path, blocks - 1] seconds of a stage whose terms count so often, [path, term]: the most of all orders.

        The two terms that messages add have seconds of 0 or more. What is known of directions is for weighed paths.
        """
        least: Array = counts @ self.terms[s].T
        orders = [[k, *(j for j in self.alone if j != k)] for k in range(self.paths)]
        return reduce(np.maximum, (least + self._more(s, counts, [self.known[k] for k in order]) for order in orders),
                      least)

    def _more(self, s: int, counts: Array, known: Sequence[Known]) -> Array:
        """[path, blocks - 1] seconds above those of the terms, by what is known of a stage, in this order."""
        left = np.repeat(counts.T[:, :, None], self.blocks, axis=2)
        found: Array = np.zeros(left.shape[1:])
        for weights, values in known:
            more, used = np.maximum(values[s] - self.terms[s] @ weights, 0.0), weights > 0
            if more.any():
                each = weights[used, None, None]
                times = np.where(more > 0, (left[used] / each).min(axis=0), 0.0)
                found += times * more
                left[used] -= times * each
        return found

    def _priced(self, problem: CutProblem, q: int, counts: Array, prices: Mixture) -> Terms:
        """The seconds of a path on which stages of a rank are counted together, so often for each price."""
        table, fixed = self.tables[q].copy(), float(self.fixed[q])
        left, added, paid = self._together(problem, counts, prices)
        for s in {s for k, _ in prices for s in problem.priced[k].stages}:
            table[s] = np.maximum(table[s], added[s] + self._rows(s, left[s][None])[0])
        return table, fixed - paid

    def _weighed(self, problem: CutProblem, q: int, counts: Array, path: WeighedPath) -> Terms:
        """The seconds of a path on which what is known counts as often as it says."""
        left, added, paid = self._together(problem, counts, path.together)
        assert len(path.known) == len(left), f"{q} weighs what is known of other stages"
        for s, own in enumerate(path.known):
            for k, times in own:
                assert times >= 0 <= k < len(self.known), f"{q} counts something less than never, or what is not known"
                weights, values = self.known[k]
                left[s] -= times * weights
                added[s] += times * values[s]
        assert left.min() >= 0, f"{q}: what is known counts more than is on the path"
        return np.maximum(self.tables[q], added + (left[:, None] * self.terms).sum(axis=2)), float(self.fixed[q]) - paid

    def _together(self, problem: CutProblem, counts: Array, prices: Mixture) -> tuple[Array, Array, float]:
        """(the counts that are left of a path, [stage, blocks - 1] seconds that are added, seconds of every cut)."""
        left, added, paid = counts.copy(), np.zeros(self.terms.shape[:2]), 0.0
        for k, times in prices:
            one = problem.priced[k]
            ranks = {frozenset(pipe[s] for pipe in problem.schedule.placement) for s in one.stages}
            assert times >= 0 <= one.price and len(ranks) == 1 and len(set(one.stages)) == len(one.stages), \
                f"stages {one.stages} do not share the memory of the same ranks, each once"
            paid += times * one.price * one.budget
            for s, weights, values in zip(one.stages, one.weights, one.values, strict=True):
                left[s, :len(weights)] -= times * np.array(weights)
                added[s] += times * values
        assert left.min() >= 0, f"{prices}: they count more than is on the path"
        return left, added, paid

    def _check_stages(self, stages: Sequence[int], where: str) -> None:
        assert {*stages} <= {*range(len(self.terms))} and len({*stages}) == len(stages), \
            f"{where}: {stages} are not stages, each once"

    def _more_sent(self, groups: Sequence[Sequence[int]], options: Options) -> Array:
        """[boundary] seconds by which each transfer is above the least of any place, in the cuts of a box."""
        sizes = {s: own[:, i] for group, own in zip(groups, options, strict=True) for i, s in enumerate(group)}
        low, high = (np.array([end(sizes[s]) for s in range(len(sizes))]) for end in (min, max))
        found = []
        for b, row in enumerate(self.sent_more, start=1):
            least = max(low[:b].sum(), self.blocks - high[b:].sum())
            most = min(high[:b].sum(), self.blocks - low[b:].sum())
            found.append(row[least:most + 1, low[b]].min() if least <= most else 0.0)
        return np.array(found)

    def _mixed(self, mixture: Mixture, within: Collection[BlockLimit]) -> tuple[Array, float, Array]:
        """(seconds of a mixture, those of every cut, how often each transfer counts)."""
        assert mixture and all(0 <= weight < np.inf for _, weight in mixture), \
            f"{mixture}: weights are at least 0 and finite"
        weights, numbers = np.array([weight for _, weight in mixture]), [q for q, _ in mixture]
        limits = np.array([q in self.limits for q in numbers])
        assert {self.limits[q] for q in numbers if q in self.limits} <= {*within}, f"{mixture}: a limit holds elsewhere"
        weights = np.where(limits, weights, weights / max(1.0, weights[~limits].sum()))
        return (np.tensordot(weights, self.tables[numbers], 1), float(weights @ self.fixed[numbers]),
                weights @ self.sent[numbers])

    def drop(self, groups: Sequence[Sequence[int]], options: Options, mixture: Mixture,
             within: Collection[BlockLimit] = ()) -> Options:
        """The options with which a mixture may be below the bound, and those of which it says no number.

        The limits that hold are `within`.
        """
        in_a_row = all(tuple(group) == (g,) for g, group in enumerate(groups))
        table, fixed, sent = self._mixed(mixture, within)
        costs = [table[list(group), own - 1].sum(axis=1) for group, own in zip(groups, options, strict=True)]
        if in_a_row:
            return [own[~(fixed + least >= self.bound)] for own, least in zip(
                options, self._in_a_row([own[:, 0] for own in options], costs, sent), strict=True)]
        fixed += float(sent @ self._more_sent(groups, options))
        steps = [self._by_blocks(own, cost) for own, cost in zip(options, costs, strict=True)]
        before, behind = self._sums(steps), self._sums(steps[::-1])[::-1]
        kept: Options = []
        for g, own in enumerate(options):
            rest = _together(before[g], behind[g + 1])[self.blocks - own.sum(axis=1)]
            kept.append(own[~(fixed + costs[g] + rest >= self.bound)])
        return kept

    def _in_a_row(self, sizes: Sequence[NDArray[np.intp]], costs: Sequence[Array], sent: Array) -> list[Array]:
        """By stage [option]: the least of cuts with it, with transfers where they lie, which count so often."""
        places = np.arange(self.blocks + 1)
        steps = []
        for s, (own, cost) in enumerate(zip(sizes, costs, strict=True)):
            ends = places[:, None] + own
            fits = (ends <= self.blocks) & self.ends[s, np.minimum(ends, self.blocks)]
            more = sent[s - 1] * self.sent_more[s - 1][:, own] if s else 0.0
            steps.append((np.minimum(ends, self.blocks), np.where(fits, cost + more, np.inf)))
        before, behind = [np.where(places == 0, 0.0, np.inf)], [np.where(places == self.blocks, 0.0, np.inf)]
        for ends, taken in steps:
            reached = np.full(self.blocks + 1, np.inf)
            np.minimum.at(reached, ends, before[-1][:, None] + taken)
            before.append(reached)
        for ends, taken in reversed(steps):
            behind.append((taken + behind[-1][ends]).min(axis=1, initial=np.inf))
        return [(start[:, None] + taken + after[ends]).min(axis=0) for start, (ends, taken), after in zip(
            before, steps, behind[-2::-1], strict=False)]

    def _by_blocks(self, options: NDArray[np.intp], costs: Array) -> Array:
        """[blocks]: the least of the options with so many; infinite where none has."""
        found = np.full(self.blocks + 1, np.inf)
        np.minimum.at(found, options.sum(axis=1), costs)
        return found

    def _sums(self, steps: Sequence[Array]) -> list[Array]:
        """For the first 0, 1, 2 ... groups, [blocks taken] the least sum."""
        found = [np.where(np.arange(self.blocks + 1) == 0, 0.0, np.inf)]
        for step in steps:
            found.append(_together(found[-1], step))
        return found

    def prove(self, options: Options, node: CutNode, where: str, within: tuple[BlockLimit, ...] = ()) -> None:
        """Asserts that no cut of the box within some limits is below the bound."""
        for mixture in node.mixtures:
            if all(map(len, options)):
                options = self.drop(self.groups, options, mixture, within)
        if not all(map(len, options)):
            return  # a group has no option, so there is no cut
        assert node.split, f"box {where}: cuts are left below {self.bound} seconds"
        if node.split == "every":
            cuts = self._cuts(options, where)
            for limit in within:
                cuts = cuts[limit.sign * (cuts[:, list(limit.stages)].sum(axis=1) - limit.blocks) <= 0]
            most = reduce(np.maximum, (self._at(q, cuts) for q in range(len(self.tables)) if q not in self.limits))
            for one in self.listed:
                assert len(one.cut) == len(one.plans) == self.schedule.stages, f"cut {one.cut}: it is not of all stages"
                mine = (cuts == np.array(one.cut)).all(axis=1) & (most < self.bound)
                if mine.any() and self._all_are_slow(one):
                    most[mine] = self.bound
            assert (most >= self.bound).all(), f"box {where}: no path of the proof rules out {cuts[most.argmin()]}"
        elif node.split == "load":
            self._prove_loads(options, node, where, within)
        elif node.split == "blocks":
            self._prove_blocks(options, node, where, within)
        elif node.split == "total":
            self._prove_total(options, node, where, within)
        else:
            self._prove_options(options, node, where, within)

    def _prove_total(self, options: Options, node: CutNode, where: str, within: tuple[BlockLimit, ...]) -> None:
        keys = [key for _, key in node.keys if isinstance(key, tuple)]
        assert len(keys) == len(node.children) and len({stages for stages, _ in keys}) == 1, \
            f"box {where}: its parts are of other stages, or of none"
        self._check_stages(keys[0][0], f"box {where}")
        left = {*range(self.blocks + 1)}
        for (stages, (low, high)), child in zip(keys, node.children, strict=True):
            left -= {*range(low, high + 1)}
            self.prove(options, child, f"{where}, {low} to {high} blocks of stages {stages}",
                       (*within, BlockLimit(stages, 1, high), BlockLimit(stages, -1, low)))
        assert not left, f"box {where}: {min(left)} blocks of stages {keys[0][0]} are in none of its parts"

    def _prove_loads(self, options: Options, node: CutNode, where: str, within: tuple[BlockLimit, ...]) -> None:
        seconds = self.terms[:, :, :3].tolist()
        loads = [np.array([stage_load(sum(sum(seconds[s][n - 1]) for s, n in zip(group, option, strict=True)))
                           for option in own.tolist()]) for group, own in zip(self.groups, options, strict=True)]
        children = dict(zip(node.keys, node.children, strict=True))
        for g, mine in enumerate(loads):
            for v in sorted(set(mine.tolist())):
                box = [own[x == v if i == g else x < v if i < g else x <= v]
                       for i, (own, x) in enumerate(zip(options, loads, strict=True))]
                if (g, v) in children:
                    self.prove(box, children[g, v], f"{where}, {g}={v:g}", within)
                else:
                    assert not self._left(box)[0][self.blocks], f"box {where}: no child where group {g} has load {v}"

    def _prove_options(self, options: Options, node: CutNode, where: str, within: tuple[BlockLimit, ...]) -> None:
        group = node.keys[0][0]
        covered: set[tuple[int, ...]] = set()
        for (g, chosen), child in zip(node.keys, node.children, strict=True):
            assert g == group and isinstance(chosen, tuple), f"box {where}: children of several groups"
            covered |= set(chosen)
            mine = np.array([tuple(option) in chosen for option in options[g].tolist()])
            if mine.any():
                self.prove([own[mine] if i == g else own for i, own in enumerate(options)], child,
                           f"{where}, {g}={chosen}", within)
        assert covered >= set(map(tuple, options[group].tolist())), \
            f"box {where}: options of group {group} have no child"

    def _prove_blocks(self, options: Options, node: CutNode, where: str, within: tuple[BlockLimit, ...]) -> None:
        left = [np.ones(len(own), dtype=np.bool_) for own in options]
        for (g, key), child in zip(node.keys, node.children, strict=True):
            assert isinstance(key, tuple), f"box {where}: blocks lie between two numbers"
            stages, (low, high) = key
            assert {*stages} <= {*self.groups[g]}, f"box {where}: stages {stages} are not of group {g}"
            blocks = options[g][:, [self.groups[g].index(s) for s in stages]].sum(axis=1)
            mine = (low <= blocks) & (blocks <= high)
            left[g] &= ~mine
            if mine.any():
                self.prove([own[mine] if i == g else own for i, own in enumerate(options)], child,
                           f"{where}, {low} to {high} blocks of stages {stages}", within)
        assert len({g for g, _ in node.keys}) == 1, f"box {where}: children of several groups"
        rest = [own[mask] for own, mask in zip(options, left, strict=True)]
        assert not all(map(len, rest)) or not self._left(rest)[0][self.blocks], \
            f"box {where}: there are cuts in none of its parts"

    def _at(self, q: int, cuts: NDArray[np.intp]) -> Array:
        """[cut] seconds of a path; `cuts` are [cut, stage] -> blocks."""
        more = self.sent_more[np.arange(cuts.shape[1] - 1), np.cumsum(cuts[:, :-1], axis=1), cuts[:, 1:]] @ self.sent[q]
        found: Array = self.fixed[q] + more + self.tables[q][np.arange(cuts.shape[1]), cuts - 1].sum(axis=1)
        return found

    def _all_are_slow(self, one: ListedPlans) -> bool:
        """Whether no pipeline of listed plans is below the bound; paths spare most of them from being run."""
        transfers, floors = dict(one.transfers), [self.terms[s, n - 1, :6] for s, n in enumerate(one.cut)]
        assert all(groups and all(groups) for groups in one.plans), f"cut {one.cut}: a stage has no plan"
        assert all((np.array(group) >= least * (1 - SLACK)).all() for groups, least in
                   zip(one.plans, floors, strict=True) for group in groups), \
            f"cut {one.cut}: a plan is said to take less than its ops"
        for layouts in product(*(range(len(groups)) for groups in one.plans)):
            sent = transfers.get(layouts, ())
            assert len(sent) == len(self.least_sent) and (np.array(sent) >= self.least_sent * (1 - SLACK)).all(), \
                f"cut {one.cut}: transfers take less than they do at the least, or are not listed"
            fixed = self.sent @ np.array(sent)
            for stages in product(*(groups[at] for groups, at in zip(one.plans, layouts, strict=True))):
                by_paths = fixed + np.einsum("qst,st->q", self.counts, np.array(stages))
                if by_paths.max() < self.bound and run_pipeline(self.schedule, stages, sent) < self.bound:
                    return False
        return True

    def _left(self, options: Options) -> list[NDArray[np.bool_]]:
        """For each group, and behind the last, [blocks left] whether the groups from it on can have so many."""
        steps = [self._by_blocks(own, np.zeros(len(own))) for own in reversed(options)]
        return [np.isfinite(one) for one in self._sums(steps)[::-1]]

    def _cuts(self, options: Options, where: str) -> NDArray[np.intp]:
        """[cut, stage] -> blocks, every cut of the box."""
        behind = self._left(options)
        cuts, left = np.zeros((1, len(self.terms)), dtype=np.intp), np.array([self.blocks])
        for g, own in enumerate(options):
            rest = left[:, None] - own.sum(axis=1)
            at, option = np.nonzero((rest >= 0) & behind[g + 1][np.maximum(rest, 0)])
            assert len(at) <= MOST_CUTS, f"box {where}: more than {MOST_CUTS} cuts are left to be tried"
            cuts, left = cuts[at], rest[at, option]
            cuts[:, list(self.groups[g])] = own[option]
        return cuts[self.ends[np.arange(cuts.shape[1]), np.cumsum(cuts, axis=1)].all(axis=1)]


def _together(first: Array, second: Array) -> Array:
    """[blocks]: the least sum of both where they have so many together."""
    n = len(first)
    apart = np.arange(n)[:, None] - np.arange(n)
    least: Array = np.where(apart >= 0, first + second[np.maximum(apart, 0)], np.inf).min(axis=1)
    return least
