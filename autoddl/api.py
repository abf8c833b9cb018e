"""The pipeline on one page: capture, then for every mesh variables -> problem -> solution, then the best one's plan.

    plan     the fastest plan of a model on a cluster, and how far it can be from optimal
    compare  that plan beside the strategies that people use, each at its best
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autoddl.assemble import assemble, plan_of
from autoddl.cost_models import Cluster, load_cluster, parse
from autoddl.errors import Infeasible, InputError
from autoddl.graph import Graph
from autoddl.hubs import planned
from autoddl.layout import Mesh
from autoddl.meshes import check_mesh, meshes
from autoddl.plan import VERSION, Plan
from autoddl.price import OPTIMIZERS, Pricing, problem_of
from autoddl.problem import Problem, Solution
from autoddl.regions import Pin, mesh_allows, parse_pin, pinned, strategy
from autoddl.search import solve
from autoddl.space import Region, Variable, variables

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Comparison", "Progress", "compare", "plan"]

Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A strategy at its best: its plan, or why there is none."""

    name: str
    plan: Plan | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Task:
    """What every mesh is solved for."""

    graph: Graph
    original: Graph
    spec: Mapping[str, Any]
    cluster: Cluster
    budget: float
    optimizer: str
    solver: str
    time_limit: float | None
    about: Mapping[str, Any]
    capture_seconds: float
    began: float


