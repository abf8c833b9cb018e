"""Checks the proof that no cut of a chain into pipeline stages is below a bound (`core.pipeline_cuts`).

The check shares no code with the search, and redoes its arithmetic from the seconds of the stages alone:

    paths       each is walked again; how often a term is on it is counted again; blends have the means of these
    prices      what is known of stages of a rank together is taken off these counts; the whole budget is paid for
    mixtures    weights are at least 0 and are divided by their sum, if that is above 1
    boxes       the least of a mixture with each option is found again, over (group, blocks left)
    children    they must hold every cut that is left
    every       each cut that is left is tried

Sums of floats differ by their order: SLACK is granted.
"""

from collections.abc import Iterator, Mapping, Sequence

from autoddl.core.pipeline_cuts import CutNode, CutProblem, CutProof, Mixture, PricedPath, Trail, stage_load
from autoddl.search.certify.pipeline_paths import PathWalk

__all__ = ["check_pipeline_bound"]

SLACK = 1e-10
"""Relative differences of sums that are no matter."""

Option = tuple[int, ...]
Options = list[list[Option]]
"""For each group its options, each with the blocks of every stage of the group."""

Known = tuple[Sequence[float], list[list[float]]]
"""Weights of the terms, perhaps with two of messages, and [stage][blocks - 1] the least of terms weighted so."""

Counts = tuple[list[list[float]], list[float]]
"""([stage][term] how often the terms of a path count, how often the transfer of each boundary does)."""

Terms = tuple[list[list[float]], float]
"""([stage][blocks - 1] seconds, seconds that every cut takes)."""


def check_pipeline_bound(problem: CutProblem, proof: CutProof, bound: float) -> None:
    """Raise AssertionError unless the proof shows that no cut takes less than `bound` seconds."""
    check = _Check(problem, proof, bound - SLACK * abs(bound))
    stages = range(problem.schedule.stages)
    assert sorted(stage for group in proof.groups for stage in group) == list(stages), "a stage has no one group"
    sizes: Options = [[(n,) for n in range(1, problem.blocks + 1) if check.possible(s, n)] for s in stages]
    for mixture in proof.singles:
        sizes = check.drop([(s,) for s in stages], sizes, mixture)
    if all(sizes):
        check.prove([_product([sizes[s] for s in group]) for group in proof.groups], proof.root, "all")


def _counts(paths: Sequence[Trail], walk: PathWalk) -> list[Counts]:
    """The counts of all paths: those of a blend are means, those of a priced path are those of its path."""
    found: list[Counts | None] = [None] * len(paths)

    def plain(q: int) -> Counts:
        names = paths[q]
        assert not isinstance(names, PricedPath) and all(isinstance(name, str) for name in names), f"{q} is no path"
        if found[q] is None:
            stages, sent = walk.count([name for name in names if isinstance(name, str)])
            found[q] = [[float(n) for n in row] for row in stages], [float(n) for n in sent]
        return found[q]  # type: ignore[return-value]

    def counts(q: int) -> Counts:
        trail = paths[q]
        if isinstance(trail, PricedPath):
            assert not isinstance(paths[trail.path], PricedPath), f"{q} prices a path that is priced already"
            return counts(trail.path)
        parts = [one for one in trail if not isinstance(one, str)]
        return _mean(parts, [plain(k) for k, _ in parts]) if parts else plain(q)

    return [counts(q) for q in range(len(paths))]


def _mean(blend: Sequence[tuple[int, float]], counts: Sequence[Counts]) -> Counts:
    """The counts of a blend. Weights are at least 0 and are divided by their sum, if above 1."""
    assert all(weight >= 0 for _, weight in blend), f"{blend}: it blends paths with weights of at least 0"
    divisor = max(1.0, sum(weight for _, weight in blend))
    weights = [weight / divisor for _, weight in blend]
    stages = [[sum(w * one[0][s][i] for w, one in zip(weights, counts, strict=True)) for i in range(len(row))]
              for s, row in enumerate(counts[0][0])]
    return stages, [sum(w * one[1][b] for w, one in zip(weights, counts, strict=True))
                    for b in range(len(counts[0][1]))]


def _product(sizes: Sequence[Sequence[Option]]) -> list[Option]:
    found: list[Option] = [()]
    for own in sizes:
        found = [(*before, *option) for before in found for option in own]
    return found


