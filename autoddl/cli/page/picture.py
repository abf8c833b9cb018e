"""Draws a plan: the predicted step of one rank, its memory over the step, and its seconds by kind.

    time line   a row for computation, one for the collectives over each set of axes, one for waiting
    memory      bytes of a rank, and its budget
    kinds       computation, and the collectives of each kind over each set of axes: in flight, and waited for

Of a plan with stages, `pipeline_picture` draws the time line of the schedule and the memory of all ranks.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.files import write_atomically
from autoddl.core.plan import Plan
from autoddl.core.record import own_seconds
from autoddl.explain.compare_run import foreseen, foreseen_bytes
from autoddl.schedule.memory_line import MemoryLine
from autoddl.schedule.timeline import PredictedStep

__all__ = ["KINDS", "draw_plan"]

KINDS = (".svg", ".png", ".json")
Bars = dict[str, list[tuple[float, float]]]


def draw_plan(plan: Plan, path: Path) -> None:
    """Writes the picture of `plan` to `path`: svg or png by matplotlib, json for Perfetto, by the name's ending.

    Raises InputError for another ending."""
    if path.suffix not in KINDS:
        raise InputError(f"{path} ends in {path.suffix or 'nothing'}; a picture is one of {', '.join(KINDS)}")
    if path.suffix == ".json":
        from autoddl.cli.page.perfetto import plan_trace
        write_atomically(path, plan_trace(plan, []))
        return
    if plan.pipeline is not None:
        from autoddl.cli.page.pipeline_picture import draw_pipeline
        draw_pipeline(plan, path)
        return
    line = foreseen(plan)
    _picture(plan, line, foreseen_bytes(plan, line), path)


def _picture(plan: Plan, line: PredictedStep, memory: MemoryLine, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(2, 2, 1.5))
    figure.suptitle(f"{plan.model} on {plan.cluster}, {plan.mesh}: {line.step.seconds:.4g} s a step, "
                    f"{line.step.exposed:.3g} s of it waiting")
    _time_line(top, line)
    middle.step(memory.times, [n / 1e9 for n in memory.nbytes], where="post", linewidth=0.8)
    middle.axhline(memory.budget / 1e9, linestyle="--", linewidth=0.8, color="black", label="budget")
    middle.set_ylim(bottom=0.0)
    middle.set_xlim(0.0, line.step.seconds)
    middle.set_ylabel("GB held")
    middle.set_xlabel("seconds")
    middle.legend(loc="lower right")
    _kinds(bottom, line)
    figure.savefig(path)


def _rows(line: PredictedStep) -> Bars:
    """(start, seconds) by row."""
    rows: Bars = {"compute": [(span.start, span.end - span.start) for span in line.computes], "waiting": []}
    for event, own in zip(line.step.events, own_seconds(line.step.events), strict=True):
        rows.setdefault(event.axes, []).append((event.end - own, own))
        if event.wait > 0:
            rows["waiting"].append((event.end - event.wait, event.wait))
    return rows


def _time_line(axes: Any, line: PredictedStep) -> None:
    rows = _rows(line)
    for y, (name, bars) in enumerate(rows.items()):
        axes.broken_barh(bars, (y - 0.4, 0.8), color=f"C{y}", label=name)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlim(0.0, line.step.seconds)
    axes.invert_yaxis()


def _kinds(axes: Any, line: PredictedStep) -> None:
    """Seconds by kind."""
    flight: dict[str, float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    for event, own in zip(line.step.events, own_seconds(line.step.events), strict=True):
        flight[f"{event.kind} {event.axes}"] += own
        waited[f"{event.kind} {event.axes}"] += event.wait
    names = ["compute", *flight]
    axes.barh(names, [line.compute_seconds, *flight.values()], color="C0", label="busy")
    axes.barh(names, [0.0, *waited.values()], color="C1", height=0.4, label="waited for")
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
