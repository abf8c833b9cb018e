"""The verb that draws a plan: draw."""

from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import PlanPath, StageNumber

__all__ = ["draw_verb"]

Out = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
                                          help="FILE.svg, FILE.png or FILE.json; else PLAN.svg")]


def draw_verb(plan: PlanPath, output: Out = None, stage: StageNumber = None) -> None:
    """Draw a plan: time line, memory, seconds by kind."""
    from autoddl.cli.page.picture import draw_plan
    from autoddl.cli.tables.pipeline_tables import stage_of
    from autoddl.core.files import check_in_place
    from autoddl.core.plan import load_plan
    picture = output or plan.with_suffix(".svg")
    check_in_place(picture)
    draw_plan(stage_of(load_plan(plan), stage), picture)
    print(f"written: {picture}")
