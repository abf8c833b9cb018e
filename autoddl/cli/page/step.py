"""Draws one step: its time line, its memory, and where the seconds go by level and kind."""

from collections import defaultdict

from autoddl.cli.page.charts import Bar, Kinds, areas, stacks, tracks
from autoddl.cli.page.facts import Facts
from autoddl.cli.page.html import Html, button, datum, element, nbytes, seconds, section, table
from autoddl.core.plan import Plan, level_of
from autoddl.core.record import own_seconds
from autoddl.cost_models import show_bytes, show_seconds
from autoddl.cost_models.timelines.timeline import COMPUTE, Timeline
from autoddl.explain.staged_run import ranks_text
from autoddl.schedule.timeline import PredictedStep

__all__ = ["by_kind", "memory", "time_line"]


def time_line(facts: Facts) -> Html:
    """The time line of every kind of rank: rank 0 stands for all without stages, one rank of each part with stages."""
    kinds = Kinds()
    if facts.step is not None:
        step = facts.step.step
        chart = tracks(_rows(facts.step), step.seconds, kinds, "time line of rank 0")
        said = element("p", "Without the update a step takes ", seconds(step.seconds, "step/seconds"),
                       " on this line; in ", seconds(step.exposed, "step/exposed"), " of it the rank waits. Messages "
                       "are under way beside computation for ", seconds(step.hidden, "step/hidden"),
                       " in all, each counted with its queue.")
    else:
        assert facts.staged is not None
        line = facts.staged.timeline
        chart = tracks(_staged_rows(facts.plan, line), line.makespan, kinds, "time line of the parts")
        said = element("p", "The schedule takes ", seconds(line.makespan, "staged/makespan"), "; ranks do nothing in ",
                       datum(facts.staged.idle, f"{facts.staged.idle:.2%}", "staged/bubble"), " of it.")
    return section("Time line", "Every rank does the same work as the ranks drawn here. Point at a bar to read it; "
                   "widen the line to tell narrow bars apart.",
                   element("div", button("wider", "wider"), button("narrower", "narrower"), class_="buttons"), chart,
                   kinds.legend(), said)


def _rows(line: PredictedStep) -> dict[str, list[Bar]]:
    """The bars of rank 0 by row: computing, waiting, and what is in flight over each set of axes."""
    half = next((start for name, start in line.step.passes if name == "backward"), line.step.seconds)
    rows = {"compute": [Bar(span.start, span.end, "forward" if span.start < half else "backward",
                            f"{span.name}: {show_seconds(span.end - span.start)}") for span in line.computes],
            "waiting": list[Bar]()}
    for event, own in zip(line.step.events, own_seconds(line.step.events), strict=True):
        said = f"{event.kind} of {show_bytes(event.nbytes)} over {event.axes}, for {event.origin}: {show_seconds(own)}"
        rows.setdefault(event.axes, []).append(Bar(event.end - own, event.end, event.kind, said))
        if event.wait > 0:
            rows["waiting"].append(Bar(event.end - event.wait, event.end, "waiting",
                                       f"waits {show_seconds(event.wait)} for {event.kind} of {event.origin}"))
    return rows


def _staged_rows(plan: Plan, line: Timeline) -> dict[str, list[Bar]]:
    """The bars of every part of the cluster by stream; a message is drawn at its sender."""
    rows: dict[str, list[Bar]] = {}
    for rank in line.ranks:
        for stream in line.streams(rank):
            sender, to, receiver = stream.partition(" to ")
            if not to or int(sender) == rank:
                what = f" to {ranks_text(plan, int(receiver))}" if to else f" {stream}" * (stream != COMPUTE)
                rows[f"{ranks_text(plan, rank)}{what}"] = [
                    Bar(start, end, task.kind, f"{task.name}: {show_seconds(end - start)}")
                    for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True)
                    if task.stream == stream and rank in task.ranks and end > start]
    return rows


def memory(facts: Facts) -> Html:
    """The bytes of a rank over the step by what holds them; with stages those at the peak of each part."""
    kinds, plan = Kinds(), facts.plan
    rows = [(kind, nbytes(held, f"plan/predicted/nbytes/{kind}"))
            for kind, held in sorted(plan.predicted.nbytes.items(), key=lambda pair: -pair[1]) if held]
    held = table(("at the peak" + " of the fullest rank" * (plan.pipeline is not None), "bytes"), rows)
    if facts.memory is not None and facts.step is not None:
        line = facts.memory
        chart = areas(line.times, line.kinds, facts.step.step.seconds, line.budget, kinds, "memory of rank 0")
        said = element("p", "The most is ", nbytes(line.peak, "memory/peak"), " of a budget of ",
                       nbytes(line.budget, "memory/budget"), ".")
    else:
        assert plan.pipeline is not None
        rows_of = {f"stage {k}": dict(stage.plan.predicted.nbytes) for k, stage in enumerate(plan.pipeline.stages)}
        chart = stacks(rows_of, plan.budget, kinds, "memory of the stages")
        said = element("p", "Bytes at the peak of each stage, of a budget of ", nbytes(plan.budget, "plan/budget"), ".")
    return section("Memory", "Bytes of one rank, by what holds them.", chart, kinds.legend(), said, held)


def by_kind(facts: Facts) -> Html:
    """Seconds and bytes by level and kind of collective, or by kind of task in a plan with stages."""
    if facts.step is None:
        return _staged_kinds(facts)
    step, plan = facts.step.step, facts.plan
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
    for event, own in zip(step.events, own_seconds(step.events), strict=True):
        for place, value in enumerate((1, event.nbytes, own, event.wait)):
            sums[event.kind, event.axes][place] += value
    rows = []
    for (kind, axes), (count, size, took, waited) in sorted(sums.items(), key=lambda pair: -pair[1][2]):
        at = f"kinds/{kind} {axes}"
        rows.append((kind, axes, level_of(plan, axes) or "-", datum(count, f"{count:,}", f"{at}/count"),
                     nbytes(size, f"{at}/nbytes"), seconds(took, f"{at}/seconds"), seconds(waited, f"{at}/waited")))
    said = element("p", "Computing takes ", seconds(facts.step.compute_seconds, "step/compute"), ".")
    return section("Seconds by level and kind", "What is sent in a step of one rank: in flight, and waited for.", said,
                   table(("kind", "axes", "level", "count", "bytes", "in flight", "waited for"), rows), _blocks(facts))


def _blocks(facts: Facts) -> Html:
    """Seconds and bytes by block of the model."""
    assert facts.explained is not None
    rows = []
    for i, one in enumerate(facts.explained.blocks):
        at = f"explained/blocks/{i}"
        rows.append((one.block, seconds(one.compute, f"{at}/compute"), seconds(one.conversions, f"{at}/conversions"),
                     nbytes(one.nbytes, f"{at}/nbytes")))
    return table(("block of the model", "compute", "conversions", f"bytes at `{facts.explained.moment[0]}`"), rows)


def _staged_kinds(facts: Facts) -> Html:
    assert facts.staged is not None
    line = facts.staged.timeline
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for task, start, end in zip(line.tasks, line.starts, line.ends, strict=True):
        for rank in task.ranks:
            sums[rank, task.kind] += end - start
    rows = [(ranks_text(facts.plan, rank), kind, seconds(took, f"kinds/{rank} {kind}/seconds"))
            for (rank, kind), took in sorted(sums.items())]
    return section("Seconds by part and kind", "What the ranks of each part do; streams run beside each other.",
                   table(("ranks", "kind", "seconds"), rows))
