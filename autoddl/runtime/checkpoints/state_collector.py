"""Collects the state of a model and its optimizer for one save after another, at the price of a look at each tensor.

torch's get_state_dict looks up every name in several walks through the module. A collector lets it do so in the first
save, and compares. Where its names are those that the module has itself, later saves take them from there.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoddl.runtime.checkpoints.checkpoint import completed, snapshot

if TYPE_CHECKING:
    from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["StateCollector"]


class StateCollector:
    """Collects what `checkpoint.snapshot` does, for less from the second time on."""

    def __init__(self) -> None:
        self._of: tuple[object, object] = (None, None)
        self._own_names = False

    def state(self, model: "ParallelModel", optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """The state of this rank that a checkpoint holds. Its tensors are the model's own, not copies."""
        known = self._of[0] is model and self._of[1] is optimizer
        if known and not self._own_names:
            return snapshot(model, optimizer)
        mine = _collected(model, optimizer)
        if known and mine is not None:
            return mine
        whole = snapshot(model, optimizer)
        if mine is not None:
            self._of, self._own_names = (model, optimizer), _names(mine) == _names(whole)
        return whole


def _names(state: dict[str, Any]) -> tuple[set[str], ...]:
    return set(state), set(state["model"]), set(state["optimizer"])


def _collected(model: "ParallelModel", optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
    """The state by the names of the module; None where an optimizer has other values than tensors and numbers."""
    found: dict[str, Any] = {}
    if optimizer is not None:
        names = {parameter: name for name, parameter in model.module.named_parameters()}
        packed = optimizer.state_dict()
        mine = [names.get(p, "") for group in optimizer.param_groups for p in group["params"]]
        for number, kept in packed["state"].items():
            found |= {f"state.{mine[number]}.{key}": value for key, value in kept.items()}
        if not all(isinstance(value, Tensor | int | float) for value in found.values()):
            return None
        for group in packed["param_groups"]:
            found |= {f"param_groups.{mine[number]}.{key}": value for number in group["params"]
                      for key, value in group.items() if key != "params"}
    return completed(model, dict(model.module.state_dict()), found)
