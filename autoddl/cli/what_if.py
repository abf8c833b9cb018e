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
from autoddl.core.errors import InputError
from autoddl.core.files import check_file
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import show_bytes, show_seconds

if TYPE_CHECKING:
    from autoddl.explain.run_seconds import StepAsRun
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
    whole = load_plan(plan)
    read = stage_of(whole, stage)
    if stage is not None and (told := whole.source.get("software")):
        raise InputError(f"--stage {stage} has no step of its own as {told} runs the plan: ask about all stages, "
                         "without --stage")
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


def _figures(plan: Plan, ran: "StepAsRun | None") -> dict[str, Any]:
    """The figures of a plan that are set side by side, in base units; what is paid is for the step as it runs."""
    from autoddl.explain.assumptions import throughput
    predicted = plan.predicted
    own = None if ran is None else ran.seconds
    step = predicted.seconds if own is None else own
    return {"seconds": predicted.seconds, "compute": predicted.compute, "communication": dict(predicted.communication),
            "update": predicted.update, "peak_bytes": predicted.peak_bytes, "budget": plan.budget, "bound": plan.bound,
            "gap": plan.gap, "devices": plan.mesh.size, "mesh": str(plan.mesh), "microbatches": plan.microbatches,
            "device_seconds": step * plan.mesh.size, "throughput": throughput(plan, own),
            **({} if ran is None else ran.to_json())}


def _both(found: "WhatIf") -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of both plans."""
    first, second = found.ran or (None, None)
    return _figures(found.before, first), _figures(found.after, second)


def _data(found: "WhatIf") -> dict[str, Any]:
    before, after = _both(found)
    return {"changes": [plain(one) for one in found.changes], "before": before, "after": after,
            "devices": found.devices, "notes": list(found.notes), "difference": plain(found.difference)}


def _tables(found: "WhatIf") -> list[RenderableType]:
    from autoddl.cli.tables.answer_tables import difference_words
    table = columns("", "before", "after", "change")
    for one in found.changes:
        table.add_row(one.where, one.before, one.after)
    table.add_section()
    a, b = _both(found)
    if found.ran is not None:
        name, steps = found.ran[0].software, [one.seconds for one in found.ran]
        table.add_row(f"step as run by {name}", *map(show_seconds, steps), _change(*steps))
        table.add_row("8 of 10 steps lie in", *(f"{show_seconds(low)} to {show_seconds(high)}"
                                                for low, high in (one.between for one in found.ran)))
    for what, key, shown in (("step" if found.ran is None else _searched(found.before), "seconds", show_seconds),
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


def _searched(plan: Plan) -> str:
    """Names the seconds by which a search compares plans, where the step as it runs is another figure."""
    return "sum that the search compares" if plan.pipeline is None else "time line that the search compares"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before and abs(after / before - 1) >= 5e-4 else ""


def _worths(plan: Plan, rows: "tuple[Sensitivity, ...]") -> RenderableType:
    from autoddl.explain.run_seconds import step_seconds
    software, step = plan.source.get("software"), step_seconds(plan)
    saves = f"saves a step as run by {software}" if software else "saves a step"
    table = columns("1% of", "there is", saves, "share", "found by")
    for row in rows:
        table.add_row(row.resource, row.value, show_seconds(row.seconds), f"{row.seconds / step:.3%}", row.how)
    return table
