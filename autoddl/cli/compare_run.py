"""The verb that sets a plan beside the record of its run: compare-run."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table

from autoddl.cli.options import AsJson, Messages, PlanPath
from autoddl.cli.output import show
from autoddl.cli.tables.message_tables import twice, with_messages
from autoddl.cli.tables.table_style import columns, grid
from autoddl.core.errors import InputError
from autoddl.core.files import check_file, check_in_place, write_atomically
from autoddl.core.plan import Plan, load_plan
from autoddl.cost_models import show_bytes, show_seconds

if TYPE_CHECKING:
    from autoddl.core.record import Record
    from autoddl.explain.compare_run import Compared
    from autoddl.explain.record_statistics import Miss, Pair, Row
    from autoddl.explain.staged_run import ComparedStages

__all__ = ["NoRecord", "RecordPath", "compare_run_verb", "record_path"]


Given = Annotated[Path | None, typer.Argument(metavar="[RECORD]", help="what `run` or `rehearse` recorded of it; else "
                                                                      "PLAN.record.jsonl")]
RecordPath = Annotated[Path | None, typer.Option("--record", metavar="FILE",
                                                 help="what is sent when; else PLAN.record.jsonl")]
NoRecord = Annotated[bool, typer.Option("--no-record", help="write no record")]
SHOWN = 20
"""Mismatches that are printed."""


def record_path(plan: Path, given: Path | None, none: bool) -> Path | None:
    """`plan.json` -> `plan.record.jsonl` beside it, unless another place was given, or none; a place where it can be
    written."""
    if none and given is not None:
        raise InputError(f"--record {given} writes a record, and --no-record writes none: drop one of them")
    path = None if none else given or plan.with_suffix(".record.jsonl")
    try:
        check_in_place(path)
    except InputError as error:
        raise InputError(f"{error} for the record with --record FILE, or take --no-record") from None
    return path


def compare_run_verb(plan: PlanPath, record: Given = None,
                trace: Annotated[Path | None, typer.Option(metavar="FILE.json", help="both, for Perfetto")] = None,
                messages: Messages = False, as_json: AsJson = False) -> None:
    """Set a plan beside the record of its run."""
    from autoddl.core.record import read_record
    from autoddl.explain.compare_run import Compared, compare_run
    from autoddl.explain.staged_run import ComparedStages, compare_staged_run
    check_file(trace)
    read, recorded = load_plan(plan), read_record(record or plan.with_suffix(".record.jsonl"))
    found: Compared | ComparedStages = (compare_run if read.pipeline is None else compare_staged_run)(read, recorded)
    if trace is not None:
        write_atomically(trace, _trace(read, recorded))
    table, data = _table(found) if isinstance(found, Compared) else _stages_table(found), _data(found)
    show(*with_messages(table, data, read, recorded) if messages else (table, data), as_json)
    if not found.equal:
        raise typer.Exit(1)


def _trace(plan: Plan, record: "Record") -> str:
    """The prediction above the step whose length is the middle one, on every rank."""
    from autoddl.cli.page.perfetto import plan_trace
    from autoddl.explain.record_statistics import later
    steps = later(record)
    first = sorted((step for step in steps if step.rank == steps[0].rank), key=lambda step: step.seconds)
    middle = first[len(first) // 2].step
    return plan_trace(plan, [step for step in steps if step.step == middle])


def _data(found: "Compared | ComparedStages") -> dict[str, Any]:
    return asdict(found) | {"equal": found.equal, "collective_mismatches": len(found.mismatches),
                            "mismatches": found.mismatches[:SHOWN]}


def _table(found: "Compared") -> RenderableType:
    figures = _figures(found)
    figures.add_row("step", f"{_both(found.whole)}: what a step takes, the sum of the next three rows")
    for name, pair, what in (("  compute", found.compute, "a rank computes"),
                             ("  exposed", found.exposed, "it waits for collectives"),
                             ("  optimizer", found.update, "the update")):
        figures.add_row(name, f"{_both(pair)}: {what}")
    figures.add_row("hidden", f"{_both(found.hidden)}: in flight while it computes, and so no part of the step")
    figures.add_row("late ranks", f"{show_seconds(found.late)} of what was exposed, waiting for them")
    figures.add_row("plan", f"{show_seconds(found.summed)} is the step that `plan` and `show` print: it adds hidden "
                            "seconds too")
    kinds = columns("collective", "axes", "level", "count", "bytes", "seconds", "exposed", "hidden")
    for row in found.rows:
        kinds.add_row(*_cells(row))
    misses = columns("largest misses", "axes", "bytes", "seconds", "for")
    for miss in found.misses:
        misses.add_row(*_missed(miss))
    return Group(figures, "", kinds, "", misses)


def _figures(found: "Compared | ComparedStages") -> Table:
    figures = grid()
    figures.add_row("compared", f"{found.steps} steps of {found.ranks} ranks" + f"; {found.note}" * bool(found.note))
    wrong = len(found.mismatches)
    figures.add_row("collectives", f"{wrong} differ" if wrong else "as planned, every count and every byte")
    for text in found.mismatches[:SHOWN]:
        figures.add_row("", text)
    for row in found.sparse:
        figures.add_row("sparse", f"{row.count} sums over {row.axes}: {row.planned:,.0f} words of a rank predicted, "
                                  f"{row.recorded:,.0f} recorded, at most {row.most:,} of {row.limit:,.0f} allowed")
        if row.above:
            figures.add_row("", f"more in {row.above} of {row.steps} steps, of a warm-up, of a share that "
                                "falls, or with new thresholds")
    return figures


def _stages_table(found: "ComparedStages") -> RenderableType:
    figures = _figures(found)
    figures.add_row("step", _both(found.step))
    parts = columns("ranks", "stages", "compute", "waiting", "optimizer")
    for part in found.parts:
        parts.add_row(part.ranks, ", ".join(map(str, part.stages)), *map(_short, (part.compute, part.waiting,
                                                                               part.update)))
    sent = columns("sent", "kind", "axes", "count", "bytes", "waited")
    for row in found.rows:
        sent.add_row(row.ranks, row.kind, row.axes, twice(row.count, str), twice(row.nbytes, show_bytes),
                     show_seconds(row.waited))
    return Group(figures, "", parts, "", sent)


def _both(pair: "Pair") -> str:
    if not pair.predicted and not pair.recorded:
        return "none"
    error = f" ({pair.error:+.0%})" if pair.recorded else ""
    return f"{show_seconds(pair.predicted)} predicted, {show_seconds(pair.recorded)} recorded{error}"


def _cells(row: "Row") -> tuple[str, ...]:
    return (row.kind, row.axes, row.level, twice(row.count, str), twice(row.nbytes, show_bytes),
            *(_short(pair) for pair in (row.seconds, row.exposed, row.hidden)))


def _short(pair: "Pair") -> str:
    return f"{show_seconds(pair.predicted)} / {show_seconds(pair.recorded)}"


def _missed(miss: "Miss") -> tuple[str, ...]:
    return f"{miss.direction} {miss.kind}", miss.axes, show_bytes(miss.nbytes), _short(miss.seconds), miss.origin
