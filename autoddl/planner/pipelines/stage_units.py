"""Knows the units of the stages of one candidate: what they take at least, and which are alike.

Cuts lie at *places*, the ends of blocks (`cut_places`). Units are what lies between two places; a stage is some units
in a row, from place a to place b. Of every stage are known, before anything is searched,

    floor        its forward, its backward and its W of a microbatch: the work of its ops split evenly over its devices
    apart        seconds by which it may take less than two that it is made of: the ops before all parameters
    twice        bytes and seconds of parameters that a stage before it on the same ranks may count too
    structure    a name that stages have in common which are alike in all but names
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoddl.core.codecs import codecs_of, part_in_flight
from autoddl.core.cost_table import Array
from autoddl.core.graph import Graph, Kind, Op
from autoddl.core.hubs import add_hubs, needed_ops
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline import first_ranks
from autoddl.core.pipeline_proofs import Window
from autoddl.core.recompute import (
    NO_RECOMPUTE,
    SEARCH,
    blocks_of,
    is_per_block,
    member_of,
    named_blocks,
    policy_of_part,
    renamed_policy,
)
from autoddl.core.split_backward import weights_of
from autoddl.core.stages import StageGraph, check_updates, crossing, cut_graph, with_partial_ends
from autoddl.cost_models import Cluster
from autoddl.operators.footprints.table import whole_footprints
from autoddl.operators.fusion import FusedEnds, fused_ends, with_fused_ends
from autoddl.operators.work import VIEWS, base
from autoddl.planner.candidates import Candidate
from autoddl.planner.pins import pins_of_part
from autoddl.planner.pipelines.alike_units import computed_again, signature, structure
from autoddl.planner.pipelines.part_ranks import Ranks, part_clusters, ranks_of_parts
from autoddl.planner.pipelines.stage_ports import CopyMessages, Port, ports_of
from autoddl.planner.pipelines.staged import Staged
from autoddl.planner.pipelines.staged_steps import transfer_seconds
from autoddl.planner.pipelines.stored_once import Twice, most_twice
from autoddl.planner.task import PlanTask
from autoddl.pricing.floors import cone_cost, floor_sums
from autoddl.pricing.price import Pricing
from autoddl.search.limits import Late, never

__all__ = ["StageUnits", "Stretches"]

Indices = NDArray[np.intp]

Stretches = tuple[Indices, Indices, Indices]
"""(numbers of blocks, stages by their blocks, where those of each number begin among them)."""

ALIKE = 1.3
"""The factor between the work of units that count as alike."""

KINDS = 6
"""Kinds of units that are searched alone, at most."""

BLOCKS = 128
"""Blocks in which a chain of units that are not alike is measured, at most."""

ROUNDED = 0.01
"""The part of a step by which blocks may measure units wrongly, in all."""


@dataclass(eq=False)
class StageUnits:
    """The units of pipelines of so many stages and microbatches.

        task            the task of the whole model
        stages          number of stages
        parts           of the cluster, each with one stage or several
        microbatches    of a step
        places          positions of the graph at which it may be cut
        placement       by pipe and stage, the part that has it (`Staged.pipes`)
        within          meshes and regions of the plans of a stage; none: all that the options allow
        splits          whether the schedule splits backward into B and W
        start_clock     starts the clock of one search of a stage: it tells when that takes too much of the time
        sizes           ranks of every part (`part_ranks`); none: equal parts
        size            ranks of the stages that this knows; 0: of an equal part
        _ports          the messages between two stages
        _alone          graphs of stages, with their structure
        _within_longer  the same of stages as longer ones have them, where kernels are fused over cuts
    """

    task: PlanTask
    stages: int
    parts: int
    microbatches: int
    places: tuple[int, ...]
    placement: tuple[tuple[int, ...], ...]
    within: tuple[Candidate, ...] = ()
    splits: bool = False
    start_clock: Callable[[], Late] = lambda: never
    sizes: tuple[int, ...] = ()
    size: int = 0
    _ports: dict[tuple[int, int], tuple[Port, ...]] = field(default_factory=dict)
    _alone: dict[tuple[Any, ...], tuple[StageGraph, str]] = field(default_factory=dict)
    _within_longer: dict[tuple[Any, ...], tuple[StageGraph, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InputError where steps update a buffer of which every pipe would have a copy."""
        check_updates(self.task.graph, len(self.placement))

    @property
    def late(self) -> Late:
        """Tells whether the time is over that the search over stages may take."""
        return self.task.late

    @property
    def where(self) -> tuple[int, ...]:
        """By stage, its part of the cluster in the first pipe."""
        return self.placement[0]

    @property
    def together(self) -> tuple[int, ...]:
        """By stage, the first part that has it: stages of one part share the memory of its ranks."""
        return first_ranks(self.placement)

    @property
    def shares(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.together)) < self.stages

    @property
    def each(self) -> int:
        """Microbatches that a stage runs, on each part that has it."""
        return self.microbatches // len(self.placement)

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.places) + 1

    @cached_property
    def graph(self) -> Graph:
        """The captured graph of one microbatch, of whose needed ops places are positions."""
        return self.task.variant(self.microbatches).original

    @cached_property
    def _ops(self) -> tuple[Op, ...]:
        """The needed ops of that graph."""
        return needed_ops(self.graph)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """The position of the first op of every unit, and behind the last."""
        return (0, *self.places, len(self._ops))

    @cached_property
    def cluster(self) -> Cluster:
        """The part of the cluster of one stage; the first of parts of different sizes where it is of no one size."""
        at = self.sizes.index(self.size) if self.size else 0
        return part_clusters(self.task.cluster, self.parts, self.sizes)[at]

    @property
    def ranks(self) -> tuple[Ranks, ...]:
        """By part, its ranks."""
        return ranks_of_parts(self.task.cluster, self.parts, self.sizes)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """By unit, its length in blocks that take about as long: 1 of each where units do.

        What a stage of so many blocks takes hardly depends on where it begins then. Seconds of units are those that are
        known when this is asked first. There are as few blocks as measure them well, or `BLOCKS`.
        """
        works = [sum(behind) - sum(before) for before, behind in pairwise(self._works)]
        inner = [work for work in works[1:-1] if work > 0]
        if not inner or max(inner) <= ALIKE * min(inner):
            return (1,) * self.units
        seconds = np.array([self._known_alone(unit) for unit in range(self.units)])

        def measured(blocks: int) -> Array:
            found: Array = np.maximum(np.round(seconds * blocks / seconds.sum()), 1.0)
            return found

        def error(blocks: int) -> float:
            found = measured(blocks)[1:-1]
            return float(np.abs(found / found.sum() - seconds[1:-1] / seconds[1:-1].sum()).sum())

        every = range(min(self.units, BLOCKS), BLOCKS + 1)
        blocks = next((one for one in every if error(one) <= ROUNDED), min(every, key=error))
        return tuple(measured(blocks).astype(int).tolist())

    def _known_alone(self, unit: int) -> float:
        """About the seconds of a unit alone in a step: its floor."""
        return self.each * float(self.floors()[unit, unit + 1])

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The blocks before every unit, and all."""
        return (0, *accumulate(self.lengths))

    @property
    def marks(self) -> tuple[int | None, ...]:
        """By number of blocks, from 1 on, the place behind them; None where they end inside a unit."""
        found: list[int | None] = [None] * (self.ends[-1] - 1)
        for at, place in zip(self.ends[1:-1], self.places, strict=True):
            found[at - 1] = place
        return tuple(found)

    def cut_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The units at which stages but the first begin, by the numbers of blocks of all stages: those nearest."""
        found, least = list[int](), 1
        for s, at in enumerate(accumulate(sizes[:-1])):
            most = self.units - (len(sizes) - 1 - s)
            found.append(min(range(least, most + 1), key=lambda k: abs(self.ends[k] - at)))
            least = found[-1] + 1
        return tuple(found)

    def fractional_cut(self, sizes: Sequence[float]) -> tuple[float, ...]:
        """The places at which stages but the first begin, by the blocks of all stages; they may lie within units."""
        return tuple(np.interp(list(accumulate(sizes[:-1])), self.ends, range(self.units + 1)).tolist())

    @cached_property
    def _stretches(self) -> tuple[tuple[Indices, Indices], ...]:
        """By stage, (numbers of blocks in order, the stages that have them).

        A stage is the index of [a, b] in a flat table. Every other stage has one unit at least.
        """
        found = []
        for s in range(self.stages):
            begins = range(1) if s == 0 else range(s, self.units - (self.stages - 1 - s))
            ends = [self.units] if s == self.stages - 1 else range(1, self.units - (self.stages - 1 - s) + 1)
            pairs = sorted((self.ends[b] - self.ends[a], a * (self.units + 1) + b)
                           for a in begins for b in ends if a < b)
            found.append((np.array([n for n, _ in pairs]), np.array([at for _, at in pairs])))
        return tuple(found)

    def stretches(self, window: Window = ()) -> tuple[Stretches, ...]:
        """By stage, the places [a, b] that it may have in a window, ordered by its number of blocks."""
        blocks = np.array(self.ends)
        sides = [(0, blocks[-1]), *(window or ((0, blocks[-1]),) * (self.stages - 1)), (0, blocks[-1])]
        found = []
        for (every, at), (first, last), (least, most) in zip(self._stretches, sides[:-1], sides[1:], strict=True):
            a, b = (blocks[own] for own in divmod(at, self.units + 1))
            here = (a >= first) & (a <= last) & (b >= least) & (b <= most)
            numbers, begins = np.unique(every[here], return_index=True)
            found.append((numbers, at[here], begins))
        return tuple(found)

    def least_place(self, s: int, blocks: int, known: Array, window: Window = ()) -> tuple[int, int]:
        """The places in a window where least is known of stage s with so many blocks, or with the nearest, [a, b]."""
        sizes, at, first = self.stretches(window)[s]
        k = int(np.abs(sizes - blocks).argmin())
        own = at[first[k]:first[k + 1] if k + 1 < len(first) else None]
        a, b = divmod(int(own[known.ravel()[own].argmin()]), self.units + 1)
        return a, b

    @cached_property
    def _works(self) -> tuple[tuple[float, float, float], ...]:
        """Sums, up to every place, of the least seconds of forward, backward and W on a stage's devices."""
        alive = replace(self.graph, ops=self._ops, outputs=self.graph.outputs[:1])
        weights = weights_of(alive) if self.splits else frozenset[int]()
        return tuple(floor_sums(alive, self.cluster, alive.differentiable(), weights, self._ends, loosely=True))

    @property
    def copies(self) -> CopyMessages | None:
        """Prices what copies of a stage exchange; None where a stage is on one part."""
        return CopyMessages(self.task.cluster, self.placement) if len(self.placement) > 1 else None

    def floor_passes(self) -> tuple[Array, Array, Array]:
        """[a, b]: seconds of forward, backward and W of a microbatch that no layouts of a stage are below.

        Where backward is not split, W has none; nor where some kernels are in B of some stages.
        """
        forward, backward, weight = (np.maximum(sums[None, :] - sums[:, None], 0.0) for sums in np.array(self._works).T)
        return forward, backward, weight * (not self.split_depends_on_cut)

    def floors(self) -> Array:
        """[a, b]: seconds of forward and backward of a microbatch that no layouts of a stage are below."""
        sums = np.array([sum(one) for one in self._works])
        found: Array = np.maximum(sums[None, :] - sums[:, None], 0.0)
        return found

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """For every unit a number, equal for units of which the same is asked whose ops are alike in all but names."""
        ops, known, again = self._ops, dict[Any, int](), computed_again(self.graph, self._ops)
        sent, members = [(), *(tuple(sorted(one)) for one in self._crossing), ()], self._members()
        every = [(signature(self.graph, ops, first, end, sent[first], sent[end if end < len(ops) else -1], again),
                  self._asked(self._cut(k, k + 1)) if self._asks else (), self._shared_over(sent[first]),
                  self._shared_over(sent[end if end < len(ops) else -1]), members[k])
                 for k, (first, end) in enumerate(pairwise(self._ends))]
        return tuple([known.setdefault(one, len(known)) for one in every])

    def _members(self) -> tuple[tuple[tuple[int, int] | None, ...], ...]:
        """By unit, for each of its ops: how many units before it its block began, and which of that unit's it is.

        Nothing where no block runs again. An op outside every list of modules has None.
        """
        begun, found = dict[str, tuple[int, int]](), []
        for unit, (first, end) in enumerate(pairwise(self._ends)):
            names = [member_of(op.module) for op in self._ops[first:end]] if self._recomputes else []
            for number, name in enumerate(dict.fromkeys(names)):
                begun.setdefault(name, (unit, number))
            found.append(tuple((unit - begun[name][0], begun[name][1]) if name else None for name in names))
        return tuple(found)

    @cached_property
    def common_units(self) -> tuple[int, ...]:
        """The first unit of each kind between the first unit and the last, of those with most of the work.

        Units of other kinds are known by their floors alone.
        """
        work = dict[int, float]()
        for unit in range(1, self.units - 1):
            first = self._first_alike[unit]
            work[first] = work.get(first, 0.0) + sum(self._works[unit + 1]) - sum(self._works[unit])
        return tuple(sorted(sorted(work, key=lambda unit: -work[unit])[:KINDS]))

    @cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """By unit, the first between the ends that is alike within longer stages; itself of those at the ends."""
        known = dict[str, int]()
        return tuple(known.setdefault(self.joining(unit, unit + 1)[1], unit) if 0 < unit < self.units - 1 else unit
                     for unit in range(self.units))

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
        """A name of the structure of a stage and of what is asked of it: stages of one name are searched once.

        Where blocks may run again, it has where they lie.
        """
        blocks = blocks_of(add_hubs(stage.graph)) if self._recomputes else ()
        return "\n".join((structure(stage.graph), *(self._asked(stage) if self._asks else ()),
                          *(f"{one.start}-{one.end}" for one in blocks)))

    @property
    def _recomputes(self) -> bool:
        """Whether blocks may run again in backward."""
        return set(self.task.options.recompute) != {NO_RECOMPUTE}

    def _like(self, a: int, b: int) -> tuple[Any, ...]:
        """A key that stages have in common which are alike."""
        return (a == 0, b == self.units, self._kinds[a:b])

    @cached_property
    def _alike(self) -> Mapping[tuple[Any, ...], Sequence[tuple[int, int]]]:
        """By such a key, the places from which and to which its stages go."""
        found = dict[tuple[Any, ...], list[tuple[int, int]]]()
        for a, b in combinations(range(self.units + 1), 2):
            found.setdefault(self._like(a, b), []).append((a, b))
        return found

    def alone(self, a: int, b: int) -> tuple[StageGraph, str]:
        """The stage from place a to place b, or one like it; everything before is one stage, and everything behind."""
        key = self._like(a, b)
        if key not in self._alone:
            made = self._cut(a, b)
            self._alone[key] = made, self._key(made)
        return self._alone[key]

    def joining(self, a: int, b: int) -> tuple[StageGraph, str]:
        """The same stage as longer ones have it.

        No kernel that is fused over its ends takes more than there. And what several units read may come and go as
        partial sums, as all of them have it in a longer stage.
        """
        if not self._joins_otherwise:
            return self.alone(a, b)
        key = self._like(a, b)
        if key not in self._within_longer:
            made = self.alone(a, b)[0]
            graph = with_partial_ends(made.graph, self._read_by_several)
            if self._fused_ends is not None:
                graph = with_fused_ends(graph, self._fused_ends)
            made = replace(made, graph=graph)
            self._within_longer[key] = made, self._key(made)
        return self._within_longer[key]

    @property
    def _joins_otherwise(self) -> bool:
        """Whether a stage may take less within longer ones."""
        return self._fused_ends is not None or bool(self._read_by_several)

    @property
    def _joining(self) -> Mapping[tuple[Any, ...], tuple[StageGraph, str]]:
        """The stages that `joining` gave so far."""
        return self._within_longer if self._joins_otherwise else self._alone

    @cached_property
    def _fused_ends(self) -> FusedEnds | None:
        """The tensors over which kernels of stages may be fused; None where they are not."""
        device, alive = self.cluster.device, replace(self.graph, ops=self._ops, outputs=self.graph.outputs[:1])
        return fused_ends(alive, device.by_hand) if device.compiled else None

    def _shared_over(self, tensors: Sequence[int]) -> tuple[bool, ...]:
        """Whether kernels may be fused over these tensors, from behind each and from before it; who reads each."""
        ends = self._fused_ends
        names = [self.graph.tensors[t].name for t in tensors]
        fused = tuple(name in some for name in names for some in (ends.given, ends.taken)) if ends else ()
        return (*fused, *(name in self._read_by_several for name in names))

    def staged(self, name: str, cut: Sequence[int]) -> Staged:
        """The pipeline with a schedule that is cut at these places."""
        return Staged(tuple(self.places[k - 1] for k in cut), name, self.microbatches, self.task.options.compress,
                      sizes=self.sizes)

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

    @cached_property
    def apart(self) -> float:
        """Seconds of a microbatch by which a stage may take less than two that it is made of; infinite if not known."""
        policies = self.task.options.recompute
        joins = {NO_RECOMPUTE, SEARCH}.intersection(policies) or all(map(is_per_block, policies))
        return self._cone[0] if joins else inf

    @cached_property
    def shared(self) -> frozenset[frozenset[int]]:
        """Sets of units that read one parameter, where a stage may have several of them.

        It has the parameter once: no stage has both the first unit and the last.
        """
        ends = {0, self.units - 1}
        return frozenset(frozenset(read) for read in self._readers().values() if len(read) > 1 and not read <= ends)

    @cached_property
    def _read_by_several(self) -> frozenset[str]:
        """The tensors that several units read, by name."""
        return frozenset(self.graph.tensors[t].name for t in self._crossed if len(self._reading.get(t, ())) > 1)

    @cached_property
    def split_depends_on_cut(self) -> bool:
        """Whether kernels are in W of one stage and in B of another: those that read a tensor of parameters alone.

        It crosses a place, and a stage that receives it does not know what it depends on.
        """
        return self.splits and not self._crossed.isdisjoint(weights_of(replace(self.graph, ops=self._ops)))

    @cached_property
    def _crossed(self) -> frozenset[int]:
        """The tensors that would be sent over some place."""
        return frozenset[int]().union(*(self._crossing[at - 1] for at in self.places))

    @cached_property
    def apart_bytes(self) -> float:
        """Bytes at `TURN` by which a stage may have less than two that it is made of; infinite if not known.

        What two units keep would count twice. So it is known where what crosses a place is written by the unit before
        it and read by the one behind it alone. Units must share no parameter.
        """
        if self.apart == inf or self.shared:
            return inf
        ops, made = self._ops, dict[int, int]()
        for i, op in enumerate(ops):
            made |= dict.fromkeys(op.outputs, i)
        keeps = whole_footprints(replace(self.graph, ops=ops), self.cluster.device.kind == "cpu")
        readers = [(bisect_right(self.places, i), t) for i, op in enumerate(ops) for t in op.inputs]
        for k, at in enumerate(self.places):
            for t in self._crossing[at - 1]:
                i = made[t]
                one = base(ops[i]) in VIEWS or ops[i].outputs.index(t) in keeps[i].keeps
                if one or bisect_right(self.places, i) != k or any(u != k + 1 for u, read in readers if read == t):
                    return inf
        return self._cone[1]

    @cached_property
    def _cone(self) -> tuple[float, float]:
        """(seconds of a microbatch, bytes) that every stage may have for itself: those of the ops before parameters."""
        return cone_cost(self._on_all)

    @property
    def _on_all(self) -> Pricing:
        """Prices on a mesh of one axis, of all ranks of a stage; no kernels are fused."""
        mesh, eager = Mesh((Axis("rank", self.cluster.size),)), replace(self.cluster.device, compiled=False)
        return Pricing(self.task.variant(self.microbatches).graph, mesh, replace(self.cluster, device=eager),
                       microbatches=self.each)

    def _readers(self) -> dict[str, set[int]]:
        """By parameter, the units that read it."""
        found = dict[str, set[int]]()
        for i, op in enumerate(self._ops):
            for tensor in (self.graph.tensors[t] for t in op.inputs):
                if tensor.kind is Kind.PARAMETER:
                    found.setdefault(tensor.fqn, set()).add(bisect_right(self.places, i))
        return found

    @cached_property
    def twice(self) -> tuple[Twice, ...]:
        """By stage, most bytes and seconds that it and a stage before it on the same ranks may both count.

        They are those of storing, updating and exchanging a parameter that both read (`stored_once`).
        """
        readers, graph = self._readers(), self.task.variant(self.microbatches).graph
        found = []
        for s, at in enumerate(self.together):
            before = {u for p in range(s) if self.together[p] == at for u in self._within(p)}
            here = set(self._within(s)) if before else set[int]()
            names = {fqn for fqn, units in readers.items() if len(units) > 1 and before & units and here & units}
            found.append(most_twice([one for one in graph.tensors if one.kind is Kind.PARAMETER and one.fqn in names],
                                    self.cluster, graph, self.task.options.optimizer, self.copies)
                         if names else Twice())
        return tuple(found)

    def _within(self, s: int) -> range:
        """The units that a stage may have, if every other stage has one at least."""
        return range(s, self.units - (self.stages - 1 - s))

    @cached_property
    def transfers(self) -> tuple[float, ...]:
        """By boundary between stages, the least seconds of a transfer over it, wherever it may lie.

        They are those of what the unit behind it reads, or of all that the last stage does. What only later units read
        may be sent to a later stage, and counts there (`staged_steps.boundary_seconds`).
        """
        most = len(self.places) - (self.stages - 2)
        return tuple(min(row[b:b + most]) for b, row in enumerate(self.transfers_at))

    @cached_property
    def transfers_at(self) -> tuple[tuple[float, ...], ...]:
        """By boundary and place, the least seconds of a transfer over the boundary if it lies there."""
        return tuple(tuple(float(row[k, k + 2]) for k in range(len(self.places))) for row in self.transfers_to)

    @cached_property
    def transfers_to(self) -> Array:
        """[boundary, place - 1, end of the stage behind it]: the least seconds of a transfer over the boundary there.

        They are those of all that this stage reads; of the last stage, that it reads to the end.
        """
        found, last = np.zeros((self.stages - 1, len(self.places), self.units + 1)), self.stages - 2
        for b, k in product(range(self.stages - 1), range(len(self.places))):
            for unit, nbytes, is_near in self._sent[k]:
                found[b, k, 0 if b == last else unit + 1:] += self._least_transfer(b, nbytes, is_near)
        return found

    def sent_at(self, cut: Sequence[float]) -> tuple[float, ...]:
        """By boundary, the least seconds of a transfer there; between places in proportion."""
        places = range(1, self.units)
        return tuple(float(np.interp(at, places, row)) for at, row in zip(cut, self.transfers_at, strict=True))

    def _least_transfer(self, boundary: int, nbytes: float, is_near: bool) -> float:
        """Least seconds in which a tensor comes to the stage behind a boundary: near ones from the stage before it.

        Others come from there or from any stage before, perhaps from one on the same ranks. The ranks of the smaller of
        both stages send or receive all of it.
        """
        ranks, there = self.ranks, self.where[boundary + 1]
        return min(transfer_seconds(self.task.cluster, ranks, here, there,
                                    nbytes / min(end - first for first, end in (ranks[here], ranks[there])))
                   for here in set(self.where[boundary if is_near else 0:boundary + 1]))

    @cached_property
    def _sent(self) -> tuple[tuple[tuple[int, float, bool], ...], ...]:
        """By place, of each tensor that crosses it (the first unit behind that reads it, its least bytes, whether the
        unit before makes it).
        """
        made = {t: bisect_right(self.places, i) for i, op in enumerate(self._ops) for t in op.outputs}
        found = []
        for k, at in enumerate(self.places):
            own = list[tuple[int, float, bool]]()
            for t in sorted(self._crossing[at - 1] & self._reading.keys()):
                one, unit = self.graph.tensors[t], next((unit for unit in self._reading[t] if unit > k), self.units)
                codecs = codecs_of(self.task.options.compress, "pipeline", one.dtype)
                if unit < self.units:
                    own.append((unit, one.nbytes * part_in_flight(codecs, one.itemsize), made[t] == k))
            found.append(tuple(own))
        return tuple(found)

    @cached_property
    def _reading(self) -> Mapping[int, Sequence[int]]:
        """By tensor, the units that read it, in order."""
        found = dict[int, list[int]]()
        for i, op in enumerate(self._ops):
            unit = bisect_right(self.places, i)
            for t in op.inputs:
                own = found.setdefault(t, [])
                own += [unit] if unit not in own[-1:] else []
        return found

    @cached_property
    def _crossing(self) -> tuple[frozenset[int], ...]:
        """For every position of a cut, from 1 on, the tensors that would be sent over it."""
        return crossing(self.graph)
