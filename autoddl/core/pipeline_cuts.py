"""Defines the search for the best cut of a chain of blocks into stages: question, paths, answer and proof.

A cut gives stage s of a pipeline n[s] >= 1 blocks, L together. Where units have several blocks, stages end with units
alone. The seconds of a cut are the makespan of its pipeline, which is nowhere below any path of the schedule's task
graph (`cost_models.timelines.pipeline_bounds`):

    seconds(n) >= path(n) = sum over s of c[s] . seconds[s, n[s]] + sum over boundaries of d[b] transfer[b]

What crosses a boundary may depend on where it lies: on the blocks of all stages before it. It grows with those of the
stage behind it. In a set of cuts these are known where each stage is a group, in their order. Else the first lie
between two numbers. Then a transfer is at least the least of those between, into a stage of as few blocks as may be.

A *mixture* of paths, with weights >= 0 and sum 1, bounds the seconds too. It is a sum of one term per stage. So its
least over all cuts takes one dynamic program over (stage, blocks left), and so does its least with a given option.
A *blend* is a mixture that counts as one path: a stage has one set of seconds on all of its paths. So what is known of
seconds that are weighted like the blend applies to it.

Stages of one rank share its memory. Let each take w . seconds + price * bytes no less than L, with a price in seconds
of a byte. Plans that fit together have no more bytes than the budget. So whatever they are (Everett 1963),

    sum over the rank's stages of w . seconds >= sum over them of L - price * budget

A *priced path* counts the right side for some of its seconds. It is a sum of one term per stage too.

What is known of weighted terms can be put together in many ways. Let a path count the terms of a stage by c, and let
w[k] be the weights of which L[k] is known. Any times t[k] >= 0 with sum over k of t[k] w[k] <= c say that

    c . seconds >= sum over k of t[k] L[k] + (c - sum over k of t[k] w[k]) . least seconds of the terms

A *weighed path* names such times. Those that are dual values of a linear program over cuts say as much as it does.

Stages are put in groups, such as those of one rank. An *option* of a group says how many blocks each of its stages has.
A *box* is a set of options for every group. A proof of the bound B is a tree of boxes, from all cuts down:

    mixtures    in order; each drops the options with which it is nowhere below B
    children    boxes that hold every cut that is left, by the rule of `split`; none where no cut is left
        load      (g, v): group g has load v, those before it less, those behind it at most v
        options   (g, options): group g has one of these
        blocks    (g, (stages, (low, high))): these stages of group g have so many blocks together
        total     (-1, (stages, (low, high))): so have these, which are of several groups
    every       at each cut that is left, some path is at least B, or each pipeline of its listed plans is

A part by `total` has the options of its box, and limits. Where stages have at most `high` blocks, price * (their blocks
- high) is at most 0 for each price >= 0 of a block. So a mixture in such a part may add it, or price * (low - blocks).

The load of an option is the sum of F + B + W of its stages (`stage_load`). So each cut is in the box of its heaviest
group, the first of these where several are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array
from autoddl.core.pipeline import Schedule

__all__ = ["BlockLimit", "BoxPart", "CutNode", "CutProblem", "CutProof", "CutSolution", "DividedBox", "Key",
           "ListedPlans", "Mixture", "PathBound", "PricedPath", "PricedStages", "Split", "StageSeconds", "Trail",
           "WeighedPath", "stage_load"]


class StageSeconds(NamedTuple):
    """Seconds of a stage.

        forward     of a microbatch
        backward    of the gradient of its input, of a microbatch
        weight      of the gradients of its parameters, of a microbatch
        gather      of its kept parameters, once a step
        reduce      of its gradients over the replicas, once a step
        update      of the optimizer on one rank, once a step
    """

    forward: float
    backward: float
    weight: float
    gather: float = 0.0
    reduce: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class PathBound:
    """A path of tasks, and how often the seconds of every stage and boundary are on it.

        path         names of the tasks, in order
        stages       for each stage, how often each of its StageSeconds counts
        transfers    for each boundary between stages s and s+1, how often one transfer counts

    Counts of a blend are the means of those of its paths, and it has no tasks.
    """

    path: tuple[str, ...]
    stages: tuple[tuple[float, ...], ...]
    transfers: tuple[float, ...]

    def seconds(self, stages: Sequence[StageSeconds], transfers: Sequence[float]) -> float:
        """Seconds below which no pipeline of this schedule ends, if its stages and transfers take these."""
        own = sum(n * x for row, one in zip(self.stages, stages, strict=True) for n, x in zip(row, one, strict=True))
        return own + sum(n * x for n, x in zip(self.transfers, transfers, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class PricedStages:
    """Says what is known of the stages of a rank together, under a price of its bytes.

        stages     of the rank
        weights    by stage of these, how often its terms count, and the messages before and behind it (`CutProblem`)
        price      seconds of a byte
        budget     bytes of the rank
        values     [stage of these, blocks - 1], no more than the terms weighted so + price * bytes of the stage; 0
                   where nothing is known
    """

    stages: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]
    price: float
    budget: float
    values: Array


@dataclass(frozen=True, slots=True)
class ListedPlans:
    """Lists what the plans of the stages of one cut take, where they are few enough to look at each.

    Plans are told apart by the layouts in which a stage gives and takes tensors. Of plans of the same layouts those are
    listed that no other is below in all terms.

        cut          blocks of each stage
        plans        for each stage, by these layouts, the seconds of each listed plan
        transfers    (layouts of each stage, seconds of each boundary then)
        seconds      those of the fastest pipeline, less what sums of floats may differ by
    """

    cut: tuple[int, ...]
    plans: tuple[tuple[tuple[StageSeconds, ...], ...], ...]
    transfers: tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class CutProblem:
    """A chain of L blocks to be cut into the stages of a schedule, with least seconds of every stage.

        schedule     who runs what
        seconds      [stage, blocks - 1, term of StageSeconds], L blocks at most; inf where a stage cannot have so many
        transfers    for each boundary, seconds of one transfer, wherever it lies
        whole        [stage, blocks - 1], least F + B + W, where that is more than the sum of their least; or None
        known        (weights of the terms, [stage, blocks - 1] the least of terms weighted so): what else is known;
                     0 where nothing is. Two weights more are of what the messages before and behind the stage take,
                     each as half of what its boundary's transfer takes above the least where it lies
        priced       what is known of stages that share a rank's memory
        directions   more of what `known` has, for terms weighted about as those of a blend: weighed paths count them
        listed       cuts whose plans are listed
        sent         [boundary, blocks before it, blocks of the stage behind it], the least seconds of one transfer
                     there, where some are above those of `transfers`; never fewer with more blocks behind; or None
        ends         [stage, blocks], whether it may end behind so many, where it may not behind all; or None
    """

    schedule: Schedule
    seconds: Array
    transfers: tuple[float, ...]
    whole: Array | None = None
    known: tuple[tuple[tuple[float, ...], Array], ...] = ()
    priced: tuple[PricedStages, ...] = ()
    directions: tuple[tuple[tuple[float, ...], Array], ...] = ()
    listed: tuple[ListedPlans, ...] = ()
    sent: Array | None = None
    ends: NDArray[np.bool_] | None = None

    def allows(self, cut: Sequence[int]) -> bool:
        """Whether stages may end where those of a cut do."""
        return self.ends is None or all(row[n] for row, n in zip(self.ends, accumulate(cut), strict=True))

    def sent_at(self, cut: Sequence[int]) -> tuple[float, ...]:
        """For each boundary of a cut, the least seconds of one transfer there."""
        if self.sent is None:
            return self.transfers
        return tuple(float(row[n, behind]) for row, n, behind in zip(self.sent, accumulate(cut[:-1]), cut[1:],
                                                                     strict=True))

    @property
    def blocks(self) -> int:
        """L, the number of blocks of the chain."""
        return int(self.seconds.shape[1])


Mixture = tuple[tuple[int, float], ...]
"""(number of a path, its weight >= 0)."""


@dataclass(frozen=True, slots=True)
class PricedPath:
    """A path or a blend that counts stages of a rank together.

        path      its number
        prices    (number of what is known of them in `CutProblem.priced`, how often that counts)
    """

    path: int
    prices: Mixture


@dataclass(frozen=True, slots=True)
class WeighedPath:
    """A path or a blend with how often what is known counts in its stages.

        path        its number
        known       for each stage, (number of what is known, how often that counts): those of `CutProblem.known`, then
                    `whole`, then `directions`
        together    the same of what is known of stages of a rank together, in `CutProblem.priced`
    """

    path: int
    known: tuple[Mixture, ...]
    together: Mixture


@dataclass(frozen=True, slots=True)
class BlockLimit:
    """A limit that holds in a part of a box: some stages have at most so many blocks together, or at least.

        stages    of a rank
        sign      1 for at most, -1 for at least
        blocks    their number
    """

    stages: tuple[int, ...]
    sign: int
    blocks: int


Trail = tuple[str, ...] | Mixture | PricedPath | WeighedPath | BlockLimit
"""The names of a path's tasks; a *blend* of paths, whose counts are added before what is known is applied; a priced
path; a weighed path; or sign * (blocks of the stages - the limit), which is at most 0 where the limit holds."""

Split = Literal["load", "options", "blocks", "total", "every", ""]

Key = float | tuple[tuple[int, ...], ...]
"""What a part of a box has: a group's load, its options, or (stages, (least, most blocks of these together))."""


