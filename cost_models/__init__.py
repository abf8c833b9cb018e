"""Prices kernels and collectives on a cluster, from facts (a cluster file, device sheets, shapes) to seconds and bytes.

A `Cluster` is a plain value, read from YAML. The price of a kernel on one device is `kernel_seconds`, by its shape;
`compute_seconds`, `copy_seconds` and `elementwise_seconds` use a plain roofline. The price of communication among a
`Group` of ranks is `collective`: the cheapest algorithm for the group's place in the hierarchy.

Reading order:

    hardware/               a file for every known device (A100-80GB.yaml has that one's peaks), and links.yaml
    machine, units          a cluster as a value, and quantities as text
    cluster, schema         parse a cluster file; its keys and their rules are in `schema` (parts: `links`, `measured`)
    device_names            the names that devices have elsewhere
    software                what training programs do beyond the operators of a model, by profile
    curves, kernel          seconds of one kernel on one device
    topologies, groups      where a group sits in the hierarchy, and whom it shares links with
    disjoint_rings          two rings over a torus or a HammingMesh that share no link
    placement               how many rings share the busiest link of a HammingMesh
    collectives             seconds of a collective: the cheapest algorithm of the backend (`backends`, `call`)
    algorithms, hierarchy   seconds by algorithm; those over two levels, such as a two-level all-reduce, in `hierarchy`
    switches                an all-reduce in switches that reduce, and whether they have room
    timelines/              tasks on the streams of ranks, and bounds of what a pipeline of them takes

Others use the names that this file exports. They also import some modules by name:

    machine (Device, Host), groups (crossings), curves, switches, links and backends (their tables), units (texts)

This room imports `core` alone. Nothing here knows models, plans or torch.
"""

from autoddl.cost_models.backends import MESSAGE_ALGORITHMS, Algorithm
from autoddl.cost_models.cluster import Cluster, Device, Level, load_cluster, load_device, parse_cluster
from autoddl.cost_models.collectives import (
           Group,
           Price,
           collective,
           link_of,
           moved_by,
           sent_bytes,
           step_count,
           wire_seconds,
)
from autoddl.cost_models.groups import ways_of
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
           "moved_by",
           "parse_cluster",
           "parse_quantity",
           "sent_bytes",
           "show_bytes",
           "show_rate",
           "show_seconds",
           "step_count",
           "ways_of",
           "wire_seconds",
]
