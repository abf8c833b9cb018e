"""Builds the problem that the search solves: a table of seconds and bytes for every op, parameter and edge.

    own(v)        forward and backward of an op; the bytes of its own terms, and of what a parameter stores
    edge(u, v)    conversion there + conversion of the gradient back; the bytes of copies and of parameters' gradients
    end(v)        from the op that writes the loss or a new buffer value to the program's end

Variables with the same target, arguments, shapes, gradients and choices share their tables. So a repeated block names
the same tables, and the search solves it once.

Bytes are those of a *row*: a sum over moments of weight * what lives then (`lifetimes`), with weights that add up to
one. Every plan whose peak is within a budget meets every row within it; so the problem of a row bounds them all.

Where the search may recompute (`policies`), every block has one variable more, in front of the others: the level at
which backward computes it again. An op's seconds and bytes, and those of the edges into it, are then over the level of
its block too. Bytes that a later block keeps an op's output for are over the level of that block.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from autoddl.core.cost_table import Cells, Classes, Rows
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.problem import Factor, Problem, Table
from autoddl.core.stages import SEND
from autoddl.operators.work import intermediates, read_back
from autoddl.pricing.byte_rows import Sizes, bytes_of_edge, sizes_of, taken_off, weighted
from autoddl.pricing.choice_classes import Ports, pieces_of
from autoddl.pricing.choices import Choice, numbered
from autoddl.pricing.edge_tables import Ends, Use, counted, edge_ends, edge_seconds
from autoddl.pricing.lifetimes import UPDATE, Lifetimes, Moment, Owner, Pattern
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.policies import NO_POLICIES, Deciders, Policies, at_levels, deciders_of
from autoddl.pricing.price import Kernels, Pricing, cone_cost, end_seconds, inner_seconds, update_seconds
from autoddl.pricing.space import Variable
from autoddl.pricing.step_lifetimes import lifetimes_of

__all__ = ["CostNetwork", "Edge", "Entry", "Row", "carries", "edges_of", "gathered_back", "network_of", "problem_of"]

Array = npt.NDArray[np.float64]

Row = Mapping[Moment, float]
"""The weight of every moment whose bytes are added up; the weights add up to one."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Leads from output `port` of variable `source` to input `slot` of variable `target`.

    Variables and `tensor`, the one that is carried, are positions: in the variables of the mesh and in the graph.
    """

    source: int
    port: int
    target: int
    slot: int
    tensor: int


def edges_of(graph: Graph, variables: tuple[Variable, ...]) -> tuple[Edge, ...]:
    """Every edge between two variables."""
    written: dict[int, tuple[int, int]] = {}
    names = {t.name: i for i, t in enumerate(graph.tensors)}
    for v, variable in enumerate(variables):
        if isinstance(variable.item, Tensor):
            written[names[variable.item.name]] = (v, 0)
        else:
            written.update({t: (v, port) for port, t in enumerate(variable.item.outputs)})
    return tuple(Edge(*written[t], v, k, t) for v, variable in enumerate(variables) if isinstance(variable.item, Op)
                 for k, t in enumerate(variable.item.inputs) if t in written)


def carries(edge: Edge, target: Variable, differentiable: frozenset[int]) -> bool:
    """Whether a gradient comes back along the edge: none does from what has no gradient itself, like an argmax."""
    assert isinstance(target.item, Op)
    return edge.tensor in differentiable and any(t in differentiable for t in target.item.outputs)


def gathered_back(pricing: Pricing, differentiable: frozenset[int]) -> frozenset[int]:
    """Positions of the parameters that backward needs, and that are gathered again for it.

    Backward reads them, themselves or a view of them, or computes an op again that reads them.
    """
    graph = pricing.graph
    uses = graph.consumers()
    return frozenset(t for t, tensor in enumerate(graph.tensors)
                     if tensor.kind is Kind.PARAMETER and read_back(t, graph, uses, differentiable, pricing.again))


class _Tables:
    """Tables under construction, each made once per key."""

    def __init__(self) -> None:
        self.found: list[Table] = []
        self.index: dict[Hashable, int] = {}

    def number(self, key: Hashable, make: Callable[[], Table]) -> int:
        if key not in self.index:
            self.index[key] = len(self.found)
            self.found.append(make())
        return self.index[key]


def _op_seconds(pricing: Pricing, op: Op, choices: Sequence[Choice]) -> tuple[Array, Classes]:
    """Seconds of an op's kernels over the classes of its pieces, and the class of every option."""
    graph = pricing.graph
    count, every = len(op.inputs), [graph.tensors[t].shape for t in (*op.inputs, *op.outputs)]
    found = pieces_of(choices, every, pricing.mesh)
    seconds, kernels = np.zeros(len(found.shapes)), Kernels.of(pricing, op, graph.differentiable())
    times = pricing.times
    inner = numbered(choices).inner[found.first].astype(bool).tolist()
    for c, (shapes, reduces) in enumerate(zip(found.shapes, inner, strict=True)):
        forward, backward = kernels.seconds(shapes[:count], shapes[count:], reduces)
        again = times.backward * (op.name in pricing.again)
        seconds[c] = sum(forward) * (times.forward + again) + sum(backward) * times.backward
        if reduces:
            seconds[c] += sum(inner_seconds(pricing, op, choices[found.first.item(c)], times).values())
    return seconds, found.classes


