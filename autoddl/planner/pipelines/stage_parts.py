"""Knows the stages of the pipelines of one candidate: least seconds of each, sharper where a stage was solved.

Cuts lie at *places*, the ends of blocks. Units are what lies between two places; a stage is some units in a row, from
place a to place b. Of every stage are known

    floor       its forward, its backward and its W of a microbatch: the work of its ops split evenly over its devices
    whole       T, no less than m (f + b) + gather + reduce + update of any plan that fits with so many in flight
    behind      T', no less than m (f + b) + reduce + update of such a plan
    repeated    M, no less than m (f + b) of any plan
    single      of the first stage, no less than (f + b) + gather + reduce + update of any plan, and that less gather
    passes      no less than f, and no less than b, of any plan
    counted     no less than these seconds, and those of its messages, counted otherwise, of such a plan

T, T' and M follow from the floor, until a stage is solved (`bound`, `sharpen`): then they are what the search of its
layouts proved. A stage that is made of two has all that they have, and conversions between them:

    T(a, c) >= T(a, b) + T(b, c) - apart

`apart` are the ops before all parameters, which each stage computes for itself. So what is proved of some stages is
known of all longer ones (`search.pipeline_cuts.joined`). It is not where kernels are fused over cuts, or where units
share a parameter. Nor is it where policies of recomputation count the blocks of a stage (every-2, first-4), and none
lets all of them be. What is proved without a budget is true for all numbers of microbatches in flight. What is proved
under one that binds is true for that number alone. With more in flight the peak may be lower, since weights are let go
earlier, and a sum of gradients may never be needed.

Where a schedule splits backward, b is what its B and its W take together. Then a stage counts B and W by the fewer of
both. Stages that are alike in all but names are solved once (`structure`).
"""

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.cost_table import Array
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline import Flight
from autoddl.core.plan import Plan
from autoddl.core.problem import Solution
from autoddl.core.recompute import (
    NO_RECOMPUTE,
    SEARCH,
    blocks_of,
    is_per_block,
    named_blocks,
    policy_of_part,
    renamed_policy,
)
from autoddl.core.split_backward import weights_of
from autoddl.core.stages import StageGraph, crossing, cut_graph
from autoddl.cost_models import Cluster
from autoddl.planner.assemble import assemble, assemble_choice
from autoddl.planner.candidates import Candidate, chosen
from autoddl.planner.mesh_search import Found
from autoddl.planner.pins import also_pinned, pins_of_part
from autoddl.planner.pipelines.shared_budget import EVEN
from autoddl.planner.pipelines.stage_plans import (
    Staged,
    finish_stage,
    search_stage,
    stage_cluster,
    stage_task,
    transfer_seconds,
)
from autoddl.planner.pipelines.stage_ports import PieceMessages, Port, ports_of
from autoddl.planner.pipelines.stage_prices import Asking, StagePrices, named_moment
from autoddl.planner.pipelines.stored_once import most_twice
from autoddl.planner.priced_bytes import PricedFound
from autoddl.planner.task import PlanTask
from autoddl.pricing.price import Counts, Ports, Pricing, cone_cost, floor_sums
from autoddl.search.pipeline_cuts import joined

__all__ = ["PASSES", "SINGLES", "SolvedStage", "StageParts", "places_of", "structure"]

PLACES = 16
"""Places at which a model without blocks may be cut, at most."""

Weights = tuple[float, ...]
"""How often each of the `StageSeconds` of a stage counts."""

PASSES: tuple[Weights, ...] = ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 0.0, 0.0, 0.0))
"""The counts of a forward, and of a backward."""

SINGLES: tuple[Weights, ...] = ((1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.0, 1.0, 1.0))
"""The counts of one microbatch and of what comes once, of a first stage, with its gather and without."""

