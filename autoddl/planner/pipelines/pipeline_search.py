"""Searches over pipelines: numbers of stages and microbatches, schedules, cuts, and the layouts of every stage.

A candidate has D stages, a schedule and m microbatches (`pipeline_candidate`). All are bounded first. Then the one
whose bound is least is looked into, again and again (`candidate_runs`). A candidate is done once its bound is no better
than the best plan, with stages or without. Where the time that the search may take is over, what was proved by then is
the bound.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import NamedTuple

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_to_text
from autoddl.core.hubs import add_hubs
from autoddl.core.pipeline import fullest
from autoddl.core.pipeline_schedules import chunks_of, pipes_of, schedule_title, splits_backward, written_places
from autoddl.core.plan import Plan
from autoddl.core.recompute import policy_blocks
from autoddl.core.stages import StageGraph, cut_graph
from autoddl.cost_models import show_seconds
from autoddl.planner.bucket_size import fitting_buckets
from autoddl.planner.mesh_search import Found, Progress, cut_short
from autoddl.planner.pins import check_pins
from autoddl.planner.pipelines.alike_units import structure
from autoddl.planner.pipelines.candidate_runs import Clock, processes_of, run_candidates
from autoddl.planner.pipelines.cut_places import places_of
from autoddl.planner.pipelines.part_ranks import Asked, candidates_asked, part_clusters, ranks_of_parts
from autoddl.planner.pipelines.pipeline_candidate import Alternative, CutSearch
from autoddl.planner.pipelines.stage_parts import StageParts
from autoddl.planner.pipelines.stage_plans import pipeline_plan
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import TriedCut
from autoddl.planner.pipelines.stored_once import together_bytes
from autoddl.planner.process_pool import processor_seconds
from autoddl.planner.question import graphs_beside, options_text
from autoddl.planner.task import PlanTask
from autoddl.pricing.floors import state_bytes
from autoddl.schedule.memory_line import with_memory_peak
from autoddl.search.limits import Late

INTERRUPTED = "interrupted"
"""Why a candidate's search ended."""

__all__ = ["PipelineFound", "WithoutStages", "plan_of_cut", "search_pipelines", "staged_plan"]


@dataclass(frozen=True, slots=True)
class PipelineFound:
    """The best pipeline, None where none beats what there was; the least bound of all candidates; and all of them.

    `needed` are the least bytes of a rank that some stage needs of those that were found not to fit. `problem` is why
    cuts cannot be, where none of them cannot for its bytes. `crowd` says where the schedule with the fewest
    microbatches at once has most of them. `interrupted` says whether an interrupt ended the search.
    """

    plan: Plan | None
    bound: float
    alternatives: tuple[Alternative, ...]
    needed: float
    problem: InputError | None = None
    crowd: str = ""
    interrupted: bool = False


def search_pipelines(task: PlanTask, best: float, progress: Progress | None = None) -> PipelineFound:
    """The fastest pipeline of all that the options allow and that takes less than `best` seconds.

    What cannot be, such as a schedule of so few microbatches, is left out. An interrupt ends the search with the best
    so far. Raises InputError where nothing can be, and KeyboardInterrupt where there is no plan yet.
    """
    options = task.options
    check_pins(options.pins, task.graph)
    for policy in options.recompute:
        policy_blocks(task.graph, policy)
    asked = candidates_asked(task.cluster, options)
    limit = inf if options.stages_limit is None else options.stages_limit
    clock, processes = Clock(limit, processor_seconds(), best), processes_of(options.workers, limit)
    each = options if processes == 1 else replace(options, workers=1)
    problems = _begin(replace(task, late=clock.late, options=each), asked, clock,
                      _teller(progress, clock.searches, len(asked)))
    searches, interrupted = clock.searches, False
    try:
        run_candidates(clock, processes)
    except KeyboardInterrupt:
        interrupted = True
        if min(best, *(one.seconds for one in searches)) == inf:
            raise
        for one in searches:
            one.ended = one.ended or INTERRUPTED
    needed = min(min(one.needed, *(part.needed for part in one.part.every)) for one in searches)
    first = min(searches, key=lambda one: one.seconds)
    fastest = first.cuts.fastest
    plan = plan_of_cut(first.part, first.name, fastest) if fastest and first.seconds < best else None
    rows = [*problems, *(replace(one.row, nbytes=plan.predicted.peak_bytes) if plan and one is first else one.row
                         for one in searches)]
    return PipelineFound(plan, min(row.bound for row in rows), tuple(rows), needed,
                         None if any(one.cuts.is_full for one in searches) else
                         next((one.cuts.problem for one in searches if one.cuts.problem), None),
                         _crowd(searches), interrupted)


