"""Plans for tests: of random choices, which use every corner of the space."""

import random
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from random_plans import random_choice
from torch import nn

from autoddl.capture.capture import Captured, capture
from autoddl.core.graph import Tensor
from autoddl.core.hubs import add_hubs
from autoddl.core.layout import B, Mesh
from autoddl.core.plan import VERSION, Plan
from autoddl.core.problem import Solution
from autoddl.cost_models import Cluster, load_cluster
from autoddl.planner.assemble import assemble, plan_of
from autoddl.planner.strategies import strategy
from autoddl.pricing.build_problem import problem_of
from autoddl.pricing.price import Pricing
from autoddl.pricing.space import Variable, everything, variables

__all__ = ["cluster_of", "random_plans"]

TEXT = """
name: test
device: {{name: slow, memory: 1 GB, bandwidth: 1 GB/s,
         peak: {{float64: 1 MFLOP/s, float32: 1 MFLOP/s, bfloat16: 1 MFLOP/s}}}}
levels:
{levels}
"""
LEVEL = "  - {{name: {name}, size: {size}, bandwidth: {bandwidth} GB/s, latency: 1 ns, topology: switch}}"


@lru_cache
def cluster_of(text: str) -> Cluster:
    """A cluster whose levels are the axes of a mesh, with devices so slow that splitting pays."""
    axes = list(reversed(Mesh.parse(text).axes))
    levels = [LEVEL.format(name=a.name, size=a.size, bandwidth=100 // 4**i) for i, a in enumerate(axes)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.yaml")
        path.write_text(TEXT.format(levels="\n".join(levels)))
        return load_cluster(path)


def _wanted(variable: Variable, regather: bool | None) -> list[int]:
    """All choices; of a parameter those whose weight is split wherever it is, or nowhere, where any of them are."""
    every = list(enumerate(variable.choices))
    if regather is None or not isinstance(variable.item, Tensor):
        return [k for k, _ in every]
    split = {k: {depth for state, depth in zip(c.outputs[0], c.depths, strict=True) if state != B} for k, c in every}
    found = [k for k, depths in split.items() if depths == {2}] if regather else []
    return found or [k for k, depths in split.items() if depths <= {0}]


def random_plans(model: nn.Module, sample: object, mesh: str, count: int, seed: int = 0,
                 roles: Mapping[str, str] | None = None, regather: bool | None = None,
                 microbatches: int = 1, captured: Captured | None = None) -> list[Plan]:
    """Plans of random choices among all layouts, or among those of a strategy: a role for every axis. `sample` is one
    of the `microbatches`; `captured`, the model captured with it, spares capturing it again."""
    captured = capture(model, sample) if captured is None else captured
    graph, draw = add_hubs(captured.graph), random.Random(seed)
    pricing = Pricing(graph, Mesh.parse(mesh), cluster_of(mesh), microbatches=microbatches)
    region = everything if roles is None else strategy(graph, pricing.mesh, roles)
    choices = variables(graph, pricing.mesh, region, microbatches)
    problem = problem_of(pricing, choices, None)
    prints = {"model": captured.graph.fingerprint(), "cluster": "", "autoddl": str(VERSION)}
    found = []
    for _ in range(count):
        chosen = random_choice(problem, draw, [_wanted(v, regather) for v in choices])
        solution = Solution(chosen, problem.cost(chosen), problem.nbytes(chosen), 0.0, "drawn", "random")
        made = assemble(pricing, solution, choices)
        found.append(plan_of(made, pricing, solution, {
            "model": type(model).__name__, "bound": 0.0, "budget": 1e12, "candidates": 1, "sample": dict(captured.spec),
            "fingerprints": prints, "timings": {}}))
    return found
