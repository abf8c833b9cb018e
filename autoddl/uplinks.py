"""Bytes that a step's collectives send over each uplink of a network, by the plan.

A ring visits the members of a group in their order, so a member whose successor sits elsewhere sends over the uplink
all that it sends; in an all-to-all, each member sends every other an equal piece of its buffer:

    all-reduce 2 (n-1)/n N,  all-gather and reduce-scatter (n-1)/n N    if the next member is outside
    all-to-all N/n                                                      for every member outside
"""

from collections.abc import Sequence

from autoddl.cost_models import sent_bytes
from autoddl.graph import Graph
from autoddl.groups import members
from autoddl.layout import Mesh
from autoddl.plan import Plan
from autoddl.traffic import traffic

__all__ = ["leaving", "planned_bytes"]


def leaving(kind: str, nbytes: float, group: Sequence[int], rank: int, unit: range) -> float:
    """Bytes that `rank` of `unit` sends out of it in one collective of `group`."""
    if kind == "all-to-all":
        return nbytes / len(group) * sum(other not in unit for other in group)
    successor = group[(group.index(rank) + 1) % len(group)]
    return 0.0 if successor in unit else sent_bytes(kind, len(group), nbytes)


def planned_bytes(plan: Plan, graph: Graph, units: Sequence[range]) -> tuple[float, ...]:
    """Bytes that leave each unit, a range of ranks, in one step. `graph` is the planned one."""
    totals = [0.0] * len(units)
    for rank in range(plan.mesh.size):
        at = plan.mesh.coordinate(rank)
        for sent in traffic(plan, graph, at):
            group = _group(plan.mesh, sent.axes, at)
            for i, unit in enumerate(units):
                if rank in unit and len(group) > 1:
                    totals[i] += leaving(sent.kind, sent.nbytes, group, rank, unit)
    return tuple(totals)


def _group(mesh: Mesh, axes: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of the group over `axes` (like `net+node`) that the rank at `at` is in."""
    places = members(mesh, tuple(mesh.names.index(name) for name in axes.split("+")), at)
    return tuple(sum(c * stride for c, stride in zip(place, mesh.strides, strict=True)) for place in places)
