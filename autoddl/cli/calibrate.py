"""The verb that fits a machine's constants to measured runs: calibrate."""

from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import AsJson
from autoddl.cli.output import progress_bar, show
from autoddl.core.errors import InputError
from autoddl.core.files import check_file, write_atomically

__all__ = ["calibrate_verb"]

RunsPath = Annotated[Path | None, typer.Argument(metavar="RUNS.csv", help="measured runs, one per line, as `validate` "
                                                                          "reads them")]
Ran = Annotated[list[Path] | None, typer.Option("--ran", metavar="PLAN", help="a plan that ran, with the record that "
                                                "`run` wrote beside it")]


def calibrate_verb(runs: RunsPath = None, ran: Ran = None,
                   output: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                                               help="write the profile here, for plan --profile")]
                   = None,
                   workers: Annotated[int, typer.Option(min=1, help="processes that price runs")] = 1,
                   force: Annotated[bool, typer.Option("--force", help="write constants that are worse than none too")]
                   = False,
                   as_json: AsJson = False) -> None:
    """Fit a machine's constants to measured runs."""
    from autoddl.cli.tables import calibration_tables
    from autoddl.fitting.calibrate import calibrate
    if force and output is None:
        raise InputError("--force writes a profile that is worse than none: say where, with -o FILE")
    check_file(output)
    if runs is None and not ran:
        raise InputError("nothing was measured: give RUNS.csv, or plans that ran with --ran PLAN")
    with progress_bar() as progress:
        found = calibrate(runs, progress, workers, ran or ())
    written = output if force or not found.worse else None
    if written is not None:
        write_atomically(written, f"# autoddl calibrate wrote this of {len(found.errors)} runs, for plan --profile\n"
                         + found.profile.to_yaml())
    show(calibration_tables.calibration_table(found, written), calibration_tables.calibration_rows(found), as_json)
    if output != written:
        raise InputError(f"{output} is not written: its constants foresee runs worse than the package's own; look at "
                         "the rows that are furthest off, or write it with --force")
