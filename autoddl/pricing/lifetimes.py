"""Lists from which moment of a step to which everything lives that a choice decides the size of.

A step of N ops has 3 N + 1 moments, in this order:

    W_0 F_0 W_1 F_1 ...     forward of op i: before its outputs are there, and with them
    B_(N-1) ... B_0         backward of op i
    U                       the optimizer's update

What lives is a *term*: bytes that one op, one parameter or one edge decides, over an interval of moments. So the bytes
at a moment are a sum over choices, and a plan that fits a budget meets every one of these sums:

    parameter    own piece, optimizer state, residual of a sparse sum: always; the gradient at U, and from B of its
                 reader to U;
                 gathered copies: at their readers, and until the backward that reads them unless gathered again
    op           operands read: W..F; kept for backward: to B; outputs: from F to their readers;
                 temporaries: at W, F or B; gradients given and yielded: at B
    hub          a gradient that waits for those of the other readers of its tensor
    send, receive    a tensor, or its gradient, on the way to another stage: at all moments but U

What backward runs again and brings back (`operators.recomputed`) lives from B of the op that triggers it on. Until then
live the tensors that it reads, and copies that conversions made for ops that do not run again. Such a term depends on
the level of one block: that of the op that keeps, or that of the part that reads.

A gathered copy behind a hub or a view lives on until backward comes to the first reader that keeps it. Where that
reader sends it on, it does not. Whether it is gathered is up to one edge, whether it is sent on to another. So terms of
what is *taken off* (`TAKEN_OFF`) are negative, and undo the copy where it is sent on. They count at the moments of the
copy (`passed`), and may take off more than was there, never less. Copies of layouts that split the tensor on every axis
are left out: few gather these, and many send them on.

Where several readers of a hub keep what they read, its tensor lives on if one of them reads it as it is. No edge knows
that of the others. So in a network for rows the hub says it (`pricing.kept_tensors`). Where it is `kept` it lives until
backward comes to the last of these readers. Where it is not, none of them may read it as it is.

A view may keep more than it shows. Of a cut tensor some op may keep one piece. Where it is read as it is, the whole
storage lives on: the view owns the `rest`. A reshape of a permutation may copy what its source keeps anyway: it owns
what it `moved`. Where an edge behind the view copies, neither is kept, and the edge takes it off (`converted`). Both
are counted where one op keeps the view's output, and no other view on the way there copies.

Several microbatches may be in flight. Then each of the others adds what lives from the last forward to the first
backward, at every moment but the update's. Sums of gradients are there at the same time only where more microbatches
follow than are in flight. Else no forward comes behind the first backward.

Terms of one *alias* share storage: at a moment one of them counts. Where a storage is shared through views, one chain
of views counts. So the terms never add up to more than the memory line (`schedule.memory_line`) has at that moment. The
line may have more: buffers of buckets, and what the rules above leave out.

`Moment` names a moment: `forward OP`, `before OP`, `backward OP`, `update` or `around OP`. The last is never above the
largest of the op's three moments. It counts the terms that live at all three, and the largest sum of the op's own terms
at one of them. It is one sum again, and a plan need not say in which of the three the peak will be.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any

from autoddl.core.graph import RECEIVE, Graph, Kind, Op
from autoddl.core.hubs import HUB
from autoddl.core.recompute import blocks_of
from autoddl.core.stages import SEND
from autoddl.operators.footprints.table import whole_footprints
from autoddl.operators.footprints.view_storages import is_plain, is_reshape, moved_reads
from autoddl.operators.recomputed import RecomputedPart
from autoddl.operators.work import VIEWS, base
from autoddl.pricing.optimizers import Optimizer

__all__ = ["KINDS", "RESIDUAL", "TAKEN_OFF", "UPDATE", "Lifetimes", "Moment", "Owner", "Pattern", "Term",
           "lifetimes_of"]

Moment = str
"""`before OP`, `forward OP`, `backward OP`, `around OP` or `update`."""

UPDATE: Moment = "update"

KINDS = ("around", "backward", "forward", "before")
"""Moments of an op, those first that say more."""

IN_TRANSIT = ("in transit",)
"""What a stage of a pipeline sends, or a gradient that it sends back, until it has arrived."""

RESIDUAL = ("residual",)
"""What a sparse sum of a parameter's gradients has not sent yet (`core.sparse`)."""

