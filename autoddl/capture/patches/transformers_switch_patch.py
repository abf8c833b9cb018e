"""Patches transformers 5.23 so that layers of Switch Transformers are traced as one operator, `autoddl.experts`.

A router sends each token to one expert, until that has as many tokens of the sequence as its capacity. Tokens beyond it
are dropped: none of their numbers in the router's answer is 1, and what the layer adds to them is 0.

    SwitchTransformersExperts.forward    loops over the experts that were chosen, each a module of its own. The operator
                                         gets their weights as stacks, and a dropped token with a share of 0
    is_torchdynamo_compiling             a run makes a mask where none is given, and a trace does not
    SwitchTransformersTop1Router         casts its weights in place in every run, which is left out where they have that
                                         dtype
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoddl.capture.rewrites.gate_text import gate_text
from autoddl.core.errors import CaptureError

__all__ = ["MADE_FOR", "PATCHED", "switch_layers_as_operators"]

MADE_FOR = "transformers 5.23"
_LIBRARY = "transformers.models.switch_transformers.modeling_switch_transformers"
PATCHED = {f"{_LIBRARY}:SwitchTransformersExperts.forward": "self, hidden_states, selected_experts, routing_weights",
           f"{_LIBRARY}:SwitchTransformersTop1Router.forward": "self, hidden_states",
           f"{_LIBRARY}:is_torchdynamo_compiling": ""}
"""The patched functions with the names of their parameters; a test compares both with the installed transformers."""


@contextmanager
def switch_layers_as_operators(model: nn.Module) -> Iterator[None]:
    """While open, experts of Switch Transformers in `model` are traced as operators; without them nothing is patched.

    Raises CaptureError for experts that drop values between their products."""
    library: Any = sys.modules.get(_LIBRARY)
    if library is None or not hasattr(library, "SwitchTransformersExperts"):
        yield
        return
    layer, originals = library.SwitchTransformersExperts, (library.SwitchTransformersExperts.forward,
                                                           library.is_torchdynamo_compiling)
    routers = [part for part in model.modules() if isinstance(part, library.SwitchTransformersTop1Router)]
    gates = {part: _gate(part) for part in model.modules() if isinstance(part, layer)}

    def forward(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Any:
        if (gate := gates.get(self)) is None:
            return originals[0](self, hidden_states, selected_experts, routing_weights)
        chosen = selected_experts.squeeze(1)
        shares = routing_weights * chosen.sum(-1, keepdim=True).to(routing_weights.dtype)
        up, down = (torch.stack([getattr(one, name).weight for one in self.values()]) for name in ("wi", "wo"))
        return torch.ops.autoddl.experts(hidden_states, chosen.argmax(-1, keepdim=True), shares, up, down, None, None,
                                         gate, 1, False, False, down.shape[0])

    layer.forward, library.is_torchdynamo_compiling = forward, lambda: False
    for router in routers:
        router.classifier.to = partial(_stay, router.classifier)
    try:
        yield
    finally:
        for router in routers:
            del router.classifier.to
        layer.forward, library.is_torchdynamo_compiling = originals


def _stay(classifier: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """The classifier, which has the dtype of the router."""
    if classifier.weight.dtype is not dtype:
        raise CaptureError(f"a router computes in {dtype} and turns its weights, in {classifier.weight.dtype}, into "
                           "that when it runs: keep the model in that dtype, or give it another router_dtype")
    return classifier


def _gate(experts: Any) -> str | None:
    """The text of what an expert computes between its products; None where it has none."""
    for one in experts.values():
        if one.training and one.dropout.p > 0:
            raise CaptureError(f"experts drop {one.dropout.p:.0%} of the values between their products, which is not "
                               "planned for: give a config with dropout_rate=0.0, or set the p of these modules to 0")
    return gate_text(next(iter(experts.values())).act, 1)
