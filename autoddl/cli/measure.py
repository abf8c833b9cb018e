"""The verb that times this machine and writes what it found into a cluster file: measure."""

import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from autoddl.cli.options import AsJson, ClusterPath
from autoddl.cli.output import progress_bar, show
from autoddl.core.files import check_file
from autoddl.cost_models import show_bytes, show_rate, show_seconds

if TYPE_CHECKING:
    from autoddl.calibrate.measure import Measured

__all__ = ["measure_verb"]


Output = Annotated[Path | None, typer.Option("-o", "--output", help="write here instead of into the file")]
Ranks = Annotated[int, typer.Option(min=1, help="start so many processes and time the links too")]
Threads = Annotated[int, typer.Option(min=1, help="threads of a rank")]
Seconds = Annotated[float, typer.Option(min=1.0, help="how long it may take, about")]
Shaped = Annotated[bool, typer.Option("--shaped", help="all ranks here, on links as slow as the cluster's, for "
                                                       "rehearsals; needs root")]


def measure_verb(cluster: ClusterPath, output: Output = None, ranks: Ranks = 1, threads: Threads = 1,
            seconds: Seconds = 140.0, shaped: Shaped = False, as_json: AsJson = False) -> None:
    """Time the device and links, and write it into the cluster file."""
    from autoddl.calibrate.measure import measure
    from autoddl.core.processes import is_rank
    from autoddl.launch.launch import leave
    if not is_rank() or os.environ["RANK"] == "0":  # which writes
        check_file(output or (cluster if cluster.exists() else None))
    with progress_bar() as progress:
        found = measure(cluster, output=output, ranks=ranks, threads=threads, seconds=seconds,
                        shaped=shaped, progress=progress)
    if found is not None:
        show(_table(found), found.to_json(), as_json)
    leave(0)


def _table(found: "Measured") -> RenderableType:
    measured, table = found.measured, Table.grid(padding=(0, 2))
    origin = measured["device"]
    table.add_row("device", f"{origin['name']}: {origin['processor']}, {origin['threads']} threads, "
                            f"{origin['ranks']} ranks at once, load {origin['load']} before")
    for curve in measured["curves"]:
        best = max(work / second for work, second in zip(curve["work"], curve["seconds"], strict=True))
        unit = "FLOP" if len(curve["grid"]) > 1 else "B"
        table.add_row(f"{curve['name']} ({curve['dtype']})", f"{len(curve['seconds'])} sizes, from "
                      f"{show_seconds(min(curve['seconds']))}, up to {show_rate(best, unit)}, "
                      f"spread {median(curve['spread']):.0%}")
    for link in measured.get("links", ()):
        table.add_row(f"level {link['level']}", f"{show_rate(link['bandwidth'])}, {show_seconds(link['latency'])}, "
                      f"left unexplained {link['error']:.0%} of {len(link['points'])} times up to "
                      f"{show_bytes(max(point['nbytes'] for point in link['points']))}")
    table.add_row("written", f"{found.path}, after {measured['seconds']:.0f} s")
    return table
