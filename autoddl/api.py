"""Plans on one page: captures the model, solves the problem of every mesh, and writes the plan of the best one.

    plan                   the fastest plan of a model on a cluster, and how far it can be from optimal
    compare                that plan and the strategies with names, like ZeRO-3, each at its best
    plan_among             the fastest plan of some candidates: a mesh, a region, a number of microbatches
    plan_without_stages    the fastest plan of a task, whose model is captured
    compare_solvers        all solvers on the problem of the best mesh
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

from autoddl.capture.gc_pause import pause_gc
from autoddl.core.degrees import Degrees
from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.core.plan import Plan
from autoddl.core.problem import Problem
from autoddl.core.sparse import SparseRule
from autoddl.cost_models import Cluster, load_cluster, show_seconds
from autoddl.planner.candidates import Candidate, build_problem, under_policies
from autoddl.planner.degree_meshes import batch_rows, check_rows
from autoddl.planner.finish import finished_plan
from autoddl.planner.mesh_search import Found, Progress, search
from autoddl.planner.options import Options, PlanOptions, documented
from autoddl.planner.overlap import overlapped
from autoddl.planner.pins import allowed_meshes, region_of
from autoddl.planner.pipelines.pipeline_search import WithoutStages, staged_plan
from autoddl.planner.pipelines.uniform_pipelines import UNIFORM, check_degrees, configured_pipeline, uniform_pipeline
from autoddl.planner.strategies import degrees_of, named_strategies
from autoddl.planner.task import PlanTask, task_of
from autoddl.planner.unused_options import check_used, given_options
from autoddl.search import SOLVERS, solve

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Comparison", "Progress", "Raced", "compare", "compare_solvers", "plan", "plan_among",
           "plan_without_stages"]

@dataclass(frozen=True, slots=True)
class Comparison:
    """A strategy at its best: its plan, or why there is none.

        name           title of the strategy
        plan           its fastest plan; None where there is none
        detail         why there is no plan
        problem        the error that planning raised
        interrupted    whether an interrupt ended its search, or kept it from beginning
    """

    name: str
    plan: Plan | None
    detail: str = ""
    problem: AutoDDLError | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Raced:
    """The result of one solver on a problem.

        name       name of the solver
        seconds    seconds of its plan; None where it found none
        bound      seconds that no plan is below, as far as it proved; None without a plan
        wall       seconds that it took
        detail     how the bound was proved, or why there is no plan
        problem    the error that it raised
    """

    name: str
    seconds: float | None
    bound: float | None
    wall: float
    detail: str = ""
    problem: AutoDDLError | None = None


def _with_meshes(cluster: str | Path | Cluster, options: PlanOptions) -> str | Path | Cluster:
    """The cluster. Raises InputError where no mesh of it has what the options name, before the model is captured."""
    place = load_cluster(cluster) if isinstance(cluster, str | Path) else cluster
    if isinstance(place, Cluster) and 1 in options.stages:
        allowed_meshes(place, options)
    return place


def _finish(task: PlanTask, found: Found, count: int, options: PlanOptions) -> Plan:
    """The plan of the best candidate. After an interrupt, no further numbers of microbatches are captured for it."""
    if found.interrupted:
        options = replace(options, microbatches=tuple(n for n in options.microbatches if task.has(n)))
    return finished_plan(task, found, count, options, task.confirmed(found.best.pricing.microbatches))


@documented
@pause_gc()
def plan(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, name: str = "",
         factory: Mapping[str, Any] | None = None, progress: Progress | None = None, samples: Sequence[object] = (),
         **options: Unpack[Options]) -> Plan:
    """The fastest plan for `model` on `cluster`, under the performance model.

    The cluster is a file or a Cluster. The sample has the arguments of one call of the model: a tensor, a tuple or a
    dict of keywords. Without it, the model's own `example_inputs` are taken. The plan keeps `name` and `factory`. Every
    stage calls `progress(what, done, total)`.

    `samples` are batches of other shapes that will come, such as one of each length. The plan is that of the largest
    batch; the others have programs of their own that store the same pieces, and fit the budget too.

    Under a binding budget the search stops at a proven gap of `tolerance`. An interrupt ends it with the best plan so
    far and the bound that holds then. With several microbatches, layouts and sample of the plan are those of one
    microbatch. A parameter that is kept is then gathered once a step, and its gradient is reduced once. One that is
    regathered is gathered in every microbatch. With `overlap`, several searches are made, and the plan with the
    shortest time line is taken. No plan has a shorter time line than its `predicted.line_bound`.

    With `stages` above 1, pipelines are searched too: where they are cut, and the layouts of every stage. The seconds
    of a plan with stages are those of its schedule's time line.

    Raises InputError for wrong arguments, CaptureError for a model that cannot be captured, and Infeasible if no plan
    fits the budget.
    """
    asked = PlanOptions.of(options)
    check_used(asked, given_options(asked))
    if samples:
        return _of_samples(model, cluster, (sample, *samples), name, factory, progress, options)
    if progress:
        progress("capturing the model", 0, 1)
    own = asked.configured()
    task = task_of(model, _with_meshes(cluster, own), sample, own, name, factory)
    if asked.mine is not None:
        check_rows(asked.mine, task.original, task.cluster.size, asked.microbatches)
    if task.options.stages != (1,) and task.options.mine is not None:
        return configured_pipeline(task, progress)
    if task.options.stages != (1,):
        return staged_plan(task, _undrawn if 1 in task.options.stages else None, progress)
    return plan_without_stages(task, progress)


def _of_samples(model: "nn.Module", cluster: str | Path | Cluster, samples: Sequence[object], name: str,
                factory: Mapping[str, Any] | None, progress: Progress | None, options: Options) -> Plan:
    """The plan of the largest batch, with what the others take."""
    from autoddl.sampled import by_size, check_no_momentum, with_samples

    asked = PlanOptions.of(options)
    check_no_momentum([SparseRule.parse(asked.sparse)] if asked.sparse else ())
    largest, *others = by_size(model, samples)
    found = plan(model, cluster, largest, name=name, factory=factory, progress=progress, **options)
    if progress:
        progress("planning for the other samples", 0, 1)
    return with_samples(found, model, others, plan_without_stages)


@pause_gc()
def plan_without_stages(task: PlanTask, progress: Progress | None = None) -> Plan:
    """The fastest plan without stages. Raises Infeasible where none fits the budget."""
    tried = _candidates(task)
    finish = partial(_finish, task, count=len(tried), options=task.options)
    found = search(task, tried, progress)
    if progress:
        progress(f"writing down the plan of {show_seconds(found.best.solution.seconds)}, with equal blocks alike", 0, 1)
    best = finish(found)
    if task.options.overlap and not found.interrupted:
        return overlapped(task, found, best, _spaces(task, tried), finish, progress)
    return best


def _undrawn(task: PlanTask, progress: Progress | None) -> WithoutStages:
    """The fastest plan without stages, which is drawn where nothing is faster."""
    tried = _candidates(task)
    found = search(task, tried, progress)
    return WithoutStages.of(found, len(tried), partial(_finish, task, found, len(tried), task.options))


def plan_among(task: PlanTask, candidates: Sequence[Candidate], progress: Progress | None = None) -> Plan:
    """The fastest plan of some candidates without stages. Raises Infeasible where none fits the budget."""
    return _finish(task, search(task, candidates, progress), len(candidates), task.options)


def _candidates(task: PlanTask) -> list[Candidate]:
    """Every mesh that the options allow, with every number of microbatches and every policy of recomputation."""
    region, allowed = region_of(task.options), allowed_meshes(task.cluster, task.options)
    plain = [Candidate(mesh, region, n) for n in task.options.microbatches for mesh in allowed]
    return under_policies(plain, task.options.recompute)


def _spaces(task: PlanTask, tried: Sequence[Candidate]) -> list[list[Candidate]]:
    """The parts of the space to search for time lines: the whole, every candidate alone, every strategy on every mesh.

    Strategies are left out where pins or degrees ask for something else.
    """
    meshes = tuple(dict.fromkeys(one.mesh for one in tried))
    named = {} if task.options.pins or task.options.mine else named_strategies(task, meshes)
    plain = [replace(one, microbatches=n) for n in task.options.microbatches for whole in named.values()
             for one in whole]
    return [[*tried], *([one] for one in [*tried, *under_policies(plain, task.options.recompute)])]


@documented
@pause_gc()
def compare(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, name: str = "",
            factory: Mapping[str, Any] | None = None, progress: Progress | None = None, **options: Unpack[Options]
            ) -> tuple[Comparison, ...]:
    """The found plan, then every named strategy (data parallel, ZeRO, tensor parallel, HSDP, grids), each at its best.

    Every strategy takes the best mesh for it and the best number of microbatches. The arguments are those of `plan`.
    With `stages` above 1, uniform pipelines are set beside the found plan too (`planner.uniform_pipelines`). With
    `mine`, the second row is that configuration, and the others do not depend on it. An interrupt ends the comparison:
    later strategies are not begun. It raises KeyboardInterrupt where there is no found plan yet. Raises InputError for
    wrong arguments.
    """
    asked = _summed(PlanOptions.of(options))
    own = asked.configured()
    check_used(asked, given_options(asked), compares=True)
    whole = replace(asked, mine=None)
    place = _with_meshes(cluster, whole)
    if own.mine is not None and isinstance(place, Cluster):
        check_degrees(place, own.mine)
    task = task_of(model, place, sample, whole, name, factory)
    found: list[Comparison] = []
    first: dict[str, _Find] = {"found": partial(_found, task, progress)}
    if own.mine is not None:
        check_rows(own.mine, task.original, task.cluster.size, own.microbatches)
        first["mine"] = partial(_mine, replace(task, options=own.run_by(task.cluster, task.graph)), progress)
    for title, find in (first | _uniform(task, progress) | _named(task, progress)).items():
        late = bool(found) and found[-1].interrupted
        found.append(Comparison(title, None, "not begun: interrupted", interrupted=True) if late else _row(title, find))
        if found[0].plan is None and found[0].interrupted:
            raise KeyboardInterrupt
    return tuple(_beside_found(found, task))


def _beside_found(rows: Sequence[Comparison], task: PlanTask) -> list[Comparison]:
    """The rows; one of less seconds than the found plan says why that can be."""
    best = rows[0].plan
    if best is None:
        return list(rows)
    why = "faster than the found plan, whose search had no stages: add --stages" if task.options.stages == (1,) else \
        f"faster than the found plan, whose search ended {best.gap:.1%} from its bound"
    return [replace(row, detail="; ".join(filter(None, (why, row.detail)))) if row.plan is not None and row.plan
            is not best and row.plan.predicted.seconds < best.predicted.seconds * (1 - 1e-6) and (
                row.plan.pipeline is not None or task.options.stages != (1,)) else row for row in rows]


_Find = Callable[[], tuple[Plan | None, str, bool]]
"""Finds a row: its plan, its detail, and whether it was interrupted. Raises why there is none."""


def _titled(progress: Progress | None, title: str) -> Progress | None:
    """Progress that says for which row it is."""
    return progress and (lambda what, done, total: progress(f"{title}: {what}", done, total))


def _row(title: str, find: _Find) -> Comparison:
    """The row of one strategy."""
    try:
        plan, detail, interrupted = find()
    except (Infeasible, InputError) as error:
        return Comparison(title, None, str(error), error)
    except KeyboardInterrupt:
        return Comparison(title, None, "interrupted before it had a plan", interrupted=True)
    return Comparison(title, plan, detail, interrupted=interrupted)


def _found(task: PlanTask, progress: Progress | None) -> tuple[Plan | None, str, bool]:
    if task.options.stages == (1,):
        return _best(task, _candidates(task), _titled(progress, "found"))
    return staged_plan(task, _undrawn if 1 in task.options.stages else None, progress), "", False


def _mine(task: PlanTask, progress: Progress | None) -> tuple[Plan | None, str, bool]:
    """The best plan of the configuration that the options give, and its degrees."""
    degrees = str(Degrees.parse(task.options.mine or "").on(task.cluster.size))
    if task.options.stages != (1,):
        return configured_pipeline(task, progress), degrees, False
    plan, detail, interrupted = _best(task, _candidates(task), _titled(progress, "mine"))
    return plan, f"{degrees}; {detail}" if detail else degrees, interrupted


def _named(task: PlanTask, progress: Progress | None) -> dict[str, _Find]:
    """By title, what finds the rows of the strategies without stages.

    Pins narrow their meshes alone, and only where they are those of plans without stages.
    """
    options = replace(task.options, stages=(1,), cut=())
    if 1 not in task.options.stages:
        options = replace(options, pins=(), mesh=None)
    tried = tuple(dict.fromkeys(one.mesh for one in _candidates(replace(task, options=options))))
    plain = replace(task, options=replace(options, pins=()))
    return {title: partial(_best, plain, under_policies(
        [replace(one, microbatches=n) for n in options.microbatches for one in whole], options.recompute),
        _titled(progress, title))
        for title, whole in named_strategies(plain, tried).items()}


def _uniform(task: PlanTask, progress: Progress | None) -> dict[str, _Find]:
    """By title, what finds the row of the best uniform pipeline of a schedule; nothing without stages."""
    if task.options.stages == (1,):
        return {}
    plain = replace(task, options=replace(task.options, pins=()))

    def row(name: str) -> tuple[Plan | None, str, bool]:
        best = uniform_pipeline(plain, name, _titled(progress, f"uniform pipeline, {schedule_title(name)}"))
        return best.plan, str(best), False

    names = dict.fromkeys((*UNIFORM, *plain.options.schedule))
    return {f"uniform pipeline, {schedule_title(name)}": partial(row, name) for name in names}


def _summed(options: PlanOptions) -> PlanOptions:
    """The options of a comparison. Raises InputError where they ask for the shortest time line."""
    if options.overlap:
        raise InputError("a comparison sets sums of seconds beside each other, and overlap is about time lines: leave "
                         "overlap out, or plan with it")
    return options


def _of_one_problem(options: PlanOptions) -> PlanOptions:
    """The options of a comparison of solvers. Raises InputError where they ask for stages, or for several problems."""
    if options.stages != (1,):
        raise InputError("solvers are compared on one problem, that of a plan without stages: leave stages and cut out")
    for name, several in (("microbatches", options.microbatches), ("recompute", options.recompute)):
        if len(several) > 1:
            raise InputError(f"solvers are compared on one problem, and {name} {', '.join(map(str, several))} ask for "
                             f"{len(several)}: give one of them")
    return options


def _best(task: PlanTask, tried: Sequence[Candidate], progress: Progress | None) -> tuple[Plan | None, str, bool]:
    """The best plan of these candidates, a text on it, and whether an interrupt ended the search."""
    if not tried:
        return None, "no mesh here has an axis for each", False
    found = search(task, tried, progress)
    degrees = degrees_of(found.candidate.region, found.candidate.mesh)
    rows = (batch_rows(task.original) or 0) // found.candidate.microbatches
    free = "; what tp splits is free" if degrees is not None and degrees.tp > 1 else ""
    said = [f"{degrees}{free}"] * (degrees is not None) + ["interrupted: its best so far"] * found.interrupted
    if degrees is not None and rows % max(1, degrees.dp):
        said.insert(1, f"dp does not divide {rows} rows, so it splits other dims too")
    return _finish(task, found, len(tried), task.options), "; ".join(said), found.interrupted


@documented
def compare_solvers(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *,
                    solvers: Sequence[str] = tuple(SOLVERS), progress: Progress | None = None,
                    **options: Unpack[Options]) -> tuple[Raced, ...]:
    """The results of every solver of `solvers` on one problem, that of the one mesh or of the best.

    The exact solver finds the best mesh. `time_limit` is seconds per solver, 60 by default. Raises InputError for wrong
    arguments.
    """
    tell = progress or (lambda what, done, total: None)
    given = PlanOptions.of(options)
    check_used(given, given_options(given))
    asked = _of_one_problem(_summed(PlanOptions.of({"time_limit": 60.0, **options}).configured()))
    task = task_of(model, cluster, sample, replace(asked, solver="exact", time_limit=None), "", None)
    tried = _candidates(task)
    best = tried[0].mesh if len(tried) == 1 else search(task, tried, progress).best.pricing.mesh
    problem = build_problem(task, next(one for one in tried if one.mesh == best))[2]
    found = []
    for i, solver in enumerate(solvers):
        tell(f"solving by {solver}", i, len(solvers))
        found.append(_race(problem, solver, asked.tolerance, asked.time_limit))
    return tuple(found)


def _race(problem: Problem, solver: str, tolerance: float, time_limit: float | None) -> Raced:
    start = perf_counter()
    try:
        solution = solve(problem, solver, tolerance=tolerance, time_limit=time_limit)
    except (Infeasible, InputError) as error:
        return Raced(solver, None, None, perf_counter() - start, str(error), error)
    return Raced(solver, solution.seconds, solution.bound, perf_counter() - start, solution.proof)
