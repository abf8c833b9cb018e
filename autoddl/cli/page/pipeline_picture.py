"""Draws a plan with stages: the time line of its schedule, and the memory of its ranks.

    time line   for the ranks of each part of the cluster a row of computation, and one for every stream that sends
    memory      for the same ranks their bytes over the step, and the budget
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

from autoddl.core.pipeline_schedules import schedule_title
from autoddl.core.plan import Plan
from autoddl.cost_models import show_bytes
from autoddl.cost_models.timelines.timeline import COMPUTE, Timeline
from autoddl.explain.staged_run import foreseen_stages, memory_of_ranks, ranks_text, stages_there
from autoddl.planner.pipelines.staged_steps import StagedStep

__all__ = ["draw_pipeline"]

NAMED = 0.015
"""Part of the step from which on a bar has room for its name."""

FAR = 4.0
"""How many peaks a budget is at least for the picture to end before it."""

COLUMNS = 4
"""Ranks side by side in the legend of their memory."""

Bars = dict[str, list[tuple[float, float, str]]]


def draw_pipeline(plan: Plan, path: Path) -> None:
    """Writes the picture of a plan with stages to `path`, svg or png by matplotlib."""
    from matplotlib.figure import Figure

    assert plan.pipeline is not None
    step = foreseen_stages(plan)
    line = step.timeline
    rows = _rows(plan, line)
    heights = 0.28 * len(rows) + 0.8, 2.5 + 0.2 * len(line.ranks) / COLUMNS
    figure = Figure(figsize=(12, sum(heights) + 0.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    figure.suptitle(f"{plan.model} on {plan.cluster}, {len(plan.pipeline.stages)} stages, "
                    f"{schedule_title(plan.pipeline.name)}, {plan.microbatches} microbatches: "
                    f"{line.makespan:.4g} s a step, {step.idle:.1%} of it idle")
    _time_line(top, rows, line.makespan)
    _memory(bottom, plan, step)
    figure.savefig(path)


def _rows(plan: Plan, line: Timeline) -> dict[str, Bars]:
    """By row and kind of task, (start, seconds, name). A message is in a row of its sender."""
    rows = {_label(plan, rank, stream): defaultdict[str, list[tuple[float, float, str]]](list)
            for rank in line.ranks for stream in line.streams(rank) if _owner(rank, stream) == rank}
    for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True):
        for rank in task.ranks:
            if end > start and _owner(rank, task.stream) == rank:
                rows[_label(plan, rank, task.stream)][task.kind].append((start, end - start, task.name))
    return {label: dict(bars) for label, bars in rows.items()}


def _owner(rank: int, stream: str) -> int:
    """The rank in whose rows the stream is drawn: of messages, the sender."""
    sender, to, _ = stream.partition(" to ")
    return int(sender) if to else rank


def _label(plan: Plan, rank: int, stream: str) -> str:
    _, to, receiver = stream.partition(" to ")
    what = f"to {ranks_text(plan, int(receiver))}" if to else stream
    return f"{ranks_text(plan, rank)}" + f" {what}" * (stream != COMPUTE)


def _time_line(axes: Any, rows: dict[str, Bars], seconds: float) -> None:
    colors: dict[str, str] = {}
    for y, bars in enumerate(rows.values()):
        for kind, spans in bars.items():
            label = kind if kind not in colors else None
            color = colors.setdefault(kind, f"C{len(colors)}")
            axes.broken_barh([(start, took) for start, took, _ in spans], (y - 0.4, 0.8), color=color, label=label,
                             edgecolor="white", linewidth=0.4)
            for start, took, name in spans:
                if took > NAMED * seconds:
                    axes.text(start + took / 2, y, name.partition(" ")[0], ha="center", va="center", fontsize=6,
                              clip_on=True)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_xlim(0.0, seconds)
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=max(1, len(colors)), fontsize=8)


def _memory(axes: Any, plan: Plan, step: StagedStep) -> None:
    """The bytes of the ranks of each part over the step, and the budget of a rank where it is near."""
    every = memory_of_ranks(plan, step)
    for part, one in enumerate(every):
        axes.step((*one.times, step.timeline.makespan), [n / 1e9 for n in (*one.nbytes, one.nbytes[-1])], where="post",
                  linewidth=0.8, label=f"{ranks_text(plan, part)}, {_stages(plan, part)}")
    most = max(one.peak for one in every)
    near = plan.budget < FAR * most
    axes.axhline(plan.budget / 1e9, linestyle="--", linewidth=0.8, color="black",
                 label=f"budget, {show_bytes(plan.budget)}" + ", not in the picture" * (not near))
    axes.set_xlim(0.0, step.timeline.makespan)
    axes.set_ylim(0.0, 1.05 * (plan.budget if near else most) / 1e9)
    axes.set_xlabel("seconds")
    axes.set_ylabel("GB of a rank")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=COLUMNS, fontsize=8)


def _stages(plan: Plan, part: int) -> str:
    own = [str(k) for k in stages_there(plan, part)]
    return f"stage{'s' * (len(own) > 1)} {', '.join(own)}"