TAKEN_OFF = ("sent on", "not passed on", "converted")
"""Kinds of terms that are negative: a copy that the edge's reader sends on, what a view does not pass on of it, and
what a storage has behind a view where the edge copies that."""

OF_VIEWS = ("rest", "moved")
"""Kinds of terms of what is kept behind a view, and is taken off where an edge on the way copies."""

TIED = "several"
"""Stands for a block in terms that depend on several."""

Owner = tuple[str, int, int]
"""("op", op, 0), ("parameter", tensor, 0) or ("edge", op that reads, slot): whose choice decides the size."""

What = tuple[Any, ...]
"""The kind of a term, and its number among those of this kind: ("read", 0)."""

Pattern = tuple[tuple[What, float], ...]
"""The terms of one owner that count, with their weights."""


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes that live over an interval of moments.

        owner    whose choice decides the size
        what     the kind of the bytes
        start    the first moment, as a number
        end      the last
        alias    the storage: of the terms of one, one counts
        block    the block whose part keeps what it reads, where that is why the bytes live
    """

    owner: Owner
    what: What
    start: int
    end: int
    alias: Hashable
    block: str = ""


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """The terms of a graph, and its moments by name and number."""

    graph: Graph
    terms: tuple[Term, ...]
    index: Mapping[str, int]
    """The number of every op."""
    in_flight: int = 1
    """The number of microbatches whose activations are there at once."""

    def numbers(self, moment: Moment) -> tuple[int, ...]:
        """The numbers of a moment, three of an `around`. Raises KeyError where the graph has no such op."""
        count = len(self.graph.ops)
        if moment == UPDATE:
            return (3 * count,)
        kind, _, name = moment.partition(" ")
        i = self.index[name]
        known = {"before": (2 * i,), "forward": (2 * i + 1,), "backward": (3 * count - 1 - i,)}
        return known[kind] if kind != "around" else (*known["before"], *known["forward"], *known["backward"])

    def has(self, row: Mapping[Moment, float]) -> bool:
        """Whether the graph has every moment of `row`."""
        named = [moment.partition(" ") for moment in row if moment != UPDATE]
        return all(kind in KINDS and name in self.index for kind, _, name in named)

    def alive(self, number: int, counts: Callable[[Term], bool] = bool) -> list[Term]:
        """The terms that count at a moment: the first of every alias; those that do not `counts` are left out."""
        found: dict[Hashable, Term] = {}
        for term in self.terms:
            if term.start <= number <= term.end and counts(term):
                found.setdefault(term.alias, term)
        return list(found.values())

    def patterns(self, row: Mapping[Moment, float], counts: Callable[[Term], bool] = bool) -> dict[Owner, Pattern]:
        """The terms of every owner that count in the sum over moments of weight * bytes at the moment; see `alive`."""
        found: dict[Owner, dict[What, float]] = defaultdict(lambda: defaultdict(float))
        others = [] if self.in_flight == 1 else self._kept_between(counts)
        for moment, weight in row.items():
            for owner, what in self._counted(moment, counts):
                found[owner][what] += weight
            for owner, what in others if moment != UPDATE else ():
                found[owner][what] += weight * (self.in_flight - 1)
        return {owner: tuple(sorted(what.items(), key=str)) for owner, what in found.items()}

    def _kept_between(self, counts: Callable[[Term], bool]) -> list[tuple[Owner, What]]:
        """The terms that a microbatch keeps between forward and backward, copies of parameters left out."""
        last = 2 * len(self.graph.ops) - 1
        behind = {t for t, tensor in enumerate(self.graph.tensors) if tensor.kind is Kind.PARAMETER}
        behind |= {op.outputs[0] for op in self.graph.ops if op.target == HUB and op.inputs[0] in behind}
        return [(term.owner, term.what) for term in self.alive(last, counts)
                if term.end > last and term.what != IN_TRANSIT
                and (term.owner[0] == "op" or self._is_copy(term, behind))]

    def _is_copy(self, term: Term, behind: set[int]) -> bool:
        """Whether the term is of the copy of an activation that an edge makes."""
        kind, i, slot = term.owner
        return (kind == "edge" and term.what[0] in ("copy", "copy unless kept", "converted")
                and self.graph.ops[i].inputs[slot] not in behind)

    def _counted(self, moment: Moment, counts: Callable[[Term], bool]) -> Iterator[tuple[Owner, What]]:
        """(owner, what) of every term at the moment; of an `around` with the op's alternatives as one `max`."""
        sums = [Counter((term.owner, term.what) for term in self.alive(n, counts)) for n in self.numbers(moment)]
        if len(sums) == 1:
            yield from sums[0].elements()
            return
        common = sums[0] & sums[1] & sums[2]
        yield from common.elements()
        own: Owner = ("op", self.index[moment.partition(" ")[2]], 0)
        rest = tuple(tuple(sorted((what for owner, what in (one - common).elements()
                                   if owner == own and what[0] not in OF_VIEWS), key=str)) for one in sums)
        yield own, ("max", rest)


