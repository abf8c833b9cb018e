"""Lists the plans of the stages of a cut, where they are few: so its fastest pipeline is known and proved.

What is proved of a cut by paths and blends counts a stage by linear functions of its seconds. Plans are not linear: one
may be left over that no such function takes, and a budget leaves more of these. So where each stage has few choices,

    plans of a stage    by the layouts in which it gives and takes tensors, those that fit the budget and that no other
                        of these is below in all seconds: no pipeline gets shorter where a second gets longer
    pipelines           all combinations of these, those first of which paths of the schedule say least, until these
                        rule out the rest

Stages that share ranks or a parameter, copies of stages and a backward in two parts are left to bounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from autoddl.core.cost_table import Array
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import RECEIVE, Op
from autoddl.core.pipeline import Flight, flights_of
from autoddl.core.pipeline_cuts import ListedPlans, PathBound, StageSeconds
from autoddl.core.plan import Plan
from autoddl.core.stages import SEND, StageGraph, cut_graph, shared_parameters
from autoddl.planner.candidates import Candidate, build_network
from autoddl.planner.peaks import Peaks, draft_of
from autoddl.planner.pipelines.solved_stages import OutOfTime
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.stage_plans import stage_candidates
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import boundary_seconds, simulated
from autoddl.pricing.build_problem import CostNetwork
from autoddl.pricing.price import Counts
from autoddl.search.exhaustive import score_every_choice

__all__ = ["list_plans"]

CHOICES = 100_000
"""Choices of a stage that are looked at, at most."""

PEAKS = 500
"""Choices of a stage on one mesh whose memory line is drawn, at most."""

PIPELINES = 200_000
"""Pipelines that paths bound, at most."""

LAYOUTS = 1_000
"""Combinations of layouts between stages, at most."""

LESS = 1 - 1e-9
"""The part of the seconds of the fastest pipeline that is proved: sums of floats differ by their order."""

ONE_EACH = [Counts(*(float(i == k) for i in range(5))) for k in range(5)]
"""Counts that leave one of a stage's seconds each: forward, backward, gather, reduce, update."""


@dataclass(frozen=True, slots=True, eq=False)
class _Alike:
    """The plans of a stage that give and take tensors in the same layouts.

        draft      one of them, for its layouts
        seconds    [plan, term of StageSeconds]
        choices    the candidate of each, and its choice
    """

    draft: Plan
    seconds: Array
    choices: tuple[tuple[Candidate, tuple[int, ...]], ...]


def list_plans(part: StageParts, staged: Staged, paths: Sequence[PathBound]
                       ) -> tuple[ListedPlans, tuple[Plan, ...]] | None:
    """(what all plans of the stages of a cut take, the plans of the fastest pipeline), or None where they are too many.

    They are also None where a stage has no plan, or stages are of a kind that is left to bounds. There are no plans of
    the fastest where time is over, or a stage has none that fits by its own search.
    """
    schedule, graphs = staged.schedule(), cut_graph(part.graph, staged.cuts)
    if part.shares or staged.splits or schedule.pipes > 1 or shared_parameters(graphs):
        return None
    every = list[list[_Alike]]()
    for s, (graph, flight) in enumerate(zip(graphs, flights_of(schedule), strict=True)):
        alike = None if part.late() else _plans_of(part.on(s), graph, flight)
        if not alike:
            return None
        every.append(alike)
    found = _fastest(part, staged, every, paths)
    if found is None:
        return None
    chosen = [alike[at].choices[row] for alike, at, row in zip(every, found.layouts, found.rows, strict=True)]
    plans = list[Plan]()
    with suppress(Infeasible, InputError, OutOfTime):
        plans = [part.on(s).plan_of_choice(graph, flight, *choice) for s, (graph, flight, choice)
                 in enumerate(zip(graphs, flights_of(schedule), chosen, strict=True))]
    ends = [part.on(0).ends[k] for k in (0, *(part.places.index(cut) + 1 for cut in staged.cuts), part.units)]
    told = tuple(tuple(tuple(StageSeconds(*row) for row in one.seconds.tolist()) for one in alike) for alike in every)
    return ListedPlans(tuple(np.diff(ends).tolist()), told, found.transfers, found.seconds * LESS), tuple(plans)


def _plans_of(part: StageParts, stage: StageGraph, flight: Flight) -> list[_Alike] | None:
    """The plans of a stage that matter, by the layouts in which it gives and takes tensors; None for too many."""
    task, candidates = stage_candidates(part.task, stage, part.cluster, part.each, flight, part.within)
    left, found = CHOICES, list[_Alike]()
    for candidate in candidates:
        network = build_network(replace(task, copies=None), candidate)
        left -= prod(network.sizes)
        if left < 0:
            return None
        each = [score_every_choice(build_network(replace(task, counts=counts), candidate).problem(None))
                for counts in ONE_EACH]
        seconds = np.insert(np.stack([one for one, _ in each], axis=1), 2, 0.0, axis=1)
        legal = np.flatnonzero(np.isfinite(seconds).all(axis=1) & (each[0][1] <= task.budget))
        groups, peaks = _port_layouts(network, legal), _Fitting(network, task.budget)
        for group in np.unique(groups):
            least = _undominated(network, seconds, legal[groups == group], peaks)
            if peaks.left < 0:
                return None
            if least:
                choices = tuple((candidate, _choice(network, at)) for at in least)
                found.append(_Alike(draft_of(network, choices[0][1]), seconds[least], choices))
    return found


