"""What a cluster costs: facts in (a cluster file, device sheets, sizes), seconds and bytes out.

A `Cluster` is read from YAML and is a plain value. `kernel_seconds` prices a kernel on one device by its shape,
`compute_seconds`, `copy_seconds` and `elementwise_seconds` by a plain roofline, `collective` prices communication
among a `Group` of ranks by the cheapest algorithm for its place in the hierarchy. Nothing here knows models, plans or
torch.
"""

from autoddl.cost_models.backends import MESSAGE_ALGORITHMS, Algorithm
from autoddl.cost_models.cluster import Cluster, Device, Level, load_cluster, load_device, parse_cluster
from autoddl.cost_models.collectives import Group, Price, collective, link_of, sent_bytes, step_count, wire_seconds
from autoddl.cost_models.kernel import (
           Kernel,
           compute_seconds,
           copy_seconds,
           elementwise_seconds,
           kernel_seconds,
           least_seconds,
)
from autoddl.cost_models.units import parse_quantity, show_bytes, show_rate, show_seconds

__all__ = [
           "MESSAGE_ALGORITHMS",
           "Algorithm",
           "Cluster",
           "Device",
           "Group",
           "Kernel",
           "Level",
           "Price",
           "collective",
           "compute_seconds",
           "copy_seconds",
           "elementwise_seconds",
           "kernel_seconds",
           "least_seconds",
           "link_of",
           "load_cluster",
           "load_device",
           "parse_cluster",
           "parse_quantity",
           "sent_bytes",
           "show_bytes",
           "show_rate",
           "show_seconds",
           "step_count",
           "wire_seconds",
]
