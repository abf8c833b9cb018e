"""The verb that draws a plan: draw."""

from pathlib import Path
from typing import Annotated

import typer

from autoddl.cli.options import PlanPath, StageNumber

__all__ = ["draw_verb"]

Out = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="FILE.svg, FILE.png or FILE.json")]


def draw_verb(plan: PlanPath, output: Out, stage: StageNumber = None) -> None:
    """Draw a plan: time line, memory, seconds by kind."""
    from autoddl.cli.page.picture import draw_plan
    from autoddl.cli.tables.pipeline_tables import stage_of
    from autoddl.core.files import check_in_place
    from autoddl.core.plan import load_plan
    check_in_place(output)
    draw_plan(stage_of(load_plan(plan), stage), output)