ANY, ONE, SEVERAL = Flight(0), Flight(1), Flight(2)
"""In place of a number of microbatches in flight: what was found without a budget, true for any number."""


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
    that runs no op, or before which nothing runs. Raises it for modules that are not in the order in which they run.
    """
    ops = needed_ops(graph)
    if cuts:
        named = tuple(_begin(graph, name) for name in cuts)
        for (a, before), (b, after) in pairwise(zip(named, cuts, strict=True)):
            if a >= b:
                raise InputError(f"cut names {before!r} before {after!r}, which does not run after it: name the "
                                 "modules with which stages begin in the order in which they run, each once")
        return named
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


@dataclass(frozen=True, slots=True)
class SolvedStage:
    """A stage that was searched with so many microbatches in flight: what was found, or the problem if there is none.

    `binds` says whether the budget changed the answer.
    """

    graph: StageGraph
    found: Found | None
    binds: bool = True
    problem: Infeasible | InputError | None = None

    @property
    def bound(self) -> float:
        """Seconds that no plan of the stage is below; infinite where it is proved that it has none."""
        if self.found is None:
            return inf if isinstance(self.problem, Infeasible) and self.problem.is_proved else 0.0
        return self.found.bound


def _kept(flight: Flight) -> bool:
    """Whether weights that are gathered stay gathered: so the layouts to choose from are the same."""
    return flight.in_flight + flight.waiting > 1


@dataclass(eq=False)
class StageParts:
    """The stages of pipelines of so many stages and microbatches: what is known of them so far.

        task            the task of the whole model
        stages          number of stages
        parts           of the cluster, each with one stage or several
        microbatches    of a step
        places          positions of the graph at which it may be cut
        within          meshes and regions of the plans of a stage; none: all that the options allow
        splits          whether the schedule splits backward into B and W
        placement       by stage, the part of the cluster that has it; none: one after the other, again and again
        _solved         stages that were solved, by structure and microbatches in flight
        _free           plans of stages without a budget, by structure and whether gathered weights stay
        _drawn          their plans, by structure, flight, and the names of the first and the last op
        _least          least seconds of stages, by structure, counts, and microbatches in flight (ANY without a budget)
        _ports          the messages between two stages
        _counted        least seconds of stages under other counts
        _prices         what is known of stages whose bytes have a price
        _alone          graphs of stages, with their structure
        _under          stages like these under shares of the budget, by these
        _pinned         stages like these on one mesh with more pins, by these
    """

    task: PlanTask
    stages: int
    parts: int
    microbatches: int
    places: tuple[int, ...]
    within: tuple[Candidate, ...] = ()
    splits: bool = False
    placement: tuple[int, ...] = ()
    _solved: dict[tuple[str, Flight], SolvedStage] = field(default_factory=dict)
    _free: dict[tuple[str, bool], tuple[StageGraph, Found]] = field(default_factory=dict)
    _drawn: dict[tuple[str, Flight, str, str], Plan] = field(default_factory=dict)
    _least: dict[tuple[str, Weights, Flight], float] = field(default_factory=dict)
    _ports: dict[tuple[int, int], tuple[Port, ...]] = field(default_factory=dict)
    _counted: dict[tuple[str, Any, tuple[float, ...], Flight], float] = field(default_factory=dict)
    _prices: StagePrices = field(default_factory=StagePrices)
    _alone: dict[tuple[Any, ...], tuple[StageGraph, str]] = field(default_factory=dict)
    _under: dict[int, "StageParts"] = field(default_factory=dict)
    _pinned: dict[tuple[str, ...], "StageParts"] = field(default_factory=dict)

    @property
    def where(self) -> tuple[int, ...]:
        """By stage, its part of the cluster."""
        return self.placement or tuple(stage % self.parts for stage in range(self.stages))

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.places) + 1

    @cached_property
    def graph(self) -> Graph:
        """The captured graph of one microbatch, with its needed ops alone."""
        return self.task.variant(self.microbatches).original

    @cached_property
    def cluster(self) -> Cluster:
        """The part of the cluster of one stage."""
        return stage_cluster(self.task.cluster, self.parts)

    @cached_property
    def _works(self) -> tuple[tuple[float, float, float], ...]:
        """Sums, up to every place, of the least seconds of forward, backward and W on a stage's devices."""
        alive = replace(self.graph, ops=needed_ops(self.graph), outputs=self.graph.outputs[:1])
        flows, ends = alive.differentiable(), [0, *self.places, len(alive.ops)]
        weights = weights_of(alive) if self.splits else frozenset[int]()
        return tuple(floor_sums(alive, self.cluster, flows, weights, ends))

    def floor(self, a: int, b: int) -> tuple[float, float, float]:
        """Seconds of forward, backward and W of a microbatch that no layouts of a stage are below.

        Where backward is not split, W has none.
        """
        forward, backward, weight = (max(0.0, y - x) for x, y in zip(self._works[a], self._works[b], strict=True))
        return forward, backward, weight

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """For every unit a number, equal for units of which the same is asked whose ops are alike in all but names."""
        ops, ends = needed_ops(self.graph), [0, *self.places, len(needed_ops(self.graph))]
        sent, known = [(), *(tuple(sorted(one)) for one in crossing(self.graph)), ()], dict[Any, int]()
        every = [(_signature(self.graph, ops, first, end, sent[first], sent[end if end < len(ops) else -1]),
                  self._asked(self._cut(k, k + 1)) if self._asks else ())
                 for k, (first, end) in enumerate(pairwise(ends))]
        return tuple([known.setdefault(one, len(known)) for one in every])

    @property
    def _asks(self) -> bool:
        """Whether more may be asked of some units than of others."""
        return bool(self.task.options.pins) or any(map(named_blocks, self.task.options.recompute))

    def _asked(self, stage: StageGraph) -> tuple[str, ...]:
        """The pins of what a stage has, and the policies of its blocks, these by number."""
        graph = add_hubs(stage.graph)
        numbers = {block.name: str(k) for k, block in enumerate(blocks_of(graph))}
        policies = (policy_of_part(policy, graph) for policy in self.task.options.recompute)
        return (*pins_of_part(self.task.options.pins, graph, self.task.graph),
                *(renamed_policy(policy, numbers) for policy in policies))

    def _key(self, stage: StageGraph) -> str:
        """A name of the structure of a stage and of what is asked of it: stages of one name are searched once."""
        return "\n".join((structure(stage.graph), *(self._asked(stage) if self._asks else ())))

    def _like(self, a: int, b: int) -> tuple[Any, ...]:
        """A key that stages have in common which are alike."""
        return (a == 0, b == self.units, self._kinds[a:b])

    def alone(self, a: int, b: int) -> tuple[StageGraph, str]:
        """The stage from place a to place b, or one like it; everything before is one stage, and everything behind."""
        key = self._like(a, b)
        if key not in self._alone:
            made = self._cut(a, b)
            self._alone[key] = made, self._key(made)
        return self._alone[key]

    def staged(self, name: str, cut: Sequence[int]) -> Staged:
        """The pipeline with a schedule that is cut at these places."""
        return Staged(tuple(self.places[k - 1] for k in cut), name, self.microbatches, self.task.options.compress)

    def under(self, share: int) -> "StageParts":
        """Stages like these under some of the `EVEN` shares of the budget, with what is known without a budget."""
        if share not in self._under:
            task = replace(self.task, budget=self.task.budget * share / EVEN)
            least = {key: value for key, value in self._least.items() if key[2] == ANY}
            self._under[share] = replace(self, task=task, _solved={}, _counted={}, _prices=StagePrices(), _under={},
                                         _pinned={}, _least=least)
        return self._under[share]

    def scheduled(self, splits: bool, placement: tuple[int, ...]) -> "StageParts":
        """Stages like these under a schedule of another kind; what is found of plans of one is known of the other."""
        return replace(self, splits=splits, placement=placement, _counted={}, _prices=StagePrices(), _under={},
                       _pinned={})

    def pinned_to(self, mesh: Mesh, pins: tuple[str, ...]) -> "StageParts":
        """Stages like these on one mesh, with more pins; nothing is known of them yet."""
        key = (str(mesh), *pins)
        if key not in self._pinned:
            options = replace(self.task.options, mesh=str(mesh), pins=(*self.task.options.pins, *pins))
            within = tuple(replace(one, region=also_pinned(one.region, pins)) for one in self.within
                           if one.mesh == mesh)
            self._pinned[key] = replace(self, task=replace(self.task, options=options), within=within, _solved={},
                                        _free={}, _drawn={}, _least={}, _counted={}, _prices=StagePrices(), _alone={},
                                        _under={}, _pinned={})
        return self._pinned[key]

    def _known_key(self, a: int, b: int) -> str:
        """The structure of the stage, empty where neither it nor one like it was made."""
        like = self._like(a, b)
        return self._alone[like][1] if like in self._alone else ""

    def _cut(self, a: int, b: int) -> StageGraph:
        """The stage from place a to place b."""
        return cut_graph(self.graph, [self.places[k - 1] for k in (a, b) if 0 < k < self.units])[bool(a)]

    def ports(self, a: int, b: int) -> tuple[Port, ...]:
        """The tensors that the stage gives to and takes from the units next to it."""
        if (a, b) not in self._ports:
            self._ports[a, b] = ports_of(self.graph, self.places, a, b, self.task.options.compress)
        return self._ports[a, b]

    def _sides(self, a: int, b: int) -> tuple[tuple[Any, ...], ...]:
        """The ports without their names: equal for stages that are alike and have equal ports."""
        return tuple((port.number, port.sends, port.shape, port.itemsize) for port in self.ports(a, b))

    def _every(self, known: Callable[[str], float]) -> Array:
        """[a, b]: what is known of the stage from place a to place b by its structure, else 0."""
        found = np.zeros((self.units + 1, self.units + 1))
        for a, b in combinations(range(self.units + 1), 2):
            key = self._known_key(a, b)
            found[a, b] = known(key) if key else 0.0
        return found

    def floors(self) -> Array:
        """[a, b]: seconds of forward and backward of a microbatch that no layouts of a stage are below."""
        sums = np.array([sum(one) for one in self._works])
        found: Array = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found

    @cached_property
    def apart(self) -> float:
        """Seconds of a microbatch by which a stage may take less than two that it is made of; infinite if not known."""
        policies, ends = self.task.options.recompute, {0, self.units - 1}
        joins = {NO_RECOMPUTE, SEARCH}.intersection(policies) or all(map(is_per_block, policies))
        shared = any(len(read) > 1 and not read <= ends for read in self._readers().values())
        if not joins or shared or self.cluster.device.compiled:
            return inf
        variant = self.task.variant(self.microbatches)
        mesh = Mesh((Axis("rank", self.cluster.size),))
        return cone_cost(Pricing(variant.graph, mesh, self.cluster, microbatches=self.microbatches))[0]

    def _readers(self) -> dict[str, set[int]]:
        """By parameter, the units that read it."""
        found = dict[str, set[int]]()
        for i, op in enumerate(needed_ops(self.graph)):
            for tensor in (self.graph.tensors[t] for t in op.inputs):
                if tensor.kind is Kind.PARAMETER:
                    found.setdefault(tensor.fqn, set()).add(bisect_right(self.places, i))
        return found

    @cached_property
    def twice(self) -> tuple[tuple[float, float], ...]:
        """By stage, most bytes and seconds that it and a stage before it on the same ranks may both count.

        They are those of storing and updating a parameter that both read (`stored_once`).
        """
        readers, graph = self._readers(), self.task.variant(self.microbatches).graph
        found = []
        for s, at in enumerate(self.where):
            before = {u for p in range(s) if self.where[p] == at for u in self._within(p)}
            names = {fqn for fqn, units in readers.items() if before & units and set(self._within(s)) & units
                     and len(units) > 1}
            found.append(most_twice([one for one in graph.tensors if one.kind is Kind.PARAMETER and one.fqn in names],
                                    self.cluster, graph, self.task.options.optimizer) if names else (0.0, 0.0))
        return tuple(found)

    def _within(self, s: int) -> range:
        """The units that a stage may have, if every other stage has one at least."""
        return range(s, self.units - (self.stages - 1 - s))

    def wholes(self, flights: Iterable[Flight]) -> dict[Flight, Array]:
        """By flight T of every stage, [a, b], as far as it is known."""
        m, floors = self.microbatches, self.floors()
        free = {kept: joined(np.maximum(self._every(partial(self._free_bound, kept)), m * floors), m * self.apart)
                for kept in (False, True)}
        return {flight: np.maximum(free[_kept(flight)], self._every(partial(self._solved_bound, flight)))
                for flight in flights}

    def _free_bound(self, kept: bool, key: str) -> float:
        """T of a stage of some structure without a budget, whether gathered weights stay or not; else 0."""
        return max((self._free[key, at][1].bound for at in {False, kept} if (key, at) in self._free), default=0.0)

    def _solved_bound(self, flight: Flight, key: str) -> float:
        return self._solved[key, flight].bound if (key, flight) in self._solved else 0.0

    def least(self, weights: Weights) -> Array:
        """[a, b]: least seconds of every stage counted so, whatever its budget, as far as they are known."""
        known = self._every(lambda key: self._least.get((key, weights, ANY), 0.0))
        floors = np.array(self._works) @ np.array(weights[:3])
        most = np.maximum(known, floors[None, :] - floors[:, None])
        if weights == self.behind:
            most = np.maximum(most, self.least(self.repeated))
        if weights in SINGLES:
            most = np.maximum(most, sum(self.least(one) for one in PASSES))
        return joined(most, weights[0] * self.apart if self.apart < inf else inf)

    def behinds(self, flights: Iterable[Flight]) -> dict[Flight, Array]:
        """By flight T' of every stage, [a, b], as far as it is known."""
        free = self.least(self.behind)
        return {flight: np.maximum(free, self._every(partial(self._behind_bound, flight))) for flight in flights}

    def _behind_bound(self, flight: Flight, key: str) -> float:
        return self._least.get((key, self.behind, flight), 0.0)

    @property
    def repeated(self) -> Weights:
        """The counts of M."""
        return (float(self.microbatches),) * 3 + (0.0, 0.0, 0.0)

    @property
    def behind(self) -> Weights:
        """The counts of T'."""
        return (float(self.microbatches),) * 3 + (0.0, 1.0, 1.0)

    @property
    def weights(self) -> tuple[tuple[float, ...], ...]:
        """The counts of seconds and messages of which something is known."""
        return tuple(dict.fromkeys(weights for _, _, weights, _ in self._counted))

    def counted(self, flight: Flight, weights: tuple[float, ...]) -> Array:
        """[a, b]: the least seconds counted so of a stage with its messages, as far as it is known; else 0."""
        known = {(key, sides): max(self._counted.get((key, sides, weights, at), 0.0) for at in (ANY, flight))
                 for key, sides, counts, _ in self._counted if counts == weights}
        return self._every_side(known)

    def priced(self, flight: Flight, weights: tuple[float, ...], price: float) -> Array:
        """[a, b]: the least seconds counted so + price * bytes of a stage, as far as it is known; else 0."""
        return self._every_side(self._prices.known(flight, weights, price))

    def _every_side(self, known: Mapping[tuple[str, Any], float]) -> Array:
        """[a, b]: what is known of the stage from place a to place b by its structure and its ports, else 0."""
        keys, found = {key for key, _ in known}, np.zeros((self.units + 1, self.units + 1))
        for a, b in combinations(range(self.units + 1), 2):
            if (key := self._known_key(a, b)) in keys:
                found[a, b] = known.get((key, self._sides(a, b)), 0.0)
        return found

    def _counted_so(self, a: int, b: int, weights: tuple[float, ...]) -> PlanTask:
        """The task in which the seconds and messages of a stage count so."""
        ports = PieceMessages(self.ports(a, b), self.task.cluster, self.parts, self.where, (weights[6], weights[7]))
        return replace(self.task, counts=Counts(weights[0], min(weights[1:3]), *weights[3:6]), ports=ports)

    def count_priced(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], stage: StageGraph, price: float
                     ) -> Plan | None:
        """Searches a stage whose seconds count so, as in `count`, and of which a byte has a price in seconds.

        The plan of `stage` that it returns may be above the budget.
        """
        made = self.learn_priced(a, b, flight, weights, price)
        if made is None or made.candidate is None or made.solution is None:
            return None
        free = SolvedStage(*self._freely(*self.alone(a, b), flight))
        return self._plan_alone(free, stage, made.candidate, made.solution, flight)

    def learn_priced(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], price: float
                     ) -> PricedFound | None:
        """Searches a stage for its least seconds counted so + price * bytes, which are known then; None if none count.
        """
        if not any(weights[:6]):
            return None
        return self._prices.counted(partial(self._counted_so, a, b, weights), self._asking(self._cut(a, b), flight),
                                    (self.alone(a, b)[1], self._sides(a, b), weights, flight, price))

    def _asking(self, graph: StageGraph, flight: Flight) -> Asking:
        return Asking(graph, self.cluster, self.microbatches, flight, self.within)

    def planned_for(self, graph: StageGraph, flight: Flight, price: float) -> tuple[Plan | None, float]:
        """(the plan of a stage a byte of which has a price, seconds + price * bytes that none is below).

        The plan is None where none was drawn, and may be above the budget.
        """
        key = self._key(graph)
        source, made = self._prices.alone(self.task, self._asking(graph, flight), key, price)
        if made.candidate is None or made.solution is None:
            return None, made.bound
        found = replace(self._freely(graph, key, flight)[1], candidate=made.candidate, solution=made.solution)
        return self._plan(source, graph, found, flight), made.bound

    def count(self, a: int, b: int, flight: Flight, weights: tuple[float, ...], stage: StageGraph) -> Plan | None:
        """Searches a stage whose seconds and messages count so: its bound is known then.

        Returns the plan of `stage`, which is it with the names of a pipeline; None where none was found that fits.
        """
        graph, solved = self._cut(a, b), self._alone_solved(*self.alone(a, b), flight)
        if solved.found is None or not any(weights[:6]):
            return None
        at = flight if solved.binds else ANY
        task = replace(self._counted_so(a, b, weights), budget=self.task.budget if solved.binds else inf)
        try:
            made = search_stage(task, graph, self.cluster, self.microbatches, at if solved.binds else ONE, self.within)
            self._counted[self.alone(a, b)[1], self._sides(a, b), weights, at] = made.bound
            if _kept(at) != _kept(flight):
                made = search_stage(task, graph, self.cluster, self.microbatches, flight, (made.candidate,))
        except Infeasible:
            return None
        return self._planned_alone(solved, stage, made, flight)

    def _planned_alone(self, solved: SolvedStage, graph: StageGraph, made: Found, flight: Flight) -> Plan | None:
        """The plan of a stage of what was made under other counts; None where it does not fit the budget."""
        assert solved.found is not None
        plan = self._plan_alone(solved, graph, made.candidate, made.solution, flight)
        return plan if plan.predicted.peak_bytes <= self.task.budget else None

    def _plan_alone(self, solved: SolvedStage, graph: StageGraph, candidate: Candidate, solution: Solution,
                    flight: Flight) -> Plan:
        """The plan of a stage with a choice that was made under other counts, and its seconds alone."""
        assert solved.found is not None
        task = stage_task(self.task, graph, self.cluster, self.microbatches)
        one = chosen(task, candidate, solution, {})
        seconds = assemble_choice(one.pricing, one.solution.choice, one.variables).predicted.seconds
        alone = replace(solved.found.solution, choice=solution.choice, seconds=seconds)
        return self._plan(solved.graph, graph, replace(solved.found, candidate=candidate, solution=alone), flight)

    def solve(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts of a stage that is like this graph."""
        if (key, flight) not in self._solved:
            try:
                found = self._searched(graph, key, flight)
            except (Infeasible, InputError) as error:
                found = SolvedStage(graph, None, problem=error)
            self._solved[key, flight] = found
        return self._solved[key, flight]

    def _alone_solved(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts of a stage if nothing else were on its ranks; without a budget where more is."""
        return self.solve(graph, key, flight) if self.parts == self.stages else SolvedStage(
            *self._freely(graph, key, flight), binds=False)

    def _searched(self, graph: StageGraph, key: str, flight: Flight) -> SolvedStage:
        """The best layouts without a budget, if they fit; else under it. Raises why there are none."""
        source, found = self._freely(graph, key, flight)
        if self._plan(source, source, found, flight).predicted.peak_bytes <= self.task.budget:
            return SolvedStage(source, found, binds=False)
        made = search_stage(self.task, graph, self.cluster, self.microbatches, flight, self.within)
        return SolvedStage(graph, made)

    def _freely(self, graph: StageGraph, key: str, flight: Flight) -> tuple[StageGraph, Found]:
        """The best layouts without a budget of a stage or one like it, and that stage."""
        at = key, _kept(flight)
        if at not in self._free:
            free, some = replace(self.task, budget=inf), SEVERAL if at[1] else ONE
            self._free[at] = graph, search_stage(free, graph, self.cluster, self.microbatches, some, self.within)
        return self._free[at]

    @property
    def needed(self) -> float:
        """The least bytes of a rank that a stage needs of those that are proved not to fit; infinite without any."""
        return min((one.problem.needed for one in self._solved.values() if isinstance(one.problem, Infeasible)),
                   default=inf)

    def bound(self, a: int, b: int, flight: Flight) -> bool:
        """Makes T and M of a stage as sharp as searches over its layouts do; returns whether they were not.

        Where a rank has several stages the budget is theirs together: first T is that without one.
        """
        graph, key = self.alone(a, b)
        if self.parts < self.stages:
            new = (key, _kept(flight)) not in self._free
            self._freely(graph, key, flight)
        else:
            new = self.fit(a, b, flight)
        return self._search_least(graph, key, self.repeated) or new

    def sharpen(self, a: int, b: int, flight: Flight) -> bool:
        """Makes all else of a stage as sharp as T and M; returns whether it was not."""
        graph, key = self.alone(a, b)
        news = [self._search_least(graph, key, weights) for weights in (*PASSES, *(SINGLES if a == 0 else ()))]
        if self.parts == self.stages:
            news.append(self.fit(a, b, flight))
        solved = self._alone_solved(graph, key, flight)
        if a == 0 or solved.found is None:
            return any(news)
        return self._search_least(graph, key, self.behind, flight if solved.binds else ANY) or any(news)

    def fit(self, a: int, b: int, flight: Flight) -> bool:
        """Finds out whether a stage fits the whole budget, and what it takes then; returns whether that was not known.
        """
        graph, key = self.alone(a, b)
        new = (key, flight) not in self._solved
        self.solve(graph, key, flight)
        return new

    def begin(self) -> None:
        """Makes known what the commonest unit between the first and the last takes alone, so that stages join to it."""
        inner = self._kinds[1:-1]
        if inner and self.apart < inf:
            at = 1 + inner.index(Counter(inner).most_common(1)[0][0])
            self.bound(at, at + 1, ONE)
            self.sharpen(at, at + 1, ONE)

    def _search_least(self, graph: StageGraph, key: str, weights: Weights, at: Flight = ANY) -> bool:
        """Searches a stage for its least seconds counted so, without a budget or at a flight; False if it was."""
        if (key, weights, at) in self._least:
            return False
        counts = Counts(weights[0], min(weights[1:3]), *weights[3:])
        task = replace(self.task, counts=counts, budget=inf if at == ANY else self.task.budget)
        if not any(weights[3:]):
            task = replace(task, hidden=1.0)
        try:
            some = ONE if at == ANY else at
            self._least[key, weights, at] = search_stage(task, graph, self.cluster, self.microbatches, some).bound
        except Infeasible:
            self._least[key, weights, at] = 0.0
        return True

    def planned(self, graph: StageGraph, flight: Flight) -> Plan:
        """The plan of a stage, found for it or for one that is like it. Raises why there is none."""
        solved = self.solve(graph, self._key(graph), flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        return self._plan(solved.graph, graph, solved.found, flight)

    def freely_planned(self, graph: StageGraph, flight: Flight) -> Plan:
        """The plan of a stage without a budget."""
        key, ops = self._key(graph), graph.graph.ops
        at = key, flight, ops[0].name, ops[-1].name
        if at not in self._drawn:
            source, found = self._freely(graph, key, flight)
            self._drawn[at] = self._plan(source, graph, found, flight)
        return self._drawn[at]

    def price(self, graph: StageGraph, flight: Flight) -> float:
        """Seconds that a byte more of the budget saves a stage that was solved, about."""
        solved = self.solve(graph, self._key(graph), flight)
        return solved.found.solution.price if solved.binds and solved.found is not None else 0.0

    def searched_for(self, graph: StageGraph, flight: Flight, counts: Counts, ports: Ports) -> Plan | None:
        """The plan of a stage whose seconds count otherwise, on meshes known to be good; None if too full.

        Its bound stays that of the stage alone. Raises why there is none.
        """
        solved = self._alone_solved(graph, self._key(graph), flight)
        if solved.found is None:
            assert solved.problem is not None
            raise solved.problem
        every = [one.found for one in self._solved.values()] + [found for _, found in self._free.values()]
        within = tuple({str(one.candidate.mesh): one.candidate for one in every if one is not None}.values())
        tasks = [replace(self.task, counts=counts, ports=ports, budget=budget) for budget in (inf, self.task.budget)]
        for task in tasks:
            made = search_stage(task, graph, self.cluster, self.microbatches, flight, within)
            plan = self._planned_alone(solved, graph, made, flight)
            if plan is not None:
                break
        return plan

    def _plan(self, source: StageGraph, graph: StageGraph, found: Found, flight: Flight) -> Plan:
        """The plan of a stage that takes the layouts that were found for `source`, which is like it."""
        task = stage_task(self.task, graph, self.cluster, self.microbatches)
        theirs, own = ([block.name for block in blocks_of(add_hubs(one.graph))] for one in (source, graph))
        candidate = replace(found.candidate, in_flight=flight.in_flight, waiting=flight.waiting,
                            recompute=renamed_policy(found.candidate.recompute, dict(zip(theirs, own, strict=True))))
        row = {named_moment(source, graph, moment): weight for moment, weight in found.best.row.items()}
        one = chosen(task, candidate, found.solution, row)
        made = assemble(one.pricing, one.solution, one.variables)
        return finish_stage(task, graph, replace(found, best=one), made)

    @cached_property
    def transfers(self) -> tuple[float, ...]:
        """By boundary between stages, the least seconds of a transfer over it: of what crosses where least does."""
        sent, tensors = crossing(self.graph), self.graph.tensors
        parts = [part_in_flight(codecs_of(self.task.options.compress, "pipeline", one.dtype), one.itemsize)
                 for one in tensors]
        least = min((sum(tensors[t].nbytes * parts[t] for t in sent[at - 1]) for at in self.places), default=0)
        return tuple(transfer_seconds(self.task.cluster, self.parts, here, there, least / self.cluster.size)
                     for here, there in pairwise(self.where))


def _signature(graph: Graph, ops: Sequence[Any], first: int, end: int, before: Sequence[int], behind: Sequence[int]
               ) -> Any:
    """A name of the ops [first, end): each with its arguments, tensors, and where it reads from."""
    made = {t: (i - first, n) for i, op in enumerate(ops[first:end], start=first) for n, t in enumerate(op.outputs)}
    given = {t: k for k, t in enumerate(before)}
    leaves: dict[int, int] = {}

    def source(t: int) -> Any:
        tensor = graph.tensors[t]
        about = (tensor.shape, tensor.dtype, tensor.trained, tensor.master, tensor.reduced)
        if t in made:
            return (*about, made[t])
        if t in given:
            return (*about, "given", given[t])
        return (*about, tensor.kind is Kind.PARAMETER, leaves.setdefault(t, len(leaves)))

    rows = tuple((op.target, op.slots, tuple(pair for pair in op.args if pair[0] != "key"),
                  tuple(map(source, op.inputs)), tuple(map(source, op.outputs))) for op in ops[first:end])
    return rows, tuple(made.get(t, ("given", given.get(t))) for t in behind)
