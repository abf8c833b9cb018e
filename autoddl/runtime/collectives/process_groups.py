"""Process groups of a mesh: one for every set of axes that a plan communicates over.

The members of a group are the ranks that differ along its axes only. They are ordered row-major by those axes, which is
the order in which nested splits cut a tensor. Every rank creates all groups in the same order, which the backends need.
A group of one rank is None: nothing is sent there, so a mesh of one rank needs no processes at all.

The stages of a pipeline have meshes of their own. All ranks make the groups of all stages (`connect_stages`), and one
group of all ranks for what stages send each other.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoddl.core.errors import MismatchError, PeerError
from autoddl.core.layout import Mesh
from autoddl.cost_models import Cluster, Group, parse_cluster
from autoddl.runtime.collectives.c10d_registry import find_group, set_group_timeout
from autoddl.runtime.collectives.sparse_sum import Swap
from autoddl.runtime.collectives.transport import Transport

__all__ = ["Groups", "StageRanks", "connect_stages", "peer_error"]


def peer_error(what: str, error: Exception) -> PeerError:
    """The error of something that all ranks do together, `what`, after one of them or a link failed."""
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return PeerError(f"{what} failed: {said}; a peer died or hung, or a link is down: "
                        "the other ranks' messages say which, restart from the last checkpoint")


def _rank(mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    return sum(c * stride for c, stride in zip(coordinate, mesh.strides, strict=True))


def _every(mesh: Mesh, axes: tuple[int, ...]) -> list[list[int]]:
    """The ranks of every group over `axes`, in a fixed order."""
    firsts = [mesh.coordinate(rank) for rank in range(mesh.size)]
    return [[_rank(mesh, c) for c in mesh.members(axes, first)] for first in firsts
            if all(first[a] == 0 for a in axes)]


def _described(mesh: Mesh, axes: tuple[int, ...]) -> str:
    """The description of the groups over `axes`, by which they are found again."""
    return "+".join(f"{mesh.sizes[a]}x{mesh.strides[a]}" for a in axes if mesh.sizes[a] > 1)


@dataclass(frozen=True, slots=True)
class StageRanks:
    """The ranks of a stage, from `first` on, on a mesh of their own.

        subsets    the sets of axes over which the stage communicates
        label      the description of the stage's groups, before that of their axes
    """

    mesh: Mesh
    first: int
    subsets: tuple[tuple[int, ...], ...]
    label: str = ""

    @property
    def groups(self) -> dict[str, list[list[int]]]:
        """The ranks of every group, in order, by description: of each axis, and of each of the subsets."""
        if self.mesh.size == 1:
            return {}
        sets = sorted({*(tuple(sorted(one)) for one in self.subsets), *((a,) for a in range(len(self.mesh.axes)))})
        return {f"{self.label} {_described(self.mesh, axes)}": [
            [self.first + rank for rank in ranks] for ranks in _every(self.mesh, axes)] for axes in sets}


def connect_stages(stages: Sequence[StageRanks], timeout: timedelta) -> tuple[dist.ProcessGroup, list[StageRanks]]:
    """Makes the groups of all stages; every rank calls it. Returns the group of all ranks, and the stages labelled.

    All were made by an earlier model if the group of all ranks was: its description tells all others. Raises
    MachineError where a peer cannot be reached.
    """
    print_of = hashlib.sha256(repr([(one.first, one.groups) for one in stages]).encode())
    text = f"autoddl stages {print_of.hexdigest()[:12]}"
    found = [StageRanks(one.mesh, one.first, one.subsets, f"{text} {s}") for s, one in enumerate(stages)]
    world = find_group(text)
    if world is None:
        try:
            for one in found:
                for description, every in one.groups.items():
                    for ranks in every:
                        dist.new_group(ranks, timeout=timeout, group_desc=description)
            world = dist.new_group(timeout=timeout, group_desc=text)
        except RuntimeError as error:
            raise peer_error("connecting the ranks of the stages", error) from error
    set_group_timeout(world, timeout)
    return world, found


class Groups:
    """The groups of `mesh` over each of `subsets` of its axes, and this rank's place in it.

    The `cluster`, or its text, decides how collectives run; without one of the mesh's size they are the library's own.
    A group is a set of threads and connections that torch keeps until the end. So a group that an earlier model made
    over the same ranks is used again, found by its description. Groups of a `stage` are there already
    (`connect_stages`). Raises MismatchError where the number of processes is not that of the mesh.
    """

    def __init__(self, mesh: Mesh, subsets: Iterable[tuple[int, ...]] = (), timeout: timedelta | None = None,
                 cluster: Cluster | str | None = None, stage: StageRanks | None = None) -> None:
        self.mesh, self._stage = mesh, stage
        if isinstance(cluster, str):
            cluster = parse_cluster(cluster, "the plan's cluster")
        self._transport = Transport(cluster if cluster is not None and cluster.size == mesh.size else None, timeout)
        ready = dist.is_available() and dist.is_initialized()
        world = dist.get_world_size() if ready else 1
        if world != mesh.size and stage is None:
            raise MismatchError(f"the mesh '{mesh}' has {mesh.size} ranks, and {world} run: start {mesh.size}, or plan "
                                f"for {world}")
        self.rank, self._first = dist.get_rank() if ready else 0, stage.first if stage is not None else 0
        self.coordinate = mesh.coordinate(self.rank - self._first)
        self._timeout = timeout
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._extents: dict[tuple[int, ...], Group] = {}
        self._open = set[dist.ProcessGroup]()
        for axes in sorted({tuple(sorted(subset)) for subset in subsets}):
            alone = prod(mesh.sizes[a] for a in axes) == 1
            self._groups[axes] = None if alone else self._group(axes)

    def _group(self, axes: tuple[int, ...]) -> dist.ProcessGroup:
        text = f"{'autoddl' if self._stage is None else self._stage.label} {_described(self.mesh, axes)}"
        found = find_group(text)
        if found is not None:
            if self._timeout is not None:
                set_group_timeout(found, self._timeout)
            return found
        every = _every(self.mesh, axes)
        try:
            made = {tuple(ranks): dist.new_group(ranks, timeout=self._timeout, group_desc=text) for ranks in every}
        except RuntimeError as error:
            names = "+".join(self.mesh.names[a] for a in axes)
            raise peer_error(f"connecting the ranks along {names}", error) from error
        mine: dist.ProcessGroup = next(group for ranks, group in made.items() if self.rank in ranks)
        return mine

    @property
    def timeout(self) -> timedelta | None:
        """How long a collective may take; None: as the backend has it."""
        return self._timeout

    def of(self, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
        """This rank's group over `axes`; None if it is alone there."""
        return self._groups[tuple(sorted(axes))]

    def connect(self, axis: int) -> None:
        """Makes the group over one axis, if it is not there; every rank calls it."""
        if (axis,) not in self._groups:
            self._groups[axis,] = self._group((axis,)) if self.mesh.sizes[axis] > 1 else None

    def open(self, axes: tuple[int, ...], like: Tensor) -> None:
        """Makes the communicator of the group over `axes` on the device of `like`, once; every member calls it."""
        group = self.of(axes)
        if group is not None and group not in self._open:
            dist.all_reduce(like.new_zeros(1), group=group)
            self._open.add(group)

    def start(self, kind: str, axes: tuple[int, ...], got: Tensor, given: Tensor, asynchronous: bool = True,
              how: str = "sum") -> Any:
        """Starts a collective over `axes` on contiguous tensors; see `Transport.start`."""
        group = self.of(axes)
        assert group is not None, "a group of one rank sends nothing"
        return self._transport.start(kind, got.view(-1), given.view(-1), group, self._extent(axes), asynchronous, how)

    def algorithm(self, kind: str, axes: tuple[int, ...], nbytes: int) -> str:
        """The name of the algorithm of a collective over `axes`; see `Transport.algorithm`."""
        return self._transport.algorithm(kind, self._extent(axes), nbytes)

    def _extent(self, axes: tuple[int, ...]) -> Group:
        """The sizes and strides of a group over `axes`."""
        extents = self._extents.get(axes)
        if extents is None:
            extents = self._extents[axes] = Group(tuple((self.mesh.sizes[a], self.mesh.strides[a]) for a in axes))
        return extents

    def start_swaps(self, axes: tuple[int, ...], action: Callable[[Swap], None], asynchronous: bool = True) -> Any:
        """Starts an action that swaps tensors with the ranks over `axes`; see `Transport.start_swaps`."""
        group = self.of(axes)
        assert group is not None, "a group of one rank sends nothing"
        return self._transport.start_swaps(action, group, asynchronous)

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh as torch's DeviceMesh, for DTensor, over the same groups."""
        groups = [self._group((a,)) for a in range(len(self.mesh.axes))]
        ranks = torch.arange(self._first, self._first + self.mesh.size).view(self.mesh.sizes)
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=self.mesh.names)
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=self.mesh.names)
