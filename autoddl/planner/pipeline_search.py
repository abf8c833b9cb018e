"""Searches over pipelines: numbers of stages and microbatches, schedules, cuts, and the layouts of every stage.

A candidate has D stages, a schedule and m microbatches. The least seconds of its stages are known (`stage_parts`), and
with them a bound of all its cuts by the paths of its schedule (`search.pipeline_cuts`). The cut that is least under
what is known is solved: the layouts of its stages are searched, the pipeline is simulated, and more is known. So the
bound rises until it reaches the best pipeline, or until nothing is left to be solved. A candidate whose bound is no
better than the best plan, with stages or without, is done.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from math import comb, inf
from time import perf_counter
from typing import Any

import numpy as np

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_to_text
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import Schedule
from autoddl.core.pipeline_cuts import CutProblem, CutProof, StageSeconds
from autoddl.core.pipeline_proofs import proof_to_json
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models.pipeline_bounds import closed_paths, trace_cut
from autoddl.cost_models.pipelines import ONCE
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.joint_stages import blend_paths, improved
from autoddl.planner.mesh_search import Progress
from autoddl.planner.pins import check_pins
from autoddl.planner.stage_parts import StageParts, places_of
from autoddl.planner.stage_plans import (
    Staged,
    chunks_of,
    in_flight_of,
    pipeline_plan,
    simulated,
    stage_cluster,
    stage_times,
)
from autoddl.planner.task import PlanTask
from autoddl.search.cut_planes import Blend
from autoddl.search.pipeline_cuts import least_over_cuts

__all__ = ["Alternative", "PipelineFound", "TriedCut", "plan_of_cut", "search_pipelines", "staged_plan", "try_cut"]

ROUNDS = 24
"""Cuts of a candidate that are solved at most."""

ROUGH = 0.02
"""The gap of the bounds by which candidates are ordered."""

STALE = 2
"""Cuts whose stages were known already that are solved for one bound."""

TOGETHER = 3
"""Cuts of a candidate whose stages are chosen together."""

FEW = 32
"""Cuts of a chain that are all looked at."""

OTHERS = 4
"""Cuts beside the best that are solved where a gap is left."""

EFFORT = 60
"""Boxes of cuts that are looked into for one bound."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What became of a candidate: the seconds and peak bytes of its best pipeline, a bound of all, and why it ended.

    `proof` has the least seconds of stages from which the bound follows, the proof, and the places of cuts.
    """

    stages: int
    schedule: str
    microbatches: int
    seconds: float | None
    nbytes: float | None
    bound: float
    detail: str
    proof: tuple[CutProblem, CutProof, tuple[int, ...]] | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as JSON."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"bound": None if self.bound == inf else self.bound,
                        "proof": None if self.proof is None else proof_to_json(*self.proof)}


@dataclass(frozen=True, slots=True)
class PipelineFound:
    """The best pipeline, None where none beats what there was; the least bound of all candidates; and all of them.

    `needed` are the least bytes of a rank that some stage needs of those that were found not to fit.
    """

    plan: Plan | None
    bound: float
    alternatives: tuple[Alternative, ...]
    needed: float


@dataclass(frozen=True, slots=True)
class TriedCut:
    """A cut that was solved: the plans of its stages, and the seconds of the pipeline.

    Stages that share ranks are planned again under a part of the budget, where they do not fit together.
    """

    cut: tuple[int, ...]
    plans: tuple[Plan, ...]
    seconds: float


def try_cut(part: StageParts, schedule_name: str, cut: tuple[int, ...]) -> TriedCut:
    """Solves the stages of a cut and simulates the pipeline. Raises why a stage has no plan."""
    staged = staged_cut(part, schedule_name, cut)
    schedule = staged.schedule()
    graphs = cut_graph(part.graph, staged.cuts)
    plans = _fitting(part, staged, graphs, in_flight_of(schedule))
    seconds, between = stage_times(part.task.cluster, plans, staged, part.graph)
    return TriedCut(cut, plans, simulated(schedule, seconds, between).makespan)


def _fitting(part: StageParts, staged: Staged, graphs: Sequence[StageGraph], flights: Sequence[int]
             ) -> tuple[Plan, ...]:
    """The plans of the stages; those of one part of the cluster fit its ranks together. Raises why there are none."""
    plans = [part.planned(graph, flight) for graph, flight in zip(graphs, flights, strict=True)]
    budget = part.task.budget
    for at in range(staged.parts):
        mine = range(at, staged.stages, staged.parts)
        used = sum(plans[s].predicted.peak_bytes for s in mine)
        for s in mine if used > budget else ():
            share = budget * plans[s].predicted.peak_bytes / used
            less = replace(part.task, budget=share)
            own = StageParts(less, part.stages, staged.parts, part.microbatches, part.places,
                             part.within)
            plans[s] = replace(own.planned(graphs[s], flights[s]), budget=budget)
    return tuple(plans)


def _candidate(part: StageParts, name: str, best: float, tell: Callable[[str], None]
               ) -> tuple[Alternative, TriedCut | None]:
    """The best pipeline of one candidate that is below `best` seconds, and what became of it."""
    schedule = Staged(tuple(range(1, part.stages)), name, part.microbatches).schedule()
    flights, tolerance = in_flight_of(schedule), part.task.options.tolerance
    paths, tried = closed_paths(schedule, ONCE), dict[tuple[int, ...], TriedCut | None]()
    found: TriedCut | None = None
    stale, blends, blended = 0, list[Blend](), set[tuple[int, ...]]()
    bound, detail, proof = 0.0, f"{ROUNDS} cuts were solved", None
    for _ in range(ROUNDS):
        problem = _problem(part, schedule, flights)
        try:
            answer = least_over_cuts(problem, paths, partial(trace_cut, _likely(problem)), tolerance=tolerance / 4,
                                     effort=EFFORT, blends=blends)
        except InputError:
            bound, detail = inf, "no stage has a plan that fits the budget with its microbatches in flight"
            break
        paths = answer.paths
        if answer.bound > bound:
            bound, proof, stale = answer.bound, (problem, answer.proof, part.places), 0
        if bound >= min(best, found.seconds if found else inf) * (1 - tolerance):
            detail = "proved" if found is not None and found.seconds <= best else "no better than the best"
            break
        cut = tuple(accumulate(answer.cut))[:-1]
        tell(f"solving {part.stages} stages, {name}, {part.microbatches} microbatches: bound {bound:.4g} s")
        ends = [0, *cut, part.units]
        stages = [(a, b, k) for (a, b), k in zip(pairwise(ends), flights, strict=True)]
        news = [part.bound(*stage) for stage in stages]
        if not any(news):
            news = [part.sharpen(*stage) for stage in stages]
        if cut not in tried:
            tried[cut] = _solved_cut(part, name, cut)
            one = tried[cut]
            found = one if one is not None and (found is None or one.seconds < found.seconds) else found
        one = tried[cut]
        if not any(news) and cut not in blended and one is not None:
            made, plans, seconds = blend_paths(part, name, cut, one.plans)
            blends, news = [*blends, *made], [True]
            blended.add(cut)
            tried[cut] = one = TriedCut(cut, plans, seconds)
            found = one if found is None or one.seconds < found.seconds else found
        stale += not any(news)
        if stale > STALE:
            detail = "stages are proved one by one: their layouts might be better together"
            break
    if bound < min(best, found.seconds if found else inf) * (1 - tolerance):
        for cut in _others(problem, tried, found):
            tell(f"solving {part.stages} stages, {name}, {part.microbatches} microbatches: cuts beside the best")
            tried[cut] = _solved_cut(part, name, cut)
        found = _together(part, name, [one for one in tried.values() if one is not None])
    reached = found.seconds if found else None
    peak = max(plan.predicted.peak_bytes for plan in found.plans) if found else None
    return Alternative(part.stages, name, part.microbatches, reached, peak, min(bound, reached or inf), detail,
                       proof), found


def _others(problem: CutProblem, tried: Mapping[tuple[int, ...], TriedCut | None], best: TriedCut | None
            ) -> list[tuple[int, ...]]:
    """Cuts that were not solved and that may be better than the best, those first that likely are.

    These are all cuts of a chain that has few; else those where one stage begins one block earlier or later.
    """
    stages, blocks = problem.schedule.stages, problem.blocks
    if comb(blocks - 1, stages - 1) <= FEW:
        near = list(combinations(range(1, blocks), stages - 1))
    else:
        cut = best.cut if best else ()
        near = [(*cut[:i], at, *cut[i + 1:]) for i, k in enumerate(cut) for at in (k - 1, k + 1)]
    likely, found = _likely(problem), dict[tuple[int, ...], float]()
    for cut in near:
        sizes = [b - a for a, b in pairwise((0, *cut, blocks))]
        known = cut in tried or min(sizes) < 1 or not np.isfinite([likely.seconds[s, n - 1] for s, n in
                                                                   enumerate(sizes)]).all()
        if not known:
            found[cut] = trace_cut(likely, sizes)[0]
    most = best.seconds if best else inf
    return sorted((cut for cut in found if found[cut] < most), key=found.__getitem__)[:OTHERS]


def _together(part: StageParts, name: str, tried: Sequence[TriedCut]) -> TriedCut | None:
    """The fastest of the cuts, after the layouts of the stages of the fastest were chosen together."""
    best = min(tried, key=lambda one: one.seconds, default=None)
    for one in sorted(tried, key=lambda one: one.seconds)[:TOGETHER]:
        plans, seconds = improved(part, staged_cut(part, name, one.cut), one.plans)
        best = TriedCut(one.cut, plans, seconds) if best is None or seconds < best.seconds else best
    return best


def staged_cut(part: StageParts, name: str, cut: Sequence[int]) -> Staged:
    """The pipeline that is cut at these places."""
    return Staged(tuple(part.places[k - 1] for k in cut), name, part.microbatches)


def _first_bound(part: StageParts, name: str) -> float:
    """Seconds that no pipeline of a candidate is below, by the work of its stages alone; infinite where there is none.
    """
    schedule = Staged(tuple(range(1, part.stages)), name, part.microbatches).schedule()
    problem = _problem(part, schedule, in_flight_of(schedule))
    return least_over_cuts(problem, closed_paths(schedule, ONCE), partial(trace_cut, _likely(problem)),
                           tolerance=ROUGH, effort=1).bound


def _problem(part: StageParts, schedule: Schedule, flights: Sequence[int]) -> CutProblem:
    """The least seconds of every stage with every number of units, wherever it may begin."""
    m, units, shape = part.microbatches, part.units, (part.stages, part.units)
    seconds = np.full((*shape, len(StageSeconds._fields)), inf)
    whole, known, behind = (np.full(shape, inf) for _ in range(3))
    single, extra = np.zeros(shape), {weights: np.zeros(shape) for weights in part.weights}
    sides = (0.0, *part.transfers, 0.0)
    for s, flight in enumerate(flights):
        for n in range(1, units - part.stages + 2):
            begins = [0] if s == 0 else [units - n] if s == part.stages - 1 else range(
                s, units - n - (part.stages - 1 - s) + 1)
            each = [(part.whole(a, a + n, flight), part.behind(a, a + n, flight), part.repeated(a, a + n),
                     *part.floor(a, a + n)) for a in begins]
            total, later, repeated, forward, backward = map(min, zip(*each, strict=True))
            known[s, n - 1], behind[s, n - 1], whole[s, n - 1] = total, min(total, later), repeated / m
            single[s, n - 1] = part.single(0, n) if s == 0 else 0.0
            seconds[s, n - 1] = (forward, backward, 0, 0, 0, 0) if total < inf else inf
            for weights, values in extra.items():
                least = (weights[6] * sides[s] + weights[7] * sides[s + 1]) / 2
                values[s, n - 1] = max(0.0, min(part.counted(a, a + n, flight, weights) for a in begins) - least)
    return CutProblem(schedule, seconds, part.transfers, whole,
                      (((m, m, m, 1, 1, 1), known), ((m, m, m, 0, 1, 1), behind), ((1, 1, 1, 1, 1, 1), single),
                       *extra.items()))


def _likely(problem: CutProblem) -> CutProblem:
    """The problem with seconds that a stage may have: its forward and backward add up to what is known of both."""
    (weights, total), least = problem.known[0], problem.seconds[:, :, :3].sum(axis=2)
    assert problem.whole is not None
    with np.errstate(invalid="ignore"):
        seconds = problem.seconds * np.nan_to_num(np.maximum(problem.whole / least, 1.0), nan=1.0)[:, :, None]
        seconds[:, :, 4] += np.maximum(total - weights[0] * seconds[:, :, :3].sum(axis=2), 0.0)
    return replace(problem, seconds=np.where(np.isfinite(problem.seconds), seconds, inf))


def _solved_cut(part: StageParts, name: str, cut: tuple[int, ...]) -> TriedCut | None:
    """The pipeline of a cut, None where a stage has no plan."""
    try:
        return try_cut(part, name, cut)
    except (Infeasible, InputError):
        return None


def search_pipelines(task: PlanTask, best: float, progress: Progress | None = None) -> PipelineFound:
    """The fastest pipeline of all that the options allow and that takes less than `best` seconds.

    Raises InputError where the model or the cluster cannot be cut into so many stages.
    """
    options = task.options
    check_pins(options.pins, task.graph)
    asked = [(d, m, name) for d in options.stages if d > 1 for m in options.microbatches for name in options.schedule]
    parts: dict[tuple[int, int, int], StageParts] = {}
    winner: tuple[StageParts, str, TriedCut] | None = None
    rows: list[Alternative] = []
    order: list[tuple[float, int, StageParts, str]] = []
    for d, m, name in asked:
        key = d, m, chunks_of(name)
        if key not in parts:
            parts[key] = _part(task, *key)
        order.append((_first_bound(parts[key], name), len(order), parts[key], name))
    for k, (_, _, part, name) in enumerate(sorted(order, key=lambda one: one[:2])):

        def tell(what: str, k: int = k, best: float = best) -> None:
            if progress:
                progress(f"{what}, best {best:.4g} s", k, len(asked))

        row, found = _candidate(part, name, best, tell)
        rows.append(row)
        if found is not None and found.seconds < best:
            best, winner = found.seconds, (part, name, found)
    plan = None if winner is None else plan_of_cut(*winner)
    needed = min((part.needed for part in parts.values()), default=inf)
    return PipelineFound(plan, min((row.bound for row in rows), default=inf), tuple(rows), needed)


def staged_plan(task: PlanTask, plain: Callable[[PlanTask, Progress | None], Plan] | None, progress: Progress | None
                ) -> Plan:
    """The fastest plan of all numbers of stages that the options allow; `plain` finds the one without stages.

    Its bound is that of all of them. Raises Infeasible, with what each alternative lacks, where none fits.
    """
    best, problem = None, None
    if plain is not None:
        try:
            best = plain(replace(task, options=replace(task.options, stages=(1,))), progress)
        except Infeasible as error:
            problem = error
    found = search_pipelines(task, best.predicted.seconds if best else inf, progress)
    bound = min(found.bound, best.bound if best else inf)
    source = {"alternatives": [row.to_json() for row in found.alternatives], "cluster": task.cluster.to_yaml(),
              "bound_without_stages": best.bound if best else None, "pins": list(task.options.pins),
              "optimizer": task.options.optimizer}
    if found.plan is not None:
        source["graph"] = graph_to_text(task.variant(found.plan.microbatches).original)
    if found.plan is not None:
        proof = "paths of its schedule over all cuts, and layouts of every stage" + (
            "; without stages: " + best.proof if best else "")
        return replace(found.plan, bound=min(bound, found.plan.predicted.seconds), proof=proof, source=source,
                       candidates=len(found.alternatives) + (best.candidates if best else 0),
                       timings={"capture": task.capture_seconds, "total": perf_counter() - task.began})
    if best is None:
        raise Infeasible(min(found.needed, problem.needed if problem else inf), task.budget,
                         "take more stages, recomputation, a smaller batch or a larger budget",
                         problem.reachable if problem else inf)
    return replace(best, bound=min(bound, best.predicted.seconds),
                   source=best.source | {"alternatives": source["alternatives"], "bound_without_stages": best.bound},
                   proof=f"{best.proof}; {len(found.alternatives)} pipelines by the paths of their schedules")


def plan_of_cut(part: StageParts, name: str, tried: TriedCut) -> Plan:
    """The plan of a cut that was solved, its stages with their best bucket sizes."""
    staged = staged_cut(part, name, tried.cut)
    plans = [fitting_buckets(plan, add_hubs(graph.graph), part.task.options.optimizer, part.cluster)
             for plan, graph in zip(tried.plans, cut_graph(part.graph, staged.cuts), strict=True)]
    return pipeline_plan(part.task, staged, plans)


def _part(task: PlanTask, parts: int, microbatches: int, chunks: int) -> StageParts:
    """The stages of one candidate. Raises InputError where the cluster or the model cannot be cut so."""
    stage_cluster(task.cluster, parts)
    stages = parts * chunks
    if task.options.cut and chunks > 1:
        raise InputError(f"an interleaved schedule has {chunks} stages on each of {parts} parts of the cluster, and "
                         f"cut names where {parts} stages begin: leave cut out, or take 1f1b or gpipe")
    places = places_of(task.variant(microbatches).original, task.options.cut)
    if len(places) < stages - 1:
        raise InputError(f"{stages} stages need {stages - 1} cuts, and this model can be cut at {len(places)} places, "
                         "the ends of its blocks: ask for fewer stages, or name the modules with cut")
    return StageParts(task, stages, parts, microbatches, places)
