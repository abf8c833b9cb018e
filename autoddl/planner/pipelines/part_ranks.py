"""Divides the ranks of a cluster among the stages of a pipeline: into equal parts, or into parts of different sizes.

    1+1+2      three parts, of 1, 1 and 2 ranks, in the order of the stages (`core.pipeline.sizes_of`)

A part is some units of one level of the cluster, such as nodes of a rack. They are in one unit of the level above.
Inside a node their number divides those that are there, and the part begins at a multiple of its size. So 8 ranks of a
node are cut into parts of 1, 2, 4 or 8. Such parts always tile a cluster (Zheng et al. 2022, "Alpa", section 5.2).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, islice, pairwise

from autoddl.core.errors import InputError
from autoddl.core.pipeline import sizes_of, sizes_text
from autoddl.cost_models import Cluster
from autoddl.cost_models.links import is_network
from autoddl.planner.options import PlanOptions
from autoddl.planner.pipelines.staged import stage_cluster

__all__ = ["Asked", "Ranks", "candidates_asked", "part_clusters", "part_of", "ranks_of_parts", "size_vectors"]

DIVISIONS = 64
"""Divisions of a cluster into parts of different sizes that are weighed for a number of stages."""

MOST_PARTS = 128
"""Parts of a cluster of which unequal divisions are looked for, at most."""

Ranks = tuple[int, int]
"""The ranks [first, end) of a part."""


Asked = tuple[int, tuple[int, ...], int, str]
"""Numbers of stages on as many parts, ranks of these, microbatches; and a schedule."""


def candidates_asked(cluster: Cluster, options: PlanOptions) -> list[Asked]:
    """Every pipeline that the options ask for: stages, their ranks, microbatches, and the schedule."""
    return [(d, sizes, m, name) for d in options.stages if d > 1 for sizes in _divisions(cluster, d, options)
            for m in options.microbatches for name in options.schedule]


def _divisions(cluster: Cluster, stages: int, options: PlanOptions) -> tuple[tuple[int, ...], ...]:
    """The numbers of ranks of so many stages that the options ask for; none are equal parts of the whole cluster.

    `any` are equal parts and the `DIVISIONS` other divisions that are nearest to them.
    """
    found = dict[tuple[int, ...], None]()
    for text in options.stage_ranks or ("even",):
        every = ((), *size_vectors(cluster, stages, DIVISIONS)) if text == "any" else (sizes_of(text),)
        found |= dict.fromkeys(() if len(set(one)) == 1 and sum(one) == cluster.size else one for one in every
                               if len(one) in (0, stages))
    return tuple(found)


def ranks_of_parts(cluster: Cluster, parts: int, sizes: Sequence[int] = ()) -> tuple[Ranks, ...]:
    """The ranks of every part, one after the other; without `sizes` the parts are equal.

    Raises InputError where there are not so many parts, or they have not all ranks together.
    """
    each = tuple(sizes) or (cluster.size // parts,) * parts
    if len(each) != parts or sum(each) != cluster.size:
        raise InputError(f"stage ranks {sizes_text(sizes)} are of {len(each)} stages and {sum(each)} ranks, and there "
                         f"are {parts} stages on the {cluster.size} ranks of cluster {cluster.name}: let both agree")
    return tuple(pairwise(accumulate(each, initial=0)))


def part_clusters(cluster: Cluster, parts: int, sizes: Sequence[int] = ()) -> tuple[Cluster, ...]:
    """The parts of a cluster as clusters of their own. Raises InputError where it cannot be cut so."""
    if not sizes:
        return (stage_cluster(cluster, parts),) * parts
    return tuple(part_of(cluster, ranks) for ranks in ranks_of_parts(cluster, parts, sizes))


@lru_cache(maxsize=10_000)
def part_of(cluster: Cluster, ranks: Ranks) -> Cluster:
    """The ranks [first, end) of a cluster as a cluster of their own. Raises InputError where they are no part.

    Parts of as many ranks are equal.
    """
    if not _is_part(cluster, *ranks):
        sizes = ", ".join(f"{level.name}={level.size}" for level in reversed(cluster.levels))
        raise InputError(f"ranks {ranks[0]} to {ranks[1] - 1} of cluster {cluster.name} ({sizes}) are no part for a "
                         "stage: inside a node its size divides the node and it begins at a multiple of it, beyond a "
                         "node it has whole ones, of one unit of the next level")
    at, count = _units(cluster, ranks[1] - ranks[0])
    levels = [level if i < at else replace(level, size=count if i == at else 1, dims=() if level.size > 1 else
                                           level.dims) for i, level in enumerate(cluster.levels)]
    if at < len(levels) and count == cluster.levels[at].size:
        levels[at] = cluster.levels[at]
    return replace(cluster, name=f"{cluster.name}/{ranks[1] - ranks[0]} ranks", levels=tuple(levels))


def _units(cluster: Cluster, size: int) -> tuple[int, int]:
    """The level of which so many ranks are children, and how many; the outermost such level."""
    at = max(i for i, unit in enumerate(cluster.units[:-1]) if size % unit == 0)
    return at, size // cluster.units[at]


def _is_part(cluster: Cluster, first: int, end: int) -> bool:
    """Whether a stage may have the ranks [first, end), by the rule above."""
    size = end - first
    at, count = _units(cluster, size)
    level, unit, above = cluster.levels[at], cluster.units[at], cluster.units[at + 1]
    fits = count <= level.size and first % unit == 0 and first // above == (end - 1) // above and not cluster.parts
    if 1 < count < level.size and (level.dims or level.leaf or level.topology not in ("switch", "fat-tree",
                                                                                     "fully-connected")):
        return False
    return fits and (is_network(level, at) or (level.size % count == 0 and first % size == 0))


def size_vectors(cluster: Cluster, parts: int, most: int) -> tuple[tuple[int, ...], ...]:
    """At most `most` divisions of a cluster into so many parts that are not all equal, those nearest to equal first.

    How near is the ratio of an equal part to that part which differs most from it. Raises InputError for more parts
    than `MOST_PARTS`.
    """
    if parts > MOST_PARTS:
        raise InputError(f"unequal stages are looked for where at most {MOST_PARTS} are asked for, these are {parts}: "
                         "ask for fewer, or write the ranks of each in place of 'any'")
    sizes = sorted({unit * count for unit, level in zip(cluster.units, cluster.levels, strict=False)
                    for count in range(1, level.size + 1)})
    far = {size: max(size * parts, cluster.size) / min(size * parts, cluster.size) for size in sizes}
    fits, found = cache(partial(_is_part, cluster)), dict[tuple[int, ...], None]()
    for ratio in sorted(set(far.values())):
        near = [size for size in sizes if far[size] <= ratio]
        unequal = (one for one in _divided(cluster.size, parts, near, fits) if len(set(one)) > 1 and one not in found)
        found |= dict.fromkeys(islice(unequal, most - len(found)))
        if len(found) == most:
            break
    return tuple(found)


def _divided(ranks: int, parts: int, sizes: Sequence[int], fits: Callable[[int, int], bool]
             ) -> Iterator[tuple[int, ...]]:
    """Yields the divisions of so many ranks into parts of these sizes, where `fits` says which [first, end) is one."""
    @cache
    def begun(first: int, left: int) -> tuple[int, ...]:
        """The sizes of a part that begins there, behind which the last parts can have the ranks that are left."""
        return tuple(size for size in sizes if sizes[0] * (left - 1) <= ranks - first - size <= sizes[-1] * (left - 1)
                     and fits(first, first + size) and (left == 1 or begun(first + size, left - 1)))

    def behind(first: int, left: int) -> Iterator[tuple[int, ...]]:
        for size in begun(first, left):
            yield from ((size, *others) for others in behind(first + size, left - 1)) if left > 1 else ((size,),)

    return behind(0, parts)
