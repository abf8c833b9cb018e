"""The verb that draws a plan: draw."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="a plan, as `plan -o` wrote it")]
Out = Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="FILE.svg, FILE.png or FILE.json")]


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""

    @app.command("draw")
    def _draw(plan: PlanPath, output: Out) -> None:
        """Draw a plan: time line, memory, seconds by kind."""
        from autoddl.core.files import check_opened
        from autoddl.core.plan import load_plan
        from autoddl.picture import draw
        check_opened(output)
        draw(load_plan(plan), output)