def _port_seconds(pricing: Pricing, op: Op, choices: Sequence[Choice]) -> Array | float:
    """Seconds of the messages of an op that sends to another stage, or receives, by option; 0 of other ops."""
    if pricing.ports is None or op.target not in (SEND, RECEIVE):
        return 0.0
    layouts = [(choice.inputs if op.target == SEND else choice.outputs)[0] for choice in choices]
    known = {layout: pricing.ports.seconds(op.name, layout, pricing.mesh) for layout in set(layouts)}
    return np.array([known[layout] for layout in layouts])


def likeness(graph: Graph, variable: Variable, differentiable: frozenset[int], dependent: frozenset[int],
             hubs: frozenset[int], pricing: Pricing) -> Hashable:
    """A key that is equal for variables whose costs are equal.

    It says what is computed, how often, on which shapes, with which gradients, and fused with what.
    """
    if isinstance(variable.item, Tensor):
        item = variable.item
        return (item.shape, item.dtype, item.master, item.reduced, item.trained, id(variable.choices))
    op = variable.item
    tensors = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in differentiable, t in dependent,
                     t in hubs, graph.tensors[t].kind is Kind.PARAMETER)
                    for t in (*op.inputs, *op.outputs))
    args = tuple((k, v) for k, v in op.args if k != "key")
    port = op.name if pricing.ports is not None and op.target in (SEND, RECEIVE) else None
    return op.target, op.slots, args, tensors, id(variable.choices), pricing.chained.get(op.name), port


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One factor before its bytes are known.

        variables    the variables that it is over, those of policies apart
        likeness     by level, what it is like: equal entries share a table
        seconds      by level, its seconds over `classes`
        classes      the class of every option of each variable
        owner        the owner of its bytes, if any
        ends         the two ends of an edge
        policy       the number of the policy of its op's block, -1 for none
    """

    variables: tuple[int, ...]
    likeness: tuple[Hashable, ...]
    seconds: tuple[Cells, ...]
    classes: tuple[Classes, ...]
    owner: Owner | None = None
    ends: Ends | None = None
    policy: int = -1

    def at(self, level: int) -> "Entry":
        """The entry where its block is at a level."""
        return replace(self, likeness=self.likeness[level:level + 1], seconds=self.seconds[level:level + 1], policy=-1)

    def level(self, levels: "_Levels") -> int:
        """The level of its block under the levels of all policies, 0 of an op in no block."""
        return levels[self.policy] if self.policy >= 0 else 0


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """All costs of all choices but for the budget: `problem` makes a cost network of it for any row of bytes.

    A choice names the level of every policy first, then an option of every variable.
    """

    pricing: Pricing
    """The prices, where no policy computes anything again."""
    variables: tuple[Variable, ...]
    """The decisions about layouts."""
    entries: tuple[Entry, ...]
    """The factors before their bytes are known."""
    policies: Policies = NO_POLICIES
    """The blocks whose level is a variable."""
    kept: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    """The hubs that say whether their tensor is kept, and by which reads (`kept_tensors`)."""
    known: dict[Hashable, Lifetimes] = field(default_factory=dict)
    """Lifetimes found so far; networks of one graph on several meshes may share them."""
    _sizes: dict[Hashable, Sizes] = field(default_factory=dict)
    """Bytes of terms found so far, by what their entry is like."""
    _found: dict[tuple[tuple[Moment, float], ...], "_Patterns"] = field(default_factory=dict)
    """Patterns found so far, by row."""

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """The lifetimes where no policy computes anything again."""
        return self._lifetimes_at(self.policies.alternating(0, 0))

    @cached_property
    def _lifetimes(self) -> Mapping[tuple[int, int], Lifetimes]:
        """The lifetimes by the levels of the blocks of even and of odd number."""
        levels = range(len(self.policies.levels))
        return {(even, odd): self._lifetimes_at(self.policies.alternating(even, odd)) for even in levels
                for odd in levels}

    def _lifetimes_at(self, levels: Sequence[int]) -> Lifetimes:
        given, processor = self.pricing, self.pricing.cluster.device.kind == "cpu"
        key = (id(given.graph), given.optimizer, given.microbatches, processor, given.recompute, given.in_flight,
               self.policies, tuple(levels), bool(self.kept), given.sparse > 0)
        if key not in self.known:
            pricing = at_levels(given, self.policies, levels)
            self.known[key] = lifetimes_of(pricing.graph, optimizer_of(pricing.optimizer), pricing.microbatches,
                                           processor, pricing.parts, pricing.in_flight, self.kept,
                                           pricing.sparse > 0)
        return self.known[key]

    @cached_property
    def _deciders(self) -> Deciders:
        return deciders_of(self.pricing.graph, self.policies, self._lifetimes.values())

    @cached_property
    def fixed(self) -> tuple[float, float]:
        """(seconds, bytes of a rank) that every choice has: those of the cone."""
        seconds, nbytes = cone_cost(self.pricing)
        return seconds * self.pricing.times.forward, nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Options of each policy and each variable."""
        return (*self.policies.sizes, *(len(v.choices) for v in self.variables))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of policies and variables."""
        return (*(f"recompute {name}" for name in self.policies.blocks), *(v.name for v in self.variables))

    def resolve(self, choice: Sequence[int]) -> tuple[Pricing, tuple[int, ...]]:
        """The prices of the levels that a choice names, and its options of the variables."""
        count = len(self.policies.blocks)
        return at_levels(self.pricing, self.policies, choice[:count]), tuple(choice[count:])

    def fixed_at(self, levels: Sequence[int]) -> "CostNetwork":
        """The network in which every block is at its level, made of the entries of this one."""
        if not self.policies.blocks:
            return self
        known = _Levels(dict(enumerate(levels)))
        return CostNetwork(at_levels(self.pricing, self.policies, levels), self.variables,
                           tuple([entry.at(entry.level(known)) for entry in self.entries]), kept=self.kept,
                           known=self.known)

    @cached_property
    def _free(self) -> Problem:
        return self.problem(None)

    def problem(self, budget: float | None, row: Row | None = None) -> Problem:
        """The problem whose bytes are those of `row`; by default those of the optimizer's update.

        `budget` is in bytes per device, None for no limit. Raises KeyError where the graph has no such moment.
        """
        row = {UPDATE: 1.0} if row is None else row
        patterns, tables, factors = self._patterns(row), _Tables(), list[Factor]()
        seconds, nbytes = self.fixed[0], self.fixed[1] * sum(row.values())
        for entry in self.entries:
            policies, levels = self._over(entry, patterns)
            here, key = [patterns.of(entry.owner, one) for one in levels], tuple([
                _cost(entry, patterns, one) for one in levels])
            make = partial(self._table, entry, levels, here, tuple([len(self.policies.levels)] * len(policies)))
            scope = (*policies, *(v + len(self.policies.blocks) for v in entry.variables))
            factors.append(Factor(scope, tables.number((key, len(policies)), make)))
            nbytes -= _most_taken_off(entry, here)
        return Problem(self.names, self.sizes, tuple(tables.found), tuple(factors), budget, seconds, nbytes)

    def _patterns(self, row: Row) -> "_Patterns":
        key = tuple(sorted(row.items()))
        if key not in self._found:
            self._found[key] = _Patterns({at: one.patterns(row, self._deciders.counts)
                                          for at, one in self._lifetimes.items()}, self._deciders)
        return self._found[key]

    def _over(self, entry: Entry, patterns: "_Patterns") -> tuple[tuple[int, ...], list["_Levels"]]:
        """The policies that an entry's costs depend on, and the levels of all policies, for every combination."""
        if not self.policies.blocks:
            return (), [_Levels({})]
        own, count = entry.policy, range(len(self.policies.levels))
        later = self._deciders.later.get(entry.owner, -1) if entry.owner else -1
        plain = [_Levels({own: a}) for a in count] if own >= 0 else [_Levels({})]
        if later >= 0:
            rows = [[one.at(later, c) for c in count] for one in plain]
            costs = [[_cost(entry, patterns, one) for one in row] for row in rows]
            if any(cost != row[0] for row in costs for cost in row):
                same = all(row == costs[0] for row in costs)
                return ((later,), rows[0]) if same else ((own, later), [one for row in rows for one in row])
        return ((own,), plain) if len({_cost(entry, patterns, one) for one in plain}) > 1 else ((), plain[:1])

    def _table(self, entry: Entry, levels: Sequence["_Levels"], patterns: Sequence[Pattern], sizes: tuple[int, ...]
               ) -> Table:
        nothing = _nothing((*sizes, *entry.seconds[0].shape))
        seconds = _stacked([entry.seconds[entry.level(one)] for one in levels], sizes)
        most = _most_taken_off(entry, patterns)
        nbytes = _stacked([_more(self._bytes(entry, pattern), most - _taken_off(entry, pattern))
                           for pattern in patterns], sizes) if any(patterns) else nothing
        return Table.over(seconds, nbytes, nothing, (*(np.arange(n) for n in sizes), *entry.classes))

    def _bytes(self, entry: Entry, pattern: Pattern) -> Cells:
        """The bytes of a pattern over the classes of an entry."""
        if not pattern:
            return _nothing(entry.seconds[0].shape)
        if entry.ends is not None:
            return bytes_of_edge(entry.ends, pattern)
        return Cells.of(weighted(self.entry_sizes(entry), pattern))

    def entry_sizes(self, entry: Entry) -> Sizes:
        """The sizes of the terms that the entry's variable owns, over the classes of its table."""
        if entry.likeness[0] not in self._sizes:
            variable = self.variables[entry.variables[0]]
            self._sizes[entry.likeness[0]] = sizes_of(self.pricing, variable.item, variable.choices)
        return self._sizes[entry.likeness[0]]

    @property
    def weight_bytes(self) -> float:
        """The least bytes of a rank that parameters and the optimizer's state take under any choice."""
        least = 0.0
        copies = {term.owner: float(term.what[1]) for term in self.lifetimes.terms
                  if term.owner[0] == "parameter" and term.start == 0 and term.what[0] == "own"}
        for entry in self.entries:
            if entry.owner in copies:
                least += copies[entry.owner] * float(self.entry_sizes(entry)[("own",)].min())
        return least

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds of a step under one choice (an option per variable), infinite where it is forbidden."""
        return self._free.cost(choice)

    def row_bytes(self, choice: Sequence[int], row: Row) -> float:
        """The bytes of `row` under one choice."""
        known, total = dict[Hashable, float](), self.fixed[1] * sum(row.values())
        count, patterns = len(self.policies.blocks), self._patterns(row)
        levels, options = _Levels(dict(enumerate(choice[:count]))), choice[count:]
        for entry in self.entries:
            pattern = patterns.of(entry.owner, levels)
            if pattern:
                key = entry.likeness[0], pattern, tuple([options[v] for v in entry.variables])
                total -= _taken_off(entry, pattern)
                if key not in known:
                    known[key] = self._bytes_at(entry, pattern, options)
                total += known[key]
        return total

    def _bytes_at(self, entry: "Entry", pattern: Pattern, options: Sequence[int]) -> float:
        at = tuple([int(c[options[v]]) for c, v in zip(entry.classes, entry.variables, strict=True)])
        if entry.ends is None:
            return float(weighted(self.entry_sizes(entry), pattern)[at])
        return float(bytes_of_edge(entry.ends.only(at), pattern).whole[0, 0])


@dataclass(frozen=True, slots=True)
class _Levels:
    """The levels of some policies by number; others are at level 0."""

    known: Mapping[int, int]

    def __getitem__(self, policy: int) -> int:
        return self.known.get(policy, 0)

    def at(self, policy: int, level: int) -> "_Levels":
        """These levels, but for one policy."""
        return _Levels({**self.known, policy: level})


@dataclass(frozen=True, slots=True)
class _Patterns:
    """The patterns of a row by the levels of even and odd blocks, then by owner."""

    found: Mapping[tuple[int, int], Mapping[Owner, Pattern]]
    deciders: Deciders

    def of(self, owner: Owner | None, levels: _Levels) -> Pattern:
        """The pattern of an owner under the levels of its own block and of the later one that it lives for."""
        if owner is None:
            return ()
        own, later = self.deciders.own.get(owner, -1), self.deciders.later.get(owner, -1)
        first = own if own >= 0 else later
        other = later if later >= 0 else own
        if first < 0:
            return self.found[0, 0].get(owner, ())
        a, b = levels[first], levels[other]
        return self.found[(a, b) if first % 2 == 0 else (b, a)].get(owner, ())


def _cost(entry: Entry, patterns: _Patterns, levels: _Levels) -> tuple[Hashable, Pattern]:
    """A name of an entry's seconds and bytes under some levels."""
    return entry.likeness[entry.level(levels)], patterns.of(entry.owner, levels)


