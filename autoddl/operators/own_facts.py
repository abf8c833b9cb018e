"""Reads what an op of no table says of itself, in arguments that its call does not have.

    autoddl.rule     the dimension string that a user registered for it
    autoddl.flops    flops of forward on whole tensors, and for each name of the rule one (tensor, dim) that it names,
                     inputs before outputs
    autoddl.saves    what is kept for backward: (positions of inputs, positions of outputs, other bytes of whole
                     tensors, elements of the first output)
    autoddl.tried    the dimension string that was found by trying the op on pieces (`trials.probe`)
    autoddl.untried  why none was found, or no more

They are written down when the model is captured, the last two when it is planned. So a plan knows them wherever it is
read, and no rank has to ask.
A piece has the share of the flops that its dims have of the whole, and of the other bytes the share of its output:

    share = product over the names of the rule of (size here) / (whole size)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from autoddl.core.graph import TRIED, UNTRIED, Graph, Op, Value

__all__ = ["FLOPS", "RULE", "SAVES", "Saves", "own_flops", "own_rule", "own_saves", "told_by_trials",
           "tried_rules", "with_tried_rules"]

RULE, FLOPS, SAVES = "autoddl.rule", "autoddl.flops", "autoddl.saves"

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Saves:
    """Lists what an op keeps for backward.

        inputs     positions of inputs
        outputs    positions of outputs
        density    other bytes, by element of the first output
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    density: float


def own_rule(op: Op) -> str | None:
    """The dimension string that was registered for the operator, or found by trying; None without."""
    said = _own(op.args)
    text = said.get(RULE, said.get(TRIED))
    return None if text is None else str(text)


def tried_rules(graph: Graph) -> dict[str, str]:
    """By name of the op, the dimension strings that were found by trying."""
    return {op.name: str(_own(op.args)[TRIED]) for op in graph.ops if TRIED in _own(op.args)}


def told_by_trials(graph: Graph) -> tuple[dict[str, str], dict[str, str]]:
    """By operator, the dimension strings that were found by trying, and why none was found, or no more."""
    said = [(op.target, _own(op.args)) for op in graph.ops]
    return ({target: str(own[TRIED]) for target, own in said if TRIED in own},
            {target: str(own[UNTRIED]) for target, own in said if UNTRIED in own})


def with_tried_rules(graph: Graph, found: Mapping[str, str]) -> Graph:
    """The graph whose ops have these dimension strings, by their names; itself without any."""
    if not found:
        return graph
    return replace(graph, ops=tuple(replace(op, args=(*op.args, (TRIED, found[op.name]))) if op.name in found else op
                                    for op in graph.ops))


def own_saves(op: Op) -> Saves | None:
    """The tensors that the op keeps for backward, None where nothing says which."""
    found = _own(op.args).get(SAVES)
    return None if found is None else Saves(tuple(found[0]), tuple(found[1]), found[2] / max(1, found[3]))


@lru_cache(maxsize=10_000)
def _own(args: tuple[tuple[str, Value], ...]) -> dict[str, Any]:
    return {name: value for name, value in args if name.startswith("autoddl.")}


def own_flops(op: Op, graph: Graph, here: Shapes) -> float:
    """Flops of forward on pieces of shapes `here`, of the inputs and then the outputs; 0 where nothing was said."""
    flops, places = _own(op.args).get(FLOPS, (0.0, ()))
    tensors = (*op.inputs, *op.outputs)
    local: float = prod(here[t][d] / graph.tensors[tensors[t]].shape[d] for t, d in places)
    return float(flops) * local
