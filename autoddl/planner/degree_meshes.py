"""Makes the mesh of a configuration that is given by degrees, with a role for each axis (`core.degrees`).

The axes are, outermost first, and with the roles of `strategies`:

    copies   data              ranks of dp beyond those that `shard` counts
    dp       data, zero-1 ...  the others of dp, but for those of ep
    ep       expert data ...
    cp       context data ...
    tp       split tensor; whole tensor without sp

Where ep does not divide dp, experts lie apart over cp and tp too. Megatron-Core has them so without tensor
parallelism inside experts. These axes are `expert context data ...` and `expert split tensor`.

An axis of n ranks with stride s reaches from s to s n. Where a unit of a level ends in between, the axis is cut there:
`dp=8` on tp=4 and nodes of 8 ranks is `dp.1=4,dp.0=2`. An axis that is whole levels stays in one piece. For a program
makes one communicator of a degree's ranks, and NCCL has no collective that goes level by level. A plan that is searched
may have such an axis in pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Kind
from autoddl.core.layout import Axis, Mesh
from autoddl.cost_models import Cluster
from autoddl.planner.strategies import strategy
from autoddl.pricing.space import Region

__all__ = ["DegreesRegion", "batch_rows", "check_rows", "degree_mesh", "degrees_meaning"]


def degree_mesh(cluster: Cluster, degrees: Degrees) -> Mesh:
    """The mesh of a configuration without stages on `cluster`.

    Raises InputError where the degrees do not multiply to its devices, and where an axis would divide a unit unevenly.
    """
    full = degrees.on(cluster.size)
    pieces = full.shard or full.dp
    apart = full.experts_in_dp
    if pieces % apart:
        raise InputError(f"'{degrees}': experts lie apart inside the ranks that hold the pieces, so ep={apart} must "
                         f"divide {pieces}")
    sizes = {"copies": full.dp // pieces, "dp": pieces // apart, "ep": apart, "cp": full.cp, "tp": full.tp}
    axes = [(name, size) for name, size in sizes.items() if size > 1] or [("tp", 1)]
    return Mesh(tuple(_pieces(cluster, degrees, axes)))


def batch_rows(graph: Graph) -> int | None:
    """The rows of the batch that a captured graph reads; None where it reads none."""
    return next((t.shape[0] for t in graph.tensors if t.kind is Kind.INPUT and t.shape), None)


def check_rows(text: str, graph: Graph, ranks: int, counts: Sequence[int]) -> None:
    """Raises InputError where dp of a configuration on so many ranks does not divide the rows of a microbatch.

    `graph` is that of the whole batch, which runs in one of the numbers `counts` of microbatches. Other dims would be
    split in place of the rows, which is none of what was asked for.
    """
    dp, rows = Degrees.parse(text).on(ranks).dp, batch_rows(graph)
    uneven = next((n for n in counts if rows is not None and rows % n == 0 and rows // n % dp), None)
    if rows is not None and uneven is not None:
        part = "the batch" if uneven == 1 else f"each of {uneven} microbatches"
        way = "a smaller dp beside tp or cp, or fewer microbatches" if uneven > 1 else "or a smaller dp beside tp or cp"
        raise InputError(f"mine '{text}': dp splits rows over {dp} ranks, and {part} has {rows // uneven}: take a "
                         f"batch of {dp * uneven} rows or a multiple, {way}")


def _pieces(cluster: Cluster, degrees: Degrees, axes: Sequence[tuple[str, int]]) -> list[Axis]:
    """The axes, outermost first, cut where units of levels end, unless they are whole levels."""
    stride, found = 1, list[Axis]()
    for name, size in reversed(axes):
        end = stride * size
        between = [unit for unit in cluster.units if stride < unit < end]
        if {stride, end} <= set(cluster.units):
            between = []
        for unit in between:
            if unit % stride or end % unit:
                raise InputError(f"'{degrees}': {name} joins {size} ranks, every {stride}th, and a unit of cluster "
                                 f"{cluster.name} has {unit}: these would lie unevenly; choose degrees of which one "
                                 f"divides the other")
        marks = [stride, *sorted(set(between)), end]
        cut = [high // low for low, high in pairwise(marks)]
        found += [Axis(f"{name}.{k}" if len(cut) > 1 else name, n) for k, n in enumerate(cut)]
        stride = end
    return found[::-1]


def _roles(degrees: Degrees) -> dict[str, str]:
    """By axis, before it is cut, its role."""
    states = f"zero-{degrees.zero}" if degrees.zero else "data"
    length, apart = "ring" if degrees.ring else "context", "expert " if degrees.experts_span else ""
    return {"copies": "data", "dp": states, "ep": f"expert {states}", "cp": f"{apart}{length} {states}",
            "tp": f"{apart}{'split' if degrees.sp else 'whole'} tensor"}


def degrees_meaning(text: str) -> str:
    """Says in words what the configuration that `text` gives fixes; the rest is free."""
    degrees = Degrees.parse(text)
    pieces = ("", "the optimizer's state", "the optimizer's state and gradients", "weights, gradients and state")
    said = ["the batch over dp"]
    said += ["length over cp"] * (degrees.cp > 1) + ["keys and values round a ring of cp"] * degrees.ring
    said += ["experts over ep" + ", cp and tp" * degrees.experts_span] * (degrees.ep > 1)
    said += [f"weights of products over tp, length {'too' if degrees.sp else 'not'}"] * (degrees.tp > 1)
    said += [f"{pieces[degrees.zero]} in pieces"] if degrees.zero else ["parameters stored whole but for tp"]
    return f"{', '.join(said)}; what this leaves open is searched"


@dataclass(frozen=True, slots=True)
class DegreesRegion:
    """Makes the region of a configuration on a graph and one of its meshes; of a stage, `whole` is the whole graph."""

    degrees: Degrees
    whole: Graph | None = None

    def __call__(self, graph: Graph, mesh: Mesh) -> Region:
        roles = _roles(replace(self.degrees, pp=1, vp=1).on(mesh.size))
        return strategy(graph, mesh, {name: roles[name.partition(".")[0]] for name in mesh.names}, self.whole)