def _stacked(cells: Sequence[Cells], sizes: tuple[int, ...]) -> Cells:
    """Cells of every combination of levels, the first axes; without levels the only ones."""
    if not sizes:
        return cells[0]

    def rows(which: Rows) -> Array:
        every = np.arange(len(cells)).reshape(sizes)[which]
        return np.stack([cells[k].whole for k in every.ravel().tolist()]).reshape(*every.shape, *cells[0].shape)

    least = min(known) if all((known := [one.least for one in cells if one.least is not None]) and
                              one.least is not None for one in cells) else None
    return Cells((*sizes, *cells[0].shape), rows, least)


def _taken_off(entry: Entry, pattern: Pattern) -> float:
    """The bytes that every cell of an entry has too much."""
    return taken_off(entry.ends, pattern) if entry.ends is not None else 0.0


def _most_taken_off(entry: Entry, patterns: Sequence[Pattern]) -> float:
    """The most of them over the levels that an entry depends on; a table has as much too much at all."""
    return max(_taken_off(entry, pattern) for pattern in patterns)


def _more(cells: Cells, nbytes: float) -> Cells:
    """The cells with some bytes more in each."""
    if not nbytes:
        return cells
    return Cells(cells.shape, lambda rows: cells.rows(rows) + nbytes,
                 None if cells.least is None else cells.least + nbytes)


