"""Where the ranks of a cluster start on this machine: in the namespaces of its network, or side by side."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from autoddl.cost_models import Cluster
from autoddl.launch.launch import Place
from autoddl.launch.shaped_network import PORT, Network, Uplink, network

__all__ = ["placed", "places_of"]


@contextmanager
def placed(cluster: Cluster | None) -> Iterator[tuple[tuple[Uplink, ...], list[Place] | None]]:
    """The uplinks to count on and the place of each rank, while the network of `cluster` stands; of None, neither."""
    if cluster is None:
        yield (), None
        return
    with network(cluster) as built:
        yield built.uplinks, places_of(built)


def places_of(built: Network) -> list[Place]:
    """Where `launch` is to start each rank of the network."""
    return [Place(("ip", "netns", "exec", node.namespace),
                  {"GLOO_SOCKET_IFNAME": PORT, "MASTER_ADDR": built.nodes[0].address,
                   "LOCAL_RANK": str(at), "LOCAL_WORLD_SIZE": str(node.ranks),
                   "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")})  # no names of hosts there
            for node in built.nodes for at in range(node.ranks)]
