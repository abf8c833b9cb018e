"""Collects the terms of a step, and answers what decides how long they live: who reads, keeps, and runs again."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

from autoddl.core.graph import Graph
from autoddl.core.recompute import blocks_of
from autoddl.operators.footprints.table import whole_footprints
from autoddl.operators.footprints.view_storages import moved_reads
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.lifetimes import Owner, Term, What
from autoddl.pricing.optimizers import Optimizer

__all__ = ["StepTerms"]


class StepTerms:
    """The terms of a step as they are found, and what is asked of its graph to find them.

        graph        the planned graph, with hubs; `count` its number of ops
        has_sums     whether a sum of gradients is there while forward runs
        kept         the hubs that say whether their tensor is kept, and by which reads
        sparse       whether the gradients of some parameters may add up sparse
        flows        the tensors that have a gradient; `yielding` by op whether it yields one
        dependent    the tensors that depend on parameters or inputs
        readers      by tensor, the ops that read it, with the slot; `writer` the op that writes it
        is_view      by op, whether it is a view
        made         by op, its footprint on whole tensors; `moved` the reshapes that copy
        again        by op that runs again, its part; `block` by op of its block
        copies       the inputs (op, number) of others that are converted again
        terms        the terms found so far
    """

    def __init__(self, graph: Graph, optimizer: Optimizer, microbatches: int, processor: bool,
                 parts: Sequence[RecomputedPart], in_flight: int,
                 kept: Mapping[int, Sequence[tuple[int, int]]], sparse: bool) -> None:
        self.has_sums, self.kept, self.sparse = microbatches > max(1, in_flight), kept, sparse
        self.graph, self.optimizer, self.microbatches, self.count = graph, optimizer, microbatches, len(graph.ops)
        self.flows, self.dependent = graph.differentiable(), graph.dependent()
        self.readers, self.writer = graph.consumers(), graph.producers()
        self.is_view = [base(op) in VIEWS for op in graph.ops]
        self.made, self.moved = whole_footprints(graph, processor), moved_reads(graph, processor)
        self.yielding = [not self.flows.isdisjoint(op.outputs) for op in graph.ops]
        self.terms: list[Term] = []
        self.again = {i: part for part in parts for i in part.ops}
        self.copies = {copy for part in parts for copy in part.copies}
        self.block = {i: part for part in parts for i in range(part.block.start, part.block.end)}

    @cached_property
    def home(self) -> Mapping[int, int]:
        """By op of a block, any of which may run again, the number of that."""
        return {i: n for n, block in enumerate(blocks_of(self.graph)) for i in range(block.start, block.end)}

    def before(self, i: int) -> int:
        """The moment before op i writes its outputs."""
        return 2 * i

    def forward(self, i: int) -> int:
        """The moment of op i with its outputs."""
        return 2 * i + 1

    def backward(self, i: int) -> int:
        """The moment of the backward of op i."""
        return 3 * self.count - 1 - i

    @property
    def update(self) -> int:
        """The moment of the optimizer's update."""
        return 3 * self.count

    def add(self, owner: Owner, what: What, start: int, end: int, alias: Hashable = None, block: str = "") -> None:
        """Adds a term from moment `start` to moment `end`, unless that is earlier; without an alias it has its own."""
        if start <= end:
            self.terms.append(Term(owner, what, start, end, len(self.terms) if alias is None else alias, block))

    def keep(self, owner: Owner, what: What, start: int, i: int) -> None:
        """Adds a term from `start`, in forward, until op i's backward; if that runs again, it is gone in between."""
        if i in self.again:
            self.add(owner, what, start, self.forward(i))
            self.add(owner, what, self.backward(self.again[i].trigger), self.backward(i))
        else:
            self.add(owner, what, start, self.backward(i))

    def keep_copy(self, i: int, k: int, start: int) -> None:
        """Adds the copy of input k of op i from `start` until its backward; made again, it is gone in between."""
        if (i, k) in self.copies:
            self.add(("edge", i, k), ("copy",), start, self.forward(i))
            self.add(("edge", i, k), ("copy",), self.backward(self.block[i].trigger), self.backward(i))
        else:
            self.keep(("edge", i, k), ("copy",), start, i)

    def save(self, i: int, k: int) -> None:
        """Adds input k of op i from its forward on until its backward.

        Brought back or copied again it is gone in between, but for another copy.
        """
        owner, start = ("op", i, 0), self.forward(i) + 1
        if i in self.again or not self.comes_back(i, k):
            self.keep(owner, ("saved", k), start, i)
            return
        then = self.backward(self.block[i].trigger)
        if (i, k) not in self.copies:
            self.add(("edge", i, k), ("copy",), start, then - 1)
        self.add(owner, ("saved", k), then, self.backward(i))

    def comes_back(self, i: int, k: int) -> bool:
        """Whether op i reads in input k what its block brings back, or copies again."""
        return (i, k) in self.copies or self.is_brought_back(i, self.graph.ops[i].inputs[k])

    def is_brought_back(self, i: int, t: int) -> bool:
        """Whether op i reads tensor t, itself or behind views, from what its block brings back."""
        while i in self.block and t not in self.block[i].noted:
            source = self.writer.get(t)
            if source is None or source in self.again or not self.is_view[source]:
                return False
            t = self.graph.ops[source].inputs[0]
        return i in self.block

    def saves(self, i: int, k: int) -> bool:
        """Whether backward of op i, no view, reads its input k."""
        return not self.is_view[i] and k in self.made[i].saves

    def savers(self, i: int, k: int) -> list[int]:
        """The ops whose backward reads input k of op i, itself or behind views."""
        if not self.is_view[i]:
            return [i] * (k in self.made[i].saves)
        return [s for o in self.graph.ops[i].outputs for reader in self.readers[o] for s in self.savers(*reader)]

    def first(self, savers: Sequence[int]) -> int:
        """The saver by which a storage counts: of those in the block of the earliest, one that does not run again."""
        part = self.block.get(min(savers))
        return min(savers, key=lambda i: (self.block.get(i) is not part, i in self.again, i))

    def last_reader(self, t: int) -> int:
        """The last op that reads tensor t, itself or behind views."""
        found = [i for i, _ in self.readers[t]]
        return max([*found, *(self.last_reader(o) for i in found if self.is_view[i] for o in self.graph.ops[i].outputs)
                    ], default=0)