@dataclass(frozen=True, slots=True)
class CutNode:
    """A box of the proof, and how it is divided.

        mixtures    the mixtures that drop options, in order
        split       how the cuts that are left are divided, see above
        keys        for each child its group, or -1, with its load, its options or the blocks of some stages
        children    the boxes
    """

    mixtures: tuple[Mixture, ...]
    split: Split = ""
    keys: tuple[tuple[int, Key], ...] = ()
    children: tuple["CutNode", ...] = ()


@dataclass(frozen=True, slots=True)
class CutProof:
    """A proof that no cut is below a bound.

        paths      the paths, as names of tasks, blends of them, and priced ones; and limits
        singles    mixtures that drop sizes while every stage is a group of its own, in order
        groups     the groups of the tree
        root       the tree
    """

    paths: tuple[Trail, ...]
    singles: tuple[Mixture, ...]
    groups: tuple[tuple[int, ...], ...]
    root: CutNode


class BoxPart(NamedTuple):
    """A blend that bounds a box, found by a linear program over its cuts, with the dual values of that.

        blend       paths with their weights >= 0, of sum 1
        limits      the seconds that it pays for a block at each limit of the box; there may be fewer than limits
        known       for each stage, (weights of terms of which something is known, how often that counts)
        together    (stages of a rank, weights and price of what is known of them, how often that counts)
    """

    blend: tuple[tuple[PathBound, float], ...]
    limits: tuple[float, ...]
    known: tuple[tuple[tuple[tuple[float, ...], float], ...], ...]
    together: tuple[tuple[tuple[object, ...], float], ...]