def _begin(task: PlanTask, asked: Sequence[Asked], clock: Clock, tell: Callable[[str], None]) -> list[Alternative]:
    """Bounds all candidates by what little is known, and adds them to those of the clock; returns what cannot be.

    Raises InputError where nothing can be.
    """
    problems = list[Alternative]()
    parts, known = dict[tuple[int, tuple[int, ...], int, int, bool, int, str], StageParts](), dict[
        int, dict[int, StageParts]]()
    for d, sizes, m, name in asked:
        key = d, sizes, m, chunks_of(name), splits_backward(name), pipes_of(name), written_places(name)
        try:
            if key not in parts:
                alike = (part for (*one, _, _, pipes, _), part in parts.items()
                         if (*one, pipes) == (d, sizes, m, key[5]))
                other = next(alike, None)
                parts[key] = _part(task, d, m, name, other, clock.of_stage, sizes, known.setdefault(m, {}))
            search = CutSearch(parts[key], name, tell, lambda: clock.best.value)
            search.advance()
            clock.searches.append(search)
        except InputError as error:
            if len(problems) == len(asked) - 1:
                raise
            problems.append(Alternative(d * chunks_of(name), name, m, None, None, inf, str(error), sizes=sizes))
    clock.is_bounded = True
    return problems


def _crowd(searches: Sequence[CutSearch]) -> str:
    """Which ranks have most microbatches at once, of the schedule where they are fewest, and from which action on."""
    every = [(*fullest(one.schedule), one.name, k) for k, one in enumerate(searches)]
    if not every:
        return ""
    most, at, action, name, k = min(every)
    part = searches[k].part
    first, end = ranks_of_parts(part.task.cluster, len(searches[k].schedule.actions), part.sizes)[at]
    one, many = (f"rank {first}", "has", "its"), (f"ranks {first}-{end - 1}", "have", "their")
    ranks, has, its = one if end == first + 1 else many
    return f"{ranks} of {schedule_title(name)} {has} {most} microbatch{'es' * (most > 1)} of {its} stages at {action}; "


def _teller(progress: Progress | None, searches: Sequence[CutSearch], count: int) -> Callable[[str], None]:
    """Tells progress: what is done, the best seconds, and how many candidates are done."""
    def tell(what: str) -> None:
        if progress:
            best = min((one.best for one in searches), default=inf)
            gap = max(0.0, 1 - min(one.bound for one in searches) / best) if best < inf else 0.0
            said = f"{what}, best {show_seconds(best)}, gap {gap:.2%}" if best < inf else what
            progress(said, sum(one.is_done for one in searches), count)

    return tell


class WithoutStages(NamedTuple):
    """The fastest plan without stages, before it is drawn.

        seconds      of a step
        bound        seconds that no plan without stages is below
        proof        of the bound
        candidates   that were searched
        draw         makes the plan, which takes seconds where it is large
    """

    seconds: float
    bound: float
    proof: str
    candidates: int
    draw: Callable[[], Plan]

    @classmethod
    def of(cls, found: Found, candidates: int, draw: Callable[[], Plan]) -> "WithoutStages":
        """The fastest plan that a search over so many candidates found."""
        solution = found.best.solution
        proof = cut_short(solution.proof) if found.interrupted else solution.proof
        return cls(solution.seconds, min(found.bound, solution.seconds), proof, candidates, draw)


def staged_plan(task: PlanTask, plain: Callable[[PlanTask, Progress | None], WithoutStages] | None,
                progress: Progress | None) -> Plan:
    """The fastest plan of all numbers of stages that the options allow; `plain` finds the one without stages.

    Its bound is that of all of them. Raises Infeasible, with what each alternative lacks, where none fits, and
    InputError where no cut can be. Where parameters and states alone are above the budget, that is before anything is
    searched.
    """
    best, problem, least = None, None, state_bytes(task.graph, task.options.optimizer) / task.cluster.size
    if least > task.budget:
        raise Infeasible(least, task.budget, "parameters, gradients and the optimizer's state take that, split over "
                         "all devices: use more devices, another optimizer or a larger budget")
    if plain is not None:
        try:
            best = plain(replace(task, options=replace(task.options, stages=(1,))), progress)
        except Infeasible as error:
            problem = error
    found = search_pipelines(task, best.seconds if best else inf, progress)
    bound = min(found.bound, best.bound if best else inf)
    source = {"alternatives": [row.to_json() for row in found.alternatives], "cluster": task.cluster.to_yaml(),
              "bound_without_stages": best.bound if best else None,
              "seconds_without_stages": best.seconds if best else None, "pins": list(task.options.pins),
              "optimizer": task.options.optimizer, "asked": options_text(task.options)} | (
                  {"notes": list(task.notes)} if task.notes else {})
    if found.plan is not None:
        own = found.plan.microbatches
        source |= {"graph": graph_to_text(task.variant(own).original),
                   "parts": graphs_beside(task, own, task.options.microbatches)}
    if found.plan is not None:
        proof = "paths of its schedule over all cuts, and layouts of every stage" + (
            "; without stages: " + best.proof if best else "")
        proof = cut_short(proof) if found.interrupted else proof
        return replace(found.plan, bound=min(bound, found.plan.predicted.seconds), proof=proof, source=source,
                       candidates=len(found.alternatives) + (best.candidates if best else 0),
                       timings={"capture": task.capture_seconds, "total": perf_counter() - task.began})
    if best is None and found.problem and found.needed == inf:
        raise found.problem
    if best is None:
        least = min(found.needed, problem.needed if problem else inf) if found.bound == inf else 0.0
        raise Infeasible(least, task.budget,
                         f"{found.crowd}take more stages, recomputation, a smaller batch or a larger budget",
                         problem.reachable if problem else inf)
    drawn = best.draw()
    return replace(drawn, bound=min(bound, drawn.predicted.seconds),
                   source=drawn.source | {"alternatives": source["alternatives"], "asked": source["asked"],
                                         "bound_without_stages": best.bound},
                   proof=f"{drawn.proof}; {len(found.alternatives)} pipelines by the paths of their schedules")


