"""The verb that compares the performance model with published runs: validate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

from autoddl.cli.options import AsJson, ProfilePath
from autoddl.cli.output import progress_bar, show
from autoddl.core.files import check_file, write_atomically
from autoddl.cost_models.profile import SHIPPED, load_profile

__all__ = ["validate_verb"]


class Rows(StrEnum):
    """The kinds of rows that the table may have: one per source, or one per run."""

    SOURCE = "source"
    RUN = "run"


RunsPaths = Annotated[list[Path], typer.Argument(metavar="RUNS.csv ...", help="tables of published runs, one per line")]
By = Annotated[Rows, typer.Option(help="a row per source or per run")]


def validate_verb(runs: RunsPaths, by: By = Rows.SOURCE,
                  workers: Annotated[int, typer.Option(min=1, help="processes that price runs")] = 1,
                  intervals: Annotated[Path | None, typer.Option(metavar="FILE", help="write how sure predictions "
                                                                  "are")] = None,
                  profile: ProfilePath = None, as_json: AsJson = False) -> None:
    """Predict published runs, each as the plan of its degrees, and compare with what was measured."""
    from autoddl.cli.tables import validation_tables
    from autoddl.validation.intervals import covered, find_intervals, intervals_text
    from autoddl.validation.validate import check_priced
    from autoddl.validation.validate import validate as predict
    check_file(intervals)
    known = SHIPPED if profile is None else load_profile(profile)
    with progress_bar() as progress:
        found = [one for table in runs for one in predict(table, progress, workers, known)]
    if intervals is not None:
        write_atomically(intervals, intervals_text(find_intervals(found), [table.name for table in runs]))
    if by is Rows.RUN:
        show(validation_tables.run_table(found, known), validation_tables.run_rows(found, known), as_json)
        return check_priced(found)
    table = Group(validation_tables.score_table(found), "", validation_tables.coverage_table(covered(found)))
    show(table, validation_tables.score_rows(found), as_json)
    check_priced(found)
