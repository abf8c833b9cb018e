"""Computes Pareto fronts: seconds against bytes per device, and seconds against the number of devices.

    bytes     on the plan's mesh: the corners of the lower hull of (bytes, seconds), where one multiplier answers, and
              between the fastest plan and the smallest the optimum under evenly spaced budgets, each with its bound
    devices   the whole search on clusters whose outermost level is cut to each of its divisors, with the batch as it
              is; a size for which there is no plan, or no such cluster, has a row that says why

Every point is a plan, at its predicted seconds. Points that another one beats in both are left out. Bytes are those at
the peak of the memory line.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from time import monotonic

from autoddl.core.errors import AutoDDLError, Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.core.problem import Problem
from autoddl.cost_models import Cluster, Level
from autoddl.cost_models.topologies import check_topology
from autoddl.planner.budget_search import BudgetSearch, Fitted
from autoddl.planner.finish import answer_plan
from autoddl.planner.mesh_search import Progress
from autoddl.planner.peaks import Peaks
from autoddl.planner.pins import parse_pin
from autoddl.planner.question import Question, question_of, rebuild
from autoddl.search import smallest, solve
from autoddl.search.elimination_order import plan_exact_elimination
from autoddl.search.relaxations import HullPoint, Space

__all__ = ["DevicePoint", "PointOfBytes", "front_of_bytes", "front_of_devices", "least_bytes", "level_of_size",
           "resized"]

BUDGETS = 10
CORNERS = 12
CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class PointOfBytes:
    """A plan that takes `seconds` a step and `nbytes` of a rank.

    No plan with as few bytes takes less than `bound` seconds; None where no bound was asked for.
    """

    nbytes: float
    seconds: float
    bound: float | None


@dataclass(frozen=True, slots=True)
class DevicePoint:
    """The best plan on a number of devices, or why there is none."""

    devices: int
    """The number of devices."""
    mesh: str
    """The plan's mesh, as text; empty without a plan."""
    seconds: float | None
    """Seconds of a step; None without a plan."""
    nbytes: float
    """Bytes of a rank at the peak; without a plan the bytes that any plan needs, 0 where they are not known."""
    bound: float
    """Seconds that no plan on so many devices is below."""
    detail: str = ""
    """Why there is no plan."""


def least_bytes(problem: Problem) -> float:
    """Bytes of the problem's row that every plan needs at least."""
    return smallest(problem)[0]


def front_of_bytes(plan: Plan, budgets: int = BUDGETS, progress: Progress | None = None, until: float = inf
                   ) -> tuple[PointOfBytes, ...]:
    """The front of seconds against bytes on the mesh of `plan`, the smallest plan first.

    `budgets` is the number of budgets that are solved between the smallest plan and the fastest, large ones first. From
    the moment `until` of `time.monotonic`, in seconds, no further search begins: points may be missing then.
    """
    made, tell = rebuild(plan), progress or (lambda what, done, total: None)
    free, peaks = solve(made.problem.within(None)), Peaks(made.network)
    found = [PointOfBytes(peaks.of(free.choice).nbytes, free.seconds, free.bound),
             *_corners(made.problem.within(None), peaks, until)]
    least = min(point.nbytes for point in found)
    guess: Fitted | None = None
    for i in reversed(range(budgets)):
        left = until - monotonic()
        if left <= 0:
            break
        budget = (least + (found[0].nbytes - least) * i / budgets) * (1 + 1e-12)
        tell("solving under budgets", budgets - 1 - i, budgets)
        search = BudgetSearch(made.network, budget, time_limit=left if left < inf else None)
        fitted = _under(search, guess, plan.source["tolerance"])
        if fitted is not None:
            guess, best = fitted, fitted.solution
            found.append(PointOfBytes(best.nbytes, best.seconds, best.bound))
    return _undominated(found)


def _under(search: BudgetSearch, guess: Fitted | None, tolerance: float) -> Fitted | None:
    """The fastest plan that fits; `guess` is that of another budget, whose row is likely to bind here."""
    try:
        if guess is None:
            return search.solve(None, 0.0, inf, tolerance)
        return search.solve(guess.row, guess.solution.price, inf, tolerance)
    except Infeasible:
        return None


