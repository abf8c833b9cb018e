"""The verb that compares the performance model with published runs: validate."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import AsJson
from autoddl.cli.output import progress_bar, show

__all__ = ["validate_verb"]


class Rows(StrEnum):
    """The kinds of rows that the table may have: one per source, or one per run."""

    SOURCE = "source"
    RUN = "run"


RunsPath = Annotated[Path, typer.Argument(metavar="RUNS.csv", help="published runs, one per line")]
By = Annotated[Rows, typer.Option(help="a row per source or per run")]


def validate_verb(runs: RunsPath, by: By = Rows.SOURCE,
                  as_plan: Annotated[bool, typer.Option("--as-plan", help="price every run as a plan of its degrees")]
                  = False,
                  workers: Annotated[int, typer.Option(min=1, help="processes that price runs")] = 1,
                  as_json: AsJson = False) -> None:
    """Predict published runs and compare with what was measured."""
    from autoddl.cli.tables import validation_tables
    from autoddl.validation.validate import validate as predict
    with progress_bar() as progress:
        found = predict(runs, progress, as_plan, workers)
    if by is Rows.RUN:
        return show(validation_tables.run_table(found), validation_tables.run_rows(found), as_json)
    show(validation_tables.score_table(found), validation_tables.score_rows(found), as_json)
