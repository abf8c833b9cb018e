"""Patches transformers 5.23 so that a layer of experts is traced as one operator, `autoddl.experts`.

Experts run in one of several implementations, all of which compute what `kernels.experts` does:

    eager         a loop over the experts that were chosen, which no trace can follow
    grouped_mm    the default: rows sorted by expert, whose places depend on all tokens, so that no layout splits them
    batched_mm    a copy of a matrix for every token, from ordinary operators

    ExpertsInterface.get_interface    gives the operator for the first two; other implementations stay

The function between the two products is written as text (`gate_text`). Experts for which there is none, or that
normalise their results, run as `batched_mm`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.rewrites.gate_text import gate_text

__all__ = ["MADE_FOR", "OWN_BACKWARD", "PATCHED", "experts_as_operators"]

MADE_FOR = "transformers 5.23"
PATCHED = {"transformers.integrations.moe:ExpertsInterface.get_interface": "self, experts_implementation, default",
           "transformers.integrations.moe:batched_mm_experts_forward":
               "self, hidden_states, top_k_index, top_k_weights",
           "transformers.integrations.moe:grouped_mm_experts_forward":
               "self, hidden_states, top_k_index, top_k_weights",
           "transformers.integrations.moe:_default_apply_gate": "self, gate_up_out"}
"""The patched function, and those that it stands for, with the names of their parameters; a test compares them with the
installed transformers."""

OWN_BACKWARD = "GeneratedBackwardFor_transformers_grouped_mm_fallback_default"
"""Name of the Function by which grouped products of the library have a backward, which `passes` knows."""

REPLACED = (None, "eager", "grouped_mm")

torch.library.define("autoddl::experts", "(Tensor x, Tensor chosen, Tensor shares, Tensor up, Tensor down, "
                     "Tensor? up_bias, Tensor? down_bias, str gate, int halves, bool paired, bool transposed, "
                     "int count) -> Tensor")


@torch.library.register_fake("autoddl::experts")  # type: ignore[untyped-decorator]
def _like(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None,
          down_bias: Tensor | None, gate: str, halves: int, paired: bool, transposed: bool, count: int) -> Tensor:
    return x.new_empty(x.shape[0], down.shape[2 if transposed else 1])


@contextmanager
def experts_as_operators(model: nn.Module) -> Iterator[None]:
    """While open, the experts of `model` are traced as operators; without transformers nothing is patched."""
    library: Any = sys.modules.get("transformers.integrations.moe")
    if library is None or not hasattr(library, "ExpertsInterface"):
        yield
        return
    interface, batched = library.ExpertsInterface, library.batched_mm_experts_forward
    gates = {part: _gate(part) for part in model.modules() if hasattr(part, "_apply_gate")}
    original = interface.get_interface

    def get_interface(self: Any, experts_implementation: str | None, default: Callable[..., Any]) -> Any:
        if experts_implementation not in REPLACED:
            return original(self, experts_implementation, default)

        def forward(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Any:
            gate = gates.get(module)
            if getattr(module, "_is_expert_parallel", False) or gate is None:
                return batched(module, hidden, chosen, shares)
            return _call(module, hidden, chosen, shares, gate)

        return forward

    interface.get_interface = get_interface
    try:
        yield
    finally:
        interface.get_interface = original


def _gate(module: Any) -> str | None:
    """The text of what an expert computes between its products; None if it has none, or a norm behind them."""
    if getattr(module, "has_post_expert_norm", False):
        return None
    return gate_text(module._apply_gate, 2) if module.has_gate else gate_text(module.act_fn, 1)


def _call(module: Any, hidden: Tensor, chosen: Tensor, shares: Tensor, gate: str) -> Any:
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    biases = (getattr(module, f"{name}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return torch.ops.autoddl.experts(hidden, chosen, shares, up, down, *biases, gate, 1 + module.has_gate,
                                     not module.is_concatenated, module.is_transposed, down.shape[0])
