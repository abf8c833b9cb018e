"""The pipeline on one page: capture, then for every mesh variables -> problem -> solution, then the best one's plan.

    plan     the fastest plan of a model on a cluster, and how far it can be from optimal
    compare  that plan beside the strategies that people use, each at its best
    compare_solvers   all solvers on the one problem that the best mesh poses
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autoddl.capture.gc_pause import uncollected
from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.layout import Mesh
from autoddl.core.plan import VERSION, Plan
from autoddl.core.problem import Problem
from autoddl.cost_models import Cluster, show_bytes
from autoddl.planner.assemble import assemble, plan_of
from autoddl.planner.bucket_size import best_buckets
from autoddl.planner.candidates import Candidate, posed
from autoddl.planner.mesh_search import Found, Progress, cut_short, search
from autoddl.planner.meshes import check_mesh, meshes
from autoddl.planner.overlap import Finish, overlapped
from autoddl.planner.pins import Pin, mesh_allows, parse_pin, pinned
from autoddl.planner.question import source_of
from autoddl.planner.strategies import named_strategies
from autoddl.planner.task import Task, task_of
from autoddl.schedule.memory_line import with_memory
from autoddl.search import SOLVERS, solve

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Comparison", "Progress", "Raced", "compare", "compare_solvers", "plan"]

AGAIN = 2
"""Searches with more room for what the charge does not know of."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A strategy at its best: its plan, or why there is none; `problem` is what planning it raised. What an interrupt
    ended, or kept from being begun, says so."""

    name: str
    plan: Plan | None
    detail: str = ""
    problem: AutoDDLError | None = None
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Raced:
    """What one solver found: seconds of its plan and its bound (None: no plan, see `detail`), and how long it took;
    `problem` is what it raised."""

    name: str
    seconds: float | None
    bound: float | None
    wall: float
    detail: str = ""
    problem: AutoDDLError | None = None


def _finish(task: Task, found: Found, count: int, pins: Sequence[str], mesh: str | None, most: int,
            counts: Sequence[int]) -> Plan:
    """The plan of the best candidate. After an interrupt nothing more is captured for it to keep."""
    counts = [n for n in counts if task.has(n)] if found.interrupted else counts
    solved = found.best
    one = task.confirmed(solved.pricing.microbatches)
    task = replace(task, graph=one.graph, original=one.original, spec=one.spec)
    if found.interrupted:
        solved = replace(solved, solution=replace(solved.solution, proof=cut_short(solved.solution.proof)))
    made = assemble(solved.pricing, solved.problem, solved.solution, solved.variables)
    timings = {"capture": task.capture_seconds, "solve": found.seconds, "total": perf_counter() - task.began}
    prints = {"model": task.original.fingerprint(), "cluster": task.cluster.fingerprint, "autoddl": str(VERSION)}
    best = plan_of(made, solved.pricing, solved.solution, dict(task.about) | {
        "bound": min(found.bound, made.predicted.seconds), "budget": task.budget, "candidates": count,
        "sample": dict(task.spec), "fingerprints": prints, "timings": timings,
        "source": source_of(task, solved, pins, mesh, most, counts)})
    best = best_buckets(best, task.graph, task.cluster)
    return with_memory(best, task.graph, task.optimizer, task.cluster)


def _meshes(task: Task, mesh: str | None, pins: tuple[Pin, ...], most: int) -> tuple[Mesh, ...]:
    """The meshes to try: the given one, or all that the pins allow."""
    if mesh is not None:
        chosen = check_mesh(Mesh.parse(mesh), task.cluster)
        if not mesh_allows(pins, chosen):
            raise InputError(f"the pins {', '.join(map(str, pins))} name axes or sizes that mesh '{chosen}' does not "
                             "have")
        return (chosen,)
    every = meshes(task.cluster, most)
    allowed = tuple(m for m in every if mesh_allows(pins, m))
    if not allowed:
        raise InputError(f"no mesh of cluster {task.cluster.name} fits the pins {', '.join(map(str, pins))}; "
                         f"it has {'; '.join(map(str, every[:6]))}")
    return allowed


@uncollected()
def plan(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, mesh: str | None = None,
         pins: Sequence[str] = (), budget: float | str | None = None, optimizer: str = "adamw", solver: str = "exact",
         tolerance: float = 1e-3, max_axes: int = 3, time_limit: float | None = None, name: str = "",
         factory: Mapping[str, Any] | None = None, progress: Progress | None = None, workers: int | None = None,
         microbatches: Sequence[int] = (1,), overlap: bool = False) -> Plan:
    """The fastest plan for `model` on `cluster`, under the performance model.

    `budget` is bytes per device (the device's memory); `time_limit` seconds per mesh. Under a binding budget the search
    stops at a proven gap of `tolerance`; an interrupt ends it with the best plan so far and the bound that holds then.
    `workers` processes search; their number changes no plan. `microbatches` are the numbers of equal parts in which a
    step may run the batch, one after the other; the plan's layouts and sample are those of a part. A parameter that is
    kept is gathered and its gradient reduced once a step, one that is gathered anew in every part. With `overlap` the
    plan is the one with the shortest time line of those that several searches find, between which parameters'
    collectives count for less; no plan's time line is shorter than its `predicted.line_bound`.
    Raises InputError for what is wrong with the arguments, Infeasible if no plan fits the budget.
    """
    if progress:
        progress("capturing the model", 0, 1)
    counts = _counts(microbatches)
    task = task_of(model, cluster, sample, budget, optimizer, solver, tolerance, time_limit, name, factory, workers,
                   counts)
    asked = tuple(parse_pin(text) for text in pins)
    region = partial(pinned, asked)
    tried = [Candidate(m, region, n) for n in counts for m in _meshes(task, mesh, asked, max_axes)]
    finish = partial(_finish, task, count=len(tried), pins=pins, mesh=mesh, most=max_axes, counts=counts)
    best, found = _fitting(task, tried, progress, finish)
    if overlap and not found.interrupted:
        return overlapped(task, found, best, _spaces(task, tried, bool(pins)), finish)
    return best


def _fitting(task: Task, tried: Sequence[Candidate], progress: Progress | None, finish: Finish) -> tuple[Plan, Found]:
    """The best candidate's plan, and the search that found it. The charge of a search knows of no bucket and of nothing
    that the optimizer makes for a moment: where these lift the peak above the budget, the search leaves them room and
    is done again, and the bound stays that of the first. What still does not fit says so (`report`). The first plan is
    kept where the search is interrupted then, which it says, finds none, or one of a graph that was guessed wrongly."""
    found = search(task, tried, progress)
    best, room = finish(found), 0.0
    try:
        for _ in range(AGAIN):
            over = best.predicted.peak_bytes - task.budget
            if over <= 0 or found.interrupted:
                break
            room += over
            other = _again(replace(task, budget=task.budget - room), found, tried, progress)
            other = replace(other, bound=min(found.bound, other.bound), seconds=found.seconds + other.seconds)
            best, found = finish(other), other
    except (Infeasible, InputError):
        pass
    except KeyboardInterrupt:
        best, found = replace(best, proof=cut_short(best.proof)), replace(found, interrupted=True)
    return best, found


def _again(task: Task, first: Found, tried: Sequence[Candidate], progress: Progress | None) -> Found:
    """What fits on the mesh of `first`, if that is within the tolerance of its bound; else on any."""
    best = first.best.pricing
    same = [one for one in tried if (one.mesh, one.microbatches) == (best.mesh, best.microbatches)]
    try:
        near = search(task, same, progress)
    except Infeasible:
        if len(same) == len(tried):
            raise
        return search(task, tried, progress)
    enough = first.bound >= near.best.solution.seconds * (1 - task.tolerance)
    if enough or near.interrupted or len(same) == len(tried):
        return near
    try:
        whole = search(task, tried, progress)
    except KeyboardInterrupt:
        return replace(near, bound=first.bound, interrupted=True)
    faster = min(whole, near, key=lambda found: found.best.solution.seconds)
    return replace(whole, best=faster.best)


def _spaces(task: Task, tried: Sequence[Candidate], pinned: bool) -> list[list[Candidate]]:
    """The whole, every candidate alone; every strategy on every mesh, unless pins ask for something else."""
    named = {} if pinned else named_strategies(task, tuple(dict.fromkeys(one.mesh for one in tried)))
    counts = sorted({one.microbatches for one in tried})
    regions = [[replace(one, microbatches=n)] for n in counts for whole in named.values() for one in whole]
    return [[*tried], *([one] for one in tried), *regions]


def _counts(microbatches: Sequence[int]) -> list[int]:
    """The numbers of microbatches to try, each once, rising."""
    counts = sorted(set(microbatches))
    if not counts or counts[0] < 1:
        raise InputError(f"numbers of microbatches are at least 1, not {list(microbatches)}; 1 is the whole batch")
    return counts


@uncollected()
def compare(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, mesh: str | None = None,
            pins: Sequence[str] = (), budget: float | str | None = None, optimizer: str = "adamw",
            solver: str = "exact", tolerance: float = 1e-3, max_axes: int = 3, time_limit: float | None = None,
            name: str = "", factory: Mapping[str, Any] | None = None, progress: Progress | None = None,
            workers: int | None = None, microbatches: Sequence[int] = (1,)) -> tuple[Comparison, ...]:
    """The found plan, then data parallel, ZeRO-3, tensor parallel and the best tensor x data grid, each at its best,
    with the best of the numbers of microbatches. An interrupt ends it: what was not begun then never is. Raises
    KeyboardInterrupt before there is the found plan."""
    counts = _counts(microbatches)
    task = task_of(model, cluster, sample, budget, optimizer, solver, tolerance, time_limit, name, factory, workers,
                   counts)
    asked = tuple(parse_pin(text) for text in pins)
    tried = _meshes(task, mesh, asked, max_axes)
    free = [Candidate(m, partial(pinned, asked)) for m in tried]
    found: list[Comparison] = []
    for title, whole in ({"found": free} | named_strategies(task, tried)).items():
        if found and found[-1].interrupted:
            found.append(Comparison(title, None, "not begun: interrupted", interrupted=True))
            continue
        candidates = [replace(one, microbatches=n) for n in counts for one in whole]
        finish = partial(_finish, task, count=len(candidates), pins=pins if title == "found" else (), mesh=mesh,
                         most=max_axes, counts=counts)
        found.append(_compared(task, title, candidates, progress, finish))
        if found[0].plan is None and found[0].interrupted:
            raise KeyboardInterrupt
    return tuple(found)


def _compared(task: Task, title: str, tried: Sequence[Candidate], progress: Progress | None, finish: Finish
              ) -> Comparison:
    """One strategy's row."""
    if not tried:
        return Comparison(title, None, "no mesh here has an axis for each")
    try:
        best, found = _fitting(task, tried, progress, finish)
    except (Infeasible, InputError) as error:
        return Comparison(title, None, str(error), error)
    except KeyboardInterrupt:
        return Comparison(title, None, "interrupted before it had a plan", interrupted=True)
    said = ["interrupted: its best so far"] * found.interrupted
    said += [f"its peak is above the budget of {show_bytes(task.budget)}"] * (best.predicted.peak_bytes > task.budget)
    return Comparison(title, best, "; ".join(said), interrupted=found.interrupted)


def compare_solvers(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *,
                    mesh: str | None = None, pins: Sequence[str] = (), budget: float | str | None = None,
                    optimizer: str = "adamw", tolerance: float = 1e-3, max_axes: int = 3,
                    time_limit: float | None = 60.0, solvers: Sequence[str] = tuple(SOLVERS), name: str = "",
                    factory: Mapping[str, Any] | None = None, progress: Progress | None = None,
                    workers: int | None = None) -> tuple[Raced, ...]:
    """Every solver on the same problem: that of the mesh, or of the best mesh, for which `workers` processes search.
    `time_limit` is seconds per solver."""
    tell = progress or (lambda what, done, total: None)
    task = task_of(model, cluster, sample, budget, optimizer, "exact", tolerance, None, name, factory, workers)
    asked = tuple(parse_pin(text) for text in pins)
    tried = [Candidate(m, partial(pinned, asked)) for m in _meshes(task, mesh, asked, max_axes)]
    best = tried[0].mesh if len(tried) == 1 else search(task, tried, progress).best.pricing.mesh
    problem = posed(task, next(one for one in tried if one.mesh == best))[2]
    found = []
    for i, solver in enumerate(solvers):
        tell(f"solving by {solver}", i, len(solvers))
        found.append(_race(problem, solver, tolerance, time_limit))
    return tuple(found)


def _race(problem: Problem, solver: str, tolerance: float, time_limit: float | None) -> Raced:
    start = perf_counter()
    try:
        solution = solve(problem, solver, tolerance=tolerance, time_limit=time_limit)
    except (Infeasible, InputError) as error:
        return Raced(solver, None, None, perf_counter() - start, str(error), error)
    return Raced(solver, solution.seconds, solution.bound, perf_counter() - start, solution.proof)