@dataclass(frozen=True, slots=True)
class _Solved:
    """One mesh, solved: `variables` are what the solution's choices choose among."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    problem: Problem
    solution: Solution


def _task(model: "nn.Module", cluster: str | Path | Cluster, sample: object, budget: float | str | None, optimizer: str,
          solver: str, time_limit: float | None, name: str, factory: Mapping[str, Any] | None) -> _Task:
    """Read and check everything that planning needs; the model is captured here."""
    from autoddl.capture import capture

    began = perf_counter()
    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is not known; its memory is known for {', '.join(OPTIMIZERS)}")
    limit = place.device.memory if budget is None else float(parse(budget, "bytes"))
    if limit <= 0:
        raise InputError(f"a memory budget is above 0 bytes, not {budget}")
    start = perf_counter()
    captured = capture(model, sample)
    about = {"model": name or type(model).__name__, "factory": dict(factory or {})}
    return _Task(planned(captured.graph), captured.graph, captured.spec, place, limit, optimizer, solver, time_limit,
                 about, perf_counter() - start, began)


def _solve(task: _Task, mesh: Mesh, region: Callable[[Graph, Mesh], Region], best: float) -> _Solved:
    """The best plan on one mesh. `best` is what others reached already."""
    pricing = Pricing(task.graph, mesh, task.cluster, task.optimizer)
    choices = variables(task.graph, mesh, region(task.graph, mesh))
    problem = problem_of(pricing, choices, task.budget)
    return _Solved(pricing, choices, problem, solve(problem, task.solver, time_limit=task.time_limit))


def _best(task: _Task, candidates: Sequence[tuple[Mesh, Callable[[Graph, Mesh], Region]]], progress: Progress | None
          ) -> tuple[_Solved, float, float]:
    """The fastest over all candidates, the least bound of all, and the seconds that solving took."""
    start, found, bound = perf_counter(), list[_Solved](), float("inf")
    impossible: list[Infeasible] = []
    for i, (mesh, region) in enumerate(candidates):
        if progress:
            progress(f"mesh {mesh}", i, len(candidates))
        try:
            solved = _solve(task, mesh, region, min((s.solution.seconds for s in found), default=float("inf")))
        except Infeasible as error:
            impossible.append(error)
            continue
        found.append(solved)
        bound = min(bound, solved.solution.bound)
    if progress:
        progress("solved", len(candidates), len(candidates))
    if not found:
        raise min(impossible, key=lambda e: e.needed)
    return min(found, key=lambda s: s.solution.seconds), bound, perf_counter() - start


def _finish(task: _Task, best: tuple[_Solved, float, float], count: int) -> Plan:
    """The plan of the best candidate."""
    solved, bound, seconds = best
    made = assemble(solved.pricing, solved.problem, solved.solution, solved.variables)
    timings = {"capture": task.capture_seconds, "solve": seconds, "total": perf_counter() - task.began}
    prints = {"model": task.original.fingerprint(), "cluster": task.cluster.fingerprint, "autoddl": str(VERSION)}
    return plan_of(made, solved.pricing, solved.solution, dict(task.about) | {
        "bound": min(bound, made.predicted.seconds), "budget": task.budget, "candidates": count, "sample": dict(task.spec),
        "fingerprints": prints, "timings": timings})


def _meshes(task: _Task, mesh: str | None, pins: tuple[Pin, ...], most: int) -> tuple[Mesh, ...]:
    """The meshes to try: the given one, or all that the pins allow."""
    if mesh is not None:
        chosen = check_mesh(Mesh.parse(mesh), task.cluster)
        if not mesh_allows(pins, chosen):
            raise InputError(f"the pins {', '.join(map(str, pins))} name axes or sizes that mesh '{chosen}' does not have")
        return (chosen,)
    every = meshes(task.cluster, most)
    allowed = tuple(m for m in every if mesh_allows(pins, m))
    if not allowed:
        raise InputError(f"no mesh of cluster {task.cluster.name} fits the pins {', '.join(map(str, pins))}; "
                         f"it has {'; '.join(map(str, every[:6]))}")
    return allowed


def plan(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, mesh: str | None = None,
         pins: Sequence[str] = (), budget: float | str | None = None, optimizer: str = "adamw", solver: str = "exact",
         max_axes: int = 3, time_limit: float | None = None, name: str = "", factory: Mapping[str, Any] | None = None,
         progress: Progress | None = None) -> Plan:
    """The fastest plan for `model` on `cluster`, under the performance model.

    `budget` is bytes per device (the device's memory); `time_limit` seconds per mesh. Raises InputError for what is
    wrong with the arguments, Infeasible if no plan fits the budget.
    """
    if progress:
        progress("capturing the model", 0, 1)
    task = _task(model, cluster, sample, budget, optimizer, solver, time_limit, name, factory)
    asked = tuple(parse_pin(text) for text in pins)
    tried = [(m, lambda graph, on: pinned(asked, graph, on)) for m in _meshes(task, mesh, asked, max_axes)]
    return _finish(task, _best(task, tried, progress), len(tried))


def _strategies(task: _Task, tried: tuple[Mesh, ...]) -> dict[str, list[tuple[Mesh, Callable[[Graph, Mesh], Region]]]]:
    """Named strategies as candidates: a mesh and a role for each of its axes."""
    found: dict[str, list[tuple[Mesh, Callable[[Graph, Mesh], Region]]]] = {
        "data parallel": [], "ZeRO-3": [], "tensor parallel": [], "tensor x data grid": []}
    for mesh in tried:
        for roles in product(("data", "tensor", "zero"), repeat=len(mesh.axes)):
            kinds, named = set(roles), dict(zip(mesh.names, roles, strict=True))
            name = {frozenset({"data"}): "data parallel", frozenset({"zero"}): "ZeRO-3",
                    frozenset({"tensor"}): "tensor parallel",
                    frozenset({"data", "tensor"}): "tensor x data grid"}.get(frozenset(kinds))
            if name is not None:
                found[name].append((mesh, lambda graph, on, named=named: strategy(graph, on, named)))
    return found


def compare(model: "nn.Module", cluster: str | Path | Cluster, sample: object = None, *, mesh: str | None = None,
            pins: Sequence[str] = (), budget: float | str | None = None, optimizer: str = "adamw",
            solver: str = "exact", max_axes: int = 2, time_limit: float | None = None, name: str = "",
            factory: Mapping[str, Any] | None = None, progress: Progress | None = None) -> tuple[Comparison, ...]:
    """The found plan, then data parallel, ZeRO-3, tensor parallel and the best tensor x data grid, each at its best."""
    task = _task(model, cluster, sample, budget, optimizer, solver, time_limit, name, factory)
    asked = tuple(parse_pin(text) for text in pins)
    tried = _meshes(task, mesh, asked, max_axes)
    free = [(m, lambda graph, on: pinned(asked, graph, on)) for m in tried]
    found = []
    for title, candidates in ({"found": free} | _strategies(task, tried)).items():
        try:
            found.append(Comparison(title, _finish(task, _best(task, candidates, progress), len(candidates))))
        except Infeasible as error:
            found.append(Comparison(title, None, str(error)))
        except InputError as error:
            found.append(Comparison(title, None, str(error)))
    return tuple(found)
