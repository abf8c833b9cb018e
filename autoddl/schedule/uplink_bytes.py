"""Counts the bytes that a step's collectives send over each uplink of a network, by the plan.

A ring visits the members of a group in their order. So a member whose successor is in another unit sends all its bytes
over the uplink. In an all-to-all, each member sends every other an equal piece of its buffer:

    all-reduce 2 (n-1)/n N,  all-gather and reduce-scatter (n-1)/n N    if the next member is outside
    all-to-all N/n                                                      for every member outside
    halo: what a member reads of the piece                              for every member outside
    traded halves: N/2 of each half                                     if its member is outside
    sparse all-reduce 2 N/n                                             for every member outside

Where the cost model chooses messages of the runtime, their bytes are counted. To switches that reduce, a unit sends all
N bytes of the buffer once, if members are outside. The reduce-scatter of gloo sends as many bytes as its all-reduce.
Messages between stages leave a unit if their receiver is outside. As many halves come back to a unit as have left it:
trades back count like those there. Tokens count as spread evenly over the ranks of their experts.
"""

from collections.abc import Callable, Sequence
from functools import partial

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.core.sparse import SPARSE
from autoddl.core.stages import cut_graph
from autoddl.cost_models import Algorithm, Cluster, Group, collective, sent_bytes
from autoddl.operators.expert_sizes import EXCHANGE
from autoddl.operators.ring import ROUND, half_goes_to
from autoddl.operators.rules.places import halo_parts
from autoddl.operators.windows import HALO
from autoddl.schedule import message_programs
from autoddl.schedule.moved_bytes import group_over, planned_cluster
from autoddl.schedule.stage_lanes import copies_of, lanes_of
from autoddl.schedule.traffic import PlannedCollective, option_of, traffic

__all__ = ["count_uplink_bytes", "leaving_bytes", "rising_bytes"]


def leaving_bytes(kind: str, nbytes: float, group: Sequence[int], rank: int, unit: range,
                  ways: tuple[int, ...] | None = None) -> float:
    """Bytes that `rank` sends out of its `unit` in one collective of `group`; by messages of these `ways` if given.

    Raises InputError for a halo, of which each member gets another part."""
    if kind == HALO:
        raise InputError("what a halo sends out of a unit is counted by its op, not by its bytes alone")
    if kind == SPARSE:
        return 2 * leaving_bytes("all-to-all", nbytes, group, rank, unit)
    if ways is not None:
        outside = frozenset(i for i, other in enumerate(group) if other not in unit)
        return message_programs.leaving_fraction(kind, ways, group.index(rank), outside) * nbytes
    if kind in ("all-to-all", EXCHANGE):
        return nbytes / len(group) * sum(other not in unit for other in group)
    successor = group[(group.index(rank) + 1) % len(group)]
    return 0.0 if successor in unit else sent_bytes(kind, len(group), nbytes)


def rising_bytes(nbytes: float, group: Sequence[int], rank: int, unit: range) -> float:
    """Bytes of an all-reduce in switches that leave the `unit`: its first member counts those of all."""
    inside = [one for one in group if one in unit]
    return float(nbytes) if inside[0] == rank and len(inside) < len(group) else 0.0


def count_uplink_bytes(plan: Plan, graph: Graph, units: Sequence[range]) -> tuple[float, ...]:
    """Bytes that leave each unit, a range of ranks, in one step.

    `graph` is the planned one, of one microbatch; of a plan with stages it is the captured one, without hubs.
    """
    if plan.pipeline is None:
        return _of_mesh(plan, graph, units)
    totals, parts = [0.0] * len(units), cut_graph(graph, plan.pipeline.cuts)
    for copy in copies_of(plan.pipeline):
        own = [range(unit.start - copy.first, unit.stop - copy.first) for unit in units]
        stage = plan.pipeline.stages[copy.stage].plan
        for i, left in enumerate(_of_mesh(stage, add_hubs(parts[copy.stage].graph), own)):
            totals[i] += left
    for lane in lanes_of(plan, graph):
        for one in lane.messages():
            for i, unit in enumerate(units):
                if one.sender in unit and one.receiver not in unit:
                    totals[i] += one.nbytes(lane.tensor.itemsize, lane.codec) * lane.times
    return tuple(totals)


def _of_mesh(plan: Plan, graph: Graph, units: Sequence[range]) -> tuple[float, ...]:
    """The bytes of a plan without stages; units are ranges of the ranks of its mesh."""
    totals = [0.0] * len(units)
    for rank in range(plan.mesh.size):
        at = plan.mesh.coordinate(rank)
        for sent in traffic(plan, graph, at):
            group = _group(plan.mesh, sent.axes, at)
            if len(group) > 1:
                leaving = _leaving(plan, graph, sent, group, rank)
                for i, unit in enumerate(units):
                    totals[i] += leaving(unit) if rank in unit else 0.0
    return tuple(totals)


def _leaving(plan: Plan, graph: Graph, sent: PlannedCollective, group: tuple[int, ...], rank: int
             ) -> Callable[[range], float]:
    """The bytes of one collective that the rank sends out of a unit."""
    cluster, extents = planned_cluster(plan), group_over(plan.mesh, sent.axes)
    parts = _parts(plan, graph, sent, group, rank)
    if parts:
        return lambda unit: float(sum(part for part, one in zip(parts, group, strict=True) if one not in unit))
    if cluster is not None and _in_switches(cluster, sent, extents):
        return partial(rising_bytes, sent.nbytes, group, rank)
    ways = None if cluster is None or sent.kind == SPARSE else message_programs.chosen_ways(
        cluster, sent.kind, extents, sent.nbytes)
    kind = "all-reduce" if plan.backend == "gloo" and sent.kind == "reduce-scatter" and ways is None else sent.kind
    return lambda unit: leaving_bytes(kind, sent.nbytes, group, rank, unit, ways)


def _parts(plan: Plan, graph: Graph, sent: PlannedCollective, group: tuple[int, ...], rank: int) -> tuple[float, ...]:
    """The bytes of a halo, or of traded halves, for each member of the group; () for other collectives."""
    if sent.kind not in (HALO, EXCHANGE):
        return ()
    op = next(op for op in graph.ops if op.name == sent.origin)
    if sent.kind == EXCHANGE:
        place, ranks = group.index(rank), len(group)
        to = [half_goes_to(2 * place + half, ranks) for half in (0, 1)] if op.target in ROUND else []
        return tuple(sent.nbytes / 2 * to.count(member) for member in range(ranks)) if to else ()
    option = option_of(op, graph, plan.mesh, plan.index().decisions.get(op.name))
    back, at = sent.direction == "backward" and not sent.again, plan.mesh.coordinate(rank)
    return tuple(map(float, halo_parts(op, graph, option.inputs[0], plan.mesh, option.inner, at, back)))


def _in_switches(cluster: Cluster, sent: PlannedCollective, extents: Group) -> bool:
    return collective(cluster, sent.kind, extents, float(sent.nbytes)).algorithm is Algorithm.SWITCH_TREE


def _group(mesh: Mesh, axes: str, at: tuple[int, ...]) -> tuple[int, ...]:
    """Ranks of the group over `axes` (like `net+node`) of the rank at `at`."""
    places = mesh.members(tuple(mesh.names.index(name) for name in axes.split("+")), at)
    return tuple(sum(c * stride for c, stride in zip(place, mesh.strides, strict=True)) for place in places)
