"""Kernels that a compiler makes of several ops (torch.compile; Ansel et al. 2024, "PyTorch 2", section 4.4).

A compiler writes one kernel for neighbours that compute element by element, and for the sums and norms that follow or
precede them. A product, attention, a lookup or a message is none of these, and what needs its result comes later:

    depth(op)    max over inputs of depth(maker) + (0 if the op and the maker both fuse, else 1)
    fused        two ops that fuse, one of which reads what the other made, of equal depth

    inside       the share of an op's bytes that never leave the kernel: inputs that an op fused with it made, outputs
                 that only ops fused with it read
    joins        whether there is such an input: then the op launches nothing of its own

    seconds(memory-bound kernel of an op) = seconds((1 - inside) bytes) - launch if it joins

Kernels that are written by hand (Megatron-LM, TransformerEngine) fuse the same chains, with two differences. A softmax
and a dropout of it are a kernel each (Megatron-LM, `fused_kernels`). An op that backward runs again is fused as well.

Views and hubs are looked through. Backward runs the ops in reverse, so it saves the same share. Three approximations:

    * Neighbours are assumed to have the same layout. A conversion between them ends the kernel, and the price is then
      too low by the bytes that were counted as inside.
    * An op that backward runs again is not compiled (`runtime.compiled`), and saves nothing. Its neighbours are priced
      as if it were: so an op's price depends on its own block alone.
    * Values that a compiler recomputes instead of keeping them are not counted as saved.

The depth of an op depends on what is before it. So a stage of a pipeline may fuse what the whole graph does not, and
the other way round. What stages may fuse at most, whichever they are, is what is fused *loosely*:

    fused loosely    two ops that fuse, one of which reads what the other made, with no path between them over an op
                     that does not fuse: such a path is in every stage that has both, and makes them of unequal depth.
                     Where the first depends on no parameter, stages compute it again, and paths do not tell

A graph whose ops of sending and receiving say what they are fused with (`with_fused_ends`) is a part of such stages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from types import MappingProxyType

from autoddl.core.graph import RECEIVE, Graph, Op
from autoddl.core.stages import SEND
from autoddl.cost_models import Cluster, Device
from autoddl.operators.families import family_of
from autoddl.operators.work import VIEWS, base

__all__ = ["ALONE", "Chained", "FusedEnds", "as_compiled", "chains", "fused_ends", "is_fused", "with_fused_ends"]

CURVES = frozenset(("add", "copy", "exponential", "multiply", "reduce", "normalise", "batch normalise", "loss"))
"""Curves of ops that a compiler writes itself; not of lookups and windows."""
LIBRARY = frozenset(("aten.sort", "aten.topk", "aten.cumsum", "aten.kthvalue", "aten.median", "aten.mode",
                     "autoddl.draw"))
"""Ops of these curves that stay calls of their own."""
WHOLE = ("matmul", "experts", "recurrent")
"""Files of rules whose ops are no elementwise work."""
OUTSIDE = -1
"""Stands for the reader of a result."""
FUSES = "fuses"
"""The argument of an op of sending or receiving that says whether it is fused with others."""


@dataclass(frozen=True, slots=True)
class Chained:
    """The saving of one op of a chain: the share of its bytes, and whether it saves its launch."""

    inside: float = 0.0
    joins: bool = False


ALONE = Chained()


def as_compiled(cluster: Cluster) -> Cluster:
    """Returns `cluster` with every device set to run compiled programs."""
    return replace(cluster, device=_compiled(cluster.device),
                   parts=tuple((_compiled(device), ranks) for device, ranks in cluster.parts))


def _compiled(device: Device) -> Device:
    """The device whose programs are compiled: the compiler writes batch norms as it does other norms."""
    kernels = tuple((name, share) for name, share in device.kernels if not name.startswith("batch normalise"))
    return replace(device, compiled=True, kernels=kernels)


def chains(graph: Graph, by_hand: bool = False, *, loosely: bool = False) -> Mapping[str, Chained]:
    """Maps the name of every op that is fused with others to its saving: by a compiler, or in kernels by hand.

    `loosely`, or in a graph with fused ends, it is the most that the op saves in any stage that has all of the graph.
    """
    loosely = loosely or any(map(_is_end, graph.ops))
    makers, readers, fused = _fused(graph, by_hand, loosely)
    found = {}
    for i, op in enumerate(graph.ops):
        if not fused(i, i):
            continue
        given = [t for t in op.inputs if fused(i, makers.get(t, OUTSIDE))]
        taken = [t for t in op.outputs if (loosely or t in readers) and all(fused(j, i) for j in readers.get(t, ()))]
        if given or taken:
            found[op.name] = Chained(_bytes(graph, (*given, *taken)) / _bytes(graph, (*op.inputs, *op.outputs)),
                                     bool(given))
    return MappingProxyType(found)


@dataclass(frozen=True, slots=True)
class FusedEnds:
    """Names the tensors over which stages may fuse ops.

        given    their maker may be fused with a reader
        taken    every reader may be fused with their maker
    """

    given: frozenset[str]
    taken: frozenset[str]


def fused_ends(graph: Graph, by_hand: bool = False) -> FusedEnds:
    """The tensors of a whole graph over which its stages may fuse ops at most."""
    makers, readers, fused = _fused(graph, by_hand, loosely=True)
    origin = _origins(graph)
    fuses = {t: j for t, j in makers.items() if fused(j, j)}
    taken = (t for t, j in fuses.items() if all(fused(i, j) for i in readers.get(origin.get(t, t), ())))
    return FusedEnds(frozenset(graph.tensors[t].name for t in fuses), frozenset(graph.tensors[t].name for t in taken))


def with_fused_ends(stage: Graph, ends: FusedEnds) -> Graph:
    """The graph of a stage whose ops of sending and receiving are fused with the others as `ends` of the whole say."""
    return replace(stage, ops=tuple(replace(op, args=(*op.args, (FUSES, (
        stage.tensors[(op.outputs if op.target == RECEIVE else op.inputs)[0]].name in (
            ends.given if op.target == RECEIVE else ends.taken)))))
        if op.target in (SEND, RECEIVE) else op for op in stage.ops))


def _is_end(op: Op) -> bool:
    """Whether an op sends or receives, and says whether it is fused with others."""
    return op.target in (SEND, RECEIVE) and any(name == FUSES for name, _ in op.args)


def _fused(graph: Graph, by_hand: bool, loosely: bool
           ) -> tuple[dict[int, int], dict[int, list[int]], Callable[[int, int], bool]]:
    """(the makers and readers of tensors, whether an op is fused with one before it which made what it reads)."""
    makers, readers = _ends(graph)
    apart = _apart(graph, makers, loosely) if by_hand else frozenset[str]()
    fuses = [bool(op.arg(FUSES)) if _is_end(op) else is_fused(op) and op.name not in apart for op in graph.ops]
    behind = _behind(graph, makers, fuses) if loosely else []
    depth = [] if loosely else _depths(graph, makers, fuses)

    def fused(i: int, j: int) -> bool:
        if i < 0 or j < 0 or not (fuses[i] and fuses[j]):
            return False
        return not behind[i] >> j & 1 if loosely else depth[i] == depth[j]

    return makers, readers, fused


def _bytes(graph: Graph, tensors: Sequence[int]) -> int:
    return sum(graph.tensors[t].nbytes for t in tensors)


def is_fused(op: Op) -> bool:
    """Whether a compiler writes the op into a kernel with others."""
    name = base(op)
    family = family_of(name)
    return (name in family.names and family.curve in CURVES and family.rule not in WHOLE
            and family.footprint != "attention" and name not in VIEWS | LIBRARY and "free" not in family.flags)


def _apart(graph: Graph, makers: Mapping[int, int], loosely: bool) -> frozenset[str]:
    """Names of the softmaxes and of the dropouts of their results, which kernels by hand keep apart.

    A stage that begins at such a dropout does not know of what it is one, so `loosely` it is not kept apart.
    """
    softmax = {i for i, op in enumerate(graph.ops) if "softmax" in base(op)}
    if loosely:
        return frozenset(graph.ops[i].name for i in softmax)
    dropped = {i for i, op in enumerate(graph.ops) if base(op) == "autoddl.dropout" and any(
        makers.get(t) in softmax for t in op.inputs)}
    return frozenset(graph.ops[i].name for i in softmax | dropped)


def _ends(graph: Graph) -> tuple[dict[int, int], dict[int, list[int]]]:
    """By tensor the op that made it, and by made tensor the ops that read it, both behind views; OUTSIDE: a result."""
    origin, makers, readers = _origins(graph), dict[int, int](), dict[int, list[int]]()
    for i, op in enumerate(graph.ops):
        if base(op) not in VIEWS:
            for t in op.inputs:
                readers.setdefault(origin.get(t, t), []).append(i)
            makers |= dict.fromkeys(op.outputs, i)
    for t in (*graph.outputs, *(new for _, new in graph.updates)):
        readers.setdefault(origin.get(t, t), []).append(OUTSIDE)
    return makers | {t: makers[source] for t, source in origin.items() if source in makers}, readers


def _origins(graph: Graph) -> dict[int, int]:
    """By view, the tensor that it is one of."""
    origin = dict[int, int]()
    for op in graph.ops:
        if base(op) in VIEWS and op.inputs:
            origin |= dict.fromkeys(op.outputs, origin.get(op.inputs[0], op.inputs[0]))
    return origin


def _behind(graph: Graph, makers: Mapping[int, int], fuses: Sequence[bool]) -> list[int]:
    """By op, as bits, the ops before it from which a path leads to it over two neighbours that do not both fuse.

    Of ops that depend on no parameter it has none: a stage computes these again, and may receive what lies between.
    """
    before, apart, dependent = list[int](), list[int](), graph.dependent()
    own = [0 if dependent.isdisjoint(op.outputs) else 1 << j for j, op in enumerate(graph.ops)]
    for i, op in enumerate(graph.ops):
        read = op.inputs[:1] if op.target == SEND else op.inputs
        sources = {makers[t] for t in read if t in makers}
        before.append(reduce(or_, (before[j] | own[j] for j in sources), 0))
        apart.append(reduce(or_, (apart[j] if fuses[i] and fuses[j] else before[j] | own[j] for j in sources), 0))
    return apart


def _depths(graph: Graph, makers: Mapping[int, int], fuses: Sequence[bool]) -> list[int]:
    """The depth of every op; that of a view is not asked for."""
    depth: list[int] = []
    for i, op in enumerate(graph.ops):
        sources = [makers[t] for t in op.inputs if t in makers]
        depth.append(max((depth[j] + (0 if fuses[i] and fuses[j] else 1) for j in sources), default=0))
    return depth
