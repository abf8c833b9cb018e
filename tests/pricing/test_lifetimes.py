"""Rows of bytes: no row lies above the memory line of any plan, and the rows of good plans reach their peaks."""

import random

import pytest
import zoo
from random_plans import LAPTOP, MESHES, random_choice

from autoddl.capture.capture import capture
from autoddl.capture.sample import as_sample, parted
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import Mesh
from autoddl.core.precision import Precision
from autoddl.cost_models import load_cluster
from autoddl.planner.assemble import assemble_choice
from autoddl.planner.peaks import KINDS, Peaks
from autoddl.pricing.build_problem import CostNetwork, network_of
from autoddl.pricing.lifetimes import UPDATE
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import variables
from autoddl.search import solve

MODELS = ["gpt", "resnet", "vit", "regression", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "mixture", "t5", "vgg_bn"))]


def _network(name: str, mesh: str, microbatches: int = 1, optimizer: str = "adamw", recipe: str = "as-written"
             ) -> CostNetwork:
    model, sample = getattr(zoo, name)()
    graph = add_hubs(capture(model, parted(as_sample(sample), microbatches), Precision.parse(recipe)).graph)
    pricing = Pricing(graph, Mesh.parse(mesh), load_cluster(LAPTOP), optimizer, microbatches)
    return network_of(pricing, variables(graph, pricing.mesh, microbatches=microbatches))


def _rows_are_below(network: CostNetwork, choice: tuple[int, ...], seed: int) -> None:
    """Every row of every 25th op, and of the update."""
    peaks, ops = Peaks(network), network.pricing.graph.ops
    peak = peaks.of(choice).nbytes
    moments = [UPDATE, *(f"{kind} {op.name}" for op in ops[seed % 25::25] for kind in KINDS)]
    above = {m: n for m in moments if (n := peaks.row_bytes(choice, m)) > peak * (1 + 1e-9)}
    assert not above, (peak, above)


@pytest.mark.parametrize("name", MODELS)
def test_no_row_is_above_the_peak_of_a_random_plan(name: str) -> None:
    for seed, mesh in enumerate(MESHES):
        network = _network(name, mesh, 1 if name == "regression" else 1 + seed % 2, "adamw" if seed else "sgd")
        _rows_are_below(network, random_choice(network.problem(None), random.Random(seed)), seed)


@pytest.mark.parametrize(("recipe", "microbatches"), [("bf16-mixed", 1), ("bf16-mixed,reduce=bfloat16", 2)])
def test_no_row_is_above_the_peak_of_a_mixed_plan(recipe: str, microbatches: int) -> None:
    network = _network("llama", "machine=2,pair=2", microbatches, recipe=recipe)
    for seed in range(3):
        _rows_are_below(network, random_choice(network.problem(None), random.Random(seed)), seed)
    choice = solve(network.problem(None)).choice
    _rows_are_below(network, choice, 3)
    made = assemble_choice(network.pricing, choice, network.variables)
    assert made.predicted.seconds == pytest.approx(network.seconds(choice), rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_reaches_the_peak_of_the_best_plan(name: str) -> None:
    network = _network(name, "machine=2,pair=2")
    choice, peaks = solve(network.problem(None)).choice, Peaks(network)
    _rows_are_below(network, choice, 3)
    assert peaks.row_bytes(choice, peaks.moment_of(choice)) > 0.8 * peaks.of(choice).nbytes


def test_the_bytes_of_a_row_are_those_of_its_problem() -> None:
    network = _network("gpt", "machine=2,pair=2")
    problem = network.problem(None)
    choice, ops = random_choice(problem, random.Random(5)), network.pricing.graph.ops
    for row in ({UPDATE: 1.0}, {f"around {ops[9].name}": 0.25, f"backward {ops[20].name}": 0.75}):
        assert network.problem(None, row).nbytes(choice) == pytest.approx(network.row_bytes(choice, row), rel=1e-12)
        assert network.problem(None, row).cost(choice) == problem.cost(choice)