def _nothing(shape: tuple[int, ...]) -> Cells:
    """Zeros, made when they are asked for."""
    return Cells(shape, partial(_zeros, shape), 0.0)


def _zeros(shape: tuple[int, ...], rows: slice | Classes) -> Array:
    return np.zeros((len(np.arange(shape[0])[rows]), *shape[1:]))


def network_of(pricing: Pricing, variables: tuple[Variable, ...], policies: Policies = NO_POLICIES) -> CostNetwork:
    """All seconds of all choices. With `policies`, all `separable`, `pricing` computes nothing again by itself."""
    return _Builder(pricing, variables, policies).run()


class _Builder:
    """Makes the entries of a network, those that are alike of the same cells."""

    def __init__(self, pricing: Pricing, variables: tuple[Variable, ...], policies: Policies) -> None:
        graph = pricing.graph
        self.variables, self.policies, self.graph, self.ports = variables, policies, graph, Ports()
        self.pricings = [at_levels(pricing, policies, [level] * len(policies.blocks))
                         for level in range(len(policies.levels))]
        self.flows, dependent = graph.differentiable(), graph.dependent()
        hubs = frozenset(t for op in graph.ops if op.target == HUB for t in op.outputs)
        classes: dict[Hashable, int] = {}
        self.alike = [classes.setdefault(likeness(graph, v, self.flows, dependent, hubs, pricing), len(classes))
                      for v in variables]
        self.ops = {op.name: i for i, op in enumerate(graph.ops)}
        self.tensors = {tensor.name: t for t, tensor in enumerate(graph.tensors)}
        self.block, self.intermediates = policies.numbers(graph), intermediates(graph)
        self.made: dict[Hashable, tuple[Cells, tuple[Classes, ...]]] = {}
        self.ends: dict[Hashable, Ends] = {}

    def run(self) -> CostNetwork:
        entries, pricing = list[Entry](), self.pricings[0]
        for v, variable in enumerate(self.variables):
            if isinstance(variable.item, Op):
                entries += _end_entries(pricing, v, variable.item, variable, self.alike[v], self.made)
            entries.append(self.own(v, variable))
        read = [gathered_back(one, self.flows) for one in self.pricings]
        entries += [self.edge(edge, read) for edge in edges_of(self.graph, self.variables)]
        return CostNetwork(pricing, self.variables, tuple(entries), self.policies)

    def own(self, v: int, variable: Variable) -> Entry:
        """The entry of a variable by itself, at every level."""
        item, keys = variable.item, list[Hashable]()
        for pricing in self.pricings:
            keys.append(("own", self.alike[v], item.name in pricing.again))
            if keys[-1] not in self.made:
                self.made[keys[-1]] = _own_seconds(pricing, variable)
        if isinstance(item, Op):
            return self.entry((v,), keys, ("op", self.ops[item.name], 0), None, self.block[self.ops[item.name]])
        return self.entry((v,), keys, ("parameter", self.tensors[item.name], 0), None, -1)

    def edge(self, edge: Edge, read: Sequence[frozenset[int]]) -> Entry:
        """The entry of an edge, at every level of its reader's block."""
        source, target, keys = self.variables[edge.source], self.variables[edge.target], list[Hashable]()
        assert isinstance(target.item, Op)
        flows = carries(edge, target, self.flows)
        for pricing, back in zip(self.pricings, read, strict=True):
            use = Use(self.graph.tensors[edge.tensor], edge.port, edge.slot, flows, edge.tensor in back,
                      target.name in pricing.again, edge.tensor in self.intermediates)
            keys.append(("edge", self.alike[edge.source], edge.port, self.alike[edge.target], edge.slot, use.flows,
                         use.back, use.again, use.intermediate))
            if keys[-1] not in self.made:
                self.ends[keys[-1]] = ends = edge_ends(pricing, self.ports, source, target, use)
                self.made[keys[-1]] = edge_seconds(pricing, self.ports, target, use, ends), ends.classes
        i = self.ops[target.item.name]
        return self.entry((edge.source, edge.target), keys, ("edge", i, edge.slot), self.ends[keys[0]], self.block[i])

    def entry(self, variables: tuple[int, ...], keys: Sequence[Hashable], owner: Owner, ends: Ends | None, policy: int
              ) -> Entry:
        seconds = tuple([self.made[key][0] for key in keys])
        return Entry(variables, tuple(keys), seconds, self.made[keys[0]][1], owner, ends, policy)


