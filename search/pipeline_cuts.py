"""Finds the best cut of a chain of blocks into the stages of a pipeline, with a proven bound.

The seconds of a cut are at least each path of its schedule (`core.pipeline_cuts`). The paths are linear, and the
critical path of a cut is exact there. So this is a search by cutting planes in a tree of boxes (`cut_boxes`):

    1  trace the even cut and the neighbours that no path rules out, step by step, and keep their critical paths
    2  drop every option with which some path is nowhere below the goal = best seconds * (1 - tolerance), first with
       each stage alone, then with stages of one rank together
    3  in a box, blend the paths, by a linear program over fractional cuts (`path_tables`); or mix them: weights that
       maximise the least mixture over some cuts (another), the cut that has the least of this mixture, again while that
       raises the bound; each drops options
    4  a box with few cuts is finished by the greatest path at each of its cuts, or a blend of paths there
    5  else the box is halved: of some stages of a group, or all of a rank, the mean number of blocks in the blend's
       fractional cut lies farthest from a whole number, and halves have fewer or more. Without blends it is divided by
       its heaviest group, then by the options of a group. The least bound comes first

A search that knows more of the stages goes on with the boxes of the one before. Their blends still bound them, and
those that are left are told what is known since (`path_tables.told_anew`).

It ends when no box is left, after `effort` boxes, or when it is late. The bound is the least of the goal and the boxes
that are left.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array
from autoddl.core.errors import InputError
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import (
    BlockLimit,
    BoxPart,
    CutNode,
    CutProblem,
    CutProof,
    CutSolution,
    DividedBox,
    Key,
    Mixture,
    PathBound,
    Split,
    stage_load,
)
from autoddl.search.cut_boxes import (
    Box,
    Mask,
    count_cuts,
    enumerate_cuts,
    group_stages,
    least_cut,
    least_with_options,
    single_stages,
)
from autoddl.search.cut_planes import CutPlanes, Evaluate, Trace, TraceMean
from autoddl.search.path_tables import Blend, TraceStages

__all__ = ["bound_of_paths", "least_over_cuts"]

STEP = 0.1
"""A box is divided when mixtures can close less than such a part of its gap."""

FEW = 300
"""Cuts of a box that are looked at one by one."""

MIXTURES = 40
"""Most mixtures of a box."""

OTHERS = 100
"""Cuts of such a box that are evaluated at most once the least of it is known."""

BLENDED = 8
"""Cuts of a box with few of which a blend is found each."""

CLOSE = 1e-3
"""The gap to the best mixture of paths that is close enough where no cut is traced."""

KEPT = 100
"""Paths of those that were known first that another search begins with too."""

EVEN = 0.05
"""Blocks by which the mean of a stage has to be from a whole number for a box to be halved there; half of it of groups.
"""

OF_RANKS = -1
"""In place of a group, where the blocks of stages of several groups decide: all of a rank."""

SHARPER = 8
"""How much farther the mean of a whole rank counts than that of a stage; twice as far counts that of a group."""

FINEST = 1e-11
"""The relative tolerance below which sums of floats cannot be told apart."""


def least_over_cuts(problem: CutProblem, paths: Sequence[PathBound], trace: Trace, evaluate: Evaluate | None = None,
                    *, tolerance: float = 1e-3, effort: int = 100, starts: Sequence[tuple[int, ...]] = (),
                    blends: Sequence[Blend] = (), ceiling: float = math.inf, mean: TraceMean | None = None,
                    late: Callable[[], bool] = lambda: False, stages: TraceStages | None = None,
                    before: DividedBox | None = None) -> CutSolution:
    """The cut with the least seconds and a bound of all cuts, in seconds.

        problem      the chain, with least seconds of its stages
        paths        paths that are known, such as `closed_paths` and then those of an answer before; at least one
        trace        critical paths of the problem, as `trace_cut` finds them
        evaluate     exact seconds of a cut, at least those that `trace` tells, which hold where this is None
        tolerance    the relative gap at which the search stops
        effort       most boxes that are looked into
        starts       cuts to evaluate first
        blends       mixtures of paths that count as one, where something is known of seconds weighted so
        ceiling      seconds of something better than these cuts: the search stops once its bound reaches them
        mean         critical paths of the mean of cuts, as `trace_mean` finds them; with them mixtures bound more
        late         whether the time is over: then no other box and no other mixture is looked into
        stages       critical paths of any seconds of stages: with them boxes are bounded by blends, not by mixtures
        before       how another search divided these cuts: this one goes on from there

    Raises InputError where no cut gives every stage a number of blocks that it can have.
    """
    search = CutPlanes(problem, trace, evaluate, max(tolerance, FINEST), ceiling, mean, stages)
    search.add_all([*paths, *(path for blend in blends for path, _ in blend)])
    for blend in blends:
        search.add_blend(blend)
    box = _every_cut(search)
    for cut in (*starts, search.even(box)):
        search.evaluate(cut)
    search.improve(search.best)
    search.settle(late)
    singles: list[Mixture] = []
    for _ in range(2):
        if not box.empty:
            least, used = search.rule_out(box)
            box = box.keep([np.less(one, search.goal) for one in least])
            singles += used
    search.look_within(box)
    tree = _Tree(search, group_stages(box, _together(problem.schedule)), late)
    bound = tree.grow(effort, before)
    proof = CutProof(tuple(search.trails), tuple(singles), tree.root.box.groups, tree.proof())
    cut, blended = search.best, (path for part in tree.last.parts[-1:] for path, _ in part.blend)
    weakest = tree.weakest if tree.closed <= bound else cut
    return CutSolution(cut, search.seen[cut], bound, proof, weakest, dict(search.seen), len(search.traced),
                       tuple(dict.fromkeys([*paths[:KEPT], *search.begun(), *blended])), tree.blend,
                       _divided(tree.root), tree.last.mean)


def bound_of_paths(problem: CutProblem, paths: Sequence[PathBound], mean: TraceMean | None = None
                   ) -> tuple[float, CutProof]:
    """(seconds that no cut is below, the proof): by the mixture of these paths whose least is greatest, nearly.

    No cut is traced, only the `mean` of some, as in `least_over_cuts`: so it is quick. Raises InputError as that does.
    """
    search = CutPlanes(problem, _untraced, None, FINEST, mean=mean)
    search.add_all(paths)
    box, best, mixture = _every_cut(search), (0.0, Mixture([(0, 1.0)])), Mixture()
    cuts = [search.even(box)]
    for _ in range(MIXTURES):
        mixture, most = search.mix(cuts, mixture)
        table, fixed, sent = search.mixed(mixture)
        least, cut = least_cut(box, table, sent)
        best = max(best, (least + fixed, mixture))
        if cut in cuts or most - best[0] < CLOSE * most:
            break
        cuts.append(cut)
    return best[0] * (1 - FINEST), CutProof(tuple(search.trails), (), box.groups, CutNode((best[1],)))


def _untraced(cut: tuple[int, ...]) -> tuple[float, PathBound]:
    raise AssertionError(f"{cut}: paths alone bound here")


def _every_cut(search: CutPlanes) -> Box:
    """The box of all cuts. Raises InputError where there is none."""
    box = single_stages(search.possible, search.places)
    nothing = np.zeros((len(box.groups), box.blocks + 1))
    if box.empty or math.isinf(least_cut(box, nothing, nothing[1:, 0])[0]):
        raise InputError(f"{search.problem.blocks} blocks for {search.problem.schedule.stages} stages: no cut gives "
                         "each stage a number of blocks that it can have; use fewer stages, or give them more memory")
    return box


def _together(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank; with several pipes, stages that share ranks with their mirror image."""
    found: dict[int, list[int]] = {}
    for stage, rank in enumerate(schedule.placement[0]):
        place = min(stage, schedule.stages - 1 - stage) if len(schedule.placement) > 1 else rank
        found.setdefault(place, []).append(stage)
    return list(found.values())


