"""Checkpoints that outlive the plan: saved under one, loaded under any other, by any number of ranks.

    save(model, optimizer, path)      writes beside `path`, then renames: a failure leaves the old checkpoint as it was
    load(model, optimizer, path)      every rank reads the pieces that its own plan stores

The format is torch.distributed.checkpoint's: parameters, buffers and optimizer state by the user's own names.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autoddl.errors import InputError, MachineError, MismatchError

if TYPE_CHECKING:
    from autoddl.apply import ParallelModel

__all__ = ["load", "save"]

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _barrier() -> None:
    if _distributed():
        dist.barrier()


def _first() -> bool:
    return not _distributed() or dist.get_rank() == 0


@contextmanager
def _quietly() -> Iterator[None]:
    """One process needs no process group, and no warning that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None, steps: int) -> dict[str, Any]:
    model, state = get_state_dict(module, optimizer or (), options=_OPTIONS)
    return {"model": model, "optimizer": state, "steps": torch.tensor(steps)}


def save(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Write parameters, buffers, optimizer state and step count; every rank calls it."""
    final = Path(path)
    writing, old = final.with_name(f"{final.name}.writing"), final.with_name(f"{final.name}.old")
    if _first():
        shutil.rmtree(writing, ignore_errors=True)
    _barrier()
    try:
        with _quietly():
            dcp.save(_state(model.module, optimizer, model.steps), checkpoint_id=writing, no_dist=not _distributed())
    except (CheckpointException, OSError) as error:
        raise MachineError(f"the checkpoint {final} was not written ({_reason(error)}); the one from before, if there "
                           "was one, is as it was") from error
    if _first():
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.rename(final, old)
        os.rename(writing, final)
        shutil.rmtree(old, ignore_errors=True)
    _barrier()


def load(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Read a checkpoint into the model and the optimizer, whatever plan it was saved under; every rank calls it."""
    final, old = Path(path), Path(path).with_name(f"{Path(path).name}.old")
    found = final if final.exists() else old
    if not (found / ".metadata").exists():
        raise InputError(f"{path} is no checkpoint: it has no .metadata; give the folder that `save` wrote")
    state = _state(model.module, optimizer, 0)
    try:
        with _quietly():
            dcp.load(state, checkpoint_id=found, no_dist=not _distributed())
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise MismatchError(f"{path} does not fit this model and optimizer ({_reason(error)}); load it into the model "
                            "and the kind of optimizer that it was saved from") from error
    set_state_dict(model.module, optimizer or (), model_state_dict=state["model"], optim_state_dict=state["optimizer"],
                   options=_OPTIONS)
    model.steps = int(state["steps"])


def _reason(error: BaseException) -> str:
    """The first line that says something."""
    inner = error
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))[0]
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