def _own_seconds(pricing: Pricing, variable: Variable) -> tuple[Cells, tuple[Classes, ...]]:
    """Seconds that a variable costs by itself: an op its kernels, a parameter its update, a hub nothing."""
    every = np.arange(len(variable.choices))
    if isinstance(variable.item, Tensor):
        layouts = [choice.outputs[0] for choice in variable.choices]
        known = {layout: update_seconds(pricing, variable.item, layout) for layout in set(layouts)}
        return Cells.of(np.array([known[layout] for layout in layouts]) * pricing.times.update), (every,)
    if variable.item.target == HUB:
        return _nothing((len(variable.choices),)), (every,)
    seconds, classes = _op_seconds(pricing, variable.item, variable.choices)
    messages = _port_seconds(pricing, variable.item, variable.choices)
    if isinstance(messages, float):
        return Cells.of(seconds), (classes,)
    return Cells.of(seconds[classes] + messages), (every,)


def _end_entries(pricing: Pricing, v: int, op: Op, variable: Variable, alike: int,
                 made: dict[Hashable, tuple[Cells, tuple[Classes, ...]]]) -> list[Entry]:
    """Entries for bringing an op's outputs to the program's end: the loss and new values of buffers."""
    ends, found = {pricing.graph.outputs[0]: True} | {new: False for _, new in pricing.graph.updates}, []
    for port, t in enumerate(op.outputs):
        if t in ends:
            key = ("end", alike, port, ends[t])
            if key not in made:
                costs = np.array([end_seconds(pricing, t, c, port, ends[t]) for c in variable.choices])
                made[key] = (Cells.of(counted(costs, pricing.hidden)),
                             (np.arange(len(costs)),))
            seconds, classes = made[key]
            found.append(Entry((v,), (key,), (seconds,), classes))
    return found


def problem_of(pricing: Pricing, variables: tuple[Variable, ...], budget: float | None, row: Row | None = None
               ) -> Problem:
    """The problem of the variables of a mesh under `budget` bytes per device (`CostNetwork.problem`)."""
    return network_of(pricing, variables).problem(budget, row)
