"""Searches over pipelines: numbers of stages and microbatches, schedules, cuts, and the layouts of every stage.

A candidate has D stages, a schedule and m microbatches. Its cuts lie at `places`: the ends of blocks. For every stage
from place a to place b the search knows lower bounds, which get sharper when the stage is solved:

    T(s, a, b)   of m (f + b) + gather + reduce + update, with the microbatches in flight that stage s has
    M(s, a, b)   of m (f + b) alone

at first the work of its ops, split evenly over its devices; then what the search over its layouts proves. Paths of the
schedule (`cost_models.pipeline_bounds`, A) give a bound for all cuts at once, with p the least seconds of a transfer:

    bound = min over cuts of  max over s of  max( T_s,  sum over j < s of (M_j / m + 2 p_j)  +  M_s )

It is the least threshold t at which the shortest second part of cuts whose T stay within t is at most t
(`least_cut`). The cut that attains it is solved and simulated, its bounds get sharper, and so on, until the bound
reaches the best pipeline or does not move. A candidate whose bound is no better than the best plan, with stages or
without, is done. Stages that are alike are solved once (`structure`).
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import Graph, graph_to_text
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of
from autoddl.core.stages import StageGraph, crossing, cut_graph
from autoddl.cost_models import Cluster
from autoddl.planner.assemble import assemble
from autoddl.planner.candidates import chosen
from autoddl.planner.mesh_search import Found, Progress
from autoddl.planner.stage_plans import (
    Staged,
    boundary_seconds,
    finish_stage,
    in_flight_of,
    pipeline_plan,
    search_stage,
    simulated,
    stage_cluster,
    stage_task,
    transfer_seconds,
)
from autoddl.planner.task import PlanTask
from autoddl.pricing.price import floor_seconds
from autoddl.schedule.stage_seconds import stage_seconds

__all__ = ["Alternative", "PipelineFound", "least_cut", "search_pipelines", "staged_plan", "structure"]

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

ROUNDS = 24
"""Cuts of a candidate that are solved at most."""

PLACES = 16
"""Places at which a model without blocks may be cut, at most."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What became of a candidate: the seconds and peak bytes of its best pipeline, a bound of all, and why it ended."""

    stages: int
    schedule: str
    microbatches: int
    seconds: float | None
    nbytes: float | None
    bound: float
    detail: str

    def to_json(self) -> dict[str, Any]:
        """The fields by name, as JSON."""
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"bound": None if self.bound == inf else self.bound}


@dataclass(frozen=True, slots=True)
class PipelineFound:
    """The best pipeline, None where none beats what there was; the least bound of all candidates; and all of them."""

    plan: Plan | None
    bound: float
    alternatives: tuple[Alternative, ...]


