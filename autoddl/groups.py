"""Process groups of a mesh: one for every set of axes that a plan communicates over.

The members of a group are the ranks that differ along its axes only, ordered row-major by those axes: the order in
which nested splits cut a tensor. Every rank creates all groups in the same order, which the backends need. A group of
one rank is None: nothing is sent there, so a mesh of one rank needs no processes at all.
"""

from collections.abc import Iterable
from datetime import timedelta
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoddl.errors import MismatchError
from autoddl.layout import Mesh

__all__ = ["Groups", "members"]


def members(mesh: Mesh, axes: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Coordinates of the group's members over `axes`, row-major, for the rank at `coordinate`."""
    found = []
    for index in product(*(range(mesh.sizes[a]) for a in sorted(axes))):
        place = dict(zip(sorted(axes), index, strict=True))
        found.append(tuple(place.get(a, c) for a, c in enumerate(coordinate)))
    return tuple(found)


def _rank(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    return sum(c * stride for c, stride in zip(coordinate, mesh.strides, strict=True))


def _every(mesh: Mesh, axes: tuple[int, ...]) -> list[list[int]]:
    """Ranks of all groups over `axes`, in a fixed order."""
    firsts = [mesh.coordinate(rank) for rank in range(mesh.size)]
    return [[_rank(mesh, c) for c in members(mesh, axes, first)] for first in firsts
            if all(first[a] == 0 for a in axes)]


class Groups:
    """The groups of `mesh` over each of `subsets` of its axes, and this rank's place in it."""

    def __init__(self, mesh: Mesh, subsets: Iterable[tuple[int, ...]] = (), timeout: timedelta | None = None) -> None:
        self.mesh = mesh
        ready = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if ready else 1
        if world != mesh.size:
            raise MismatchError(f"the mesh '{mesh}' has {mesh.size} ranks, but {world} process{'es' * (world > 1)} run; "
                                f"start {mesh.size}, or plan for {world}")
        self.rank = dist.get_rank() if ready else 0
        self.coordinate = mesh.coordinate(self.rank)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for axes in sorted({tuple(sorted(subset)) for subset in subsets}):
            self._groups[axes] = self._create(axes, timeout)

    def _create(self, axes: tuple[int, ...], timeout: timedelta | None) -> dist.ProcessGroup | None:
        every = _every(self.mesh, axes)
        if len(every[0]) == 1:
            return None
        if len(every) == 1:
            return dist.group.WORLD
        made = [(ranks, dist.new_group(ranks, timeout=timeout)) for ranks in every]
        return next(group for ranks, group in made if self.rank in ranks)

    def of(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group over `axes` that this rank is in; None if it is alone there."""
        return self._groups[tuple(sorted(axes))]

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The same mesh as torch's, for DTensor."""
        return dist.init_device_mesh(device_type, self.mesh.sizes, mesh_dim_names=self.mesh.names)
