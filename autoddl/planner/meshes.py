"""Lists the meshes that fit a cluster.

Ranks are numbered with the innermost level fastest, so a mesh axis of size n with stride s joins ranks s apart. Every
axis lies inside one level, or is one or several whole levels:

    node of 8, network of 4:   net-node=32;   net=4,node=8;   net=4,node.1=2,node.0=4;   net.1=2,net.0=2,node=8; ...

All ordered factorisations of every level are listed, outermost axis first, up to a number of axes. Levels of size 1 are
passed over; a cluster of one device has the mesh `one=1`.
"""

from itertools import pairwise
from math import prod

from autoddl.core.errors import InputError
from autoddl.core.layout import Axis, Mesh
from autoddl.cost_models import Cluster

__all__ = ["check_mesh", "meshes"]


def _factorisations(n: int) -> list[tuple[int, ...]]:
    """Ordered ways to write n as a product of factors above 1, the shortest first."""
    found: list[tuple[int, ...]] = [(n,)] if n > 1 else [()]
    for first in range(2, n):
        if n % first == 0:
            found += [(first, *rest) for rest in _factorisations(n // first)]
    return sorted(found, key=lambda f: (len(f), f))


def _level_axes(name: str, size: int, most: int) -> list[tuple[Axis, ...]]:
    """The axes into which one level may be cut, outermost first."""
    cuts = [f for f in _factorisations(size) if len(f) <= most]
    return [tuple(Axis(name if len(cut) == 1 else f"{name}.{len(cut) - 1 - i}", n) for i, n in enumerate(cut))
            for cut in cuts]


def meshes(cluster: Cluster, most: int = 3) -> tuple[Mesh, ...]:
    """Every mesh over all devices of `cluster` with at most `most` axes, few axes first.

    Raises InputError where none has so few axes.
    """
    levels = [(level.name, level.size) for level in reversed(cluster.levels) if level.size > 1]
    if not levels:
        return (Mesh((Axis("one", 1),)),)
    found: dict[Mesh, None] = {}
    for joined in _groupings(levels):
        partial: list[tuple[Axis, ...]] = [()]
        for group in joined:
            name, size = "-".join(n for n, _ in group), prod(n for _, n in group)
            cuts = _level_axes(name, size, most) if len(group) == 1 else [(Axis(name, size),)]
            partial = [(*head, *cut) for head in partial for cut in cuts if len(head) + len(cut) <= most]
        found.update(dict.fromkeys(Mesh(axes) for axes in partial))
    if not found:
        raise InputError(f"no mesh of at most {most} axes covers {cluster.size} devices; allow more axes")
    return tuple(sorted(found, key=lambda mesh: (len(mesh.axes), mesh.sizes)))


def _groupings(levels: list[tuple[str, int]]) -> list[list[list[tuple[str, int]]]]:
    """Ways to join neighbouring levels."""
    if not levels:
        return [[]]
    found = []
    for count in range(1, len(levels) + 1):
        found += [[levels[:count], *rest] for rest in _groupings(levels[count:])]
    return found


def check_mesh(mesh: Mesh, cluster: Cluster) -> Mesh:
    """Returns `mesh` if it covers the cluster and every axis lies inside a level or is whole levels.

    Raises InputError for any other.
    """
    if mesh.size != cluster.size:
        raise InputError(f"mesh '{mesh}' has {mesh.size} ranks, cluster {cluster.name} has {cluster.size} devices: "
                         f"the sizes must multiply to {cluster.size}")
    units = cluster.units
    for axis, stride in zip(mesh.axes, mesh.strides, strict=True):
        end = stride * axis.size
        inside = any(low <= stride and end <= high for low, high in pairwise(units))
        if axis.size > 1 and not inside and not (stride in units and end in units):
            sizes = ",".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
            raise InputError(f"mesh '{mesh}': axis {axis.name} straddles levels of cluster {cluster.name} ({sizes}); "
                             "an axis lies inside one level or is whole levels")
    return mesh
