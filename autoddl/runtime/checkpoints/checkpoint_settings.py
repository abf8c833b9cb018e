"""Keeps the settings of an optimizer as one value of a checkpoint: lr, betas and so on of every parameter.

torch.distributed.checkpoint would write each of them as a value of its own, ten for every parameter. That takes longer
than the tensors of a small model. Every rank keeps those of its own parameters; all are read by every rank. Parameters
with equal settings share them:

    {"param_groups": [[names, {"lr": 0.001, ...}], ...]}        checkpoints from before have every setting by its name
"""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from autoddl.runtime.checkpoints.checkpoint_reader import CheckpointReader, read

__all__ = ["fold_settings", "packed", "read_settings", "unpacked"]

SETTINGS, GROUPS = "settings", "param_groups"
PART = f"{GROUPS}."


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
    tensors, settings = dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in state["optimizer"].items():
        if name.startswith(PART) and not isinstance(value, Tensor):
            parameter, _, key = name.removeprefix(PART).rpartition(".")
            settings.setdefault(parameter, {})[key] = value
        else:
            tensors[name] = value
    return {**state, "optimizer": tensors, f"{SETTINGS}.{rank}": packed({GROUPS: _shared(settings)})}


def _shared(settings: Mapping[str, dict[str, Any]]) -> list[list[Any]]:
    """The names of parameters with equal settings, and these."""
    found: list[list[Any]] = []
    for name, mine in settings.items():
        same = next((names for names, theirs in found if theirs == mine), None)
        if same is None:
            found.append([[name], mine])
        else:
            same.append(name)
    return found


def read_settings(reader: CheckpointReader, saved: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all ranks by name; {} where the checkpoint has none as one value."""
    state: dict[str, Any] = {name: b"" for name in saved if name.startswith(f"{SETTINGS}.")}
    if state:
        read(state, reader, no_dist=True)
    return {name: value for data in state.values() for name, value in _by_name(unpacked(data)).items()}


def _by_name(found: dict[str, Any]) -> dict[str, Any]:
    """Every setting of every parameter by its name."""
    if GROUPS not in found:
        return found
    return {f"{PART}{name}.{key}": value for names, mine in found[GROUPS] for name in names
            for key, value in mine.items()}
