"""Pricing -> Problem: a table of costs for every op, parameter and edge; those that are alike share one.

    own(v)        forward and backward of an op; the bytes of its own terms, and of what a parameter stores
    edge(u, v)    conversion there + conversion of the gradient back; the bytes of copies and of parameters' gradients
    end(v)        from the op that writes the loss or a new buffer value to the program's end

Alike are variables with the same target, arguments, shapes, gradients and choices: a repeated block names the same
tables, and the search solves it once.

Bytes are those of a *row*: a sum over moments of weight * what lives then (`lifetimes`), with weights that add up to
one. Every plan whose peak is within a budget meets every row within it; so the problem of a row bounds them all.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from autoddl.core.cost_table import Cells, Classes
from autoddl.core.graph import Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.problem import Factor, Problem, Table
from autoddl.operators.work import read_back
from autoddl.pricing.byte_rows import Sizes, bytes_of_edge, sizes_of, taken_off, weighted
from autoddl.pricing.choice_classes import Ports, pieces_of
from autoddl.pricing.choices import Choice, numbered
from autoddl.pricing.edge_tables import Ends, Use, counted, edge_ends, edge_seconds
from autoddl.pricing.lifetimes import UPDATE, Lifetimes, Moment, Owner, Pattern, lifetimes_of
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.price import Kernels, Pricing, cone_cost, end_seconds, inner_seconds, update_seconds
from autoddl.pricing.space import Variable

__all__ = ["CostNetwork", "Edge", "Row", "carries", "edges_of", "gathered_back", "network_of", "problem_of"]

Array = npt.NDArray[np.float64]

Row = Mapping[Moment, float]
"""The weight of every moment whose bytes are added up; the weights add up to one."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Output `port` of variable `source` -> input `slot` of variable `target`."""

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
    """Parameters that are needed in backward too, where they are gathered again: read there themselves or in a view, or
    by an op that is computed again."""
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
    inner = numbered(choices).inner[found.first].astype(bool).tolist()
    for c, (shapes, reduces) in enumerate(zip(found.shapes, inner, strict=True)):
        forward, backward = kernels.seconds(shapes[:count], shapes[count:])
        seconds[c] = sum((*forward, *backward, *forward * (op.name in pricing.again)))
        if reduces:
            seconds[c] += sum(inner_seconds(pricing, op, choices[found.first.item(c)]).values())
    return seconds * pricing.microbatches, found.classes


def likeness(graph: Graph, variable: Variable, differentiable: frozenset[int], dependent: frozenset[int],
             hubs: frozenset[int], pricing: Pricing) -> Hashable:
    """Equal for variables whose costs are equal: what is computed, how often, on which shapes, with which gradients,
    fused with what."""
    if isinstance(variable.item, Tensor):
        item = variable.item
        return (item.shape, item.dtype, item.master, item.reduced, item.trained, id(variable.choices))
    op = variable.item
    tensors = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in differentiable, t in dependent,
                     t in hubs, graph.tensors[t].kind is Kind.PARAMETER)
                    for t in (*op.inputs, *op.outputs))
    args = tuple((k, v) for k, v in op.args if k != "key")
    return (op.target, op.slots, args, tensors, id(variable.choices), pricing.chained.get(op.name),
            op.name in pricing.again)


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """One factor before its bytes are known: its seconds over `classes` of the options of `variables`, what it is
    like (equal entries share a table), and the owner of its bytes, if any."""

    variables: tuple[int, ...]
    likeness: Hashable
    seconds: Cells
    classes: tuple[Classes, ...]
    owner: Owner | None = None
    ends: Ends | None = None


