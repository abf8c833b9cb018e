"""Refuses options that would be without effect beside the others, so that none is dropped in silence.

    schedule, stages_limit    no plan with stages is asked for; a limit, where `mine` leaves no search over stages
    stage_ranks               as these: `mine` has stages of equally many ranks
    max_axes                  `mesh` or `mine` say which axes there are
    cut, pins                 `mine` has stages: these are of equal size, and alike in their layouts
    compress                  only what stages send, where there are none
    expert_load               the model has no layer of experts
    recompute                 `first-N` and `every-K` beyond the number of blocks

Options that a search derives from others are none of a user's, and are not checked here.
"""

from collections.abc import Collection
from dataclasses import fields

from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import Graph
from autoddl.core.recompute import blocks_of, counted
from autoddl.operators.expert_sizes import BALANCED, expert_load
from autoddl.planner.options import PlanOptions

__all__ = ["check_of_model", "check_used", "given_options"]


def given_options(options: PlanOptions) -> tuple[str, ...]:
    """The names of the options that differ from their defaults."""
    return tuple(one.name for one in fields(PlanOptions) if getattr(options, one.name) != one.default)


def check_used(options: PlanOptions, given: Collection[str], compares: bool = False) -> None:
    """Raises InputError where one of the `given` options has no effect beside the others.

    In a comparison the options are also those of plans beside `mine`.
    """
    unused = _unused(options.configured())
    if compares and options.mine is not None:
        others = PlanOptions.of({**options.words(), "mine": None})
        unused = {name: why for name, why in unused.items() if name in _unused(others)}
    for name in given:
        if name in unused:
            raise InputError(unused[name])


def _unused(options: PlanOptions) -> dict[str, str]:
    """By name, why an option has no effect: the value, the rule and the way out."""
    staged, found = options.stages != (1,), dict[str, str]()
    pipelined = options.mine is not None and Degrees.parse(options.mine).pp > 1
    if not staged:
        found["schedule"] = (f"schedule {', '.join(options.schedule)} is of plans with stages, and none is asked for: "
                             "ask for some, like --stages 1,2,4, or leave schedule out")
        found["stage_ranks"] = (f"stage ranks {', '.join(options.stage_ranks)} are of plans with stages, and none is "
                                "asked for: ask for some, like --stages 1,2,4, or leave stage ranks out")
        found["stages_limit"] = (f"a stages limit of {options.stages_limit} s ends the search over stages, and none is "
                                 "asked for: ask for some, like --stages 1,2,4, or leave it out")
        if [word.partition("=")[0] for word in options.compress] == ["pipeline"]:
            found["compress"] = (f"compress {', '.join(options.compress)} is about what stages send each other, and "
                                 "none is asked for: ask for some, like --stages 1,2,4, or leave it out")
    if pipelined:
        fixed = f"mine '{options.mine}' has stages of equally many blocks, all with its layouts"
        found["stages_limit"] = (f"{fixed}, so there is no search over stages that a stages limit could end: leave the "
                                 "limit out, or ask for stages without mine")
        found["stage_ranks"] = (f"{fixed}, and equally many ranks: leave stage ranks {', '.join(options.stage_ranks)} "
                                "out, or ask for them without mine")
        found["cut"] = (f"{fixed}, and cut {', '.join(options.cut)} says where others begin: leave cut out, or ask for "
                        "it without mine")
        found["pins"] = (f"{fixed}, and pins of one stage would say otherwise: leave {', '.join(options.pins)} out, or "
                         "pin without mine")
    axes = next((f"{name} '{text}'" for name, text in (("mesh", options.mesh), ("mine", options.mine)) if text), None)
    if axes is not None:
        found["max_axes"] = f"{axes} says which axes there are, and at most {options.max_axes} are asked for: give one"
    return found


def check_of_model(options: PlanOptions, graph: Graph) -> None:
    """Raises InputError where an option is about a part that a model has not; `graph` is the planned one, with hubs."""
    if options.expert_load != BALANCED and expert_load(graph) is None:
        raise InputError(f"an expert load of {options.expert_load} is about layers of experts, and this model has "
                         "none: leave it out")
    blocks = blocks_of(graph)
    for policy in options.recompute:
        if blocks and counted(policy) > len(blocks):
            raise InputError(f"recompute {policy} counts {counted(policy)} blocks, and this model has {len(blocks)}, "
                             f"{blocks[0].name} to {blocks[-1].name}: count at most {len(blocks)}, or take full")
