"""Decides which ops of a block backward runs again, at a level (`core.recompute`), and which tensors they bring back.

    full         every op may run again
    selective    those without flops that reduce nothing inside their kernel
    light        elementwise ops, if no other op saves their results

An op that may, and whose forward saves something, runs again if that frees memory. To run it takes the tensors that it
reads. These come from outside the block, are saved by some op anyway, or are brought back by others. Others are
computed again as well where they may, and kept where not. `selective` leaves an op as it is where the tensors that it
would keep have as many bytes as it frees. So x + y of a product y that no one saves is kept instead of y.

Tensors that are read outside their block stay as without recomputation. At levels below full, a
product with a weight that does not run again keeps no copy that a conversion made: that runs again.
Attention and products of experts keep theirs: most of these are rows that were sent to other ranks.

What is decided depends on the graph alone, in whole tensors, and on nothing outside the block but what reads its
results.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoddl.core.graph import Graph, Kind
from autoddl.core.hubs import HUB
from autoddl.core.recompute import FULL, LIGHT, SELECTIVE, Block, blocks_of, leveled_blocks, recompute_entry
from autoddl.operators.families import family_of
from autoddl.operators.footprints.footprint import Footprint
from autoddl.operators.footprints.table import whole_footprints
from autoddl.operators.fusion import is_fused
from autoddl.operators.rules.nn import REDUCING
from autoddl.operators.windows import WINDOWED
from autoddl.operators.work import VIEWS, base, work

__all__ = ["RecomputedPart", "copied_again", "levels", "recomputed_ops", "recomputed_parts"]

_PRODUCTS = ("aten.linear", "aten.mm", "aten.addmm", "aten.matmul")

_ELEMENTWISE = ("add", "copy", "exponential", "multiply")
"""Curves of ops that compute element by element and sum up nothing."""

WORTH = 1 / 8
"""An op does not run again to free less than this part of what it writes."""

_LIGHT = WINDOWED | {"aten.group_norm.default"}
"""Targets that send nothing unless images are split, and then little."""


@dataclass(frozen=True, slots=True)
class RecomputedPart:
    """The ops of a block that backward runs again.

        block      the block
        level      its level
        ops        places of the ops, in order
        reads      the tensors that they read and do not write, in the order of first use: kept until they run again
        noted      the tensors that they bring back for the backward of other ops of the block
        copies     inputs (op, number) of other ops of the block whose conversion runs again, if there is one
        trigger    place of the op whose backward is the first to read what they bring back, so runs them
    """

    block: Block
    level: str
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    noted: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]
    trigger: int

    @property
    def steps(self) -> tuple[int, ...]:
        """The ops that run again, and those whose inputs are converted again, in order."""
        return tuple(sorted({*self.ops, *(i for i, _ in self.copies)}))


def levels(graph: Graph, by_hand: bool = False) -> tuple[str, ...]:
    """The levels at which any block of a graph with hubs is computed again, the least first; none without blocks.

    `light` is one of them in programs whose kernels are written `by_hand`, which always keep as little as that.
    """
    names = [block.name for block in blocks_of(graph)]
    parts = {level: recomputed_parts(graph, [recompute_entry(name, level) for name in names])
             for level in ((LIGHT, SELECTIVE, FULL) if by_hand else (SELECTIVE, FULL))}
    return tuple(level for level, found in parts.items() if found and (level == LIGHT or any(
        graph.ops[i].target != HUB for part in found for i in part.ops)))


def recomputed_parts(graph: Graph, names: Sequence[str]) -> tuple[RecomputedPart, ...]:
    """The parts of the blocks that a plan names which run again, in order; blocks without one are left out.

    `graph` has hubs. Raises InputError for a name that no block of it has.
    """
    asked = leveled_blocks(graph, names)
    if not asked:
        return ()
    known = _known(graph)
    found = (known.part(block, level) for block, level in asked)
    return tuple(part for part in found if part is not None)


def recomputed_ops(graph: Graph, names: Sequence[str]) -> frozenset[str]:
    """Names of the ops that are computed again of the blocks that a plan names."""
    return frozenset(graph.ops[i].name for part in recomputed_parts(graph, names) for i in part.ops)


def copied_again(graph: Graph, names: Sequence[str]) -> frozenset[tuple[str, str]]:
    """The inputs (op, slot) whose conversion backward runs again for ops that it does not."""
    return frozenset((graph.ops[i].name, graph.ops[i].slots[k])
                     for part in recomputed_parts(graph, names) for i, k in part.copies)


@lru_cache(maxsize=4)
def _known(graph: Graph) -> "_Known":
    """The knowledge of a graph, kept for the next question about it."""
    return _Known(graph)


class _Known:
    """A graph as all blocks see it."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.flows, self.dependent = graph, graph.differentiable(), graph.dependent()
        self.readers, self.writers = graph.consumers(), graph.producers()
        self.ends = {graph.outputs[0], *(new for _, new in graph.updates)}
        self._saved = dict[int, bool]()
        self._parts = dict[tuple[Block, str], RecomputedPart | None]()

    def part(self, block: Block, level: str) -> RecomputedPart | None:
        """The part of a block that runs again at a level, None if nothing does: a part depends on no other."""
        if (block, level) not in self._parts:
            self._parts[block, level] = _Chosen(self, block, level).part()
        return self._parts[block, level]

    def is_view(self, i: int) -> bool:
        return base(self.graph.ops[i]) in VIEWS

    def made(self, i: int) -> Footprint:
        """The footprint of op i on whole tensors."""
        return whole_footprints(self.graph)[i]

    def root(self, t: int) -> int:
        """The tensor whose storage t has, looking through views and hubs."""
        while (i := self.writers.get(t)) is not None and self.is_view(i):
            t = self.graph.ops[i].inputs[0]
        return t

    def savers(self, t: int) -> Iterator[int]:
        """The ops whose backward reads t, itself or behind views."""
        i = self.writers.get(t)
        if i is not None and self.graph.ops[i].outputs.index(t) in self.made(i).keeps:
            yield i
        for j, k in self.readers[t]:
            if self.is_view(j):
                for o in self.graph.ops[j].outputs:
                    yield from self.savers(o)
            elif k in self.made(j).saves:
                yield j

    def is_saved(self, t: int) -> bool:
        """Whether backward of some op reads the storage of t."""
        root = self.root(t)
        if root not in self._saved:
            self._saved[root] = next(self.savers(root), None) is not None
        return self._saved[root]

    def has_weight(self, i: int) -> bool:
        """Whether op i is a product with one weight: not with many at once, one of each expert."""
        op, tensors = self.graph.ops[i], self.graph.tensors
        return base(op) in _PRODUCTS and any(len(tensors[t].shape) == 2 and tensors[self.root(t)].kind is Kind.PARAMETER
                                             for t in op.inputs)

    def has_flops(self, i: int) -> bool:
        """Whether op i multiplies, convolves or attends in forward."""
        op, tensors = self.graph.ops[i], self.graph.tensors
        shapes = [tuple(tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
        return any(kernel.flops for kernel in work(op, self.graph, shapes[0], shapes[1], self.flows)[0])


class _Chosen:
    """The ops of one block that run again, as they are chosen from the first to the last."""

    def __init__(self, known: _Known, block: Block, level: str) -> None:
        self.known, self.block, self.level = known, block, level
        self.again, self.read = set[int](), set[int]()

    def part(self) -> RecomputedPart | None:
        """The part that runs again, None if nothing does."""
        for i in range(self.block.start, self.block.end):
            if i in self.allowed and i not in self.again:
                self._weigh(i)
        ops = self.known.graph.ops
        copies = self._copies()
        written = {t for i in self.again for t in ops[i].outputs}
        reads = dict.fromkeys(t for i in sorted(self.again) for t in ops[i].inputs if t not in written)
        reads |= dict.fromkeys(t for i, k in copies if (t := ops[i].inputs[k]) not in written)
        noted = tuple(t for i in sorted(self.again) for t in ops[i].outputs if self._is_noted(t))
        triggers = [i for i in range(self.block.start, self.block.end) if self._reads_back(i, noted)]
        triggers += [i for i, _ in copies]
        if not triggers:
            return None
        return RecomputedPart(self.block, self.level, tuple(sorted(self.again)), tuple(reads), noted, copies,
                              max(triggers))

    def _copies(self) -> tuple[tuple[int, int], ...]:
        """Factors of products that do not run again, whose conversions do; hubs in front of them run again too."""
        known, ops = self.known, self.known.graph.ops
        if self.level == FULL:
            return ()
        kept = [(i, k) for i in range(self.block.start, self.block.end)
                if i not in self.again and known.has_weight(i) and not known.flows.isdisjoint(ops[i].outputs)
                for k in known.made(i).saves if ops[i].inputs[k] in known.flows
                and known.graph.tensors[known.root(ops[i].inputs[k])].kind is Kind.RESULT]
        for i, k in kept:
            t = ops[i].inputs[k]
            if self._is_own_hub(t):
                self.again.add(known.writers[t])
        return tuple(sorted(kept))

    def _is_own_hub(self, t: int) -> bool:
        """Whether a hub of the block writes t, and no other block reads it, itself or behind views."""
        j = self.known.writers.get(t)
        return j is not None and self.is_inside(j) and self.known.graph.ops[j].target == HUB and self._is_own(t)

    def _is_own(self, t: int) -> bool:
        """Whether only the block reads t, itself or behind views."""
        known = self.known
        return t not in known.ends and all(
            self.is_inside(i) and (not known.is_view(i) or all(map(self._is_own, known.graph.ops[i].outputs)))
            for i, _ in known.readers[t])

    @cached_property
    def allowed(self) -> frozenset[int]:
        """The ops that the level lets run again: none of the cone, whose results stay."""
        ops, known = self.known.graph.ops, self.known
        return frozenset(i for i in range(self.block.start, self.block.end)
                         if not known.dependent.isdisjoint(ops[i].outputs) and self._may(i))

    def _may(self, i: int) -> bool:
        """Whether the level lets op i run again."""
        known, op = self.known, self.known.graph.ops[i]
        if self.level == LIGHT:
            return family_of(base(op)).curve in _ELEMENTWISE and is_fused(op) and not known.made(i).beside
        return self.level == FULL or not (known.has_flops(i) or op.target in REDUCING - _LIGHT)

    def is_inside(self, i: int | None) -> bool:
        return i is not None and self.block.start <= i < self.block.end

    @cached_property
    def stays(self) -> frozenset[int]:
        """The tensors of the block whose storage is read outside of it, or that the program returns."""
        known, found = self.known, set[int]()
        for i in range(self.block.start, self.block.end):
            for t in known.graph.ops[i].outputs:
                if t in known.ends or any(not self.is_inside(j) for j, _ in known.readers[t]):
                    found.update((t, known.root(t)))
        return frozenset(found)

    def _weigh(self, i: int) -> None:
        """Lets op i run again if that frees more than it keeps."""
        known, op = self.known, self.known.graph.ops[i]
        freed = self._freed(i)
        if not freed:
            return
        again, read = {i}, set[int]()
        for t in op.inputs:
            self._need(t, again, read)
        kept = sum(known.graph.tensors[t].nbytes for t in read - self.read
                   if known.graph.tensors[t].kind is Kind.RESULT and not known.is_saved(t))
        if self.level == FULL or kept < freed:
            self.again |= again
            self.read |= read

    def _freed(self, i: int) -> float:
        """Bytes that op i frees if it runs again: what it writes that is saved, and what it keeps beside.

        Statistics alone are not worth it, a mask is. A view that is saved, of what runs again, frees its conversion.
        """
        known, op = self.known, self.known.graph.ops[i]
        if known.is_view(i):
            root = known.root(op.inputs[0])
            moved = known.writers.get(root) in self.again and root not in self.stays
            return float("inf") if moved and any(next(known.savers(o), None) is not None for o in op.outputs) else 0.0
        sizes = {o: known.graph.tensors[o].nbytes for o in op.outputs}
        freed = known.made(i).beside + sum(sizes[o] for o in op.outputs if known.is_saved(o) and o not in self.stays
                                           and (self.level != LIGHT or self.allowed.issuperset(known.savers(o))))
        return freed if freed >= WORTH * sum(sizes.values()) else 0.0

    def _need(self, t: int, again: set[int], read: set[int]) -> None:
        """Adds what tensor t takes: the ops that run again for it, and the tensors that are kept for it."""
        known, i = self.known, self.known.writers.get(t)
        if i is not None and (i in self.again or i in again):
            return
        if i is None or i not in self.allowed or t in self.stays or not (
                known.is_view(i) or not known.is_saved(t)):
            read.add(t)
            return
        again.add(i)
        for source in known.graph.ops[i].inputs:
            self._need(source, again, read)

    def _is_noted(self, t: int) -> bool:
        """Whether t is brought back for an op that does not run again."""
        known = self.known
        root = known.root(t)
        if self.level != FULL and t in known.flows and self._is_own_hub(t) and any(
                i not in self.again and known.has_weight(i) and k in known.made(i).saves
                for i, k in known.readers[t]):
            return True
        return known.writers.get(root) in self.again and root not in self.stays and any(
            i not in self.again for i in known.savers(t))

    def _reads_back(self, i: int, noted: Sequence[int]) -> bool:
        """Whether backward of op i reads something that is brought back."""
        made = self.known.made(i)
        if i in self.again:
            return bool(made.saves or made.keeps or made.beside)
        return any(self._is_behind(self.known.graph.ops[i].inputs[k], noted) for k in made.saves)

    def _is_behind(self, t: int, noted: Sequence[int]) -> bool:
        """Whether t is one of `noted`, or such a view of one that does not run again."""
        while t not in noted:
            i = self.known.writers.get(t)
            if i is None or i in self.again or not self.known.is_view(i):
                return False
            t = self.known.graph.ops[i].inputs[0]
        return True