@dataclass(slots=True)
class _Node:
    """A box that is looked into; what is proved in it is as in CutNode.

        box         what is left of it
        bound       seconds that no cut in it is below
        depth       the boxes around it
        least       for each group and option, seconds that no cut of the box with that option is below
        mixtures    that dropped options
        split       how it was divided
        keys        of its children
        children    its parts
        blend       the last blend of it, or of the box around it
        parts       by blend of it the paths with their weights, and prices at its limits
        mean        the fractional cut of which that says least, if it was sought here and not in a search before
        limits      of the blocks of stages of several groups
    """

    box: Box
    bound: float
    depth: int
    least: list[Array]
    mixtures: list[Mixture] = field(default_factory=list)
    split: Split = ""
    keys: list[tuple[int, Key]] = field(default_factory=list)
    children: list["_Node"] = field(default_factory=list)
    blend: PathBound | None = None
    parts: tuple[BoxPart, ...] = ()
    mean: tuple[float, ...] = ()
    limits: tuple[BlockLimit, ...] = ()

    def learn(self, least: Sequence[Array], goal: float, mixtures: Sequence[Mixture]) -> None:
        """Takes over bounds of the options that mixtures prove, and drops options above the goal."""
        self.mixtures += mixtures
        self.least = [np.maximum(old, new) for old, new in zip(self.least, least, strict=True)]
        self.bound = max(self.bound, *(float(one.min()) for one in self.least))
        low: list[Mask] = [np.less(one, goal) for one in self.least]
        self.box = self.box.keep(low)
        self.least = [one[mask] for one, mask in zip(self.least, low, strict=True)]

    def divide(self, masks: Sequence[Mask], key: tuple[int, Key], limits: Sequence[BlockLimit] = ()) -> None:
        """Adds a child with these options, and more limits, unless that is empty."""
        box = self.box.keep(masks)
        if not box.empty:
            least = [one[mask] for one, mask in zip(self.least, masks, strict=True)]
            self.keys.append(key)
            self.children.append(_Node(box, max(self.bound, *(float(one.min()) for one in least)), self.depth + 1,
                                       least, blend=self.blend, parts=self.parts, mean=self.mean,
                                       limits=(*self.limits, *limits)))

    def between(self, stages: Sequence[int]) -> tuple[int, int]:
        """(least, most) blocks of some whole groups together, by their options and the limits of the box."""
        of = [own for group, own in zip(self.box.groups, self.box.totals, strict=True) if {*group} <= {*stages}]
        limits = [one for one in self.limits if {*one.stages} == {*stages}]
        return (max([sum(int(own.min()) for own in of), *(one.blocks for one in limits if one.sign < 0)]),
                min([sum(int(own.max()) for own in of), *(one.blocks for one in limits if one.sign > 0)]))


