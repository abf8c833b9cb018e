"""The verb that writes a plan as one page of HTML: report."""

from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import PlanPath, StageNumber
from autoddl.cli.output import progress_bar
from autoddl.core.errors import InputError
from autoddl.core.files import check_in_place, write_atomically
from autoddl.core.plan import load_plan

__all__ = ["report_verb"]


def report_verb(plan: PlanPath,
                record: Annotated[Path | None, typer.Option(metavar="FILE", help="what `run` or `rehearse` recorded of "
                                                            "it")] = None,
                output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE.html",
                                                            help="the page; else PLAN.html")] = None,
                quick: Annotated[bool, typer.Option("--quick", help="without the front and the prices of alternatives, "
                                                    "which are searched for")] = False,
                limit: Annotated[float | None, typer.Option(min=1, metavar="SECONDS", help="for these searches, else "
                                                            "20; what is not found by then is left out")] = None,
                stage: StageNumber = None) -> None:
    """Write a plan as one page of HTML."""
    if quick and limit is not None:
        raise InputError(f"--quick leaves out the searches that --limit {limit:g} is about: drop one of them")
    from autoddl.cli.page.document import document
    from autoddl.cli.page.facts import LIMIT, facts_of
    from autoddl.cli.tables.pipeline_tables import stage_of
    from autoddl.core.record import read_record
    page = output or plan.with_suffix(".html")
    check_in_place(page)
    read, recorded = stage_of(load_plan(plan), stage), None if record is None else read_record(record)
    with progress_bar() as progress:
        write_atomically(page, document(facts_of(read, recorded, quick, progress, limit or LIMIT)))
    print(f"written: {page}")
