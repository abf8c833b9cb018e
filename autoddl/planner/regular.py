"""Makes the blocks of a found plan alike where that costs next to nothing, so that a person can read it.

    alike    blocks of equal ops, whose variables have the same choices
    kind     blocks that are alike and chose alike, their recomputation included

A plan is kept if it fits the budget. It must be as fast as the found one, or have a proven gap within the tolerance of
the search. The bound of all plans is one of it too. Two ways lead to such plans:

    merges      every block of a kind takes the choices of another, the smallest kind first, into the largest first
    mixtures    n blocks of a kind a, perhaps one of a kind c, and the others of a kind b, for blocks that are alike

Where memory binds, blocks differ for a reason, and few merges fit. Then mixtures of at most three kinds fill it
(`mixtures`). What a knapsack leaves open is less than what one block can make up for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from autoddl.core.graph import Graph, Op
from autoddl.core.plan import Plan
from autoddl.core.recompute import blocks_of
from autoddl.planner.candidates import Solved, Space, picked, space_of
from autoddl.planner.mesh_search import Found
from autoddl.planner.mixtures import MANY_KINDS, Measure, mixtures
from autoddl.planner.task import PlanTask
from autoddl.schedule.memory_line import predict_memory

__all__ = ["regular"]

MOST_MERGES = 32
"""Merges that may fail; each prices a plan and draws its memory."""

Decided = tuple[int, ...]
"""The number of blocks of a kind, then what is chosen in each of them."""

SAME = 1e-9
"""Relative difference of seconds that are the same sum in another order."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Blocks that are alike and chose alike: for each, the positions in the choice of what it decides."""

    blocks: tuple[tuple[int, ...], ...]


MOST_MIXTURES = 6
"""Mixtures of a group of alike blocks that are priced, the simplest and fastest first."""


def regular(task: PlanTask, found: Found, draft: Callable[[Solved], Plan]) -> Solved:
    """The found plan's choices, with fewer kinds of blocks where they cost next to nothing.

    `draft` writes a plan down, with buckets of one tensor each.
    """
    space, choice = space_of(task, found.candidate), found.solution.choice
    if all(len(kinds) == 1 for kinds in _kinds(space, choice)):
        return found.best
    first = draft(found.best)
    limit = max(first.predicted.seconds * (1 + SAME), first.bound / (1 - task.options.tolerance))

    def priced(new: tuple[int, ...]) -> tuple[Solved, float, float]:
        """The choices, with the seconds and the peak of their plan."""
        solved = picked(space, replace(found.solution, choice=new), found.best.row)
        plan = draft(solved)
        peak = predict_memory(plan, space.pricing.graph, task.options.optimizer, task.cluster).peak
        return (replace(solved, solution=replace(solved.solution, seconds=plan.predicted.seconds)),
                plan.predicted.seconds, peak)

    best = found.best
    for group in range(len(_kinds(space, choice))):
        for new in _tried(space, choice, group, lambda one: priced(one)[1:], limit, task.budget):
            solved, seconds, peak = priced(new)
            if seconds <= limit and peak <= task.budget:
                best, choice = solved, new
                break
    return _merged(space, choice, best, priced, limit, task.budget)


def _merged(space: Space, choice: tuple[int, ...], best: Solved,
            priced: Callable[[tuple[int, ...]], tuple[Solved, float, float]], limit: float, budget: float) -> Solved:
    """Merges kinds for as long as some merged plan is fast and small enough; a pair that was not is tried once."""
    failed, merged = set[tuple[Decided, Decided]](), True
    while merged:
        merged = False
        for pair, new in _merges(space, choice):
            if pair in failed:
                continue
            if len(failed) == MOST_MERGES:
                return best
            solved, seconds, peak = priced(new)
            if seconds <= limit and peak <= budget:
                best, choice, merged = solved, new, True
                break
            failed.add(pair)
    return best


def _tried(space: Space, choice: tuple[int, ...], group: int, measure: Measure, limit: float, budget: float
           ) -> Iterator[tuple[int, ...]]:
    """Yields choices in which the blocks of a group are a mixture of at most MANY_KINDS, where there are more."""
    kinds = [kind.blocks for kind in _kinds(space, choice)[group]]
    if len(kinds) > MANY_KINDS:
        yield from islice(mixtures(kinds, choice, measure, limit, budget), MOST_MIXTURES)


def _merges(space: Space, choice: Sequence[int]) -> Iterator[tuple[tuple[Decided, Decided], tuple[int, ...]]]:
    """Yields the choices in which one kind of blocks is merged into another, with what both decide."""
    for kinds in _kinds(space, choice):
        for small in sorted(kinds, key=lambda kind: len(kind.blocks)):
            for large in sorted(kinds, key=lambda kind: -len(kind.blocks)):
                if large is not small:
                    new = list(choice)
                    for block in small.blocks:
                        for to, source in zip(block, large.blocks[0], strict=True):
                            new[to] = choice[source]
                    yield (_decided(small, choice), _decided(large, choice)), tuple(new)


def _decided(kind: _Kind, choice: Sequence[int]) -> Decided:
    """Returns how many blocks a kind has, then what they decide."""
    return len(kind.blocks), *(choice[p] for p in kind.blocks[0])


def _kinds(space: Space, choice: Sequence[int]) -> list[list[_Kind]]:
    """For all blocks that are alike, their kinds in order."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], list[tuple[int, ...]]]] = defaultdict(
        lambda: defaultdict(list))
    count = len(space.policies.blocks)
    for block in _blocks(space):
        form = tuple("level" if p < count else id(space.variables[p - count].choices) for p in block)
        alike[form][tuple(choice[p] for p in block)].append(block)
    return [[_Kind(tuple(blocks)) for blocks in kinds.values()] for kinds in alike.values()]


def _blocks(space: Space) -> Iterator[tuple[int, ...]]:
    """Yields for every block of the model the positions in the choice of its level, parameters and ops."""
    graph, count, names = space.pricing.graph, len(space.policies.blocks), list(space.policies.blocks)
    places = _places(graph)
    for block in blocks_of(graph):
        level = [names.index(block.name)] if block.name in names else []
        yield (*level, *(count + k for k, v in enumerate(space.variables)
                         if (block.start <= places[v.item.name] < block.end if isinstance(v.item, Op)
                             else v.name.startswith(f"{block.name}."))))


def _places(graph: Graph) -> dict[str, int]:
    """The position of every op by name."""
    return {op.name: i for i, op in enumerate(graph.ops)}
