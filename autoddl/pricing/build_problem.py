"""Builds the problem that the search solves: a table of seconds and bytes for every op, parameter and edge.

    own(v)        seconds of an op; the bytes of its own terms, and of what a parameter stores
    edge(u, v)    seconds of conversions; the bytes of copies and of parameters' gradients
    end(v)        seconds of bringing results to the program's end

Seconds are those of `entries`. Entries that are alike share their tables. So a repeated block names the same tables,
and the search solves it once.

Bytes are those of a *row*: a sum over moments of weight * what lives then (`lifetimes`), with weights that add up to
one. Every plan whose peak is within a budget meets every row within it; so the problem of a row bounds them all.

Where the search may recompute (`policies`), every block has one variable more, in front of the others: the level at
which backward computes it again. An op's seconds and bytes, and those of the edges into it, are then over the level of
its block too. Bytes that a later block keeps an op's output for are over the level of that block.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from autoddl.core.cost_table import Array, Cells, Rows
from autoddl.core.problem import Factor, Problem, Table
from autoddl.pricing.byte_rows import Sizes, bytes_of_edge, sizes_of, taken_off, weighted
from autoddl.pricing.entries import Entry, Levels, entries_of, zero_cells
from autoddl.pricing.floors import cone_cost
from autoddl.pricing.lifetimes import UPDATE, Lifetimes, Moment, Owner, Pattern
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.policies import NO_POLICIES, Deciders, Policies, at_levels, deciders_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable
from autoddl.pricing.step_lifetimes import lifetimes_of

__all__ = ["CostNetwork", "Row", "network_of", "problem_of"]

Row = Mapping[Moment, float]
"""The weight of every moment whose bytes are added up; the weights add up to one."""


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
               given.waiting, self.policies, tuple(levels), bool(self.kept), bool(given.sparse))
        if key not in self.known:
            pricing = at_levels(given, self.policies, levels)
            self.known[key] = lifetimes_of(pricing.graph, optimizer_of(pricing.optimizer), pricing.microbatches,
                                           processor, pricing.parts, pricing.in_flight, self.kept,
                                           bool(pricing.sparse), pricing.waiting)
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
        known = Levels(dict(enumerate(levels)))
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

    def _over(self, entry: Entry, patterns: "_Patterns") -> tuple[tuple[int, ...], list[Levels]]:
        """The policies that an entry's costs depend on, and the levels of all policies, for every combination."""
        if not self.policies.blocks:
            return (), [Levels({})]
        own, count = entry.policy, range(len(self.policies.levels))
        later = self._deciders.later.get(entry.owner, -1) if entry.owner else -1
        plain = [Levels({own: a}) for a in count] if own >= 0 else [Levels({})]
        if later >= 0:
            rows = [[one.at(later, c) for c in count] for one in plain]
            costs = [[_cost(entry, patterns, one) for one in row] for row in rows]
            if any(cost != row[0] for row in costs for cost in row):
                same = all(row == costs[0] for row in costs)
                return ((later,), rows[0]) if same else ((own, later), [one for row in rows for one in row])
        return ((own,), plain) if len({_cost(entry, patterns, one) for one in plain}) > 1 else ((), plain[:1])

    def _table(self, entry: Entry, levels: Sequence[Levels], patterns: Sequence[Pattern], sizes: tuple[int, ...]
               ) -> Table:
        nothing = zero_cells((*sizes, *entry.seconds[0].shape))
        seconds = _stacked([entry.seconds[entry.level(one)] for one in levels], sizes)
        most = _most_taken_off(entry, patterns)
        nbytes = _stacked([_more(self._bytes(entry, pattern), most - _taken_off(entry, pattern))
                           for pattern in patterns], sizes) if any(patterns) else nothing
        return Table.over(seconds, nbytes, nothing, (*(np.arange(n) for n in sizes), *entry.classes))

    def _bytes(self, entry: Entry, pattern: Pattern) -> Cells:
        """The bytes of a pattern over the classes of an entry."""
        if not pattern:
            return zero_cells(entry.seconds[0].shape)
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
        levels, options = Levels(dict(enumerate(choice[:count]))), choice[count:]
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
class _Patterns:
    """The patterns of a row by the levels of even and odd blocks, then by owner."""

    found: Mapping[tuple[int, int], Mapping[Owner, Pattern]]
    deciders: Deciders

    def of(self, owner: Owner | None, levels: Levels) -> Pattern:
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


def _cost(entry: Entry, patterns: _Patterns, levels: Levels) -> tuple[Hashable, Pattern]:
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


def network_of(pricing: Pricing, variables: tuple[Variable, ...], policies: Policies = NO_POLICIES) -> CostNetwork:
    """All seconds of all choices. With `policies`, all `separable`, `pricing` computes nothing again by itself."""
    plain = at_levels(pricing, policies, [0] * len(policies.blocks))
    return CostNetwork(plain, variables, entries_of(pricing, variables, policies), policies)


def problem_of(pricing: Pricing, variables: tuple[Variable, ...], budget: float | None, row: Row | None = None
               ) -> Problem:
    """The problem of the variables of a mesh under `budget` bytes per device (`CostNetwork.problem`)."""
    return network_of(pricing, variables).problem(budget, row)
