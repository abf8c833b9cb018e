"""Builds the question of a search over stages again, from a plan that it found.

`Plan.source` keeps the options of that search, and the graphs from which those of all numbers of microbatches are
derived. Every stage of a plan answers a question of its own too (`question`).
"""

from collections.abc import Mapping
from typing import Any

from autoddl.core.errors import InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.planner.options import PlanOptions
from autoddl.planner.question import Question, question_of

__all__ = ["options_text", "whole_question_of"]

_KEPT = ("mesh", "pins", "budget", "optimizer", "precision", "tolerance", "max_axes", "microbatches", "recompute",
         "stages", "schedule", "cut", "compress")
"""Options that say what is asked for; the others say how to search."""


def options_text(options: PlanOptions) -> dict[str, Any]:
    """The options of a search over stages as JSON."""
    found = {name: getattr(options, name) for name in _KEPT}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def whole_question_of(plan: Plan) -> Question:
    """The whole question of a plan: of one that was searched with stages, with all of these.

    Raises InputError for a plan that does not keep it.
    """
    asked: Mapping[str, Any] | None = plan.source.get("asked")
    if asked is None and plan.pipeline is None:
        return question_of(plan)
    if asked is None or "graph" not in plan.source:
        raise InputError(f"this plan has {len(plan.pipeline.stages) if plan.pipeline else 0} stages, and does not keep "
                         "what was asked for: make it again, or name a stage with --stage")
    return Question(graph_from_text(plan.source["graph"]), parse_cluster(plan.source["cluster"], "the plan's cluster"),
                    PlanOptions(**asked), plan.microbatches, plan.source.get("parts", {}))
