"""Plans in the recipe of real runs (bf16-mixed, AdamW): what recomputation and sharded states bring, and how soon.

    python examples/benchmarks/recipes.py recompute [part of a case's name]   policies at three budgets
    python examples/benchmarks/recipes.py speed [part of a case's name]       seconds of planning, gaps, memory
    python examples/benchmarks/recipes.py freedoms [part of a case's name]    layouts, states and recomputation in turn

Each row is a plan of a process of its own: seconds of a step, the bound's gap, the peak of a rank, CPU seconds of the
whole with one worker, the capture included, and the most memory of that process. Predicted; nothing runs.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpt3 import gpt3_175b
from llama import llama3_8b, llama3_70b
from torch import nn

import autoddl
from autoddl.api import plan_among
from autoddl.core.errors import Infeasible
from autoddl.core.graph import Graph, Op, Tensor
from autoddl.core.layout import B, Mesh
from autoddl.cost_models import Cluster, parse_cluster
from autoddl.planner.candidates import Candidate, under_policies
from autoddl.planner.options import PlanOptions
from autoddl.planner.pins import allowed_meshes
from autoddl.planner.task import task_of
from autoddl.pricing.space import Choice, Region

CLUSTERS = Path(__file__).parents[1] / "clusters"

POLICIES = ("none", "full", "selective", "every-2", "search")

FREEDOMS: Mapping[str, dict[str, Any]] = {
    "layouts": {"region": "states as weights", "recompute": ("none",)},
    "layouts and states": {"recompute": ("none",)},
    "layouts and recomputation": {"region": "states as weights", "recompute": ("search",)},
    "layouts, states and recomputation": {"recompute": ("search",)},
}
"""What may be chosen; without the freedom of states, gradients and states are split as weights are."""


class Case(NamedTuple):
    """A model with the cluster, a mesh, and the options that it is planned with; budgets are bytes a rank."""

    model: Callable[[], nn.Module]
    cluster: Callable[[], Cluster]
    mesh: str
    budgets: tuple[str, ...]


def racks(name: str, device: str, node: str, net: str, sizes: tuple[int, ...]) -> Cluster:
    """Nodes of eight, in racks, in a hall: `node` and `net` are the keys of their links."""
    names = ("rack", "hall")
    rows = [f"  - {{name: {level}, size: {size}, {net}, topology: fat-tree}}"
            for level, size in zip(names, sizes, strict=False)]
    text = "\n".join([f"name: {name}", f"device: {device}", "levels:",
                      f"  - {{name: node, size: 8, {node}, topology: switch}}", *rows])
    return parse_cluster(text, name)


def h100(*sizes: int) -> Cluster:
    inside, outside = "bandwidth: 450 GB/s, latency: 3.4 us", "bandwidth: 400 Gb/s, latency: 8 us"
    return racks("h100", "H100-80GB", inside, outside, sizes)


def a100(*sizes: int) -> Cluster:
    return racks("a100", "A100-80GB", "link: NVLink3", "link: InfiniBand-HDR", sizes)


CASES: Mapping[str, Case] = {
    "8b": Case(lambda: llama3_8b(batch=128), lambda: h100(8), "rack=8,node=8", ("80 GB", "60 GB", "40 GB")),
    "70b": Case(lambda: llama3_70b(batch=256), lambda: h100(32), "rack=32,node=8", ("80 GB", "60 GB", "40 GB")),
    "gpt3": Case(lambda: gpt3_175b(batch=1536), lambda: a100(16, 8), "hall=8,rack=16,node=8",
                 ("80 GB", "60 GB", "40 GB")),
}

SPEED: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Cluster], dict[str, Any]]] = {
    "8b, mesh 8 x 8": (lambda: llama3_8b(batch=64), lambda: h100(8), {"mesh": "rack=8,node=8"}),
    "8b, all free": (lambda: llama3_8b(batch=64), lambda: h100(8), {"microbatches": (1, 2, 4)}),
    "70b, 1,024 GPUs": (lambda: llama3_70b(batch=1024), lambda: h100(16, 8), {}),
}


def asked(what: str) -> Iterator[tuple[str, Callable[[], nn.Module], Callable[[], Cluster], dict[str, Any]]]:
    """The plans of a table: name of the row, model, cluster, options."""
    common = {"precision": "bf16-mixed", "workers": 1}
    if what == "speed":
        for name, (model, cluster, options) in SPEED.items():
            yield name, model, cluster, common | {"recompute": ("search",)} | options
    for name, case in CASES.items():
        if what == "recompute":
            for budget in case.budgets:
                for policy in POLICIES:
                    yield f"{name}, {budget}, {policy}", case.model, case.cluster, common | {
                        "mesh": case.mesh, "budget": budget, "recompute": (policy,)}
        if what == "freedoms":
            for freedom, options in FREEDOMS.items():
                yield f"{name}, {freedom}", case.model, case.cluster, common | {"mesh": case.mesh} | options


def as_weights(graph: Graph, mesh: Mesh) -> Region:
    """The region in which gradients and states of a parameter are split as its weight is."""
    def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
        return isinstance(item, Op) or all(depth == 2 for state, depth in zip(choice.outputs[0], choice.depths,
                                                                              strict=True) if state != B)

    return allowed


def planned(model: nn.Module, cluster: Cluster, options: dict[str, Any]) -> autoddl.Plan:
    """The plan; with a region that of a part of the space."""
    if "region" not in options:
        return autoddl.plan(model, cluster, **options)
    rest: Any = {name: value for name, value in options.items() if name != "region"}
    asked = PlanOptions.of(rest)
    mesh = Candidate(allowed_meshes(cluster, asked)[0], as_weights)
    return planned_among(model, cluster, asked, under_policies([mesh], asked.recompute))


def planned_among(model: nn.Module, cluster: Cluster, asked: PlanOptions, candidates: Sequence[Candidate]
                  ) -> autoddl.Plan:
    """The best plan of some candidates."""
    task = task_of(model, cluster, None, asked, "", None)
    return plan_among(task, candidates)


def measured(model: Callable[[], nn.Module], cluster: Callable[[], Cluster], options: dict[str, Any]) -> str:
    """A row's figures, or why there is no plan."""
    began, given = time.process_time(), model()
    try:
        plan = planned(given, cluster(), options)
    except Infeasible as error:
        return f"no plan: {error}"
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return (f"{plan.predicted.seconds:.4f} s, gap {plan.gap:.3%}, peak {plan.predicted.peak_bytes / 1e9:.1f} GB, mesh "
            f"{plan.mesh}, {plan.microbatches} microbatches, {len(plan.recompute)} blocks recomputed; "
            f"{time.process_time() - began:.0f} CPU s, {most:.1f} GB")


def main(what: str, wanted: str, row: str = "") -> None:
    """Prints the table, each row from a process of its own."""
    for name, model, cluster, options in asked(what):
        if row == name:
            print(json.dumps(measured(model, cluster, options)))
        elif not row and wanted in name:
            made = subprocess.run([sys.executable, __file__, what, wanted, name], capture_output=True, text=True,
                                  check=False)
            print(f"{name}: {json.loads(made.stdout) if made.returncode == 0 else made.stderr[-300:]}", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] if len(sys.argv) > 2 else [sys.argv[1], ""]))
