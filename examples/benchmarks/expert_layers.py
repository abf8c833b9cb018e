"""Layers of experts, predicted beside what Megatron-Core measured of them: python examples/benchmarks/expert_layers.py

data/expert_layers.csv has the layers of Megatron-Core's own performance test (moe_perf), on eight H100: 4,096 tokens a
rank, experts over all ranks, messages by NCCL. A long product before them hides what the host needs. Predicted are the
kernels of the layer, those of a shared expert, and the waits for all-to-alls.
"""

import csv
import sys
from pathlib import Path

from autoddl.core.graph import Op
from autoddl.cost_models import Kernel, kernel_seconds
from autoddl.pricing.kernel_prices import pass_seconds
from autoddl.schedule.timeline import predict_timeline
from autoddl.validation.as_plan import flat_graphs, flat_plan
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs

DATA = Path(__file__).parent / "data" / "expert_layers.csv"
MODULE = "layers.0.mlp"
"""The layer of experts in the model of a run."""


def predicted(run: Run, shared: int) -> tuple[float, float]:
    """Seconds of forward and of backward of the experts of a run's only layer, with a shared one of some width."""
    asked = RunPlan.of(run, 1)
    found = flat_plan(asked, flat_graphs(run, asked)[0])
    pricing, flows = found.space.pricing, found.space.pricing.graph.differentiable()
    forth = back = 0.0
    for variable, at in zip(found.space.variables, found.choice, strict=True):
        op = variable.item
        if isinstance(op, Op) and op.module.startswith(MODULE):
            forward, backward = pass_seconds(pricing, op, variable.choices[min(at, len(variable.choices) - 1)], flows)
            forth, back = forth + sum(forward), back + sum(backward)
    for event in predict_timeline(found.plan, found.graph, asked.cluster).step.events:
        if event.kind == "all-to-all":
            forth += event.wait * (event.direction == "forward")
            back += event.wait * (event.direction == "backward")
    dense = sum(kernel_seconds(asked.cluster.device, Kernel("matmul", (1, run.seq, n, k), 2.0 * run.seq * n * k, 0.0,
                                                            asked.software.narrow or "bfloat16"))
                for n, k in ((2 * shared, run.hidden), (run.hidden, shared)) if shared)
    return forth + dense, back + 2 * dense


def main(table: str = str(DATA)) -> None:
    """Prints both passes of every layer, measured and predicted."""
    with Path(table).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for run, row in zip(read_runs(Path(table)), rows, strict=True):
        told = []
        for name, seconds in zip(("forward", "backward"), predicted(run, int(row["x_shared"])), strict=True):
            measured = float(row[f"x_{name}_s"])
            told.append(f"{name} {1e3 * measured:6.2f} ms measured, {1e3 * seconds:6.2f} predicted "
                        f"({100 * (seconds / measured - 1):+.0f} %)")
        print(f"{run.model:16}{run.precision:5}", "   ".join(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