def plan_of_cut(part: StageParts, name: str, tried: TriedCut) -> Plan:
    """The plan of a cut that was solved, its stages with their best bucket sizes.

    Buckets of the stages of a part of the cluster have what its ranks have left, those of the first stage first.
    """
    staged, budget, buckets = part.staged(name, tried.cut), part.task.budget, dict[object, int]()
    graphs = cut_graph(part.graph, staged.cuts)
    plans = list(tried.plans)
    for s, (plan, graph, at) in enumerate(zip(tried.plans, graphs, staged.placement, strict=True)):
        left = budget - together_bytes(plans, graphs, staged.placement, staged.moments)[at]
        made = _bucketed(replace(plan, budget=plan.predicted.peak_bytes + left), graph, part.on(s), buckets)
        others = [*plans[:s], made, *plans[s + 1:]]
        fits = together_bytes(others, graphs, staged.placement, staged.moments)[at] <= budget
        plans[s] = replace(made if fits else plan, budget=budget)
    return pipeline_plan(part.task, staged, plans)


def _bucketed(plan: Plan, stage: StageGraph, part: StageParts, sizes: dict[object, int]) -> Plan:
    """The plan with the best bucket size, that of stages before of the same layouts if it fits; `sizes` has theirs."""
    graph, optimizer = add_hubs(stage.graph), part.task.options.optimizer
    key = (structure(stage.graph), str(plan.mesh), tuple((one.layout, one.split) for one in plan.stored),
           tuple((one.inputs, one.outputs, one.gradient) for one in plan.decisions))
    if key in sizes:
        made = with_memory_peak(replace(plan, bucket_bytes=sizes[key]), graph, optimizer, part.cluster)
        if made.predicted.peak_bytes <= plan.budget:
            return made
    made = fitting_buckets(plan, graph, optimizer, part.cluster)
    sizes[key] = made.bucket_bytes
    return made


def _part(task: PlanTask, parts: int, microbatches: int, name: str, other: StageParts | None,
          start_clock: Callable[[], Late], sizes: tuple[int, ...], known: dict[int, StageParts]) -> StageParts:
    """The stages of one candidate, and what `other` stages know with as many pipes and microbatches on as many ranks.

    `start_clock` starts the clock of one search. `known` are stages on some number of ranks, of other candidates whose
    parts differ. Raises InputError where the cluster or the model cannot be cut so.
    """
    part_clusters(task.cluster, parts, sizes)
    chunks = chunks_of(name)
    stages = parts * chunks
    if task.options.cut and chunks > 1:
        raise InputError(f"such a schedule has {chunks} stages on each of {parts} parts of the cluster, and "
                         f"cut names where {parts} stages begin: leave cut out, or take 1f1b or gpipe")
    places = places_of(task.variant(microbatches).original, task.options.cut)
    if len(places) < stages - 1:
        each = f" ({chunks} chunks on each of {parts} parts)" if chunks > 1 else ""
        raise InputError(f"{stages} stages{each} need {stages - 1} cuts, and this model can be cut at {len(places)} "
                          "places, the ends of its blocks: ask for fewer stages, or name the modules with cut")
    splits, where = splits_backward(name), Staged(places[:stages - 1], name, microbatches).pipes
    if other is not None and not sizes:
        return other.scheduled(stages, splits, where)
    made = StageParts(task, stages, parts, microbatches, places, where, splits=splits,
                      start_clock=start_clock)
    return made.divided(sizes, known) if sizes else made
