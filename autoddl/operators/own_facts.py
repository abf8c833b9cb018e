"""Reads what an op of no table says of itself, in arguments that its call does not have.

    autoddl.rule     the dimension string that a user registered for it
    autoddl.flops    flops of forward on whole tensors, and for each name of the rule one (tensor, dim) that it names,
                     inputs before outputs
    autoddl.saves    what is kept for backward: (positions of inputs, positions of outputs, other bytes of whole
                     tensors, elements of the first output)

They are written down when the model is captured. So a plan knows them wherever it is read, and no rank has to ask.
A piece has the share of the flops that its dims have of the whole, and of the other bytes the share of its output:

    share = product over the names of the rule of (size here) / (whole size)
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from autoddl.core.graph import Graph, Op, Value

__all__ = ["FLOPS", "RULE", "SAVES", "Saves", "own_flops", "own_rule", "own_saves"]

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
    """The dimension string that was registered for the operator, None without."""
    text = _own(op.args).get(RULE)
    return None if text is None else str(text)


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