class _Check:
    """The paths as tables of seconds, and the rules of a proof of `bound` seconds."""

    def __init__(self, problem: CutProblem, proof: CutProof, bound: float) -> None:
        self.bound, self.blocks, self.groups = bound, problem.blocks, proof.groups
        self.seconds: list[list[list[float]]] = problem.seconds.tolist()
        self.whole: list[list[float]] | None = None if problem.whole is None else problem.whole.tolist()
        self.known: list[Known] = [(weights, values.tolist()) for weights, values in problem.known]
        reduces = any(term[4] > 0 for row in self.seconds for term in row) or any(w[4] for w, _ in self.known)
        every = _counts(proof.paths, PathWalk(problem.schedule, reduces))
        self.paths = [self._terms(stages, sent, problem.transfers) for stages, sent in every]
        for q, path in enumerate(proof.paths):
            if isinstance(path, PricedPath):
                self.paths[q] = self._priced(problem, self.paths[q], every[q], path.prices)

    def possible(self, stage: int, blocks: int) -> bool:
        """Whether the stage can have so many blocks."""
        return all(x < float("inf") for x in self.seconds[stage][blocks - 1])

    def _terms(self, stages: Sequence[Sequence[float]], sent: Sequence[float], transfers: Sequence[float]) -> Terms:
        """The seconds of a path, for each stage and number of blocks."""
        sides = [0.0, *sent, 0.0]
        found = [self._row(s, [*counts, sides[s], sides[s + 1]]) for s, counts in enumerate(stages)]
        return found, sum(c * x for c, x in zip(sent, transfers, strict=True))

    def _row(self, s: int, counts: Sequence[float]) -> list[float]:
        """Seconds of a stage with 1, 2, 3 ... blocks whose terms count so often; 0 where it cannot have so many."""
        known = [*self.known, *([((1, 1, 1, 0, 0, 0), self.whole)] if self.whole is not None else [])]
        alone = [k for k, (weights, _) in enumerate(known) if len(weights) == 6]
        orders = [[k, *(j for j in alone if j != k)] for k in range(len(known))]
        return [self._most(s, n, counts, known, orders) if self.possible(s, n + 1) else 0.0
                for n in range(self.blocks)]

    def _priced(self, problem: CutProblem, path: Terms, counts: Counts, prices: Mixture) -> Terms:
        """The seconds of a path on which stages of a rank are counted together, so often for each price."""
        table, fixed, sides = [[*row] for row in path[0]], path[1], [0.0, *counts[1], 0.0]
        left = [[*row, sides[s], sides[s + 1]] for s, row in enumerate(counts[0])]
        added = [[0.0] * self.blocks for _ in left]
        for k, times in prices:
            one = problem.priced[k]
            ranks = {frozenset(pipe[s] for pipe in problem.schedule.placement) for s in one.stages}
            assert times >= 0 <= one.price and len(ranks) == 1 and len(set(one.stages)) == len(one.stages), \
                f"stages {one.stages} do not share the memory of the same ranks, each once"
            fixed -= times * one.price * one.budget
            for s, weights, values in zip(one.stages, one.weights, one.values.tolist(), strict=True):
                left[s] = [c - times * w for c, w in zip(left[s], [*weights, 0.0, 0.0], strict=False)]
                added[s] = [x + times * value for x, value in zip(added[s], values, strict=True)]
        assert min(min(row) for row in left) >= 0, f"{prices}: they count more than is on the path"
        for s in {s for k, _ in prices for s in problem.priced[k].stages}:
            table[s] = [max(x, more + rest) for x, more, rest in zip(table[s], added[s], self._row(s, left[s]),
                                                                    strict=True)]
        return table, fixed

    def _most(self, s: int, n: int, counts: Sequence[float], known: Sequence[Known], orders: Sequence[Sequence[int]]
              ) -> float:
        """The most seconds of a stage that some order of what is known of it gives."""
        useful = [order for order in orders if known[order[0]][1][s][n] > 0] or [[]]
        return max(self._seconds(s, n, counts, [known[k] for k in order]) for order in useful)

    def _seconds(self, s: int, n: int, counts: Sequence[float], known: Sequence[Known]) -> float:
        """Seconds of stage s with n + 1 blocks whose terms count so often, by what is known, in this order.

        The two terms that messages add have seconds of 0 or more.
        """
        terms, left = [*self.seconds[s][n], 0.0, 0.0], [float(c) for c in counts]
        total = sum(c * x for c, x in zip(counts, terms, strict=True))
        for weights, values in known:
            each = [*weights, 0.0, 0.0][:8]
            more = values[s][n] - sum(w * x for w, x in zip(each, terms, strict=True))
            if more > 0:
                times = min(c / w for c, w in zip(left, each, strict=True) if w)
                total += times * more
                left = [c - times * w for c, w in zip(left, each, strict=True)]
        return total

    def _mixed(self, mixture: Mixture) -> Terms:
        assert mixture and all(weight >= 0 for _, weight in mixture), f"{mixture}: weights are at least 0"
        divisor = max(1.0, sum(weight for _, weight in mixture))
        parts = [(weight / divisor, *self.paths[q]) for q, weight in mixture]
        table = [[sum(w * rows[s][n] for w, rows, _ in parts) for n in range(self.blocks)]
                 for s in range(len(self.seconds))]
        return table, sum(w * fixed for w, _, fixed in parts)

    def drop(self, groups: Sequence[Option], options: Options, mixture: Mixture) -> Options:
        """The options with which a mixture may be below the bound."""
        table, fixed = self._mixed(mixture)
        costs = [[sum(table[s][n - 1] for s, n in zip(group, option, strict=True)) for option in own]
                 for group, own in zip(groups, options, strict=True)]
        steps = [_by_blocks(own, cost) for own, cost in zip(options, costs, strict=True)]
        behind = _sums(steps[::-1], self.blocks)[::-1]
        before = _sums(steps, self.blocks)
        kept: Options = []
        for g, own in enumerate(options):
            rest = {k: min((x + behind[g + 1][self.blocks - n - k] for n, x in before[g].items()
                            if self.blocks - n - k in behind[g + 1]), default=float("inf")) for k in steps[g]}
            kept.append([option for option, cost in zip(own, costs[g], strict=True)
                         if fixed + cost + rest[sum(option)] < self.bound])
        return kept

    def prove(self, options: Options, node: CutNode, where: str) -> None:
        """Asserts that no cut of the box is below the bound."""
        for mixture in node.mixtures:
            if all(options):
                options = self.drop(self.groups, options, mixture)
        if not all(options):
            return  # a group has no option, so there is no cut
        assert node.split, f"box {where}: cuts are left below {self.bound} seconds"
        if node.split == "every":
            for cut in self._cuts(options):
                assert any(self._at(path, cut) >= self.bound for path in self.paths), \
                    f"box {where}: no path of the proof rules out {cut}"
        elif node.split == "load":
            self._prove_loads(options, node, where)
        else:
            self._prove_options(options, node, where)

    def _prove_loads(self, options: Options, node: CutNode, where: str) -> None:
        loads = [[stage_load(sum(sum(self.seconds[s][n - 1][:3]) for s, n in zip(group, option, strict=True)))
                  for option in own] for group, own in zip(self.groups, options, strict=True)]
        children = dict(zip(node.keys, node.children, strict=True))
        for g, own in enumerate(loads):
            for v in sorted(set(own)):
                box = [[option for option, x in zip(options[i], loads[i], strict=True)
                        if (x == v if i == g else x < v if i < g else x <= v)] for i in range(len(options))]
                if (g, v) in children:
                    self.prove(box, children[g, v], f"{where}, {g}={v:g}")
                else:
                    assert self.blocks not in _sums([_by_blocks(o, [0.0] * len(o)) for o in box], self.blocks)[-1], \
                        f"box {where}: no child where group {g} has load {v}"

    def _prove_options(self, options: Options, node: CutNode, where: str) -> None:
        group = node.keys[0][0]
        covered: set[Option] = set()
        for (g, chosen), child in zip(node.keys, node.children, strict=True):
            assert g == group and isinstance(chosen, tuple), f"box {where}: children of several groups"
            covered |= set(chosen)
            box = [[o for o in own if i != g or o in chosen] for i, own in enumerate(options)]
            if box[g]:
                self.prove(box, child, f"{where}, {g}={chosen}")
        assert covered >= set(options[group]), f"box {where}: options of group {group} have no child"

    def _at(self, path: Terms, cut: Mapping[int, int]) -> float:
        return path[1] + sum(path[0][s][n - 1] for s, n in cut.items())

    def _cuts(self, options: Options) -> Iterator[dict[int, int]]:
        """Every cut of the box, stage -> blocks."""
        behind = _sums([_by_blocks(own, [0.0] * len(own)) for own in reversed(options)], self.blocks)[::-1]

        def extend(g: int, left: int, cut: dict[int, int]) -> Iterator[dict[int, int]]:
            if g == len(options):
                yield cut
                return
            for option in options[g]:
                if left - sum(option) in behind[g + 1]:
                    yield from extend(g + 1, left - sum(option), {**cut, **dict(zip(self.groups[g], option,
                                                                                   strict=True))})

        yield from extend(0, self.blocks, {})


def _by_blocks(options: Sequence[Option], costs: Sequence[float]) -> dict[int, float]:
    """Blocks -> the least of the options with so many."""
    found: dict[int, float] = {}
    for option, cost in zip(options, costs, strict=True):
        found[sum(option)] = min(cost, found.get(sum(option), cost))
    return found


def _sums(steps: Sequence[Mapping[int, float]], most: int) -> list[dict[int, float]]:
    """For the first 0, 1, 2 ... groups, blocks taken -> least sum."""
    found: list[dict[int, float]] = [{0: 0.0}]
    for step in steps:
        new: dict[int, float] = {}
        for n, x in found[-1].items():
            for k, y in step.items():
                if n + k <= most and x + y < new.get(n + k, float("inf")):
                    new[n + k] = x + y
        found.append(new)
    return found
