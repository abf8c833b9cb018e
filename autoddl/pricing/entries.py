"""Prices every variable and every edge over all choices of its ends: the factors of a problem before bytes are known.

    own(v)        forward and backward of an op; the update of a parameter
    edge(u, v)    conversion there + conversion of the gradient back
    end(v)        from the op that writes the loss or a new buffer value to the program's end

Variables with the same target, arguments, shapes, gradients and choices are alike (`likeness`): their entries have the
same cells. Where the search may recompute (`policies`), an entry has its seconds at every level of its block.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from math import nan

import numpy as np

from autoddl.core.cost_table import Array, Cells, Classes
from autoddl.core.graph import RECEIVE, Graph, Kind, Op, Tensor
from autoddl.core.hubs import HUB
from autoddl.core.stages import SEND
from autoddl.operators.work import intermediates, weight_kernels
from autoddl.pricing.beside import beside_seconds
from autoddl.pricing.choice_classes import Ports, pieces_of
from autoddl.pricing.choices import Choice, numbered
from autoddl.pricing.edge_tables import Ends, Use, counted, edge_ends, edge_seconds
from autoddl.pricing.edges import Edge, carries, edges_of, gathered_back
from autoddl.pricing.kernel_prices import Kernels, inner_seconds
from autoddl.pricing.lifetimes import Owner
from autoddl.pricing.policies import Policies, at_levels
from autoddl.pricing.price import Pricing, end_seconds, update_seconds
from autoddl.pricing.space import Variable

__all__ = ["Entry", "Levels", "entries_of", "likeness", "zero_cells"]


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of some policies by number; others are at level 0."""

    known: Mapping[int, int]

    def __getitem__(self, policy: int) -> int:
        return self.known.get(policy, 0)

    def at(self, policy: int, level: int) -> "Levels":
        """These levels, but for one policy."""
        return Levels({**self.known, policy: level})


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

    def level(self, levels: Levels) -> int:
        """The level of its block under the levels of all policies, 0 of an op in no block."""
        return levels[self.policy] if self.policy >= 0 else 0


def entries_of(pricing: Pricing, variables: tuple[Variable, ...], policies: Policies) -> tuple[Entry, ...]:
    """The entries of all variables and edges, at every level of their blocks."""
    return _Builder(pricing, variables, policies).run()


class _Builder:
    """Makes the entries, those that are alike of the same cells."""

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

    def run(self) -> tuple[Entry, ...]:
        entries, pricing = list[Entry](), self.pricings[0]
        for v, variable in enumerate(self.variables):
            if isinstance(variable.item, Op):
                entries += _end_entries(pricing, v, variable.item, variable, self.alike[v], self.made)
            entries.append(self.own(v, variable))
        read = [gathered_back(one, self.flows) for one in self.pricings]
        entries += [self.edge(edge, read) for edge in edges_of(self.graph, self.variables)]
        return tuple(entries)

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
            beside = beside_seconds(pricing, self.graph.tensors[edge.tensor].name, target.item.name)
            use = Use(self.graph.tensors[edge.tensor], edge.port, edge.slot, flows, edge.tensor in back,
                      pricing.share_again(target.name, edge.slot, beside), edge.tensor in self.intermediates, beside,
                      self._behind(pricing, target.item))
            keys.append(("edge", self.alike[edge.source], edge.port, self.alike[edge.target], edge.slot, use.flows,
                         use.back, use.again, use.intermediate, use.beside, str(use.behind)))
            if keys[-1] not in self.made:
                self.ends[keys[-1]] = ends = edge_ends(pricing, self.ports, source, target, use)
                self.made[keys[-1]] = edge_seconds(pricing, self.ports, target, use, ends), ends.classes
        i = self.ops[target.item.name]
        return self.entry((edge.source, edge.target), keys, ("edge", i, edge.slot), self.ends[keys[0]], self.block[i])

    def _behind(self, pricing: Pricing, op: Op) -> float:
        """Seconds of what is computed beside the messages behind an op of one output; NaN where they differ."""
        if not pricing.cluster.device.hides:
            return 0.0
        found = {beside_seconds(pricing, self.graph.tensors[o].name, self.graph.ops[j].name)
                 for o in op.outputs[:1] for j, _ in self.graph.consumers()[o]}
        return found.pop() if len(found) == 1 else nan

    def entry(self, variables: tuple[int, ...], keys: Sequence[Hashable], owner: Owner, ends: Ends | None, policy: int
              ) -> Entry:
        seconds = tuple([self.made[key][0] for key in keys])
        return Entry(variables, tuple(keys), seconds, self.made[keys[0]][1], owner, ends, policy)


