"""Policies of recomputation as variables: every choice costs what the plain network of its levels says."""

import math
import random
from itertools import product

import pytest
import zoo
from random_plans import LAPTOP, random_choice
from sampling import parametrize_or_slow

from autoddl.capture.capture import capture
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.cost_models import load_cluster
from autoddl.explain.rows.memory_rows import line_at_moments, numbers_of
from autoddl.operators.recomputed import levels
from autoddl.planner.peaks import draft_of
from autoddl.pricing.build_problem import CostNetwork, network_of
from autoddl.pricing.policies import at_levels, policies_of, separable
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables
from autoddl.search import build_space, solve
from autoddl.search.elimination_order import plan_elimination
from autoddl.search.presolve import presolve, presolve_folded
from autoddl.search.relaxations import Space

CLUSTER = load_cluster(LAPTOP)
SMALL = {"d": 16, "T": 8, "B": 8}
"""Sizes of a small GPT."""


def joint(name: str, mesh: str, microbatches: int = 1, **size: int) -> CostNetwork:
    """The network of a model of the zoo in which every block may be computed again."""
    graph = add_hubs(capture(*getattr(zoo, name)(**size)).graph)
    pricing = Pricing(graph, Mesh.parse(mesh), CLUSTER, "adamw", microbatches)
    return network_of(pricing, variables(graph, pricing.mesh, microbatches=microbatches),
                      separable(pricing, policies_of(graph, levels(graph))))


def alone(network: CostNetwork, levels: tuple[int, ...]) -> CostNetwork:
    """The network of these levels, priced without policies."""
    return network_of(at_levels(network.pricing, network.policies, levels), network.variables)


def moments(network: CostNetwork, rng: random.Random, count: int) -> list[str]:
    names = [op.name for op in network.pricing.graph.ops]
    return ["update", *(f"{rng.choice(('before', 'forward', 'backward', 'around'))} {rng.choice(names)}"
                        for _ in range(count))]


@parametrize_or_slow("name,mesh,microbatches,size,draws", [("gpt", "pair=2", 2, SMALL | {"layers": 2}, 2)], [
    ("gpt", "pair=2", 2, SMALL | {"layers": 3}, 4), *((name, mesh, m, {}, 4)
    for name in ("gpt", "llama", "t5", "resnet", "mixture", "neox", "phi3")
    for mesh, m in (("machine=2,pair=2", 1), ("all=4", 2)))])
def test_a_choice_costs_what_its_levels_cost(name: str, mesh: str, microbatches: int, size: dict[str, int], draws: int
                                             ) -> None:
    network, rng = joint(name, mesh, microbatches, **size), random.Random(name)
    count, graph = len(network.policies.blocks), network.pricing.graph
    assert count
    free = network.problem(None)
    for _ in range(draws):
        at = tuple(rng.randrange(len(network.policies.levels)) for _ in range(count))
        fixed = alone(network, at)
        options = random_choice(fixed.problem(None), rng)
        choice = (*at, *options)
        assert free.cost(choice) == pytest.approx(fixed.seconds(options), rel=1e-12)
        line = line_at_moments(draft_of(network, choice), graph, "adamw", CLUSTER)
        for moment in moments(network, rng, 12):
            row = {moment: 1.0}
            nbytes = network.row_bytes(choice, row)
            assert network.problem(None, row).nbytes(choice) == pytest.approx(nbytes, rel=1e-12)
            assert nbytes <= fixed.row_bytes(options, row) * (1 + 1e-12)
            most = max(line[n] for n in numbers_of(graph, moment)) or max(line)
            assert nbytes <= most * (1 + 1e-9), moment


@parametrize_or_slow("name,size", [("gpt", SMALL | {"layers": 2})], [("llama", {})])
def test_the_search_finds_the_best_levels_under_a_row(name: str, size: dict[str, int]) -> None:
    network = joint(name, "pair=2", **size)
    row = {f"backward {network.pricing.graph.ops[-2].name}": 1.0}
    most = network.problem(None, row).nbytes(solve(network.problem(None, row)).choice)
    problem = network.problem(0.9 * most, row)
    best = min(solve(alone(network, at).problem(0.9 * most, row)).seconds
               for at in product(range(len(network.policies.levels)), repeat=len(network.policies.blocks)))
    found = solve(problem)
    assert found.bound <= best * (1 + 1e-9) and found.seconds == pytest.approx(best, rel=1e-9)


def test_blocks_with_policies_are_folded() -> None:
    """An elimination grows with the logarithm of their number then, and finds what that of the whole problem finds."""
    cells = []
    for layers in (8, 16):
        network = joint("gpt", "pair=2", layers=layers, **SMALL)
        problem = network.problem(1e9, {f"backward {network.pricing.graph.ops[-2].name}": 1.0})
        (fold,) = presolve_folded(problem)[0].folds
        space = build_space(problem)
        assert space.program.exact and fold.times >= layers - 5
        cells.append(len(space.program.messages()))
    assert cells[1] < 1.2 * cells[0]
    plain = presolve(problem).problem
    whole = Space.of(plain, plan_elimination(plain))
    for price in (0.0, 1e-9, math.inf):
        found, expected = (one.point(price, one.thresholds[-1]) for one in (space, whole))
        assert found.value == pytest.approx(expected.value, rel=1e-12)


@pytest.mark.slow
def test_blocks_that_all_read_one_tensor_are_folded_with_policies() -> None:
    """Decoder blocks read what the encoder wrote, and all of a stack read its position bias."""
    network = joint("t5", "pair=2", layers=8)
    problem = network.problem(1e9, {f"backward {network.pricing.graph.ops[-2].name}": 1.0})
    assert [fold.times >= 3 for fold in presolve_folded(problem)[0].folds] == [True, True]
    space = build_space(problem)
    assert space.program.exact
    choice = space.point(1e-9, space.thresholds[-1])
    assert problem.cost(tuple(choice.choice.tolist())) - problem.fixed_seconds == pytest.approx(choice.seconds)


@parametrize_or_slow("mesh", ["pair=2"], ["machine=2,pair=2"])
def test_the_copy_of_a_weight_tied_outside_of_blocks_counts_at_all_levels(mesh: str) -> None:
    """Rows of policies then have at the loss what those of the levels have, and nothing is left out."""
    network, rng = joint("gpt", mesh, layers=3, **SMALL), random.Random(mesh)
    row, count = {f"backward {network.pricing.graph.ops[-2].name}": 1.0}, len(network.policies.blocks)
    (number,) = network.lifetimes.numbers(*row)
    assert any(term.what == ("passed kept",) for term in network.lifetimes.alive(number))
    for _ in range(4):
        at = tuple(rng.randrange(len(network.policies.levels)) for _ in range(count))
        fixed = alone(network, at)
        options = random_choice(fixed.problem(None), rng)
        assert network.row_bytes((*at, *options), row) == pytest.approx(fixed.row_bytes(options, row), rel=1e-12)
        assert network.problem(None, row).nbytes((*at, *options)) == pytest.approx(fixed.row_bytes(options, row))
