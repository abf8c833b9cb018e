"""Seeded random valid plans: a random mesh, a random signature for every op, random stored layouts, good or not."""

import random
from collections.abc import Sequence
from pathlib import Path

from autoddl.capture.capture import Captured
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.pipeline import Flight
from autoddl.core.plan import VERSION, Plan
from autoddl.core.problem import Problem, Solution
from autoddl.core.recompute import FULL, LIGHT, SELECTIVE, blocks_of, recompute_entry
from autoddl.cost_models import Cluster, load_cluster
from autoddl.operators.ring import with_rings
from autoddl.planner.assemble import assemble, plan_of
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable, variables

LAPTOP = Path(__file__).parent.parent.parent / "examples" / "clusters" / "laptop.yaml"
ALONE = Flight(1)
"""One microbatch at a time."""

MESHES = ("all=4", "machine=2,pair=2", "b=2,a=2")


def random_choice(problem: Problem, rng: random.Random, wanted: Sequence[Sequence[int]] = ()) -> tuple[int, ...]:
    """A finite choice: every variable at random among what its chosen neighbours allow, and its `wanted` if given."""
    tied: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in problem.sizes]
    for factor in problem.factors:
        tied[max(factor.variables)].append((factor.variables, factor.table))
    choice: list[int] = []
    for v, size in enumerate(problem.sizes):
        options = wanted[v] if wanted else range(size)
        order = rng.sample(options, len(options))
        for option in order:
            choice.append(option)
            if all(problem.tables[t].seconds[tuple(choice[u] for u in scope)] < float("inf") for scope, t in tied[v]):
                break
            choice.pop()
        else:
            raise AssertionError(f"{problem.names[v]} has no option that its neighbours allow")
    return tuple(choice)


def _lean(choice: tuple[int, ...], space: tuple[Variable, ...], rng: random.Random, share: float) -> tuple[int, ...]:
    """Move a share of the variables to their last option (everything B), so that plans differ in how wild they are."""
    return tuple(len(v.choices) - 1 if rng.random() < share else c for v, c in zip(space, choice, strict=True))


def random_plan(captured: Captured, seed: int, mesh: str | None = None, cluster: Cluster | None = None,
                microbatches: int = 1, recompute: bool = False, flight: Flight = ALONE,
                codecs: tuple[str, ...] = (), sparse: str = "", rings: bool = False) -> Plan:
    """The plan of `seed` for the model captured with one microbatch, on four ranks; `recompute`: with random blocks
    computed again, each at a random level, if the model has any; `flight` microbatches at once, in a stage;
    `codecs` where they are faster, sums of a `sparse` share wherever the dice say so, and attention in `rings` too."""
    rng = random.Random(seed)
    place = cluster or load_cluster(LAPTOP)
    graph = add_hubs(with_rings(captured.graph) if rings else captured.graph)
    levels = random.Random(seed + 1)
    blocks = blocks_of(graph) if recompute else ()
    names = [recompute_entry(block.name, levels.choice((FULL, SELECTIVE, LIGHT))) for block in blocks]
    pricing = Pricing(graph, Mesh.parse(mesh or rng.choice(MESHES)), place, microbatches=microbatches,
                      recompute=tuple(random.Random(seed).sample(names, (len(names) + 1) // 2)),
                      in_flight=flight.in_flight, waiting=flight.waiting, later=flight.later, codecs=codecs,
                      sparse=sparse)
    space = variables(graph, pricing.mesh, microbatches=microbatches, sparse=sparse,
                      in_flight=flight.in_flight + flight.waiting + flight.later)
    problem = problem_of(pricing, space, None)
    choice = random_choice(problem, rng)
    leaning = _lean(choice, space, rng, rng.choice((0.0, 0.3, 0.7)))
    choice = leaning if problem.cost(leaning) < float("inf") else choice
    seconds = problem.cost(choice)
    solution = Solution(choice, seconds, problem.nbytes(choice), 0.0, "none: drawn at random", "random")
    made = assemble(pricing, solution, space)
    return plan_of(made, pricing, solution, {
        "model": "random", "bound": 0.0, "budget": place.device.memory, "candidates": 1, "sample": dict(captured.spec),
        "fingerprints": {"model": captured.graph.fingerprint(), "cluster": place.fingerprint, "autoddl": str(VERSION)}})
