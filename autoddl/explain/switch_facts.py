"""Says in words which all-reduces of a plan run in switches that reduce, and why others do not.

Per mesh axis whose group crosses a level that reduces. The rule is that of the price (`cost_models.switches`).
"""

from collections.abc import Collection

from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, Group
from autoddl.cost_models.groups import crossings
from autoddl.cost_models.switches import why_not
from autoddl.schedule.moved_bytes import planned_cluster

__all__ = ["not_offered", "reducing_levels", "switch_texts"]


def reducing_levels(cluster: Cluster | None) -> tuple[str, ...]:
    """Names of the levels whose switches reduce."""
    return tuple(level.name for level in cluster.levels if level.reduces is not None) if cluster else ()


def switch_texts(plan: Plan) -> tuple[str, ...]:
    """A text for each mesh axis whose group crosses a level that reduces; of a pipeline, for those of its first stage.
    """
    part = plan.pipeline.stages[0].plan if plan.pipeline else plan
    cluster = planned_cluster(part)
    names = reducing_levels(cluster)
    if cluster is None or not names or cluster.size != part.mesh.size:
        return ()
    found = []
    for name, size, stride in zip(part.mesh.names, part.mesh.sizes, part.mesh.strides, strict=True):
        crossed = crossings(cluster, Group(((size, stride),))) if size > 1 else ()
        if not any(crossing.level.name in names for crossing in crossed):
            continue
        reason = why_not(crossed)
        found.append(f"all-reduces over {name} do not run in switches: {reason}" if reason else
                     f"all-reduces over {name} run in the switches of level "
                     f"{', '.join(crossing.level.name for crossing in crossed)} where that is the fastest; a rank then "
                     "sends its buffer once")
    return tuple(found)


def not_offered(plan: Plan, offered: Collection[str] = ()) -> str:
    """Says that switches of a plan's cluster are not there where it runs, but for those of levels that are `offered`.

    Empty where none is missed."""
    names = [name for name in reducing_levels(planned_cluster(plan)) if name not in offered]
    return f"no switch of level {', '.join(names)} reduces here: rings take their place" if names else ""