def lifetimes_of(graph: Graph, optimizer: Optimizer, microbatches: int, processor: bool,
                 parts: Sequence[RecomputedPart] = (), in_flight: int = 1,
                 kept: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}), sparse: bool = False
                 ) -> Lifetimes:
    """The lifetimes in a step of `graph`, with hubs, of one of `microbatches`, of which some are `in_flight` at once.

    `processor` says whether the device is a CPU; `parts` run again in backward. Hubs of `kept` say whether their tensor
    is kept by the readers that are named. With `sparse` the gradients of some parameters may add up sparse.
    """
    made = _Builder(graph, optimizer, microbatches, processor, parts, in_flight, kept, sparse)
    return Lifetimes(graph, tuple(made.terms), {op.name: i for i, op in enumerate(graph.ops)}, in_flight)


class _Builder:
    """Terms as they are found."""

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
        self.block = {i: part for part in parts for i in range(part.block.start, part.block.end)}
        self._parameters()
        for i, op in enumerate(graph.ops):
            if op.target in (SEND, RECEIVE):
                self.add(("op", i, 0), IN_TRANSIT, 0, self.update - 1)
            if not self.is_view[i] and set(op.outputs) & self.dependent:
                self._op(i, op)
        self._gradients()
        for part in parts:
            self._read_by(part)

    @cached_property
    def home(self) -> Mapping[int, int]:
        """By op of a block, any of which may run again, the number of that."""
        return {i: n for n, block in enumerate(blocks_of(self.graph)) for i in range(block.start, block.end)}

    def before(self, i: int) -> int:
        return 2 * i

    def forward(self, i: int) -> int:
        return 2 * i + 1

    def backward(self, i: int) -> int:
        return 3 * self.count - 1 - i

    @property
    def update(self) -> int:
        return 3 * self.count

    def add(self, owner: Owner, what: What, start: int, end: int, alias: Hashable = None, block: str = "") -> None:
        if start <= end:
            self.terms.append(Term(owner, what, start, end, len(self.terms) if alias is None else alias, block))

    def keep(self, owner: Owner, what: What, start: int, i: int) -> None:
        """A term from `start`, in forward, until the backward of op i; if that runs again, it is gone in between."""
        if i in self.again:
            self.add(owner, what, start, self.forward(i))
            self.add(owner, what, self.backward(self.again[i].trigger), self.backward(i))
        else:
            self.add(owner, what, start, self.backward(i))

    def save(self, i: int, k: int) -> None:
        """Input k of op i from its forward on until its backward; if it is brought back, a copy alone stays."""
        owner, start = ("op", i, 0), self.forward(i) + 1
        if i in self.again or not self.is_brought_back(i, self.graph.ops[i].inputs[k]):
            self.keep(owner, ("saved", k), start, i)
            return
        then = self.backward(self.block[i].trigger)
        self.add(("edge", i, k), ("copy",), start, then - 1)
        self.add(owner, ("saved", k), then, self.backward(i))

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

    def _parameters(self) -> None:
        graph, largest = self.graph, None
        for t, tensor in enumerate(graph.tensors):
            if tensor.kind is not Kind.PARAMETER:
                continue
            trained, owner = t in self.flows, ("parameter", t, 0)
            self.add(owner, ("own", 1 + self.optimizer.copies(tensor) * trained), 0, self.update)
            if trained:
                self.add(owner, ("own", 1), self.update, self.update)
                if self.sparse:
                    self.add(owner, RESIDUAL, 0, self.update)
                if self.optimizer.is_adam and (largest is None or tensor.nbytes > graph.tensors[largest].nbytes):
                    largest = t
            for j, k in self.readers[t]:
                self._gathered(j, k)
                if trained and self.yielding[j]:
                    self._reduced(j, k)
        if largest is not None:  # AdamW holds two temporaries of the parameter at hand
            self.add(("parameter", largest, 0), ("own", 2), self.update, self.update)

    def _gathered(self, j: int, k: int) -> None:
        """The gathered copy that op j reads, `kept` or gathered `again` in backward."""
        edge, savers, part = ("edge", j, k), sorted(set(self.savers(j, k))), self.again.get(j)
        if self.microbatches > 1:
            self.add(edge, ("gathered kept",), 0, self.before(j) - 1)
        self.add(edge, ("gathered",), self.before(j), self.forward(j))
        if part is not None and not self.is_view[j]:
            then = self.backward(part.trigger)
            last = max(then, self.backward(j)) if savers else then - 1  # gone before the trigger's own backward
            self.add(edge, ("gathered kept",), self.forward(j) + 1, last)
            self.add(edge, ("gathered again",), then, last)
        elif savers == [j]:
            self.add(edge, ("gathered kept",), self.forward(j) + 1, self.backward(j))
            self.add(edge, ("gathered again",), self.backward(j), self.backward(j))
        elif savers:  # behind a hub or a view each reader may send it on, and keep what it received instead
            last = max(i for o in self.graph.ops[j].outputs for i, _ in self.readers[o])
            self.add(edge, ("gathered kept",), self.forward(j) + 1, self.before(last) - 1)
            self._passed_on(j, k, last)
        if self.graph.ops[j].target == HUB:
            for i, slot in self.readers[self.graph.ops[j].outputs[0]]:
                if self.saves(i, slot):
                    self.keep(("edge", i, slot), ("copy",), self.before(i), i)
                else:
                    self.add(("edge", i, slot), ("copy",), self.before(i), self.forward(i))

    def _passed_on(self, j: int, k: int, last: int) -> None:
        """The copy of edge (j, k) behind op j, from its `last` reader there on, where one keeps it as it is.

        It depends on the levels of all blocks that read it: with policies it is left out (`policies.Deciders`). Where
        all who read it are outside of blocks, it does not.
        """
        every = self._keepers(j)
        keepers = [(i, path) for i, path in every if i not in self.again]
        if not keepers or j in self.again:
            return
        first, path = min(keepers)
        start, end = self.before(last), self.backward(first)
        block = "" if self.home.keys().isdisjoint((j, *(i for _, path in every for i, _ in path))) else TIED
        self.add(("edge", j, k), ("passed kept",), start, end, block=block)
        self.add(("edge", j, k), ("passed again",), end, end, block=block)
        for at in path[:-1]:
            self.add(("edge", *at), ("not passed on",), start, end, block=block)
        self.add(("edge", *path[-1]), ("sent on",), start, end, block=block)

    def _keepers(self, j: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """The ops that keep the input of op j, a hub or a view of all of it. Each comes with the edges on the way."""
        op, tensors = self.graph.ops[j], self.graph.tensors
        if len(op.inputs) > 1 or len(op.outputs) > 1 or tensors[op.inputs[0]].nbytes != tensors[op.outputs[0]].nbytes:
            return []
        found = []
        for i, k in self.readers[op.outputs[0]]:
            if self.is_view[i]:
                found += [(saver, ((i, k), *path)) for saver, path in self._keepers(i)]
            elif self.saves(i, k):
                found.append((i, ((i, k),)))
        return found

    def _reduced(self, j: int, k: int) -> None:
        """The gradient that op j yields of a parameter, from then on; of several microbatches it is summed up."""
        edge, op = ("edge", j, k), self.graph.ops[j]
        passes = op.target == HUB or self.is_view[j] or k in self.made[j].passes
        if self.has_sums:
            self.add(edge, ("gradient summed",), 0, self.backward(j))
        if self.microbatches > 1 or not passes:
            self.add(edge, ("gradient",), self.backward(j) + 1, self.update - 1)

    def _op(self, i: int, op: Op) -> None:
        made, owner = self.made[i], ("op", i, 0)
        self.keep(owner, ("beside",), self.forward(i), i)
        self.add(owner, ("during",), self.forward(i), self.forward(i))
        self.add(owner, ("before",), self.before(i), self.before(i))
        for n, o in enumerate(op.outputs):
            if n in made.keeps:
                self.keep(owner, ("kept", n), self.forward(i), i)
                self._copies(o)
                self._moved(o)
            else:
                self._storage(o, owner, ("written", n), self.forward(i))

    def _storage(self, t: int, owner: Owner, what: What, start: int) -> None:
        """The storage of tensor t from `start` on, along the views to the first op that keeps it or the last reader."""
        source = self.writer.get(t, -1)
        if source in self.kept and source not in self.block:
            self._kept_storage(self.kept[source], owner, what, start)
            return
        found = [(self.first(savers), i, k) for i, k in self.readers[t] if (savers := self.savers(i, k))]
        if not found and not self.readers[t]:
            return
        first = self.first([saver for saver, _, _ in found]) if found else -1
        i, k = min((i, k) for saver, i, k in found if saver == first) if found else max(self.readers[t])
        self.add(owner, what, start, self.forward(i) - 2)
        op, reader = self.graph.ops[i], ("op", i, 0)
        if not self.is_view[i]:
            self.add(reader, ("read", k), self.before(i), self.forward(i))
            if found:
                self.save(i, k)
        elif len(op.outputs) > 1:  # it cuts: the pieces live on their own
            for n, o in enumerate(op.outputs):
                self._storage(o, reader, ("written", n), self.before(i))
            self._rest(i)
        else:
            self._storage(op.outputs[0], reader, ("through",), self.before(i))
            self._rest(i)
        for i2, k2 in self.readers[t]:
            if (i2, k2) != (i, k) and self.saves(i2, k2):
                self.keep(("edge", i2, k2), ("copy",), self.forward(i2), i2)

    def _kept_storage(self, reads: Sequence[tuple[int, int]], hub: Owner, what: What, start: int) -> None:
        """The storage of a hub that says whether it is kept by one of `reads`, and the copies that these keep."""
        (first, k), (last, _) = reads[0], reads[-1]
        self.add(hub, what, start, self.before(last) - 1)
        self.add(hub, ("kept",), self.before(last), self.backward(last))
        self.add(("edge", first, k), ("copy",), self.before(first), self.before(last) - 1)
        self.add(("edge", first, k), ("copy unless kept",), self.before(last), self.backward(last))
        self.add(("op", first, 0), ("saved", k), self.backward(last) + 1, self.backward(first))
        for i, slot in reads[1:]:
            self.add(("edge", i, slot), ("copy",), self.before(i), self.backward(i))

    def _rest(self, c: int) -> None:
        """Adds what a storage has beyond the one output of view c that is kept, after the last reader of the others."""
        op, tensors = self.graph.ops[c], self.graph.tensors
        pieces = [n for n, o in enumerate(op.outputs) if any(self.savers(*at) for at in self.readers[o])]
        if len(pieces) != 1 or self._is_expanded(op.inputs[0]):
            return
        whole, piece = (prod(tensors[t].shape) for t in (op.inputs[0], op.outputs[pieces[0]]))
        others = [self.forward(self._last_reader(o)) + 1 for n, o in enumerate(op.outputs) if n != pieces[0]]
        if whole > piece:
            share = whole / piece - 1
            self._behind(c, ("rest", pieces[0], share), share, max([self.before(c), *others]),
                         self._way(op.outputs[pieces[0]]))

    def _moved(self, t: int) -> None:
        """The copies of an output that its own op keeps which reshapes make, and other ops keep."""
        for i, _ in self.readers[t]:
            if not self.is_view[i] or len(self.graph.ops[i].outputs) > 1:
                continue
            if i in self.moved:
                way = self._way(self.graph.ops[i].outputs[0], True)
                self._behind(i, ("moved", self.moved[i]), 1.0, self.forward(way[-1][0]) if way else 0, way)
            else:
                self._moved(self.graph.ops[i].outputs[0])

    def _behind(self, c: int, what: What, share: float, start: int, way: Sequence[tuple[int, int]]) -> None:
        """Bytes of view c from `start` on that the last op of `way` keeps, taken off where an edge on the way copies.

        They are `share` times what the op reads. All must be in one block, or outside of blocks.
        """
        if not way or len({self.home.get(i, -1) for i in (c, *(i for i, _ in way))}) > 1:
            return
        saver, k = way[-1]
        spans = [(start, self.backward(saver))]
        if saver in self.again or self.is_brought_back(saver, self.graph.ops[saver].inputs[k]):
            spans = [(start, self.forward(saver)), (self.backward(self.block[saver].trigger), self.backward(saver))]
        for begin, end in spans:
            self.add(("op", c, 0), what, begin, end)
            for i, slot in way:
                self.add(("edge", i, slot), ("converted", share), begin, end)

    def _way(self, t: int, row_major: bool = False) -> tuple[tuple[int, int], ...]:
        """The edges from tensor t to the one op that keeps it, behind views that copy it under no layout; else none.

        Of a `row_major` tensor no reshape copies.
        """
        keeping = [at for at in self.readers[t] if self.savers(*at)]
        if len(keeping) != 1:
            return ()
        (i, k), = keeping
        if not self.is_view[i]:
            return ((i, k),)
        op = self.graph.ops[i]
        row_major = row_major and is_reshape(op, self.graph)
        if len(op.inputs) > 1 or len(op.outputs) > 1 or not (row_major or is_plain(op, self.graph)):
            return ()
        rest = self._way(op.outputs[0], row_major)
        return ((i, k), *rest) if rest else ()

    def _is_expanded(self, t: int) -> bool:
        """Whether a view before tensor t shows elements several times."""
        i = self.writer.get(t)
        if i is None or not self.is_view[i]:
            return False
        before, tensors = self.graph.ops[i].inputs[0], self.graph.tensors
        return prod(tensors[t].shape) > prod(tensors[before].shape) or self._is_expanded(before)

    def _copies(self, t: int) -> None:
        """The copies that readers keep of an output that its own op keeps."""
        for i, k in self.readers[t]:
            if self.is_view[i]:
                for o in self.graph.ops[i].outputs:
                    self._copies(o)
            elif k in self.made[i].saves:
                self.keep(("edge", i, k), ("copy",), self.forward(i), i)

    def _read_by(self, part: RecomputedPart) -> None:
        """Adds what a part reads of other ops: it lives until the part has run again."""
        for t in part.reads:
            i = self.writer.get(t)
            if i is None or t not in self.dependent:
                continue
            op = self.graph.ops[i]
            root = op.inputs[0] if op.target == HUB else t
            source = self.writer.get(root)
            if source is None or self.is_view[source]:
                continue  # a hub of a parameter, whose copies the edges count; a view of what lives anyway
            start = max(self._free_from(t, i, part), self._free_from(root, source, part))
            self.add(("op", i, 0), ("written", op.outputs.index(t)), start, self.backward(part.trigger) - 1,
                     ("read by a part", root), part.block.name)

    def _free_from(self, t: int, i: int, part: RecomputedPart) -> int:
        """From when on no other term has the storage of tensor t, which op i writes, whatever runs again beside `part`.
        """
        ends = list[int]()
        if not self.is_view[i] and self.graph.ops[i].outputs.index(t) in self.made[i].keeps:
            ends.append(self.backward(i))
        for s in (s for j, k in self.readers[t] for s in self.savers(j, k)):
            ends.append(self.forward(s) if self.again.get(s) is part else self.backward(s))
        return max(ends, default=self.forward(self._last_reader(t))) + 1

    def _last_reader(self, t: int) -> int:
        """The last op that reads tensor t, itself or behind views."""
        found = [i for i, _ in self.readers[t]]
        return max([*found, *(self._last_reader(o) for i in found if self.is_view[i] for o in self.graph.ops[i].outputs)
                    ], default=0)

    def _gradients(self) -> None:
        """Gradients of activations: given to an op, yielded by it, and waiting at a hub for those of later readers."""
        shared = self._shared_gradients()
        for i, op in enumerate(self.graph.ops):
            if not self.yielding[i]:
                continue
            now, owner = self.backward(i), ("op", i, 0)
            if not self.is_view[i] and any(t in self.flows for t in op.inputs):
                given = next(o for o in op.outputs if o in self.flows)
                self.add(owner, ("written", op.outputs.index(given)), now, now, shared.find(("given", given)))
                self.add(owner, ("yields",), now, now)
                self.add(owner, ("back",), now, now)
            if op.target == HUB and op.inputs[0] in self.flows and not self._is_parameter(op.inputs[0]):
                reads = self._yielding(op.outputs[0])
                if len(reads) > 1:
                    first, second = self.backward(reads[-1]), self.backward(reads[-2])
                    self.add(owner, ("waiting",), first + 1, second, shared.find(("waits", op.outputs[0])))
                    self.add(owner, ("waiting",), second + 1, now - 1)

    def _yielding(self, t: int) -> list[int]:
        """The readers of t that yield a gradient of it, in order."""
        return [i for i, _ in self.readers[t] if self.yielding[i]]

    def _is_parameter(self, t: int) -> bool:
        return self.graph.tensors[t].kind is Kind.PARAMETER

    def _shared_gradients(self) -> "_Sets":
        """Which gradients may be one storage: those that views, hubs and ops pass on as they are."""
        found = _Sets({})
        for i, op in enumerate(self.graph.ops):
            if not self.yielding[i]:
                continue
            if op.target == HUB or self.is_view[i]:
                for o in op.outputs:
                    found.join(("given", op.inputs[0]), ("given", o))
                continue
            for k in self.made[i].passes:
                t = op.inputs[k]
                if t in self.flows and not self._is_parameter(t):
                    self._passed(found, i, t)
        return found

    def _passed(self, found: "_Sets", i: int, t: int) -> None:
        """Op i passes its gradient on to t: behind a hub with several readers, as what waits if it is the first."""
        writer, reads, own = self.writer.get(t), self._yielding(t), ("given", self.graph.ops[i].outputs[0])
        if writer is None or self.graph.ops[writer].target != HUB or len(reads) < 2:
            found.join(("given", t), own)
        elif reads[-1] == i:
            found.join(("waits", t), own)


@dataclass(frozen=True, slots=True)
class _Sets:
    """Disjoint sets."""

    parent: dict[Hashable, Hashable]

    def find(self, a: Hashable) -> Hashable:
        while self.parent.get(a, a) != a:
            a = self.parent[a]
        return a

    def join(self, a: Hashable, b: Hashable) -> None:
        self.parent[self.find(a)] = self.find(b)
