"""The verb that compares the performance model with published runs: validate."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

__all__ = ["register"]

Print = Callable[[RenderableType, Any, bool], None]
Bar = Callable[[], AbstractContextManager[Any]]


class Rows(StrEnum):
    """What a row of the table is."""

    SOURCE = "source"
    RUN = "run"


RunsPath = Annotated[Path, typer.Argument(metavar="RUNS.csv", help="published runs, one per line")]
By = Annotated[Rows, typer.Option(help="what a row of the table is")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]


def register(app: typer.Typer, show: Print, bar: Bar) -> None:
    """Add the verb to `app`; `show` prints a table or JSON, `bar` shows progress."""

    @app.command("validate")
    def _validate(runs: RunsPath, by: By = Rows.SOURCE, as_json: AsJson = False) -> None:
        """Predict published runs and compare with what was measured."""
        from autoddl import validate
        with bar() as progress:
            found = validate.validate(runs, progress)
        if by is Rows.RUN:
            return show(validate.run_table(found), validate.run_rows(found), as_json)
        show(validate.score_table(found), validate.score_rows(found), as_json)
