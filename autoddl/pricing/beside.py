"""Says which messages of activations a program sends beside its computation, and how long that takes.

A device says which roles of messages its program hides (`Device.hides`, `operators.message_roles`). These are sent in
pieces while a rank, one of n, computes for c seconds, whatever the layouts:

    tp, cp    c = seconds of the forward of the product or the attention at one of their ends / n
    ep        c = seconds of the whole block, forward and backward / 4 n: rows go to experts and back while another
              microbatch is computed, forward beside its backward (Megatron-Core, overlap_moe_expert_parallel_comm)

Seconds are those of whole tensors. What runs at once slows both by SLOWDOWN, so a message of s seconds takes

    s - (2 - SLOWDOWN) * min(s, c)

Backward of a product or of attention computes longer, and hides as much.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from autoddl.core.graph import Graph, Op
from autoddl.core.layout import Mesh
from autoddl.core.recompute import blocks_of
from autoddl.cost_models import Cluster
from autoddl.operators.message_roles import Role, message_roles
from autoddl.pricing.kernel_prices import Kernels
from autoddl.pricing.price import Pricing

__all__ = ["beside_seconds", "computed_beside"]

_NOTHING: Mapping[tuple[str, str], float] = MappingProxyType({})


def computed_beside(pricing: Pricing) -> Mapping[tuple[str, str], float]:
    """By (name of a tensor, name of an op that reads it), the seconds c of what is computed beside its messages.

    Edges whose messages the program sends alone are left out.
    """
    device = pricing.cluster.device
    return _computed(pricing.graph, pricing.mesh, pricing.cluster) if device.hides else _NOTHING


def beside_seconds(pricing: Pricing, tensor: str, op: str) -> float:
    """The seconds c of one edge, 0 where its messages are sent alone."""
    return computed_beside(pricing).get((tensor, op), 0.0)


@lru_cache(maxsize=64)
def _computed(graph: Graph, mesh: Mesh, cluster: Cluster) -> Mapping[tuple[str, str], float]:
    hides, known = cluster.device.hides, _Known(Pricing(graph, mesh, cluster))
    return MappingProxyType({edge: known.seconds(role) for edge, role in message_roles(graph).items()
                             if role.name in hides})


class _Known:
    """The seconds that ranks compute beside messages of a role, as far as they were asked for."""

    def __init__(self, pricing: Pricing) -> None:
        self.pricing, self.flows, self.found = pricing, pricing.graph.differentiable(), dict[Role, float]()
        self.ops, self.blocks = {op.name: i for i, op in enumerate(pricing.graph.ops)}, blocks_of(pricing.graph)

    def seconds(self, role: Role) -> float:
        """The seconds c beside messages of a role."""
        if role not in self.found:
            i, ops = self.ops[role.op], self.pricing.graph.ops
            block = next((one for one in self.blocks if one.start <= i < one.end), None)
            beside = ops[block.start:block.end] if role.name == "ep" and block else (ops[i],)
            passes = [self._passes(op) for op in beside]
            whole = sum(map(sum, passes)) / 4 if role.name == "ep" else passes[0][0]
            self.found[role] = whole / self.pricing.mesh.size
        return self.found[role]

    def _passes(self, op: Op) -> tuple[float, float]:
        """Seconds of forward and of backward of an op on whole tensors."""
        tensors = self.pricing.graph.tensors
        reads, writes = (tuple(tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs))
        forward, backward = Kernels.of(self.pricing, op, self.flows).seconds(reads, writes)
        return sum(forward), sum(backward)
