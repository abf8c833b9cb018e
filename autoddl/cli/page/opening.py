"""Draws what comes first: how fast, on what, how sure; then what each axis of the mesh splits, on pictures of ranks.

The colours of a picture are coordinates: cells of one colour hold the same piece along that axis.
"""

from autoddl.cli.page.facts import Facts, largest_first
from autoddl.cli.page.html import Html, datum, element, nbytes, part, seconds, section, table
from autoddl.cli.tables.assumption_rows import assumption_rows, idle_rows
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.explain.axis_splits import AxisSplit
from autoddl.explain.staged_run import ranks_of_stage

__all__ = ["at_a_glance", "splits"]

MOST_RANKS = 512
"""Ranks that a picture shows."""

FEW_RANKS = 64
"""Ranks that are drawn larger."""


def at_a_glance(facts: Facts) -> Html:
    """The figures for the one who pays, then what the prediction takes for granted."""
    plan, predicted = facts.plan, facts.plan.predicted
    step = predicted.seconds if facts.ran is None else facts.ran.seconds
    cards = [*_steps(facts),
             *(_card(f"{what} a second", datum(rate, f"{rate:,.4g}" if rate < 1e4 else f"{rate:,.0f}",
                                               f"throughput/{what}"), "") for what, rate in facts.throughput.items()),
             _card("devices", datum(plan.mesh.size, f"{plan.mesh.size:,}", "devices"), f"of {plan.cluster}"),
             _card("device-seconds a step", seconds(step * plan.mesh.size, "device_seconds"), "what is paid"),
             _card("at the peak of a rank", nbytes(predicted.peak_bytes, "peak_bytes"),
                   Html(f"of {nbytes(plan.budget, 'plan/budget')}")),
             _card("from the best", part(plan.gap, "gap"), Html(
                 f"at most: none is below {seconds(plan.bound, 'plan/bound')}"))]
    if facts.utilisation is not None:
        cards.insert(-4, _card("of the peak", part(facts.utilisation, "utilisation"), "FLOPs of the model"))
    assumed = [row for row in assumption_rows(plan, facts.ran) if row[0] != "speed"]  # the cards say that
    said = [*assumed, *idle_rows(plan), ("proof", plan.proof)]
    return section("At a glance", "Seconds and bytes are predictions of the performance model; the bound says what no "
                   "plan of the searched space is below.", element("div", *cards, class_="cards"),
                   table(("", "what the figures take for granted"), said), _parts(facts))


def _steps(facts: Facts) -> list[Html]:
    """The seconds of a step; with a program those as it runs, how sure they are, and those that the search compares."""
    plan, ran = facts.plan, facts.ran
    searched = seconds(plan.predicted.seconds, "plan/predicted/seconds")
    if ran is None:
        return [_card("a step", searched, "predicted")]
    low, high = ran.between
    whose = f"by {ran.runs} runs of the profile" if ran.runs else "by published runs of this kind"
    return [_card("a step", seconds(ran.seconds, "ran/seconds"), f"as run by {ran.software}"),
            _card("8 of 10 steps lie in", Html(f"{seconds(low, 'ran/low')} to {seconds(high, 'ran/high')}"), whose),
            _card("that the search compares", searched, "the sum" if plan.pipeline is None else "the time line")]


def _card(what: str, number: Html, more: str) -> Html:
    return element("div", element("div", number, class_="figure"), element("div", what),
                   element("div", more, class_="more"), class_="card")


def _parts(facts: Facts) -> Html:
    """The seconds of a step by what they go to; with a program, those that the search compares."""
    plan, predicted = facts.plan, facts.plan.predicted
    head = "the step of the busiest rank goes to" if facts.ran is None else "what the search compares goes to"
    sent = [] if plan.pipeline is not None else [(f"communication over {axes}", took, f"communication/{axes}")
                                                 for axes, took in largest_first(predicted.communication)]
    rows = [(what, seconds(took, f"plan/predicted/{at}"), part(took / predicted.seconds, f"part/plan/predicted/{at}"))
            for what, took, at in (("compute", predicted.compute, "compute"), *sent,
                                   ("update", predicted.update, "update"))]
    return table((head, "seconds", "of the step" if facts.ran is None else "of that"), rows)