def _choice(network: CostNetwork, at: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(at, network.sizes))


def _port_layouts(network: CostNetwork, legal: NDArray[np.intp]) -> NDArray[np.intp]:
    """A number for each choice, equal where tensors are given and taken in the same layouts."""
    found, options = np.zeros(len(legal), dtype=np.intp), np.unravel_index(legal, network.sizes)
    levels = len(network.sizes) - len(network.variables)
    for v, variable in enumerate(network.variables):
        if isinstance(variable.item, Op) and variable.item.target in (SEND, RECEIVE):
            layouts = [str((*choice.inputs, *choice.outputs)) for choice in variable.choices]
            number = {text: i for i, text in enumerate(dict.fromkeys(layouts))}
            found = found * len(number) + np.array([number[text] for text in layouts])[options[levels + v]]
    return found


class _Fitting:
    """Tells whether choices of a network fit a budget, while lines of memory may be drawn."""

    def __init__(self, network: CostNetwork, budget: float) -> None:
        self.network, self.budget, self.peaks, self.left = network, budget, Peaks(network), PEAKS

    def __call__(self, at: int) -> bool:
        if self.budget == inf:
            return True
        self.left -= 1
        return self.left >= 0 and self.peaks.of(_choice(self.network, at)).nbytes <= self.budget


def _undominated(network: CostNetwork, seconds: Array, among: NDArray[np.intp], fits: _Fitting) -> list[int]:
    """The choices that fit and that no other that fits is below or equal to in all seconds."""
    kept = list[int]()
    for at in among[np.lexsort(seconds[among].T[::-1])].tolist():
        if not (kept and (seconds[kept] <= seconds[at]).all(axis=1).any()) and fits(at):
            kept.append(at)
        if fits.left < 0:
            break
    return kept


Sent = tuple[tuple[int, ...], tuple[float, ...]]
"""(layouts of each stage, seconds of each boundary then)."""


@dataclass(frozen=True, slots=True)
class _Fastest:
    """The fastest pipeline: by stage its layouts, and which of their plans; and transfers by the layouts of stages."""

    seconds: float
    layouts: tuple[int, ...]
    rows: tuple[int, ...]
    transfers: tuple[Sent, ...]


def _fastest(part: StageParts, staged: Staged, every: Sequence[Sequence[_Alike]], paths: Sequence[PathBound]
             ) -> _Fastest | None:
    """The fastest of all pipelines of these plans; None where they are too many."""
    if prod(sum(len(one.seconds) for one in alike) for alike in every) > PIPELINES or prod(map(len, every)) > LAYOUTS:
        return None
    schedule, best, transfers = staged.schedule(), _Fastest(inf, (), (), ()), list[Sent]()
    for layouts in product(*(range(len(alike)) for alike in every)):
        if part.late():
            return None
        stages = [alike[at] for alike, at in zip(every, layouts, strict=True)]
        between = tuple(boundary_seconds(part.task.cluster, [one.draft for one in stages], staged, part.graph))
        transfers.append((layouts, between))
        least = _by_paths(paths, [one.seconds for one in stages], between)
        for rows in _rising(least):
            if least[rows] >= best.seconds:
                break
            own = [StageSeconds(*one.seconds[row].tolist()) for one, row in zip(stages, rows, strict=True)]
            seconds = simulated(schedule, own, between).makespan
            best = replace(best, seconds=seconds, layouts=layouts, rows=rows) if seconds < best.seconds else best
    return replace(best, transfers=tuple(transfers))


def _by_paths(paths: Sequence[PathBound], stages: Sequence[Array], between: Sequence[float]) -> Array:
    """[plan of the first stage, of the second, ..] the most that some path says of these [plan, term] seconds."""
    counts, sent = np.array([path.stages for path in paths]), np.array([path.transfers for path in paths])
    least = (sent @ np.array(between)).reshape(-1, *(1,) * len(stages))
    for s, seconds in enumerate(stages):
        shape = [-1 if k == s else 1 for k in range(len(stages))]
        least = least + (counts[:, s] @ seconds.T).reshape(len(paths), *shape)
    return np.asarray(least.max(axis=0))


def _rising(values: Array) -> Iterator[tuple[int, ...]]:
    """The places of an array, the least value first."""
    for flat in np.argsort(values, axis=None, kind="stable").tolist():
        yield tuple(int(i) for i in np.unravel_index(flat, values.shape))
