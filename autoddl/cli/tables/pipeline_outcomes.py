"""Says what became of every pipeline that was weighed, and of plans without stages: `explain PLAN --pipeline`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from autoddl.cli.tables.table_style import columns
from autoddl.core.errors import InputError
from autoddl.core.pipeline import sizes_text
from autoddl.core.pipeline_schedules import chunks_of, schedule_title
from autoddl.core.plan import Plan
from autoddl.cost_models.units import show_bytes, show_seconds
from autoddl.explain.pipeline_proof import not_weighed

__all__ = ["alternatives_of", "alternatives_table"]

Row = Mapping[str, Any]


def alternatives_of(plan: Plan) -> Sequence[Row]:
    """The outcome of every candidate with stages, behind that of plans without stages where these were weighed.

    `parts` are the parts of the cluster, as `--stages` asks for them; of several chunks on each there are more stages.
    Raises InputError for a plan that was searched without stages.
    """
    if "alternatives" not in plan.source:
        raise InputError(not_weighed(plan))
    staged = ({"parts": row["stages"] // chunks_of(row["schedule"])} | {
        name: value for name, value in row.items() if name != "proof"} for row in plan.source["alternatives"])
    return [*_without_stages(plan), *staged]


def _without_stages(plan: Plan) -> list[Row]:
    """The outcome of plans without stages, as a row; none where they were not asked for."""
    source, seconds, best = plan.source, plan.source.get("seconds_without_stages"), plan.predicted.seconds
    if 1 not in (source.get("asked") or {}).get("stages", ()):
        return []
    bound, is_best, slack = source.get("bound_without_stages"), plan.pipeline is None, 1 - source["asked"]["tolerance"]
    seconds = best if is_best else seconds
    reached = [why for limit, why in ((seconds, "proved"), (best, "no better than the best"))
               if limit is not None and bound is not None and bound >= limit * slack]
    return [{"parts": 1, "stages": 1, "schedule": None, "microbatches": plan.microbatches if is_best else None,
             "seconds": seconds, "nbytes": plan.predicted.peak_bytes if is_best else None, "bound": bound,
             "detail": "no plan fits" if bound is None else next(iter(reached), "")}]


def alternatives_table(plan: Plan) -> RenderableType:
    """A row for each outcome: the best seconds and peak, or what rules all its plans out, and why its search ended."""
    table = columns("stages", "schedule", "microbatches", "seconds", "peak", "")
    for row in alternatives_of(plan):
        table.add_row(_stages(row), schedule_title(row["schedule"]) if row["schedule"] else "-",
                      str(row["microbatches"] or "-"), _seconds(row),
                      "-" if row["nbytes"] is None else show_bytes(row["nbytes"]), row["detail"])
    return table


def _stages(row: Row) -> str:
    """Stages as they were asked for, with chunks and numbers of ranks where they have some: `4 of 2 chunks`."""
    chunks: int = row["stages"] // row["parts"]
    return (f"{row['parts']}" + f" of {chunks} chunks" * (chunks > 1)
            + (f" of {sizes_text(row['sizes'])} ranks" if row.get("sizes") else ""))


def _seconds(row: Row) -> str:
    """Seconds of the best plan of a row, and what none is below, where that is less; or this alone."""
    if row["bound"] is None:
        return "no plan"
    least = f"no less than {show_seconds(row['bound'])}"
    if row["seconds"] is None:
        return least
    taken = show_seconds(row["seconds"])
    return taken if taken == show_seconds(row["bound"]) else f"{taken}, {least}"
