"""Says by which algorithm a planned collective is sent, and how many bytes a rank sends for it.

    switch tree      all N bytes of the buffer, to the switch
    stages           (w-1)/w N in each level, of w members
    any other        those of a ring: 2 (n-1)/n N in an all-reduce, (n-1)/n N in others, N in a message

The algorithm is the one that the cost model chooses for the size of the buffer; the runtime asks the same function.
"""

from functools import lru_cache

from autoddl.core.layout import Mesh
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, Group, collective, moved_by, parse_cluster, ways_of

__all__ = ["algorithm_of", "group_over", "levels_of", "moved_bytes", "planned_cluster"]


def planned_cluster(plan: Plan) -> Cluster | None:
    """The plan's cluster; None where the plan does not keep it."""
    return _parsed(plan.source["cluster"]) if "cluster" in plan.source else None


@lru_cache(maxsize=64)
def _parsed(text: str) -> Cluster:
    return parse_cluster(text, "the plan's cluster")


def group_over(mesh: Mesh, axes: str) -> Group:
    """The group of ranks along axes, like `net+node`, as the cost model takes it."""
    which = [mesh.names.index(name) for name in axes.split("+")]
    return Group(tuple((mesh.sizes[a], mesh.strides[a]) for a in which))


def _placed(plan: Plan, axes: str) -> tuple[Cluster, Group] | None:
    """The plan's cluster and a group over mesh axes; None where one is not known, or the group has one member."""
    cluster = planned_cluster(plan)
    if cluster is None or cluster.size != plan.mesh.size or not set(axes.split("+")) <= set(plan.mesh.names):
        return None
    group = group_over(plan.mesh, axes)
    return (cluster, group) if group.size > 1 else None


def algorithm_of(plan: Plan, kind: str, axes: str, nbytes: int) -> str:
    """The name of the algorithm of a collective over mesh axes; "" where the plan's cluster is not known."""
    placed = _placed(plan, axes)
    if placed is None:
        return ""
    cluster, group = placed
    return str(collective(cluster, kind, group, float(nbytes)).algorithm)


def moved_bytes(plan: Plan, kind: str, axes: str, nbytes: int) -> float:
    """Bytes that a rank sends for a collective over mesh axes of the plan."""
    return moved_by(algorithm_of(plan, kind, axes, nbytes), kind, group_over(plan.mesh, axes).size, nbytes,
                    levels_of(plan, axes))


def levels_of(plan: Plan, axes: str) -> tuple[int, ...]:
    """How many members a group over mesh axes has in each level; nothing where the plan's cluster is not known."""
    placed = _placed(plan, axes)
    return () if placed is None else ways_of(*placed)