def structure(graph: Graph) -> str:
    """A hash of a graph without its names: equal for stages that are alike in all but names."""
    rows = [[t.shape, t.dtype, t.kind, bool(t.fqn), t.trained, t.master, t.reduced] for t in graph.tensors]
    rows += [[op.target, op.inputs, op.slots, op.outputs, [pair for pair in op.args if pair[0] not in ("key", "stage")]]
             for op in graph.ops]
    text = json.dumps([rows, graph.outputs, graph.updates], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def places_of(graph: Graph, cuts: Sequence[str]) -> tuple[int, ...]:
    """The positions at which a captured graph may be cut: where blocks begin and end, or where `cuts` name a module.

    A model without blocks may be cut wherever least is sent, at no more than PLACES. Raises InputError for a module
    that runs no op, or before which nothing runs.
    """
    ops = needed_ops(graph)
    if cuts:
        return tuple(_begin(graph, name) for name in cuts)
    alive = replace(graph, ops=ops, outputs=graph.outputs[:1])
    sent = crossing(graph)
    blocks = blocks_of(alive)
    found = sorted({at for block in blocks for at in (block.start, block.end) if 0 < at < len(ops) and sent[at - 1]})
    if found:
        return tuple(found)
    least = min((len(one) for one in sent if one), default=0)
    narrow = [i + 1 for i, one in enumerate(sent) if len(one) == least and one]
    return tuple(narrow[::max(1, -(-len(narrow) // PLACES))])


def _begin(graph: Graph, name: str) -> int:
    """The position of the first op of a module."""
    ops = needed_ops(graph)
    found = next((i for i, op in enumerate(ops) if op.module == name or op.module.startswith(f"{name}.")
                  or op.module.endswith(f".{name}") or f".{name}." in op.module), None)
    if not found:
        modules = ", ".join(list(dict.fromkeys(op.module for op in ops if op.module))[:6])
        raise InputError(f"there is no cut at {name!r}: it names a module before which others run, like {modules}")
    return found


def least_cut(whole: Array, repeated: Array, more: Array) -> tuple[float, tuple[int, ...]]:
    """(the bound of the module docstring, the inner places of a cut that attains it); infinite where there is none.

    Places are numbered from 0, the start, to the end. By stage, from place and to place, `whole` is T. By from and to
    place, `repeated` is M, and `more` are the seconds that a stage adds to those of later ones.
    """
    allowed = _allowed(*whole.shape[:2])
    values = np.unique(whole[allowed & np.isfinite(whole)])
    low, high = 0, len(values) - 1
    best: tuple[float, tuple[int, ...]] = (inf, ())
    while low <= high:
        middle = (low + high) // 2
        rest, cut = _shortest(allowed & (whole <= values[middle]), repeated, more)
        best = min(best, (max(rest, float(values[middle])), cut)) if cut or rest < inf else best
        if rest <= values[middle]:
            high = middle - 1
        else:
            low = middle + 1
    return best


def _allowed(stages: int, ends: int) -> Bools:
    """By stage, from and to place: whether it is there in a cut in which every stage has a part."""
    s, a, b = np.ogrid[:stages, :ends, :ends]
    found: Bools = (a < b) & (a >= s) & (b <= ends - stages + s) & ((a == 0) == (s == 0)) & (
        (b == ends - 1) == (s == stages - 1))
    return found


def _shortest(allowed: Bools, repeated: Array, more: Array) -> tuple[float, tuple[int, ...]]:
    """The least, over allowed cuts, of max over s of (sum of `more` before s + M_s): from the last stage on."""
    stages, ends = allowed.shape[:2]
    rest, steps = np.full(ends, -inf), list[Any]()
    for s in reversed(range(stages)):
        found = np.where(allowed[s], np.maximum(repeated, np.where(allowed[s], more, 0.0) + rest[None, :]), inf)
        steps.append(found.argmin(axis=1))
        rest = found.min(axis=1)
    at, cut = 0, list[int]()
    for step in reversed(steps[1:]):
        at = int(step[at])
        cut.append(at)
    return float(rest[0]), tuple(cut)


@dataclass(frozen=True, slots=True)
class _Solved:
    """A stage that was searched: what was found, and the microbatches in flight then; `problem` where there is none."""

    graph: StageGraph
    found: Found | None
    in_flight: int
    problem: Infeasible | InputError | None = None

    def holds(self, in_flight: int) -> bool:
        """Whether it is the answer with so many microbatches in flight too."""
        if in_flight == self.in_flight:
            return True
        if self.found is None:
            return self.is_proved and in_flight >= self.in_flight
        return not self.found.solution.price and in_flight <= self.in_flight and (in_flight > 1 or self.in_flight == 1)

    @property
    def is_proved(self) -> bool:
        """Whether it is proved that the stage has no plan."""
        return isinstance(self.problem, Infeasible) and self.problem.is_proved

    def bound(self, in_flight: int) -> float:
        """Seconds that no plan of the stage is below with so many microbatches in flight."""
        if in_flight < self.in_flight and not self.holds(in_flight):
            return 0.0
        if self.found is None:
            return inf if self.is_proved else 0.0
        return self.found.bound

    def named(self, graph: StageGraph, moment: str) -> str:
        """The moment of a row, with the names of a stage that is like this one."""
        kind, _, name = moment.partition(" ")
        names = {a.name: b.name for a, b in zip(add_hubs(self.graph.graph).ops, add_hubs(graph.graph).ops, strict=True)}
        return f"{kind} {names[name]}" if name else moment


@dataclass(eq=False)
class _Part:
    """The stages of D on one part of the cluster with m microbatches: what was solved of them so far.

        task            the task of the whole model
        stages          number of stages
        microbatches    of a step
        places          positions of the graph at which it may be cut
    """

    task: PlanTask
    stages: int
    microbatches: int
    places: tuple[int, ...]
    _solved: dict[str, list[_Solved]] = field(default_factory=dict)
    _repeated: dict[str, float] = field(default_factory=dict)
    _alone: dict[tuple[int, int], tuple[StageGraph, str]] = field(default_factory=dict)

    @cached_property
    def graph(self) -> Graph:
        """The captured graph of one microbatch."""
        return self.task.variant(self.microbatches).original

    @cached_property
    def cluster(self) -> Cluster:
        """The part of the cluster of one stage."""
        return stage_cluster(self.task.cluster, self.stages)

    @cached_property
    def _works(self) -> tuple[float, ...]:
        """Sums, up to every place, of the least seconds of a microbatch's work on a stage's devices."""
        ends = [*self.places, len(needed_ops(self.graph))]
        alive = replace(self.graph, ops=needed_ops(self.graph), outputs=self.graph.outputs[:1])
        flows = alive.differentiable()
        return (0.0, *(floor_seconds(replace(alive, ops=alive.ops[:end]), self.cluster, flows) for end in ends))

    def floor(self, a: int, b: int) -> float:
        """Seconds of a microbatch that no layouts of a stage are below."""
        return self._works[b] - self._works[a]

    def alone(self, a: int, b: int) -> tuple[StageGraph, str]:
        """The stage from place a to place b, everything before it one stage and everything behind another."""
        if (a, b) not in self._alone:
            ends = [0, *self.places, -1]
            cuts = [ends[k] for k in (a, b) if 0 < k <= len(self.places)]
            made = cut_graph(self.graph, cuts)[bool(a)]
            self._alone[a, b] = made, structure(made.graph)
        return self._alone[a, b]

    def whole(self, a: int, b: int, in_flight: int) -> float:
        """T of a stage, as far as it is known."""
        known = self.microbatches * self.floor(a, b)
        solved = self._solved.get(self._alone[a, b][1], ()) if (a, b) in self._alone else ()
        return max([known, *(one.bound(in_flight) for one in solved)])

    def repeated(self, a: int, b: int) -> float:
        """M of a stage, as far as it is known."""
        known = self.microbatches * self.floor(a, b)
        return max(known, self._repeated.get(self._alone[a, b][1], 0.0)) if (a, b) in self._alone else known

    def solve(self, graph: StageGraph, key: str, in_flight: int) -> _Solved:
        """The best layouts of a stage that is like this graph."""
        known = self._solved.setdefault(key, [])
        for one in known:
            if one.holds(in_flight):
                return one
        try:
            made = search_stage(self.task, graph, self.cluster, self.microbatches, in_flight)
            found = _Solved(graph, made, in_flight)
        except (Infeasible, InputError) as error:
            found = _Solved(graph, None, in_flight, error)
        known.append(found)
        return found

    def bound(self, a: int, b: int, in_flight: int) -> None:
        """Makes T and M of a stage as sharp as searches over its layouts make them."""
        graph, key = self.alone(a, b)
        if self.solve(graph, key, in_flight).found is not None and key not in self._repeated:
            free = replace(self.task, budget=inf, hidden=1.0, once=False)
            self._repeated[key] = search_stage(free, graph, self.cluster, self.microbatches, 1).bound

    def planned(self, graph: StageGraph, in_flight: int) -> Plan:
        """The plan of a stage, found for it or for one that is like it. Raises why there is none."""
        solved = self.solve(graph, structure(graph.graph), in_flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        task = stage_task(self.task, graph, self.cluster, self.microbatches)
        candidate = replace(solved.found.candidate, in_flight=in_flight)
        row = {solved.named(graph, moment): weight for moment, weight in solved.found.best.row.items()}
        one = chosen(task, candidate, solved.found.solution, row)
        made = assemble(one.pricing, one.solution, one.variables)
        return finish_stage(task, graph, replace(solved.found, best=one), made)


@dataclass(frozen=True, slots=True)
class _Tried:
    """A cut that was solved: the plans of its stages, and the seconds of the pipeline."""

    cut: tuple[int, ...]
    plans: tuple[Plan, ...]
    seconds: float


def _try(part: _Part, schedule_name: str, cut: tuple[int, ...]) -> _Tried:
    """Solves the stages of a cut and simulates the pipeline. Raises why a stage has no plan."""
    staged = Staged(tuple(part.places[k - 1] for k in cut), schedule_name, part.microbatches)
    schedule = staged.schedule()
    graphs = cut_graph(part.graph, staged.cuts)
    plans = tuple(part.planned(graph, flight) for graph, flight in zip(graphs, in_flight_of(schedule), strict=True))
    seconds = [stage_seconds(plan, add_hubs(graph.graph), part.cluster)
               for plan, graph in zip(plans, graphs, strict=True)]
    between = boundary_seconds(part.task.cluster, plans, staged.cuts, part.graph)
    return _Tried(cut, plans, simulated(schedule, seconds, between).makespan)


def _candidate(part: _Part, name: str, best: float, tell: Callable[[str], None]) -> tuple[Alternative, _Tried | None]:
    """The best pipeline of one candidate that is below `best` seconds, and what became of it."""
    task, m = part.task, part.microbatches
    flights = in_flight_of(Staged(tuple(range(1, part.stages)), name, m).schedule())
    p = np.array([0.0, *_least_transfers(part), 0.0])
    tried: dict[tuple[int, ...], _Tried | None] = {}
    found: _Tried | None = None
    bound, detail = 0.0, "every cut that could be better was solved"
    for _ in range(ROUNDS):
        bound, cut = least_cut(*_tables(part, flights, p))
        if bound == inf:
            detail = "no stage plan fits the budget with its microbatches in flight"
            break
        if bound >= min(best, found.seconds if found else inf) * (1 - task.options.tolerance):
            detail = "its bound is not below the best" if found is None or found.seconds > best else detail
            break
        if cut in tried:
            detail = "its bound does not tell cuts apart"
            break
        tell(f"solving {part.stages} stages, {name}, {m} microbatches: bound {bound:.4g} s")
        tried[cut] = _solved_cut(part, name, cut, flights)
        one = tried[cut]
        if one is not None and (found is None or one.seconds < found.seconds):
            found = one
    else:
        detail = f"{ROUNDS} cuts were solved"
    peak = max(plan.predicted.peak_bytes for plan in found.plans) if found else None
    seconds = found.seconds if found else None
    return Alternative(part.stages, name, m, seconds, peak, min(bound, seconds or inf), detail), found


def _tables(part: _Part, flights: Sequence[int], transfers: Array) -> tuple[Array, Array, Array]:
    """T by stage and places; M and what a stage adds to later ones by places (`least_cut`)."""
    count = len(part.places) + 2
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    known = {k: np.full((count, count), inf) for k in set(flights)}
    repeated = np.full((count, count), inf)
    for a, b in pairs:
        repeated[a, b] = part.repeated(a, b)
        for k, table in known.items():
            table[a, b] = part.whole(a, b, k)
    return np.stack([known[k] for k in flights]), repeated, repeated / part.microbatches + 2 * transfers[None, :]


def _solved_cut(part: _Part, name: str, cut: tuple[int, ...], flights: Sequence[int]) -> _Tried | None:
    """Sharpens the bounds of the stages of a cut; then its pipeline, None where a stage has no plan."""
    ends = [0, *cut, len(part.places) + 1]
    for s, (a, b) in enumerate(pairwise(ends)):
        part.bound(a, b, flights[s])
    try:
        return _try(part, name, cut)
    except (Infeasible, InputError):
        return None


def _least_transfers(part: _Part) -> list[float]:
    """By place, the least seconds of sending what crosses there, every rank a share."""
    sent, tensors = crossing(part.graph), part.graph.tensors
    nbytes = [sum(tensors[t].nbytes for t in sent[at - 1]) / part.cluster.size for at in part.places]
    boundaries = range(part.stages - 1)
    return [min(transfer_seconds(part.task.cluster, part.stages, b, n) for b in boundaries) for n in nbytes]


def search_pipelines(task: PlanTask, best: float, progress: Progress | None = None) -> PipelineFound:
    """The fastest pipeline of all that the options allow and that takes less than `best` seconds.

    Raises InputError where the model or the cluster cannot be cut into so many stages.
    """
    options = task.options
    asked = [(d, m, name) for d in options.stages if d > 1 for m in options.microbatches for name in options.schedule]
    parts: dict[tuple[int, int], _Part] = {}
    winner: tuple[_Part, str, _Tried] | None = None
    rows: list[Alternative] = []
    for k, (d, m, name) in enumerate(asked):
        if (d, m) not in parts:
            parts[d, m] = _part(task, d, m)
        part = parts[d, m]

        def tell(what: str, k: int = k, best: float = best) -> None:
            if progress:
                progress(f"{what}, best {best:.4g} s", k, len(asked))

        row, found = _candidate(part, name, best, tell)
        rows.append(row)
        if found is not None and found.seconds < best:
            best, winner = found.seconds, (part, name, found)
    plan = None
    if winner is not None:
        part, name, tried = winner
        staged = Staged(tuple(part.places[k - 1] for k in tried.cut), name, part.microbatches)
        plan = pipeline_plan(task, staged, _bucketed(part, tried, staged))
    return PipelineFound(plan, min((row.bound for row in rows), default=inf), tuple(rows))


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
    source = {"alternatives": [row.to_json() for row in found.alternatives], "cluster": task.cluster.to_yaml()}
    if found.plan is not None:
        source["graph"] = graph_to_text(task.variant(found.plan.microbatches).original)
    if found.plan is not None:
        proof = "paths of its schedule over all cuts, and layouts of every stage" + (
            "; without stages: " + best.proof if best else "")
        return replace(found.plan, bound=min(bound, found.plan.predicted.seconds), proof=proof, source=source,
                       candidates=len(found.alternatives) + (best.candidates if best else 0),
                       timings={"capture": task.capture_seconds, "total": perf_counter() - task.began})
    if best is None:
        raise problem or Infeasible(min((row.nbytes for row in found.alternatives if row.nbytes), default=inf),
                                    task.budget, "no stage of any pipeline fits: take more stages, recomputation or "
                                    "fewer microbatches in flight")
    return replace(best, bound=min(bound, best.predicted.seconds),
                   source=best.source | {"alternatives": source["alternatives"]},
                   proof=f"{best.proof}; {len(found.alternatives)} pipelines by the paths of their schedules")


def _bucketed(part: _Part, tried: _Tried, staged: Staged) -> list[Plan]:
    from autoddl.planner.bucket_size import fitting_buckets

    graphs = cut_graph(part.graph, staged.cuts)
    return [fitting_buckets(plan, add_hubs(graph.graph), part.task.options.optimizer, part.cluster)
            for plan, graph in zip(tried.plans, graphs, strict=True)]


def _part(task: PlanTask, stages: int, microbatches: int) -> _Part:
    """The stages of one candidate. Raises InputError where the cluster or the model cannot be cut so."""
    stage_cluster(task.cluster, stages)
    places = places_of(task.variant(microbatches).original, task.options.cut)
    if len(places) < stages - 1:
        raise InputError(f"{stages} stages need {stages - 1} cuts, and this model can be cut at {len(places)} places, "
                         "the ends of its blocks: ask for fewer stages, or name the modules with cut")
    return _Part(task, stages, microbatches, places)
