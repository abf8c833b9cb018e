"""Prices candidates of the outer search: a mesh, a region of its plans, a number of microbatches.

    build_network(task, candidate)      all choices of the candidate, priced
    build_problem(task, candidate)      its problem under the budget, with the bytes of a row of moments
    chosen(task, candidate, solution)   the choices of a solution of it, priced alone
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from autoddl.core.graph import Graph, Kind
from autoddl.core.layout import Mesh
from autoddl.core.problem import Problem, Solution
from autoddl.core.recompute import FULL, NO_RECOMPUTE, SEARCH, SELECTIVE, policy_blocks, recomputes_more
from autoddl.operators.recomputed import levels
from autoddl.planner.task import PlanTask
from autoddl.pricing.build_problem import CostNetwork, Row, network_of
from autoddl.pricing.lifetimes import Lifetimes
from autoddl.pricing.policies import NO_POLICIES, Policies, at_levels, policies_of, separable
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Choice, Region, Variable, variables

__all__ = ["Built", "Candidate", "Solved", "Space", "bounds", "build_network", "build_problem", "chosen", "picked",
           "policies_on", "space_of", "under_policies"]

SEARCHED_AXES = 3
"""Axes of the meshes on which the level of every block is a variable."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of the space of plans that is searched at once.

        mesh           the mesh of all its plans
        region         the part of the space, from a graph and a mesh
        microbatches   number of them in a step
        recompute      the blocks that backward computes again, as text (`core.recompute`)
        in_flight      microbatches whose activations are there at once
        waiting        others, whose gradients of weights wait
        later          how many more wait at another time (`core.pipeline.Flight`)
        stays          whether there are several at other times, so that gathered weights stay
    """

    mesh: Mesh
    region: Callable[[Graph, Mesh], Region]
    microbatches: int = 1
    recompute: str = NO_RECOMPUTE
    in_flight: int = 1
    waiting: int = 0
    later: int = 0
    stays: bool = False

    def __str__(self) -> str:
        parts = f" x {self.microbatches} microbatches" if self.microbatches > 1 else ""
        return f"{self.mesh}{parts}" + (f", recompute {self.recompute}" if self.recompute != NO_RECOMPUTE else "")


@dataclass(frozen=True, slots=True)
class Solved:
    """A solved candidate: each of its `variables` has the chosen option alone; `row` is that of the bound's proof."""

    pricing: Pricing
    variables: tuple[Variable, ...]
    solution: Solution
    row: Row


Built = tuple[Pricing, tuple[Variable, ...], Problem]
"""The prices of a mesh, its variables, and the problem that they make."""


def build_network(task: PlanTask, candidate: Candidate, known: dict[Hashable, Lifetimes] | None = None) -> CostNetwork:
    """All choices of the candidate, priced. Lifetimes of the task's graphs are looked up in `known`, and kept there."""
    pricing, space = _space(task, candidate)
    made = network_of(pricing, space, _policies(pricing, candidate))
    return made if known is None else replace(made, known=known)


def build_problem(task: PlanTask, candidate: Candidate, row: Row | None = None) -> Built:
    """The candidate's prices, variables and problem under the task's budget.

    Bytes of the problem are those of `row`, by default those of the optimizer's update.
    """
    network = build_network(task, candidate)
    return network.pricing, network.variables, network.problem(task.budget, row)


def policies_on(mesh: Mesh, policy: str) -> tuple[str, ...]:
    """The policies that are searched for `policy` on a mesh.

    For `search` on a mesh of many axes these are one level for all blocks. Such problems are solved by messages, which
    know factors of two variables alone.
    """
    return (NO_RECOMPUTE, SELECTIVE, FULL) if policy == SEARCH and len(mesh.axes) > SEARCHED_AXES else (policy,)


def under_policies(candidates: Sequence[Candidate], recompute: Iterable[str]) -> list[Candidate]:
    """The candidates under every policy of recomputation of `recompute`."""
    return [replace(one, recompute=each) for policy in recompute for one in candidates
            for each in policies_on(one.mesh, policy)]


def _policies(pricing: Pricing, candidate: Candidate) -> Policies:
    """The policies that the search chooses a level of."""
    if candidate.recompute != SEARCH:
        return NO_POLICIES
    return separable(pricing, policies_of(pricing.graph, levels(pricing.graph, pricing.cluster.device.by_hand)))


def _space(task: PlanTask, candidate: Candidate) -> tuple[Pricing, tuple[Variable, ...]]:
    graph = task.variant(candidate.microbatches).graph
    pricing = Pricing(graph, candidate.mesh, task.cluster, task.options.optimizer, candidate.microbatches, task.hidden,
                      policy_blocks(graph, candidate.recompute), candidate.in_flight, task.counts,
                      candidate.waiting, task.ports, task.options.compress, task.options.sparse or "", task.copies,
                      candidate.later)
    region = candidate.region(graph, candidate.mesh)
    several = candidate.in_flight + candidate.waiting + candidate.later
    others = max(several, 1 + candidate.stays)  # whose weights must stay gathered
    return pricing, variables(graph, candidate.mesh, region, candidate.microbatches, others, pricing.sparse)


@dataclass(frozen=True, slots=True)
class Space:
    """The prices of a candidate, the policies of its blocks, its variables. A choice has levels first, then options."""

    pricing: Pricing
    policies: Policies
    variables: tuple[Variable, ...]


def space_of(task: PlanTask, candidate: Candidate) -> Space:
    """The space of the candidate, none of it priced."""
    pricing, space = _space(task, candidate)
    return Space(pricing, _policies(pricing, candidate), space)


def chosen(task: PlanTask, candidate: Candidate, solution: Solution, row: Row) -> Solved:
    """The choices of `solution` alone: a worker priced the rest, and that stays there."""
    return picked(space_of(task, candidate), solution, row)


def picked(space: Space, solution: Solution, row: Row) -> Solved:
    """The choices of `solution` alone. Variables with the same choices that chose alike share one, and one price."""
    count = len(space.policies.blocks)
    pricing, options = at_levels(space.pricing, space.policies, solution.choice[:count]), solution.choice[count:]
    single: dict[tuple[int, int], tuple[Choice, ...]] = {}
    found = tuple(Variable(v.item, single.setdefault((id(v.choices), k), (v.choices[k],)))
                  for v, k in zip(space.variables, options, strict=True))
    return Solved(pricing, found, replace(solution, choice=(0,) * len(found)), row)


def bounds(task: PlanTask, one: Candidate, other: Candidate) -> bool:
    """Whether the seconds of `one` without a budget bound those of `other`, on the same mesh.

    They do where `other` computes more blocks again, or has more microbatches, with two exceptions. Kernels with
    measured curves may be faster where they are small. A microbatch of one row splits as none of more rows does.
    For example, (1, S, C) -> (S, C) leaves S whole, and (2, S, C) -> (2S, C) does not.
    """
    if (other.mesh, other.in_flight, other.waiting) != (one.mesh, one.in_flight, one.waiting):
        return False
    if other.region is not one.region or not recomputes_more(other.recompute, one.recompute):
        return False
    if other.microbatches == one.microbatches:
        return other.recompute != one.recompute
    return (not task.cluster.device.curves and other.microbatches > one.microbatches
            and other.microbatches % one.microbatches == 0
            and all(t.shape[0] > other.microbatches for t in task.graph.tensors if t.kind is Kind.INPUT and t.shape))
