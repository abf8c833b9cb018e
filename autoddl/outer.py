"""The outer search: over meshes and regions, best first.

    bound(mesh)   the exact optimum without a budget: a lower bound with one, and the answer if it fits
    then, cheapest bound first, the budgeted problem of every mesh whose bound is below the best plan so far

A mesh whose bound is no better than the best plan by more than the tolerance is never solved further. The bound of the
whole is the least over all meshes of what was proved for each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Any

from autoddl.cost_models import Cluster
from autoddl.errors import Infeasible
from autoddl.graph import Graph
from autoddl.layout import Mesh
from autoddl.price import Pricing
from autoddl.problem import Problem, Solution
from autoddl.search import solve
from autoddl.space import Region, Variable, variables
from autoddl.tables import problem_of

__all__ = ["Candidate", "Found", "Progress", "Solved", "Task", "search"]

Progress = Callable[[str, int, int], None]
"""(what is being done, how many are done, of how many)."""


@dataclass(frozen=True, slots=True)
class Task:
    """What every mesh is solved for."""

    graph: Graph
    original: Graph
    spec: Mapping[str, Any]
    cluster: Cluster
    budget: float
    optimizer: str
    solver: str
    tolerance: float
    time_limit: float | None
    about: Mapping[str, Any]
    capture_seconds: float
    began: float


@dataclass(frozen=True, slots=True)
class Solved:
    """One mesh, solved: `variables` are what the solution's choices choose among."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    problem: Problem
    solution: Solution


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh, and the region of its plans that is searched."""

    mesh: Mesh
    region: Callable[[Graph, Mesh], Region]


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest plan, the least bound over all candidates, the seconds that the search took."""

    best: Solved
    bound: float
    seconds: float


def _pose(task: Task, candidate: Candidate) -> Solved:
    """The candidate's problem without its budget, and its optimum."""
    pricing = Pricing(task.graph, candidate.mesh, task.cluster, task.optimizer)
    choices = variables(task.graph, candidate.mesh, candidate.region(task.graph, candidate.mesh))
    problem = problem_of(pricing, choices, None)
    return Solved(pricing, choices, problem, solve(problem, task.solver, time_limit=task.time_limit))


def _within(task: Task, posed: Solved) -> Solved:
    """The same under the budget. Raises Infeasible."""
    problem = replace(posed.problem, budget=task.budget)
    if posed.solution.nbytes <= task.budget:
        return replace(posed, problem=problem)
    solution = solve(problem, task.solver, time_limit=task.time_limit, tolerance=task.tolerance)
    return replace(posed, problem=problem, solution=solution)


def search(task: Task, candidates: Sequence[Candidate], progress: Progress | None = None) -> Found:
    """The fastest plan over all candidates. Raises Infeasible, with the least bytes that any needs, if none fits."""
    start, tell = perf_counter(), progress or (lambda what, done, total: None)
    bounds, best, impossible = list[tuple[float, int]](), None, list[Infeasible]()
    for i, candidate in enumerate(candidates):
        tell(f"bounding {candidate.mesh}", i, 2 * len(candidates))
        posed = _pose(task, candidate)
        bounds.append((posed.solution.bound, i))
        if posed.solution.nbytes <= task.budget and (best is None or posed.solution.seconds < best.solution.seconds):
            best = _within(task, posed)
    proved = inf
    for rank, (bound, i) in enumerate(sorted(bounds)):
        tell(f"solving {candidates[i].mesh}", len(candidates) + rank, 2 * len(candidates))
        if best is not None and bound >= best.solution.seconds * (1 - task.tolerance):
            proved = min(proved, bound)
            continue
        try:
            solved = _within(task, _pose(task, candidates[i]))
        except Infeasible as error:
            impossible.append(error)
            continue
        proved = min(proved, solved.solution.bound)
        if best is None or solved.solution.seconds < best.solution.seconds:
            best = solved
    tell("solved", 2 * len(candidates), 2 * len(candidates))
    if best is None:
        raise min(impossible, key=lambda error: error.needed)
    return Found(best, min(proved, best.solution.seconds), perf_counter() - start)
