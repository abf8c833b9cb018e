"""The verb that trains a plan on this machine as if on its cluster: rehearse."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from autoddl.capture.factory import Factory, settings
from autoddl.cli.compare_run import NoRecord, RecordPath, record_path
from autoddl.cli.options import AsJson, FactoryText, PlanPath, Set
from autoddl.cli.output import progress_bar, show
from autoddl.core.plan import load_plan
from autoddl.cost_models import show_bytes, show_seconds

if TYPE_CHECKING:
    from autoddl.launch.rehearse import Rehearsal

__all__ = ["rehearse_verb"]


def rehearse_verb(plan: PlanPath, factory: FactoryText, set_: Set = None,
             cluster: Annotated[Path | None, typer.Option(help="the links of this cluster instead")] = None,
             steps: Annotated[int, typer.Option(min=2, help="training steps")] = 10,
             lr: Annotated[float, typer.Option(help="learning rate of AdamW")] = 1e-3,
             loopback: Annotated[bool, typer.Option("--loopback", help="no shaping, no root")] = False,
             timeout: Annotated[float, typer.Option(min=1.0, metavar="SECONDS",
                                                    help="a collective takes at most")] = 600.0,
             record: RecordPath = None, no_record: NoRecord = False, as_json: AsJson = False) -> None:
    """Train a plan here, on links shaped as its cluster's."""
    from autoddl.launch.rehearse import rehearse
    read, kept = load_plan(plan), record_path(plan, record, no_record)
    made = Factory.parse(factory, settings(set_ or ())).with_defaults(read.factory)
    with progress_bar() as progress:
        found = rehearse(plan, read, made, steps=steps, lr=lr, cluster=cluster, shaped=not loopback,
                         timeout=timeout, record=kept, progress=progress)
    show(_table(found), found.to_json(), as_json)


def _table(found: "Rehearsal") -> RenderableType:
    table = Table.grid(padding=(0, 2))
    steps = f"{len(found.losses)} steps on {found.ranks} ranks"
    table.add_row("loss", f"{found.losses[0]:.6f} -> {found.losses[-1]:.6f} in {steps}")
    table.add_row("step", f"{show_seconds(found.median_seconds)} measured, "
                          f"{show_seconds(found.predicted_seconds)} predicted")
    table.add_row("communication", f"{show_seconds(found.exposed_seconds)} exposed, "
                                   f"{show_seconds(found.hidden_seconds)} hidden a step{_foreseen(found)}")
    wrong = found.collective_mismatches
    table.add_row("collectives", "as planned" if not wrong else f"{wrong} differ: {'; '.join(found.mismatches)}")
    for row in found.uplinks:
        planned, left, entered = (show_bytes(nbytes) for nbytes in (row.planned, row.left, row.entered))
        table.add_row(f"{row.level}, {_ranks(row.first, row.ranks)}",
                      f"{planned} planned, {left} left, {entered} entered a step")
    if found.note:
        table.add_row("note", found.note)
    if found.record:
        table.add_row("record", found.record)
    return table


def _foreseen(found: "Rehearsal") -> str:
    exposed, hidden = found.predicted_exposed_seconds, found.predicted_hidden_seconds
    if exposed is None:
        return ""
    if hidden is None:
        return f"; {show_seconds(exposed)} exposed predicted"
    return f"; {show_seconds(exposed)} and {show_seconds(hidden)} predicted"


def _ranks(first: int, count: int) -> str:
    return f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
