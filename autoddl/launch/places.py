"""Places of the ranks of a cluster on this machine: in the namespaces of its shaped network, or on loopback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from autoddl.cost_models import Cluster
from autoddl.launch.launch import Place
from autoddl.launch.shaped_network import PORT, ShapedNetwork, Uplink, shape_links
from autoddl.launch.switches import start_switches
from autoddl.runtime.switches.offered import SWITCHES, Switches

__all__ = ["network_places", "placed"]


@contextmanager
def placed(cluster: Cluster | None) -> Iterator[tuple[tuple[Uplink, ...], list[Place] | None]]:
    """Builds the network of `cluster`; yields its uplinks and each rank's place, or () and None without a cluster.

    Switches of levels that reduce run meanwhile."""
    if cluster is None:
        yield (), None
        return
    with shape_links(cluster) as built, start_switches(cluster, built) as switches:
        yield built.uplinks, network_places(built, switches)


def network_places(built: ShapedNetwork, switches: Switches | None = None) -> list[Place]:
    """Returns the place where `launch` starts each rank of the network, which knows the `switches` that reduce."""
    offered = {SWITCHES: switches.to_text()} if switches is not None else {}
    return [Place(("ip", "netns", "exec", node.namespace),
                  {"GLOO_SOCKET_IFNAME": PORT, "MASTER_ADDR": built.nodes[0].address,
                   "LOCAL_RANK": str(at), "LOCAL_WORLD_SIZE": str(node.ranks), **offered,
                   "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")})  # no names of hosts there
            for node in built.nodes for at in range(node.ranks)]
