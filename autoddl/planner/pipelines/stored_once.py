"""Takes off what stages on the same ranks count twice of a parameter that they share: they store and update it once.

A tied embedding is such a parameter where the first and the last stage run on one part of the cluster. Each stage's
bytes have its piece of the parameter and of the optimizer's state, and each stage's update has its update. Both are of
one piece, since such stages store it alike (`tied_stages`). Its gradient counts for both, though it is summed in one
place: peaks may come before and behind it.

Bounds of single stages have the parameter too, and where stages have copies also the exchange of its gradient. So from
their sums is taken what these can be at most: those of a rank that has it whole (`most_twice`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autoddl.core.graph import Graph, Kind, Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Axis, Layout, Mesh
from autoddl.core.pipeline import RankMoments
from autoddl.core.plan import Plan
from autoddl.core.stages import StageGraph, shared_here
from autoddl.cost_models import Cluster
from autoddl.pricing.optimizers import optimizer_of
from autoddl.pricing.price import Copies, Pricing, update_seconds
from autoddl.schedule.memory_line import stored_bytes
from autoddl.schedule.stage_bytes import rank_peak_bytes

__all__ = ["Twice", "bytes_twice", "most_twice", "together_bytes", "update_twice"]


def bytes_twice(plans: Sequence[Plan], graphs: Sequence[StageGraph], placement: Sequence[int]
                ) -> dict[int, Mapping[str, float]]:
    """By part of the cluster and kind, bytes of stored parameters that its stages count once too often."""
    found: dict[int, Counter[str]] = {}
    for fqn, _, stages in _shared(graphs, placement):
        first = stages[0]
        tensor = _tensor(graphs[first].graph, fqn)
        own = stored_bytes(tensor, plans[first].index().stored[fqn].layout, plans[first].mesh,
                           optimizer_of(plans[first].source["optimizer"]))
        kinds = found.setdefault(placement[first], Counter())
        kinds.update({kind: (len(stages) - 1) * nbytes for kind, nbytes in own.items()
                      if tensor.trained or kind == "parameters"})
    return dict(found)


def together_bytes(plans: Sequence[Plan], graphs: Sequence[StageGraph], placement: Sequence[int],
                   moments: Mapping[int, RankMoments]) -> dict[int, float]:
    """By part of the cluster, the most bytes of a rank at any of its moments, with what its stages share once."""
    twice = bytes_twice(plans, graphs, placement)
    return {at: rank_peak_bytes([plans[s] for s, place in enumerate(placement) if place == at], moments.get(at))
            - sum(twice.get(at, {}).values()) for at in dict.fromkeys(placement)}


def update_twice(plans: Sequence[Plan], graphs: Sequence[StageGraph], placement: Sequence[int],
                 clusters: Sequence[Cluster]) -> list[float]:
    """By stage, seconds of its update in which it updates what a stage before it on the same ranks has updated.

    `clusters` are the parts.
    """
    found = [0.0] * len(plans)
    for fqn, at, stages in _shared(graphs, placement):
        for s in stages[1:]:
            pricing = Pricing(add_hubs(graphs[s].graph), plans[s].mesh, clusters[at], plans[s].source["optimizer"])
            found[s] += update_seconds(pricing, _tensor(graphs[s].graph, fqn), plans[s].index().stored[fqn].layout)
    return found


class Twice(NamedTuple):
    """What ranks may count twice of parameters that their stages share, at most.

        nbytes      of storing them
        update      seconds of their update
        exchange    seconds in which copies of a stage exchange their gradients
    """

    nbytes: float = 0.0
    update: float = 0.0
    exchange: float = 0.0

    def seconds(self, weights: Sequence[float]) -> float:
        """The seconds, where those of a stage count so often."""
        return weights[4] * self.exchange + weights[5] * self.update


def most_twice(tensors: Sequence[Tensor], cluster: Cluster, graph: Graph, optimizer: str, copies: Copies | None
               ) -> Twice:
    """What ranks may count twice of these parameters, at most: that of a rank that has them whole.

    `cluster` is that of a part, `graph` the planned one, `copies` what copies of a stage exchange.
    """
    mesh = Mesh((Axis("rank", cluster.size),))
    whole, pricing = Layout.broadcast(mesh), Pricing(graph, mesh, cluster, optimizer)
    nbytes = sum(sum(stored_bytes(one, whole, mesh, optimizer_of(optimizer)).values()) for one in tensors)
    return Twice(nbytes, sum(update_seconds(pricing, one, whole) for one in tensors),
                 sum(copies.seconds(one, whole, mesh) for one in tensors) if copies else 0.0)


def _shared(graphs: Sequence[StageGraph], placement: Sequence[int]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yields (parameter, part, stages of the part that share it)."""
    for fqn, parts in shared_here(graphs, placement).items():
        for stages in parts:
            yield fqn, placement[stages[0]], stages


def _tensor(graph: Graph, fqn: str) -> Tensor:
    return next(one for one in graph.tensors if one.fqn == fqn and one.kind is Kind.PARAMETER)
