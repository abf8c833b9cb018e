"""Hugging Face models choose their attention mask by looking at values, and give that up while they are traced.

What they would find is known from the call: without `position_ids` no sequences are packed into one row, and without
`attention_mask` nothing is padded. Then attention needs no mask tensor (of batch x length x length), only `is_causal`,
which is also what the model does when it is run.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["plain_masks"]


@contextmanager
def plain_masks(model: nn.Module) -> Iterator[None]:
    """While open, tracing `model` yields the masks that running it would use."""
    masking: Any = sys.modules.get("transformers.masking_utils")
    if masking is None or not all(hasattr(masking, name) for name in _NAMES):
        yield
        return
    given: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given.extend(value for name, value in kwargs.items() if name == "position_ids" and value is not None)

    before = {name: getattr(masking, name) for name in _NAMES}
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in model.modules()
             if hasattr(part, "dummy_inputs")]
    masking.find_packed_sequence_indices = lambda ids: before["find_packed_sequence_indices"](ids) if given else None
    masking.is_torchdynamo_exporting = lambda: False
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, function in before.items():
            setattr(masking, name, function)


_NAMES = ("find_packed_sequence_indices", "is_torchdynamo_exporting")
