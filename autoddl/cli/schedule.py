"""The verb that shows a pipeline schedule: schedule."""

from typing import Annotated

import typer
from rich.text import Text

from autoddl.cli.options import AsJson
from autoddl.cli.output import show

__all__ = ["schedule_verb"]

Name = Annotated[str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, interleaved:CHUNKS, zb-h1, zb-h2, zb-v, "
                                                          "dualpipe-v or chimera:PAIRS, or a file that has one as it "
                                                          "is shown here")]
Ranks = Annotated[int | None, typer.Option(min=1, help="ranks, each with one or more stages (default: 4, or the "
                                                       "file's)")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="microbatches of a step (default: 8, or the file's)")]


def schedule_verb(name: Name, ranks: Ranks = None, microbatches: Microbatches = None, as_json: AsJson = False) -> None:
    """Show a pipeline schedule and its time line.

    Each pass takes one unit of time, and transfers take none. What is printed first is how a file has it: change that,
    and plan with --schedule FILE.
    """
    from autoddl.cli.tables.pipeline_text import draw_schedule, unit_timeline
    from autoddl.core.pipeline_schedules import generate, named_schedule, written_numbers
    name = named_schedule(name)
    own = written_numbers(name) or (4, 8)
    ranks, microbatches = ranks or own[0], microbatches or own[1]
    made = generate(name, ranks, microbatches)
    line = unit_timeline(made)
    apart = line.bubble_apart
    said = f"; {apart:.1%} where ranks begin and end one after another, and none waits for all to update"
    drawn = Text(f"{made}\n\n{draw_schedule(made)}\n\n{line.makespan:g} units, bubble {line.bubble:.1%}"
                 + said * (apart < line.bubble - 5e-4), no_wrap=True)
    show(drawn, {"name": name, "ranks": ranks, "microbatches": microbatches, "stages": made.stages,
                 "schedule": str(made), "units": line.makespan, "bubble": line.bubble,
                 "bubble_apart": apart}, as_json)
