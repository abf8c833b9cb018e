"""Draws what was decided, what else there was and what it would cost, and what more hardware would be worth."""

from math import isfinite

from autoddl.cli.page.charts import points
from autoddl.cli.page.facts import Facts
from autoddl.cli.page.html import Html, datum, element, nbytes, part, seconds, section, table
from autoddl.cli.tables.plan_tables import operator_rows, parameter_rows
from autoddl.core.pipeline_schedules import schedule_title
from autoddl.cost_models import show_bytes, show_seconds
from autoddl.explain.explain import Named

__all__ = ["front", "layouts", "other_choices", "worth"]

SHOWN = 6
"""Alternatives that are shown of each name."""


def layouts(facts: Facts) -> Html:
    """The layouts of parameters and layers; those of each stage folded."""
    plan = facts.plan
    plans = [("", plan)] if plan.pipeline is None else [
        (f"stage {k} on {stage.plan.mesh}", stage.plan) for k, stage in enumerate(plan.pipeline.stages)]
    inside = []
    for name, one in plans:
        layers, others = operator_rows(one)
        rows = [*layers, *((f"{count} others", *kind) for kind, count in others.items())]
        inside.append(element(
            "details", element("summary", f"Parameters and layers {name}".strip()),
            table(("parameter", "stored", "split", "used", "forward", "gradient"), parameter_rows(one)),
            table(("layer", "operator", "reads", "writes"), rows), open_=None if name else "open"))
    return section("Layouts", "One state for each mesh axis: S(d) is a slice along dim d, B the whole, P a summand.",
                   *inside)


def other_choices(facts: Facts) -> Html:
    """Other choices and the best whole plan with each; of a plan with stages, what became of each pipeline."""
    plan = facts.plan
    if facts.explained is None:
        rows = [(str(row["stages"]), schedule_title(row["schedule"]), str(row["microbatches"]),
                 "-" if row["seconds"] is None else seconds(row["seconds"], f"plan/source/alternatives/{i}/seconds"),
                 "no plan" if row["bound"] is None else seconds(row["bound"], f"plan/source/alternatives/{i}/bound"),
                 row["detail"]) for i, row in enumerate(plan.source.get("alternatives", ()))]
        return section("Alternatives", "Every number of stages, schedule and number of microbatches that was searched.",
                       table(("stages", "schedule", "microbatches", "best", "no less than", ""), rows))
    tables = [_named(one, i, facts.explained.seconds) for i, one in enumerate(facts.explained.named)]
    return section("Alternatives", "For the largest parameters every other layout, with the seconds of the best whole "
                   "plan that has it.", *_ended(facts), *tables or [element("p", "Not asked for: leave --quick out.")])


def _ended(facts: Facts) -> list[Html]:
    """A line on searches that were ended, if any were."""
    said = f"Searches were ended after {show_seconds(facts.ended)}, so some may be missing or less exact; give them " \
           "more by --limit SECONDS."
    return [element("p", said, class_="note")] * bool(facts.ended)


def _named(one: Named, i: int, whole: float) -> Html:
    rows = []
    order = sorted(enumerate(one.others), key=lambda pair: (pair[1].seconds is None, pair[1].seconds or pair[1].bound))
    for k, other in [pair for pair in order if isfinite(pair[1].bound)][:SHOWN]:
        at = f"explained/named/{i}/others/{k}"
        exact = other.seconds is not None
        value, at = (other.bound, f"{at}/bound") if other.seconds is None else (other.seconds, f"{at}/seconds")
        rows.append(("this plan" if other.layouts == one.chosen else "", other.layouts, seconds(value, at),
                     "exactly" if exact else "at least",
                     datum(value / whole - 1, f"{value / whole - 1:+.2%}".replace("-0.00%", "0.00%"), f"more/{at}")))
    more = len(one.others) - len(rows)
    rest = element("p", f"{more} others cost more, or do not fit.", class_="note") if more > 0 else Html("")
    return element("div", element("h3", one.name), table(("", "layout", "best plan with it", "", "more"), rows), rest)


def front(facts: Facts) -> Html:
    """Seconds against bytes of a rank."""
    if not facts.front:
        why = "leave --quick out" if facts.explained is not None else "stages have a front each, by `front --stage N`"
        return section("Seconds against memory", "What less memory costs.", element("p", f"Not drawn: {why}."))
    found = facts.front
    tips = [f"{show_seconds(one.seconds)} with {show_bytes(one.nbytes)}" for one in found]
    rows = [(nbytes(one.nbytes, f"front/{i}/nbytes"), seconds(one.seconds, f"front/{i}/seconds"),
             "" if one.bound is None else seconds(one.bound, f"front/{i}/bound")) for i, one in enumerate(found)]
    own = facts.plan.predicted.peak_bytes, facts.plan.predicted.seconds
    return section("Seconds against memory", "Each point is the fastest plan of so many bytes, the ring this plan.",
                   *_ended(facts), points([one.nbytes for one in found], [one.seconds for one in found], tips, own,
                                          "front"),
                   table(("bytes a rank", "seconds", "no less than"), rows))


def worth(facts: Facts) -> Html:
    """The worth of one per cent of each resource."""
    if not facts.worth:
        return Html("")
    most = max((row.seconds for row in facts.worth), default=0.0) or 1.0
    step, over = (facts.plan.predicted.seconds, "part") if facts.ran is None else (facts.ran.seconds, "part_as_run")
    by = "" if facts.ran is None else f", as run by {facts.ran.software},"
    rows = [(row.resource, row.value, seconds(row.seconds, f"worth/{i}/seconds"),
             part(row.seconds / step, f"{over}/worth/{i}/seconds"),
             element("div", element("i", style=f"width:{max(0.0, 100 * row.seconds / most):.3g}%"), class_="meter"),
             row.how) for i, row in enumerate(facts.worth)]
    return section("What one per cent more is worth",
                   f"Seconds a step{by} saves if one resource is one per cent better.",
                   table(("resource", "there is", "saves", "of a step", "", "found by"), rows))