class _Tree:
    """The tree of boxes: the least bound is looked into first."""

    def __init__(self, search: CutPlanes, boxes: Box, late: Callable[[], bool]) -> None:
        self.search, self.late = search, late
        whole = {*boxes.groups}
        self.ranks = [tuple(one) for one in _together(search.problem.schedule) if tuple(one) not in whole]
        self.root = _Node(boxes, 0.0, 0, [np.zeros(len(own)) for own in boxes.options])
        self.closed, self.weakest = math.inf, tuple[int, ...]()
        self.blend: PathBound | None = None
        self.last = self.root

    def grow(self, effort: int, before: DividedBox | None) -> float:
        """Looks into `effort` boxes at most, of those into which cuts were divided before; the bound in seconds."""
        order = count()
        heap = [(node.bound, next(order), node) for node in self._left(self.root, before)]
        heapq.heapify(heap)
        while heap and heap[0][0] < self.search.goal and effort > 0 and not self.late():
            _, _, node = heapq.heappop(heap)
            effort -= 1
            self.last = node
            if not self._close(node):
                self._divide(node)
                for child in node.children:
                    heapq.heappush(heap, (child.bound, next(order), child))
        left = heap[0][0] if heap else math.inf
        self.last = heap[0][2] if heap else self.last
        if heap and not self.last.mean and self.search.stages is not None and not self.late():
            self._blend(self.last)
        self.blend = heap[0][2].blend if left < min(self.search.goal, self.closed) else self._greatest()
        return min(self.search.goal, self.closed, left)

    def _left(self, node: _Node, before: DividedBox | None) -> list[_Node]:
        """The boxes that are left of a box which was divided before, once the blends of then bound them."""
        if self.late() or before is None or not before.parts or self.search.stages is None or node.box.empty:
            return [] if node.box.empty else [node]
        node.parts = before.parts
        least, used = self.search.rule_out(node.box)
        node.learn(least, self.search.goal, used)
        if not node.box.empty:
            self._learn(node, self.search.blend_again(node.box, before.parts, node.limits))
        if node.box.empty or node.bound >= self.search.goal:
            return []
        found, children = list[_Node](), dict(zip(before.keys, before.children, strict=True))
        for g, key in self._halves(node, before.keys):
            known = len(node.children)
            self._by_blocks(node, g, key)
            found += self._left(node.children[-1], children.get((g, key))) if len(node.children) > known else []
        return found if node.split else self._left_now(node)

    def _left_now(self, node: _Node) -> list[_Node]:
        """A box that was not divided, unless its last blend rules it out with all that is known now."""
        part, mixtures = self.search.tell_anew(node.box, node.parts[-1], node.limits)
        node.parts = (*node.parts[:-1], part)
        self._learn(node, mixtures)
        return [] if node.box.empty or node.bound >= self.search.goal else [node]

    def _halves(self, node: _Node, keys: Sequence[tuple[int, Key]]) -> list[tuple[int, Key]]:
        """The two parts of a box of which one or both are told; none where its groups are others."""
        g, key = keys[0] if keys else (0, 0.0)
        if not isinstance(key, tuple):
            return []
        stages, (low, high) = key
        most = low - 1 if low else high
        if (stages not in self.ranks) if g == OF_RANKS else (
                g >= len(node.box.groups) or not {*stages} <= {*node.box.groups[g]}):
            return []
        return [(g, (stages, (0, most))), (g, (stages, (most + 1, node.box.blocks)))]

    def _greatest(self) -> PathBound | None:
        """The blend that says most of the cut which decides the bound; None where a path does, or the bound is met.

        Where bytes have prices, what says most counts in any case: more can be learned of it.
        """
        is_met, has_prices = self.closed >= self.search.goal, bool(self.search.problem.priced)
        cut = self.search.best if is_met else self.weakest
        path = self.search.paths[int(self.search.at([cut])[:, 0].argmax())]
        return path if has_prices or not (is_met or path.path) else None

    def proof(self) -> CutNode:
        """The tree as a proof."""
        return _frozen(self.root)

    def _close(self, node: _Node) -> bool:
        """Tightens a box; whether nothing of it is left to divide."""
        search = self.search
        for _ in range(2):
            if not node.box.empty:
                least, used = search.rule_out(node.box)
                node.learn(least, search.goal, used)
        if not node.box.empty and search.stages is not None:
            self._blend(node)
        elif not node.box.empty:
            self._mix(node)
        if node.box.empty or node.bound >= search.goal:
            return True
        if count_cuts(node.box) <= FEW:
            node.split = "every"
            self._finish(node)
            return True
        return False

    def _blend(self, node: _Node) -> None:
        """Drops options by blends of paths, which bound the box, and looks at the cut where the last is least."""
        search = self.search
        mixtures, node.parts, node.mean = search.blend(
            node.box, node.least, [path for part in node.parts[-1:] for path, _ in part.blend], node.limits)
        self._learn(node, mixtures)
        if not node.box.empty:
            table, _, sent = search.mixed(mixtures[-1])
            _, cut = least_cut(node.box, table, sent)
            search.look_near(cut, 10)

    def _learn(self, node: _Node, mixtures: Sequence[Mixture]) -> None:
        """Drops options by blends, until none is left."""
        for mixture in mixtures:
            if not node.box.empty:
                node.blend = self.search.paths[mixture[0][0]]
                self._learn_mixture(node, mixture)

    def _learn_mixture(self, node: _Node, mixture: Mixture) -> None:
        """Drops the options of a box that one mixture rules out."""
        table, fixed, sent = self.search.mixed(mixture)
        node.learn([one[0] + fixed for one in least_with_options(node.box, table[None], sent[None])], self.search.goal,
                   [mixture])

    def _mix(self, node: _Node) -> None:
        """Drops options by mixtures of paths, which bound the box."""
        search = self.search
        cuts = [cut for cut in sorted(search.traced, key=search.traced.__getitem__) if node.box.holds(cut)][:MIXTURES]
        mixture, most = search.mix(cuts) if cuts else (node.mixtures[-1], math.inf)
        for _ in range(MIXTURES):
            table, _, sent = search.mixed(mixture)
            _, cut = least_cut(node.box, table, sent)
            self._learn_mixture(node, mixture)
            if node.box.empty or cut in cuts or most - node.bound < STEP * (search.goal - node.bound) or self.late():
                return
            cuts.append(cut)
            search.look_near(cut, 0 if node.depth else 10)
            mixture, most = search.mix(cuts, mixture)

    def _finish(self, node: _Node) -> None:
        """Evaluates the cuts of a box within its limits, the least first, until paths bound those below the goal.

        Once one is bounded by all that is known of it, the others can't raise the bound: few more are evaluated.
        """
        search, cuts = self.search, enumerate_cuts(node.box)
        for one in node.limits:
            cuts = cuts[one.sign * (cuts[:, list(one.stages)].sum(axis=1) - one.blocks) <= 0]
        values, known, blended, left = search.at(cuts).max(axis=0), len(search.paths), 0, OTHERS
        sent = search.sent_more(cuts)
        values = np.maximum(values, [search.listed.get(cut, 0.0) for cut in map(tuple, cuts.tolist())])
        while len(cuts):
            at = int(values.argmin())
            cut = tuple(int(n) for n in cuts[at])
            if values[at] >= search.goal or not left:
                return
            late = self.late()
            left = 0 if late else left - (self.closed <= values[at])
            if not late and cut not in search.traced:
                search.evaluate(cut)
            elif not late and blended < BLENDED and cut not in search.listed and search.blend_at(
                    cut, [path for part in node.parts[-1:] for path, _ in part.blend]):
                blended += 1
            else:
                if values[at] < self.closed:
                    self.closed, self.weakest = float(values[at]), cut
                values[at] = math.inf
            if len(search.paths) > known:
                for q in sorted({*range(known, len(search.paths))} - search.bare):
                    table, own = search.tables[q], search.fixed[q] + np.array(search.paths[q].transfers) @ sent
                    values = np.maximum(values, table[np.arange(len(table)), cuts].sum(axis=1) + own)
                known = len(search.paths)

    def _divide(self, node: _Node) -> None:
        """Halves a box by its blend; else divides it by its heaviest group, one divided so by a group's options."""
        if node.mean and self._by_mean(node):
            return
        if node.depth == 0:
            node.split = "load"
            self._by_load(node)
        if node.depth > 0 or len(node.children) == 1:
            node.split, node.keys, node.children = "options", [], []
            self._by_options(node)

    def _by_load(self, node: _Node) -> None:
        """A child for every group g and load v: g has v, groups before it less, groups behind it at most v."""
        loads = [np.array([stage_load(x) for x in self._loads(group, options)])
                 for group, options in zip(node.box.groups, node.box.options, strict=True)]
        for g, own in enumerate(loads):
            for v in np.unique(own):
                masks = [one == v if i == g else one < v if i < g else one <= v for i, one in enumerate(loads)]
                node.divide(masks, (g, float(v)))

    def _by_mean(self, node: _Node) -> bool:
        """Two children, by the blocks of the stages whose mean in the fractional cut is farthest from a number."""
        best: tuple[float, int, tuple[int, ...], int] = (0.0, 0, (0,), 0)
        for g, (group, own) in enumerate(zip(node.box.groups, node.box.options, strict=True)):
            for k, at in enumerate([(*range(len(group)),), *((i,) for i in range(len(group)) if len(group) > 1)]):
                sums, mean = own[:, at].sum(axis=1), sum(node.mean[group[i]] for i in at)
                most = min(max(math.floor(mean), int(sums.min())), int(sums.max()) - 1)
                far = min(mean - most, most + 1 - mean) * (1 if k else 2)
                if sums.min() <= most < sums.max() and far > best[0]:
                    best = far, g, tuple(group[i] for i in at), most
        for stages in self.ranks:
            (least, greatest), mean = node.between(stages), sum(node.mean[s] for s in stages)
            most = min(max(math.floor(mean), least), greatest - 1)
            far = SHARPER * min(mean - most, most + 1 - mean)
            if least <= most and far > best[0]:
                best = far, OF_RANKS, stages, most
        far, g, named, most = best
        if far < EVEN:
            return False
        for low, high in ((0, most), (most + 1, node.box.blocks)):
            self._by_blocks(node, g, (named, (low, high)))
        return True

    def _by_blocks(self, node: _Node, g: int, key: Key) -> None:
        """Adds the child in which some stages of a group, or all of a rank, have so many blocks together."""
        assert isinstance(key, tuple)
        stages, (low, high) = key
        if g == OF_RANKS:
            node.split = "total"
            node.divide([np.ones(len(own), dtype=np.bool_) for own in node.box.options], (g, key),
                        (BlockLimit(stages, 1, high), BlockLimit(stages, -1, low)))
            return
        sums = node.box.options[g][:, [node.box.groups[g].index(s) for s in stages]].sum(axis=1)
        masks: list[Mask] = [np.ones(len(own), dtype=np.bool_) for own in node.box.options]
        masks[g] = (sums >= low) & (sums <= high)
        node.split = "blocks"
        node.divide(masks, (g, key))

    def _loads(self, group: Sequence[int], options: NDArray[np.intp]) -> list[float]:
        seconds = self.search.problem.seconds[:, :, :3].tolist()
        return [sum(sum(seconds[s][n - 1]) for s, n in zip(group, option, strict=True)) for option in options.tolist()]

    def _by_options(self, node: _Node) -> None:
        """A child for each option of the group that has the fewest, of those with several."""
        group = min((g for g, own in enumerate(node.box.options) if len(own) > 1),
                    key=lambda g: (len(node.box.options[g]), g))
        for i, option in enumerate(node.box.options[group].tolist()):
            masks: list[Mask] = [np.ones(len(own), dtype=np.bool_) for own in node.box.options]
            masks[group] = np.arange(len(masks[group])) == i
            node.divide(masks, (group, (tuple(option),)))


def _divided(node: _Node) -> DividedBox:
    """How a box was looked into."""
    if node.split not in ("blocks", "total"):
        return DividedBox(node.parts)
    return DividedBox(node.parts, tuple(node.keys), tuple(map(_divided, node.children)))


def _frozen(node: _Node) -> CutNode:
    return CutNode(tuple(node.mixtures), node.split, tuple(node.keys), tuple(map(_frozen, node.children)))
