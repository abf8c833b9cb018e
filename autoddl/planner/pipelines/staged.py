"""Describes a pipeline that is to be planned: where it is cut, how it runs, and which part of the cluster a stage has.

A pipeline cuts the cluster along its outermost levels into equal parts (`stage_cluster`), one for each stage, or for
several where the schedule is interleaved. Parts may also have different numbers of ranks (`part_ranks`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from autoddl.core.errors import InputError
from autoddl.core.layout import Axis, Mesh
from autoddl.core.pipeline import (
    Flight,
    RankMoments,
    Schedule,
    check_copies,
    check_schedule,
    counted_flights,
    first_ranks,
    rank_moments,
    sizes_text,
)
from autoddl.core.pipeline_schedules import chunks_of, generate, schedule_title, splits_backward
from autoddl.cost_models import Cluster

__all__ = ["PIPE", "Staged", "mesh_of_parts", "stage_cluster"]

PIPE = "pipe"
"""Name of the mesh axis of a plan with stages along which they lie."""
DIVISIBLE = ("switch", "fat-tree", "fully-connected", "hybrid-cube-mesh")
"""Topologies that a part of the children has too."""


def stage_cluster(cluster: Cluster, stages: int) -> Cluster:
    """The part of a cluster that one of `stages` equal stages has: the outermost levels are cut first.

    Raises InputError where the levels cannot be cut so, or parts would differ.
    """
    levels, left = [*cluster.levels], stages
    for i in reversed(range(len(levels))):
        level, cut = levels[i], gcd(left, levels[i].size)
        if left > 1 and cut < min(left, level.size):
            break
        if cut > 1 and cut < level.size and (level.dims or level.leaf or level.topology not in DIVISIBLE):
            break
        left //= cut
        levels[i] = replace(level, size=level.size // cut, dims=() if cut > 1 else level.dims)
    if left > 1 or cluster.parts:
        sizes = ", ".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
        raise InputError(f"{stages} stages do not cut cluster {cluster.name} ({sizes}) into equal parts: stages take "
                         "whole factors of its levels, the outermost first")
    return replace(cluster, name=f"{cluster.name}/{stages}", levels=tuple(levels))


@dataclass(frozen=True, slots=True)
class Staged:
    """A pipeline that is to be planned: where it is cut, and how it runs.

        cuts          positions of the cuts (`core.stages`)
        name          of the schedule (`core.pipeline_schedules`)
        microbatches  of a step
        compress      messages that may be coded, as text (`core.codecs`)
        codecs        by lane, as text, what it is sent as; None where that is to be decided
        sizes         ranks of every part of the cluster (`part_ranks`); none: equal parts
    """

    cuts: tuple[int, ...]
    name: str
    microbatches: int
    compress: tuple[str, ...] = ()
    codecs: Mapping[str, str] | None = None
    sizes: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @property
    def splits(self) -> bool:
        """Whether backward is split into B and W."""
        return splits_backward(self.name)

    @property
    def placement(self) -> tuple[int, ...]:
        """By stage, the part of the cluster that has it, the first such part where several have it.

        Stages of one part share the memory of its ranks.
        """
        return first_ranks(self.pipes)

    @property
    def pipes(self) -> tuple[tuple[int, ...], ...]:
        """By pipe and stage, the part of the cluster that has it."""
        return generate(self.name, self.parts, self.microbatches).placement

    @property
    def moments(self) -> Mapping[int, RankMoments]:
        """By part of the cluster that has several stages, as in `placement`, its moments."""
        return _moments(self.name, self.parts, self.microbatches)

    @property
    def flights(self) -> tuple[Flight, ...]:
        """By stage, the microbatches that count as its own: those when its ranks have most."""
        return _flights(self.name, self.parts, self.microbatches)

    @property
    def parts(self) -> int:
        """Number of parts of the cluster."""
        return self.stages // chunks_of(self.name)

    def schedule(self) -> Schedule:
        """The schedule, checked. Raises InputError where there is none so."""
        made = generate(self.name, self.parts, self.microbatches)
        if self.sizes and (self.stages > self.parts or made.pipes > 1):
            raise InputError(f"schedule {schedule_title(self.name)} has several stages on each part of the cluster, "
                             f"and stage ranks {sizes_text(self.sizes)} give each stage ranks of its own: take 1f1b, "
                             "gpipe, zb-h1 or zb-h2, or leave stage ranks out")
        check_schedule(made)
        check_copies(made)
        if self.splits and self.microbatches == 1:
            raise InputError(f"schedule {schedule_title(self.name)} puts gradients of weights off behind other "
                             "microbatches, and a step of one microbatch has no other: take 1f1b, or more "
                             "microbatches")
        return made


@lru_cache(maxsize=256)
def _moments(name: str, parts: int, microbatches: int) -> Mapping[int, RankMoments]:
    return rank_moments(generate(name, parts, microbatches))


@lru_cache(maxsize=256)
def _flights(name: str, parts: int, microbatches: int) -> tuple[Flight, ...]:
    return counted_flights(generate(name, parts, microbatches))


def mesh_of_parts(sizes: Sequence[int]) -> Mesh:
    """The mesh of a plan with stages: parts by ranks of a part, or all ranks along `pipe` where parts differ."""
    if len(set(sizes)) > 1:
        return Mesh((Axis(PIPE, sum(sizes)),))
    return Mesh((Axis(PIPE, len(sizes)), Axis("rank", sizes[0])))
