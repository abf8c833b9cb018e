"""The verb that fits a machine's constants to measured runs: calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import AsJson
from autoddl.cli.output import progress_bar, show
from autoddl.core.files import check_file, write_atomically

__all__ = ["calibrate_verb"]

RunsPath = Annotated[Path, typer.Argument(metavar="RUNS.csv", help="measured runs, one per line, as `validate` reads "
                                                                   "them")]


def calibrate_verb(runs: RunsPath,
                   output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                                               help="write the profile here, for plan --profile")]
                   = None,
                   workers: Annotated[int, typer.Option(min=1, help="processes that price runs")] = 1,
                   as_json: AsJson = False) -> None:
    """Fit a machine's constants to measured runs."""
    from autoddl.cli.tables import calibration_tables
    from autoddl.fitting.calibrate import calibrate
    check_file(output)
    with progress_bar() as progress:
        found = calibrate(runs, progress, workers)
    if output is not None:
        write_atomically(output, f"# autoddl calibrate {runs.name} wrote this, for plan --profile\n"
                         + found.profile.to_yaml())
    show(calibration_tables.calibration_table(found), calibration_tables.calibration_rows(found), as_json)