@dataclass(frozen=True, slots=True)
class DividedBox:
    """How a box of cuts was looked into, for another search that knows more.

        parts       the blends by which it was bounded
        keys        as in CutNode, where it was divided by blocks, of a group or in total
        children    the boxes then
    """

    parts: tuple[BoxPart, ...]
    keys: tuple[tuple[int, Key], ...] = ()
    children: tuple["DividedBox", ...] = ()

    @property
    def count(self) -> int:
        """How many boxes there are, with this one."""
        return 1 + sum(child.count for child in self.children)


@dataclass(frozen=True, slots=True)
class CutSolution:
    """The best cut found, in blocks per stage.

        cut            blocks of each stage
        seconds        of that cut
        bound          seconds that no cut is below
        proof          of the bound
        weakest        the cut of which least is proved, where that decides the bound; else the best
        evaluations    the cuts whose exact seconds were asked for, with these
        traces         number of cuts whose critical path was sought
        paths          of those used some that say most, for another search of this schedule
        blend          the blend of the box that decides the bound; None where no box is left, or none was blended;
                       where bytes have prices and no box is left, what says most of the weakest cut
        boxes          how cuts were divided
        mean           the mean blocks of stages of which the blend of the box that decides the bound says least, where
                       one was sought of it, or of the box around it
    """

    cut: tuple[int, ...]
    seconds: float
    bound: float
    proof: CutProof
    weakest: tuple[int, ...]
    evaluations: dict[tuple[int, ...], float]
    traces: int
    paths: tuple[PathBound, ...]
    blend: PathBound | None = None
    boxes: DividedBox | None = None
    mean: tuple[float, ...] = ()


def stage_load(seconds: float) -> float:
    """Seconds to nine digits, so that equal loads that were summed in another order are equal."""
    return float(f"{seconds:.9g}")
