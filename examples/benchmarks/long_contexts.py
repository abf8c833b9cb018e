"""What rings of attention are worth for long sequences: python examples/benchmarks/long_contexts.py [TOKENS]

Llama-3-8B in bfloat16, one sequence of TOKENS (by default 131,072) on 64 H100. Backward computes every block again.
Plans are searched with rings and without, in the whole space and in configurations by degrees. Prints predicted
seconds, the peak of a rank, where attention is split, and the CPU seconds of the search.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

FOLDER = Path(__file__).parent.parent
sys.path.insert(0, str(FOLDER))

from llama import llama3_8b  # noqa: E402

from autoddl.api import plan_among  # noqa: E402
from autoddl.core.errors import AutoDDLError  # noqa: E402
from autoddl.core.graph import Graph, Op, Tensor  # noqa: E402
from autoddl.core.layout import Mesh  # noqa: E402
from autoddl.core.plan import Plan  # noqa: E402
from autoddl.operators.ring import ATTENTION  # noqa: E402
from autoddl.planner.candidates import Candidate, under_policies  # noqa: E402
from autoddl.planner.options import PlanOptions  # noqa: E402
from autoddl.planner.pins import allowed_meshes, region_of  # noqa: E402
from autoddl.planner.task import PlanTask, task_of  # noqa: E402
from autoddl.pricing.space import Choice, Region  # noqa: E402

CLUSTER = FOLDER / "clusters" / "h100-8x8.yaml"
ROWS = (("whole space", None, True), ("whole space", None, False), ("cp=64", "cp=64,zero=3", True),
        ("cp=64", "cp=64,zero=3", False), ("cp=64,ring", "cp=64,zero=3,ring", True),
        ("tp=8,cp=8", "tp=8,cp=8,sp,zero=1", True), ("tp=8,cp=8", "tp=8,cp=8,sp,zero=1", False),
        ("tp=8,cp=8,ring", "tp=8,cp=8,sp,zero=1,ring", True))
"""Name, degrees, whether keys may go round."""


@dataclass(frozen=True, slots=True)
class WithoutRings:
    """The region of some options, in which no keys go round."""

    options: PlanOptions

    def __call__(self, graph: Graph, mesh: Mesh) -> Region:
        within = region_of(self.options)(graph, mesh)

        def allowed(graph: Graph, item: Op | Tensor, choice: Choice) -> bool:
            rings = isinstance(item, Op) and item.target == ATTENTION and bool(choice.inner)
            return not rings and within(graph, item, choice)

        return allowed


def planned(task: PlanTask, degrees: str | None, rings: bool) -> Plan:
    """The fastest plan of a row."""
    options = replace(task.options, mine=degrees)
    region = region_of(options) if rings else WithoutRings(options)
    meshes = allowed_meshes(task.cluster, options)
    return plan_among(replace(task, options=options), under_policies([Candidate(mesh, region) for mesh in meshes],
                                                                     options.recompute))


def main(tokens: int) -> None:
    task = task_of(llama3_8b(batch=1, context=tokens), CLUSTER, None, PlanOptions(recompute=("full",), workers=1),
                   "llama3_8b", None)
    print("| configuration | rings | mesh | queries; keys | step (s) | compute (s) | messages (s) | peak (GB) | gap | "
          "CPU (s) |\n|---|---|---|---|---|---|---|---|---|---|")
    for name, degrees, rings in ROWS:
        began = process_time()
        try:
            found = planned(task, degrees, rings)
        except AutoDDLError as error:
            print(f"| {name} | {'yes' if rings else 'no'} | {error} |", flush=True)
            continue
        one, said = next(d for d in found.decisions if d.target == ATTENTION), found.predicted
        print(f"| {name} | {'yes' if rings else 'no'} | {found.mesh} | {one.inputs[0]}; {one.inputs[1]} | "
              f"{said.seconds:.3f} | {said.compute:.3f} | {sum(said.communication.values()):.3f} | "
              f"{said.peak_bytes / 1e9:.1f} | {found.gap:.2%} | {process_time() - began:.0f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 131072)