@dataclass(frozen=True, eq=False)
class CostNetwork:
    """All costs of all choices but for the budget: `problem` makes a cost network of it for any row of bytes."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    entries: tuple[_Entry, ...]
    _sizes: dict[Hashable, Sizes] = field(default_factory=dict)

    @cached_property
    def lifetimes(self) -> Lifetimes:
        """What lives when."""
        return lifetimes_of(self.pricing.graph, optimizer_of(self.pricing.optimizer), self.pricing.microbatches,
                            self.pricing.cluster.device.kind == "cpu", self.pricing.blocks)

    @cached_property
    def fixed(self) -> tuple[float, float]:
        """Seconds and bytes that every choice has."""
        seconds, nbytes = cone_cost(self.pricing)
        return seconds * self.pricing.microbatches, nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Options of each variable."""
        return tuple(len(v.choices) for v in self.variables)

    @cached_property
    def _free(self) -> Problem:
        return self.problem(None)

    def problem(self, budget: float | None, row: Row | None = None) -> Problem:
        """The cost network whose bytes are those of `row`, of the update alone by default.

        `budget` is in bytes per device, None for no limit. Raises KeyError where the graph has no such moment.
        """
        row = {UPDATE: 1.0} if row is None else row
        patterns, tables, factors = self.lifetimes.patterns(row), _Tables(), list[Factor]()
        for entry in self.entries:
            pattern = patterns.get(entry.owner, ()) if entry.owner else ()
            make = partial(self._table, entry, pattern)
            factors.append(Factor(entry.variables, tables.number((entry.likeness, pattern), make)))
        return Problem(tuple(v.name for v in self.variables), self.sizes, tuple(tables.found), tuple(factors), budget,
                       self.fixed[0], self._fixed_bytes(row, patterns))

    def _fixed_bytes(self, row: Row, patterns: Mapping[Owner, Pattern]) -> float:
        """The bytes that every choice has in a row, less those that the tables have too much."""
        found = self.fixed[1] * float(sum(row.values()))
        for entry in self.entries:
            if entry.ends is not None and entry.owner is not None and entry.owner in patterns:
                found -= taken_off(entry.ends, patterns[entry.owner])
        return found

    def _table(self, entry: _Entry, pattern: Pattern) -> Table:
        nothing = _nothing(entry.seconds.shape)
        if not pattern:
            nbytes = nothing
        elif entry.ends is not None:
            nbytes = bytes_of_edge(entry.ends, pattern)
        else:
            nbytes = Cells.of(weighted(self.entry_sizes(entry), pattern))
        return Table.over(entry.seconds, nbytes, nothing, entry.classes)

    def entry_sizes(self, entry: _Entry) -> Sizes:
        """The sizes of the terms that the entry's variable owns, over the classes of its table."""
        if entry.likeness not in self._sizes:
            variable = self.variables[entry.variables[0]]
            self._sizes[entry.likeness] = sizes_of(self.pricing, variable.item, variable.choices)
        return self._sizes[entry.likeness]

    @property
    def weight_bytes(self) -> float:
        """Bytes of parameters and the optimizer's state alone that every choice has."""
        least = 0.0
        copies = {term.owner: float(term.what[1]) for term in self.lifetimes.terms
                  if term.owner[0] == "parameter" and term.start == 0}
        for entry in self.entries:
            if entry.owner in copies:
                least += copies[entry.owner] * float(self.entry_sizes(entry)[("own",)].min())
        return least

    def seconds(self, choice: Sequence[int]) -> float:
        """Seconds of one choice, infinite where it is forbidden."""
        return self._free.cost(choice)

    def row_bytes(self, choice: Sequence[int], row: Row) -> float:
        """The bytes of `row` under one choice."""
        owned = {entry.owner: entry for entry in self.entries if entry.owner is not None}
        patterns = self.lifetimes.patterns(row)
        known, total = dict[Hashable, float](), self._fixed_bytes(row, patterns)
        for owner, pattern in patterns.items():
            if owner in owned:
                entry = owned[owner]
                key = entry.likeness, pattern, tuple([choice[v] for v in entry.variables])
                if key not in known:
                    known[key] = self._bytes_at(entry, pattern, choice)
                total += known[key]
        return total

    def _bytes_at(self, entry: "_Entry", pattern: Pattern, choice: Sequence[int]) -> float:
        at = tuple([int(c[choice[v]]) for c, v in zip(entry.classes, entry.variables, strict=True)])
        if entry.ends is None:
            return float(weighted(self.entry_sizes(entry), pattern)[at])
        return float(bytes_of_edge(entry.ends.only(at), pattern).whole[0, 0])


def _nothing(shape: tuple[int, ...]) -> Cells:
    """Zeros, made when they are asked for."""
    return Cells(shape, partial(_zeros, shape), 0.0)