def likeness(graph: Graph, variable: Variable, differentiable: frozenset[int], dependent: frozenset[int],
             hubs: frozenset[int], pricing: Pricing) -> Hashable:
    """A key that is equal for variables whose costs are equal.

    It says what is computed, how often, on which shapes, with which gradients, fused with what, and in
    which dtype.
    """
    if isinstance(variable.item, Tensor):
        item = variable.item
        return (item.shape, item.dtype, item.master, item.reduced, item.trained, id(variable.choices))
    op = variable.item
    tensors = tuple((graph.tensors[t].shape, graph.tensors[t].dtype, t in differentiable, t in dependent,
                     t in hubs, graph.tensors[t].kind is Kind.PARAMETER, t in pricing.weights)
                    for t in (*op.inputs, *op.outputs))
    args = tuple((k, v) for k, v in op.args if k != "key")
    port = op.name if pricing.ports is not None and op.target in (SEND, RECEIVE) else None
    runs = pricing.chained.get(op.name), pricing.narrow.get(op.name)
    return op.target, op.slots, args, tensors, id(variable.choices), runs, port


def _own_seconds(pricing: Pricing, variable: Variable) -> tuple[Cells, tuple[Classes, ...]]:
    """Seconds that a variable costs by itself: an op its kernels, a parameter its update and exchange, a hub nothing.
    """
    every = np.arange(len(variable.choices))
    if isinstance(variable.item, Tensor):
        layouts = [choice.outputs[0] for choice in variable.choices]
        known = {layout: update_seconds(pricing, variable.item, layout) * pricing.times.update
                 for layout in set(layouts)}
        if pricing.copies is not None:
            known = {layout: seconds + pricing.copies.seconds(variable.item, layout, pricing.mesh)
                     * pricing.times.reduce for layout, seconds in known.items()}
        return Cells.of(np.array([known[layout] for layout in layouts])), (every,)
    if variable.item.target == HUB:
        return zero_cells((len(variable.choices),)), (every,)
    seconds, classes = _op_seconds(pricing, variable.item, variable.choices)
    messages = _port_seconds(pricing, variable.item, variable.choices)
    if isinstance(messages, float):
        return Cells.of(seconds), (classes,)
    return Cells.of(seconds[classes] + messages), (every,)


def _op_seconds(pricing: Pricing, op: Op, choices: Sequence[Choice]) -> tuple[Array, Classes]:
    """Seconds of an op's kernels over the classes of its pieces, and the class of every option."""
    graph = pricing.graph
    count, every = len(op.inputs), [graph.tensors[t].shape for t in (*op.inputs, *op.outputs)]
    found = pieces_of(choices, every, pricing.mesh)
    flows = graph.differentiable()
    seconds, kernels = np.zeros(len(found.shapes)), Kernels.of(pricing, op, flows)
    times = pricing.times
    inner = numbered(choices).inner[found.first].astype(bool).tolist()
    for c, (shapes, reduces) in enumerate(zip(found.shapes, inner, strict=True)):
        forward, backward = kernels.seconds(shapes[:count], shapes[count:], reduces)
        again = times.backward * (op.name in pricing.again)
        seconds[c] = sum(forward) * (times.forward + again) + sum(backward) * times.backward
        if pricing.weights:
            waits = weight_kernels(op, flows, pricing.weights, len(backward))
            seconds[c] += (times.late - times.backward) * sum(compress(backward, waits))
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


def _end_entries(pricing: Pricing, v: int, op: Op, variable: Variable, alike: int,
                 made: dict[Hashable, tuple[Cells, tuple[Classes, ...]]]) -> list[Entry]:
    """Entries for bringing an op's outputs to the program's end: the loss and new values of buffers."""
    ends, found = {pricing.graph.outputs[0]: True} | {new: False for _, new in pricing.graph.updates}, []
    for port, t in enumerate(op.outputs):
        if t in ends:
            key = ("end", alike, port, ends[t])
            if key not in made:
                costs = np.array([end_seconds(pricing, t, c, port, ends[t]) for c in variable.choices])
                made[key] = Cells.of(counted(costs, pricing.hidden)), (np.arange(len(costs)),)
            seconds, classes = made[key]
            found.append(Entry((v,), (key,), (seconds,), classes))
    return found


def zero_cells(shape: tuple[int, ...]) -> Cells:
    """Zeros, made when they are asked for."""
    return Cells(shape, partial(_zeros, shape), 0.0)


def _zeros(shape: tuple[int, ...], rows: slice | Classes) -> Array:
    return np.zeros((len(np.arange(shape[0])[rows]), *shape[1:]))
