"""Keeps the settings of an optimizer as one value of a checkpoint: lr, betas and so on of every parameter.

torch.distributed.checkpoint would write each of them as a value of its own, ten for every parameter. That takes longer
than the tensors of a small model. Every rank keeps those of its own parameters; all are read by every rank.
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoddl.runtime.checkpoints.checkpoint_reader import CheckpointReader, read

__all__ = ["fold_settings", "packed", "read_settings", "unpacked"]

SETTINGS, PART = "settings", "param_groups."


def packed(state: Mapping[str, Any]) -> bytes:
    """The state as bytes."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def unpacked(data: bytes) -> dict[str, Any]:
    """The state that was packed: numbers, texts, tensors and containers of them. What may run something is refused."""
    found: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
    return found


def fold_settings(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The state of rank `rank`, as `snapshot` gives it, with all settings as one value."""
    optimizer = state["optimizer"]
    settings = {name: value for name, value in optimizer.items()
                if name.startswith(PART) and not isinstance(value, Tensor)}
    return {**state, "optimizer": {name: value for name, value in optimizer.items() if name not in settings},
            f"{SETTINGS}.{rank}": packed(settings)}


def read_settings(reader: CheckpointReader, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all ranks by name; {} where the checkpoint has none as one value."""
    state: dict[str, Any] = {name: b"" for name in saved if name.startswith(f"{SETTINGS}.")}
    if state:
        read(state, reader, no_dist=True)
    return {name: value for data in state.values() for name, value in unpacked(data).items()}