def _zeros(shape: tuple[int, ...], rows: slice | Classes) -> Array:
    return np.zeros((len(np.arange(shape[0])[rows]), *shape[1:]))


def network_of(pricing: Pricing, variables: tuple[Variable, ...]) -> CostNetwork:
    """All seconds of all choices."""
    graph, ports, made = pricing.graph, Ports(), dict[Hashable, tuple[Cells, tuple[Classes, ...]]]()
    differentiable, dependent = graph.differentiable(), graph.dependent()
    hubs = frozenset(t for op in graph.ops if op.target == HUB for t in op.outputs)
    classes: dict[Hashable, int] = {}
    alike = [classes.setdefault(likeness(graph, v, differentiable, dependent, hubs, pricing), len(classes))
             for v in variables]
    ops = {op.name: i for i, op in enumerate(graph.ops)}
    parameters = {t.name: i for i, t in enumerate(graph.tensors)}
    entries, read = list[_Entry](), gathered_back(pricing, differentiable)
    for v, variable in enumerate(variables):
        item = variable.item
        key: Hashable = ("own", alike[v])
        if isinstance(item, Op):
            entries += _end_entries(pricing, v, item, variable, alike[v], made)
        if key not in made:
            made[key] = _own_seconds(pricing, variable)
        owner = ("op", ops[item.name], 0) if isinstance(item, Op) else ("parameter", parameters[item.name], 0)
        entries.append(_Entry((v,), key, *made[key], owner))
    ends: dict[Hashable, Ends] = {}
    for edge in edges_of(graph, variables):
        source, target = variables[edge.source], variables[edge.target]
        assert isinstance(target.item, Op)
        use = Use(graph.tensors[edge.tensor], edge.port, edge.slot, carries(edge, target, differentiable),
                  edge.tensor in read, target.name in pricing.again)
        key = ("edge", alike[edge.source], edge.port, alike[edge.target], edge.slot, use.flows, use.back, use.again)
        if key not in made:
            ends[key] = edge_ends(pricing, ports, source, target, use)
            made[key] = edge_seconds(pricing, ports, target, use, ends[key]), ends[key].classes
        entries.append(_Entry((edge.source, edge.target), key, *made[key], ("edge", ops[target.item.name], edge.slot),
                              ends[key]))
    return CostNetwork(pricing, variables, tuple(entries))


def _own_seconds(pricing: Pricing, variable: Variable) -> tuple[Cells, tuple[Classes, ...]]:
    """Seconds of what a variable costs by itself: of a parameter the update, of a hub none."""
    every = np.arange(len(variable.choices))
    if isinstance(variable.item, Tensor):
        layouts = [choice.outputs[0] for choice in variable.choices]
        known = {layout: update_seconds(pricing, variable.item, layout) for layout in set(layouts)}
        return Cells.of(np.array([known[layout] for layout in layouts])), (every,)
    if variable.item.target == HUB:
        return _nothing((len(variable.choices),)), (every,)
    seconds, classes = _op_seconds(pricing, variable.item, variable.choices)
    return Cells.of(seconds), (classes,)


def _end_entries(pricing: Pricing, v: int, op: Op, variable: Variable, alike: int,
                 made: dict[Hashable, tuple[Cells, tuple[Classes, ...]]]) -> list[_Entry]:
    """What it costs to bring an op's outputs to the program's end, where that is where they go."""
    ends, found = {pricing.graph.outputs[0]: True} | {new: False for _, new in pricing.graph.updates}, []
    for port, t in enumerate(op.outputs):
        if t in ends:
            key = ("end", alike, port, ends[t])
            if key not in made:
                costs = np.array([end_seconds(pricing, t, c, port, ends[t]) for c in variable.choices])
                made[key] = (Cells.of(counted(costs * pricing.microbatches, pricing.hidden)),
                             (np.arange(len(costs)),))
            found.append(_Entry((v,), key, *made[key]))
    return found


def problem_of(pricing: Pricing, variables: tuple[Variable, ...], budget: float | None, row: Row | None = None
               ) -> Problem:
    """All costs of all choices: `CostNetwork.problem` of their network."""
    return network_of(pricing, variables).problem(budget, row)
