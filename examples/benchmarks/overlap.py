"""How much of the reduction of gradients is hidden: sudo python examples/benchmarks/overlap.py [batch [steps]]

A GPT of 6 layers (width 128, 128 tokens, 1.2 million parameters), data parallel on rehearsal-4x1-200: four ranks behind
links of 200 Mbit/s, on this machine; once in one bucket, and once in buckets of the size with the shortest predicted
step. Of the steps after the first, mean of the ranks, median of the steps:

    reduction / backward   seconds in which gradients are on the links, over what backward computes
    hidden                 share of the reduction's seconds in which the rank computes
    error                  predicted minus recorded exposed seconds, over the recorded step
"""

import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from gpt import gpt

from autoddl.api import compare
from autoddl.capture.factory import Factory
from autoddl.core.hubs import add_hubs
from autoddl.core.plan import Plan
from autoddl.core.record import Event, RecordedStep, hidden_seconds, read_record
from autoddl.explain.compare_run import foreseen
from autoddl.explain.record_statistics import later, typical
from autoddl.launch.rehearse import rehearse
from autoddl.planner.bucket_size import best_buckets
from autoddl.planner.question import question_of

EXAMPLES = Path(__file__).parent.parent
CLUSTER = EXAMPLES / "clusters" / "rehearsal-4x1-200.yaml"
SHAPE = {"layers": 6, "width": 128, "heads": 4, "context": 128}


def data_parallel(batch: int) -> Plan:
    """The best data parallel plan."""
    found = next(one for one in compare(gpt(**SHAPE, batch=batch), CLUSTER) if one.name == "data parallel").plan
    assert found is not None, "the model fits"
    return found


def trained(plan: Plan, batch: int, steps: int) -> tuple[RecordedStep, ...]:
    """The steps of a rehearsal, as recorded."""
    with tempfile.TemporaryDirectory() as name:
        path, record = Path(name, "plan.json"), Path(name, "record.jsonl")
        plan.save(path)
        made = Factory(str(EXAMPLES / "gpt.py"), "gpt", {**SHAPE, "batch": batch})
        rehearse(path, plan, made, steps=steps, record=record)
        return later(read_record(record))


def gradients(step: RecordedStep) -> list[Event]:
    return [event for event in step.events if event.origin.startswith("the gradients of")]


def exposed(step: RecordedStep) -> float:
    return sum(event.wait for event in gradients(step))


def hidden(step: RecordedStep) -> float:
    return hidden_seconds(gradients(step), step.events)


def backward(step: RecordedStep) -> float:
    """What backward computes: all of it but the waiting."""
    return step.during("backward") - sum(event.wait for event in step.events if event.direction == "backward")


def figures(steps: Sequence[RecordedStep]) -> tuple[float, ...]:
    """Seconds of a step without the optimizer, of what backward computes, hidden, exposed."""
    return tuple(typical(steps, figure) for figure in (
        lambda step: step.seconds - step.during("update"), backward, hidden, exposed))


def show(name: str, steps: Sequence[RecordedStep]) -> None:
    """One row of the table."""
    whole, computes, runs, waits = figures(steps)
    print(f"| {name} | {whole:.3f} | {computes:.3f} | {(waits + runs) / computes:.0%} | {runs:.3f} | {waits:.3f} | "
          f"{runs / (runs + waits):.0%} |")


def main(batch: int = 128, steps: int = 8) -> None:
    whole = data_parallel(batch)
    question = question_of(whole)
    best = best_buckets(whole, add_hubs(question.graph), question.cluster)
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}; batch {batch}, {steps} steps\n")
    print("| | step s | backward s | reduction / backward | hidden s | exposed s | hidden |\n" + "|---" * 7 + "|")
    for plan in (whole, best):
        line = foreseen(plan).step
        line = replace(line, passes=(*line.passes, ("update", line.seconds)))
        name = f"{len(gradients(line))} of {plan.bucket_bytes / 2**10:.0f} KiB"
        recorded = trained(plan, batch, steps)
        show(f"{name}, predicted", [line])
        show(f"{name}, recorded", recorded)
        step, *_, waits = figures(recorded)
        print(f"| error of the exposed seconds | {(exposed(line) - waits) / step:+.1%} of the step |" + " |" * 5)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
