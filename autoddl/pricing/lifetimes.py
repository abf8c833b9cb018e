"""Tells from which moment of a step to which everything lives that a choice decides the size of.

A step of N ops has 3 N + 1 moments, in this order:

    W_0 F_0 W_1 F_1 ...     forward of op i: before its outputs are there, and with them
    B_(N-1) ... B_0         backward of op i
    U                       the optimizer's update

What lives is a *term*: bytes that one op, one parameter or one edge decides, over an interval of moments. So the bytes
at a moment are a sum over choices, and a plan that fits a budget meets every one of these sums. `step_lifetimes` lists
the terms of a graph.

Several microbatches may be in flight. Then each of the others adds what lives from the last forward to the first
backward, at every moment but the update's. Sums of gradients are there at the same time only where more microbatches
follow than are in flight. Else no forward comes behind the first backward. Each microbatch that waits for W adds what
it keeps for that (`operators.waiting`).

Terms of one *alias* share storage: at a moment one of them counts. Where a storage is shared through views, one chain
of views counts. So the terms never add up to more than the memory line (`schedule.memory_line`) has at that moment. The
line may have more: buffers of buckets, and what no term counts.

`Moment` names a moment: `forward OP`, `before OP`, `backward OP`, `update` or `around OP`. The last is never above the
largest of the op's three moments. It counts the terms that live at all three, and the largest sum of the op's own terms
at one of them. It is one sum again, and a plan need not say in which of the three the peak will be.

`turn` lies between forward and backward. It counts parameters with the optimizer's state, and copies of them that stay
gathered from one microbatch to the next. Of every microbatch in flight it counts what ops keep for backward. These are
no more than the terms of the first moment of backward. What is sent to other stages, or comes from them, is left out
with the buffers of messages, but for what the reader keeps. So where a stage is made of several, its sum is no less
than theirs together. `between` has the sums of gradients too, where there are any. It lies between two actions of a
stage of a pipeline of which a backward has ended.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import HUB

__all__ = ["BETWEEN", "IN_TRANSIT", "KINDS", "OF_VIEWS", "RESIDUAL", "STAYING", "SUMS", "TAKEN_OFF", "TIED", "TURN",
           "UPDATE", "Lifetimes", "Moment", "Owner", "Pattern", "Term", "What"]

Moment = str
"""`before OP`, `forward OP`, `backward OP`, `around OP`, `update`, `turn` or `between`."""

UPDATE: Moment = "update"

TURN: Moment = "turn"

BETWEEN: Moment = "between"

KINDS = ("around", "backward", "forward", "before")
"""Moments of an op, those first that say more."""

IN_TRANSIT = ("in transit",)
"""What a stage of a pipeline sends, or a gradient that it sends back, until it has arrived."""

RESIDUAL = ("residual",)
"""What a sparse sum of a parameter's gradients has not sent yet (`core.sparse`)."""

TAKEN_OFF = ("sent on", "not passed on", "converted")
"""Kinds of terms that are negative: a copy that the edge's reader sends on, what a view does not pass on of it, and
what a storage has behind a view where the edge copies that."""

STAYING = ("own", "gathered kept")
"""Kinds of terms of what is there in every microbatch, where it is from the first moment on."""

SUMS = ("gradient summed",)
"""Kinds of terms of sums of gradients that are there while forward runs."""

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
    waiting: int = 0
    """Others, whose gradients of weights wait for W."""
    waits: tuple[tuple[Owner, What], ...] = ()
    """The terms that wait with each of these."""

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
        named = [moment.partition(" ") for moment in row if moment not in (UPDATE, TURN, BETWEEN)]
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
        others = [] if self.in_flight == 1 and not {TURN, BETWEEN}.intersection(row) else self._kept_between(counts)
        for moment, weight in row.items():
            for owner, what in self._counted(moment, counts):
                found[owner][what] += weight
            for terms, count in ((others, self.in_flight - 1), (self.waits, self.waiting)):
                for owner, what in terms if moment != UPDATE and count else ():
                    found[owner][what] += weight * count
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
        if moment in (TURN, BETWEEN):
            yield from self._kept_between(counts)
            kinds = (*STAYING, *SUMS) if moment == BETWEEN else STAYING
            yield from ((term.owner, term.what) for term in self.terms if term.start == 0 and term.what[0] in kinds)
            return
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
