"""Patches transformers 5.23 so that a traced model builds the same attention mask as a model that runs.

A Hugging Face model looks at the values of its inputs to see whether it needs a mask tensor of batch x length x length.
It cannot do so under a trace and then always builds one. The call already tells what the values would:

    no position_ids      no sequences are packed into one row
    no attention_mask    nothing is padded

In both cases attention needs only `is_causal`, which the running model uses too.

    masking_utils.find_packed_sequence_indices    returns None unless some module is given position_ids
    masking_utils.is_torchdynamo_exporting        returns False, so the checks of a running model are made
    masking_utils.is_tracing                      the same where it is asked of no tensor, in earlier releases
    masking_utils.fast_all                        returns False: an attention_mask that is given is one with padding
    modeling_longt5.is_torchdynamo_compiling      returns False: LongT5 makes a mask of ones, which it cannot do without
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["MADE_FOR", "PATCHED", "build_masks_as_run"]

MADE_FOR = "transformers 5.23"
PATCHED = {"transformers.masking_utils:find_packed_sequence_indices": "position_ids",
           "transformers.masking_utils:is_torchdynamo_exporting": "",
           "transformers.masking_utils:fast_all": "tensor",
           "transformers.models.longt5.modeling_longt5:is_torchdynamo_compiling": ""}
"""The patched functions with the names of their parameters; a test compares both with the installed transformers."""

NAMES = tuple(path.partition(":")[2] for path in PATCHED if "masking_utils" in path)
OLDER = ("find_packed_sequence_indices", "is_tracing")
"""What is patched where NAMES are not all there."""


@contextmanager
def build_masks_as_run(model: nn.Module) -> Iterator[None]:
    """While open, tracing `model` builds the masks that running it would; without transformers nothing is patched."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    names = next((names for names in (NAMES, OLDER) if all(hasattr(masking, name) for name in names)), None)
    if names is None:
        yield
        return
    positions: list[Tensor] = []

    def note_positions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions.extend(value for name, value in kwargs.items() if name == "position_ids" and value is not None)

    originals = {name: getattr(masking, name) for name in names}
    find_packed = originals["find_packed_sequence_indices"]
    hooks = [part.register_forward_pre_hook(note_positions, with_kwargs=True) for part in model.modules()
             if hasattr(part, "dummy_inputs")]
    masking.find_packed_sequence_indices = lambda ids: find_packed(ids) if positions else None
    if names is NAMES:
        masking.is_torchdynamo_exporting = lambda: False
        masking.fast_all = lambda tensor: False
    else:
        asks = originals["is_tracing"]
        masking.is_tracing = lambda tensor=None: tensor is not None and asks(tensor)
    try:
        with _runs(sys.modules.get("transformers.models.longt5.modeling_longt5")):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, function in originals.items():
            setattr(masking, name, function)


@contextmanager
def _runs(modeling: Any) -> Iterator[None]:
    """While open, a module of models takes itself for one that runs; None, one that is not imported, is left alone."""
    original = getattr(modeling, "is_torchdynamo_compiling", None)
    if original is None:
        yield
        return
    modeling.is_torchdynamo_compiling = lambda: False
    try:
        yield
    finally:
        modeling.is_torchdynamo_compiling = original
