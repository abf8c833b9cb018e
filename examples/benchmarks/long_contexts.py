"""What rings and traded queries are worth for long sequences: python examples/benchmarks/long_contexts.py [TOKENS]

Llama-3-8B in bfloat16, one sequence of TOKENS (by default 131,072) on 64 H100. Backward computes every block again.
Plans are searched with rings, with queries traded beside whole keys, and without, in the whole space and in
configurations by degrees. Prints predicted seconds, the peak of a rank, where attention is split, and the CPU seconds
of the search.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

FOLDER = Path(__file__).parent.parent
sys.path.insert(0, str(FOLDER))

from llama import llama3_8b  # noqa: E402

from autoddl.api import plan_among  # noqa: E402
from autoddl.core.errors import AutoDDLError  # noqa: E402
from autoddl.core.graph import Graph, Op, Tensor  # noqa: E402
from autoddl.core.layout import Layout, Mesh  # noqa: E402
from autoddl.core.plan import Plan  # noqa: E402
from autoddl.operators.ring import ATTENTION, gathers_keys  # noqa: E402
from autoddl.planner.candidates import Candidate, under_policies  # noqa: E402
from autoddl.planner.options import PlanOptions  # noqa: E402
from autoddl.planner.pins import allowed_meshes, region_of  # noqa: E402
from autoddl.planner.task import PlanTask, task_of  # noqa: E402
from autoddl.pricing.space import Choice, Region  # noqa: E402

CLUSTER = FOLDER / "clusters" / "h100-8x8.yaml"
WAYS = ("ring", "trade", "plain")
"""How queries may be split: keys go round, ranks trade queries beside whole keys, or neither."""
ROWS = (*(("whole space", None, WAYS[first:]) for first in range(3)),
        *(("cp=64", "cp=64,zero=3", WAYS[first:]) for first in range(3)),
        ("cp=64,ring", "cp=64,zero=3,ring", WAYS),
        *(("tp=8,cp=8", "tp=8,cp=8,sp,zero=1", WAYS[first:]) for first in range(3)))
"""Name, degrees, ways."""


@dataclass(frozen=True, slots=True)
class Without:
    """The region of some options, in which attention goes some `ways` alone."""

    options: PlanOptions
    ways: tuple[str, ...]

    def __call__(self, graph: Graph, mesh: Mesh) -> Region:
        within, ways = region_of(self.options)(graph, mesh), self.ways

        def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
            if isinstance(item, Op) and item.target == ATTENTION and way(item, choice.inputs, choice.inner) not in ways:
                return False
            return within(graph, item, choice)

        return allowed


def way(op: Op, inputs: Sequence[Layout], inner: object) -> str:
    """Which of the ways an op goes, whose kernel communicates where `inner` is true."""
    return "plain" if not inner else "trade" if gathers_keys(op, inputs) else "ring"


def planned(task: PlanTask, degrees: str | None, ways: tuple[str, ...]) -> Plan:
    """The fastest plan of a row."""
    options = replace(task.options, mine=degrees)
    region = region_of(options) if ways == WAYS else Without(options, ways)
    meshes = allowed_meshes(task.cluster, options)
    return plan_among(replace(task, options=options), under_policies([Candidate(mesh, region) for mesh in meshes],
                                                                     options.recompute))


def main(tokens: int) -> None:
    task = task_of(llama3_8b(batch=1, context=tokens), CLUSTER, None, PlanOptions(recompute=("full",), workers=1),
                   "llama3_8b", None)
    print("| configuration | ways | mesh | queries; keys | step (s) | compute (s) | messages (s) | peak (GB) | gap | "
          "CPU (s) |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, degrees, ways in ROWS:
        began = process_time()
        try:
            found = planned(task, degrees, ways)
        except AutoDDLError as error:
            print(f"| {name} | {', '.join(ways)} | {error} |", flush=True)
            continue
        one, said = next(d for d in found.decisions if d.target == ATTENTION), found.predicted
        traded = " traded" if one.inner else ""
        print(f"| {name} | {', '.join(ways)} | {found.mesh} | {one.inputs[0]}{traded}; {one.inputs[1]} | "
              f"{said.seconds:.3f} | {said.compute:.3f} | {sum(said.communication.values()):.3f} | "
              f"{said.peak_bytes / 1e9:.1f} | {found.gap:.2%} | {process_time() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 131072)
