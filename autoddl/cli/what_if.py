"""The verb that plans again under a changed cluster: what-if."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group as Lines
from rich.console import RenderableType

from autoddl.cli.explain import plain
from autoddl.cli.options import AsJson, PlanPath, StageNumber
from autoddl.cli.output import progress_bar, show
from autoddl.cli.tables.pipeline_tables import stage_of
from autoddl.cli.tables.table_style import columns
from autoddl.core.files import check_file
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import show_bytes, show_seconds

if TYPE_CHECKING:
    from autoddl.explain.what_if import Sensitivity, WhatIf

__all__ = ["what_if_verb"]

Changes = Annotated[list[str] | None, typer.Option("--set", metavar="WHERE=VALUE",
                                                   help="net.bandwidth=2x, node.size=16, device=H200, budget='40 GB'")]


def what_if_verb(plan: PlanPath, set_: Changes = None,
                 sensitivity: Annotated[bool, typer.Option("--sensitivity", help="what one per cent of each resource "
                                                           "is worth")] = False,
                 output: Annotated[Path | None, typer.Option("-o", "--output", help="write the new plan here")] = None,
                 stage: StageNumber = None, as_json: AsJson = False) -> None:
    """Plan again under a changed cluster."""
    from autoddl.explain.what_if import sensitivities, what_if
    check_file(output)
    read = stage_of(load_plan(plan), stage)
    tables: list[RenderableType] = []
    data: dict[str, Any] = {}
    with progress_bar() as progress:
        if set_ or not sensitivity:
            found = what_if(read, set_ or (), progress)
            tables, data, read = [*_tables(found)], _data(found), found.after
        if sensitivity:
            rows = sensitivities(read, progress)
            tables += ["", _worths(read, rows)]
            data["sensitivity"] = [plain(row) for row in rows]
    if output is not None:
        read.save(output)
    show(Lines(*tables), data, as_json)


def _figures(plan: Plan) -> dict[str, Any]:
    """The figures of a plan that are set side by side, in base units."""
    from autoddl.explain.assumptions import throughput
    predicted = plan.predicted
    return {"seconds": predicted.seconds, "compute": predicted.compute, "communication": dict(predicted.communication),
            "update": predicted.update, "peak_bytes": predicted.peak_bytes, "budget": plan.budget, "bound": plan.bound,
            "gap": plan.gap, "devices": plan.mesh.size, "mesh": str(plan.mesh), "microbatches": plan.microbatches,
            "device_seconds": predicted.seconds * plan.mesh.size, "throughput": throughput(plan)}


def _data(found: "WhatIf") -> dict[str, Any]:
    return {"changes": [plain(one) for one in found.changes], "before": _figures(found.before),
            "after": _figures(found.after), "devices": found.devices, "notes": list(found.notes),
            "difference": plain(found.difference)}


def _tables(found: "WhatIf") -> list[RenderableType]:
    from autoddl.cli.tables.answer_tables import difference_words
    table = columns("", "before", "after", "change")
    for one in found.changes:
        table.add_row(one.where, one.before, one.after)
    table.add_section()
    a, b = _figures(found.before), _figures(found.after)
    for what, key, shown in (("step", "seconds", show_seconds),
                             ("no plan on these devices below", "bound", show_seconds),
                             ("compute", "compute", show_seconds), ("update", "update", show_seconds),
                             ("device-seconds a step", "device_seconds", show_seconds),
                             ("peak of a rank", "peak_bytes", show_bytes), ("budget", "budget", show_bytes)):
        table.add_row(what, shown(a[key]), shown(b[key]), _change(a[key], b[key]))
    sums = [sum(one["communication"].values()) for one in (a, b)]
    table.add_row("communication", *map(show_seconds, sums), _change(*sums))
    for what in a["throughput"]:
        rates = [one["throughput"].get(what, 0.0) for one in (a, b)]
        table.add_row(f"{what} a second", *(f"{rate:,.4g}" for rate in rates), _change(*rates))
    for what in ("devices", "mesh", "microbatches"):
        table.add_row(what, str(a[what]), str(b[what]))
    words = difference_words(found.difference)
    return [table, *(line for note in found.notes for line in ("", note)), "", *words]


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before and abs(after / before - 1) >= 5e-4 else ""


def _worths(plan: Plan, rows: "tuple[Sensitivity, ...]") -> RenderableType:
    table = columns("1% of", "there is", "saves a step", "share", "found by")
    for row in rows:
        table.add_row(row.resource, row.value, show_seconds(row.seconds), f"{row.seconds / plan.predicted.seconds:.3%}",
                      row.how)
    return table