def splits(facts: Facts) -> Html:
    """The splits along each axis, with a picture of the ranks in which equal colours are equal pieces."""
    plan = facts.plan
    if plan.pipeline is not None:
        return _stages(plan)
    rows = [(one.axis, datum(one.size, str(one.size), f"splits/{i}/size"), one.level or "-",
             "-" if one.parameters is None else part(one.parameters, f"splits/{i}/parameters"),
             element("span", *_results(one, i))) for i, one in enumerate(facts.splits)]
    pictures = [_ranks(plan, axis.name, [plan.mesh.coordinate(rank)[a] for rank in range(_shown(plan))])
                for a, axis in enumerate(plan.mesh.axes)]
    return section("What is split where", "A picture for each axis of the mesh: a cell is a rank, a row one unit of "
                   "the innermost level. Cells of one colour hold the same piece along that axis.",
                   element("div", *pictures, class_="pictures"),
                   table(("axis", "ranks", "level", "parameters stored split", "results of operators"), rows))


def _results(one: AxisSplit, i: int) -> list[str]:
    found: list[str] = []
    for state, count in one.results.items():
        found += [", " * bool(found), f"{state} ", datum(count, f"{count:,}", f"splits/{i}/results/{state}")]
    return found


def _shown(plan: Plan) -> int:
    return min(plan.mesh.size, MOST_RANKS)


def _ranks(plan: Plan, name: str, colours: list[int]) -> Html:
    """The ranks in rows of the innermost level's size."""
    cluster = parse_cluster(plan.source["cluster"], "the plan's cluster")
    row = next((level.size for level in cluster.levels if level.size > 1), 1)
    cell = 24 if len(colours) <= FEW_RANKS else 11
    marks = [element("rect", x=str(cell * (rank % row)), y=str(cell * (rank // row)), width=str(cell - 2),
                     height=str(cell - 2), class_=f"k{colour % 10}", data_tip=f"rank {rank}: {name} {colour}")
             for rank, colour in enumerate(colours)]
    width, height = cell * row, cell * ((len(colours) + row - 1) // row)
    more = "" if plan.mesh.size <= MOST_RANKS else f", the first {MOST_RANKS} ranks"
    return element("figure", element("svg", *marks, viewBox=f"0 0 {width} {height}", width=str(width),
                                     height=str(height), role="img", aria_label=f"ranks along {name}"),
                   element("figcaption", f"{name}{more}"))


def _stages(plan: Plan) -> Html:
    """The stages of a plan on a picture of its ranks, and their meshes."""
    assert plan.pipeline is not None
    part_of, rows = [k for k, ranks in enumerate(plan.pipeline.ranks) for _ in range(*ranks)], []
    for k, stage in enumerate(plan.pipeline.stages):
        at = f"plan/pipeline/stages/{k}/plan"
        rows.append((f"stage {k}", ranks_of_stage(plan.pipeline, k), str(stage.plan.mesh),
                     datum(len(stage.plan.decisions), f"{len(stage.plan.decisions):,}", f"stages/{k}/decisions"),
                     seconds(stage.plan.predicted.compute, f"{at}/predicted/compute"),
                     nbytes(stage.plan.predicted.peak_bytes, f"stages/{k}/peak_bytes")))
    return section("What is split where", "Every cell is a rank, and colours are parts of the cluster. Each part has "
                   "the stages of the table, and splits them over its own mesh.",
                   element("div", _ranks(plan, "part", part_of[:_shown(plan)]),
                           class_="pictures"),
                   table(("", "ranks", "mesh of a stage", "operators", "compute a step", "peak"), rows))