def _corners(problem: Problem, peaks: Peaks, until: float) -> list[PointOfBytes]:
    """The plans that are best for some price of a retained byte: corners of the hull, found between neighbours."""
    try:
        space = Space.of(problem, plan_exact_elimination(problem))
    except InputError:
        return []
    top = space.thresholds[-1]
    points = [space.point(0.0, top), space.point(float("inf"), top)]
    for _ in range(CORNERS):
        if monotonic() >= until:
            break
        points.sort(key=lambda p: (-p.retained, p.seconds))
        gaps = [(a, b) for a, b in pairwise(points) if a.retained > b.retained and b.seconds > a.seconds]
        gaps.sort(key=lambda gap: gap[1].retained - gap[0].retained)
        new = next(filter(None, (_between(space, top, a, b) for a, b in gaps)), None)
        if new is None:
            break
        points.append(new)
    fixed = problem.fixed_seconds
    return [PointOfBytes(peaks.of(p.choice.tolist()).nbytes, p.seconds + fixed, None)
            for p in points if p.seconds < inf]


def _between(space: Space, top: float, heavy: HullPoint, light: HullPoint) -> HullPoint | None:
    """A corner below the line through two others, if there is one."""
    slope = (light.seconds - heavy.seconds) / (heavy.retained - light.retained)
    point = space.point(slope, top)
    line = heavy.seconds + slope * heavy.retained
    return point if point.seconds + slope * point.retained < line - CLOSE * abs(line) else None


def _undominated(points: Iterable[PointOfBytes]) -> tuple[PointOfBytes, ...]:
    """The points that no other beats in both, by rising bytes."""
    found: list[PointOfBytes] = []
    for point in sorted(points, key=lambda p: (p.nbytes, p.seconds, p.bound is None)):
        if not found or point.seconds < found[-1].seconds * (1 - 1e-12):
            found.append(point)
    return tuple(found)


def resized(cluster: Cluster, size: int) -> Cluster:
    """The cluster with `size` children at its outermost level that has several.

    Raises InputError where the topology of that level cannot have so many.
    """
    last = max((i for i, level in enumerate(cluster.levels) if level.size > 1), default=len(cluster.levels) - 1)
    levels = tuple(level_of_size(level, size) if i == last else level for i, level in enumerate(cluster.levels))
    return replace(cluster, levels=levels)


def level_of_size(level: Level, size: int) -> Level:
    """The level with `size` children. Raises InputError where its topology cannot have so many.

    Children that fit below one leaf switch are below one. A single child has no links to arrange. A fully connected
    port has a link to every other child, so its bandwidth grows with them. The sides of a torus of another size, or its
    boards, do not follow from those of this one.
    """
    if size == level.size:
        return level
    if size == 1:
        return replace(level, size=1, topology="switch", dims=(), board=1, leaf=None)
    links = (size - 1) / (level.size - 1) if level.topology == "fully-connected" and level.size > 1 else 1.0
    found = replace(level, size=size, bandwidth=level.bandwidth * links,
                    leaf=None if level.leaf is None else min(level.leaf, size))
    try:
        check_topology(found)
    except InputError as error:
        raise InputError(f"level {level.name!r} with {size} children instead of {level.size}: {error}, in a cluster "
                         "file of its own") from None
    return found


def front_of_devices(plan: Plan, progress: Progress | None = None) -> tuple[DevicePoint, ...]:
    """The best plan on any mesh for every divisor of the outermost level's size, few devices first.

    Where one child of that level is left, layouts that pins ask for along it are those of any plan: no rank has less.
    """
    asked = question_of(plan).asking(mesh=None)
    last = next((level for level in reversed(asked.cluster.levels) if level.size > 1), asked.cluster.levels[-1])
    pins = {text: parse_pin(text) for text in asked.options.pins}
    whole = asked.asking(pins=tuple(text for text, pin in pins.items() if not pin.pattern or pin.axis != last.name))
    return tuple(_device_point(plan, whole if n == 1 else asked, n, asked.cluster.size // last.size * n, progress)
                 for n in range(1, last.size + 1) if last.size % n == 0)


def _device_point(plan: Plan, asked: Question, size: int, devices: int, progress: Progress | None) -> DevicePoint:
    """The best plan with `size` children at the outermost level, `devices` in all."""
    try:
        best = answer_plan(replace(asked, cluster=resized(asked.cluster, size)), plan, progress)
    except Infeasible as error:
        return DevicePoint(devices, "", None, error.needed, 0.0, "no plan fits the budget")
    except AutoDDLError as error:
        return DevicePoint(devices, "", None, 0.0, 0.0, str(error))
    return DevicePoint(devices, str(best.mesh), best.predicted.seconds, best.predicted.peak_bytes, best.bound)
