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


def _fresh(optimizer: torch.optim.Optimizer | None) -> bool:
    return optimizer is not None and not optimizer.state


def _forgotten(optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Take back the state that torch made by a step of nothing, which counts as one."""
    if optimizer is not None:
        optimizer.state.clear()
    for name in [name for name in state["optimizer"] if name.startswith("state.")]:
        del state["optimizer"][name]


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Torch gives a new optimizer its state only where no gradient is there."""
    groups = [] if optimizer is None else optimizer.param_groups
    held = [(p, p.grad) for group in groups for p in group["params"]]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in held:
            p.grad = gradient


def save(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Write parameters, buffers, optimizer state and step count; every rank calls it."""
    final = Path(path)
    writing, old = final.with_name(f"{final.name}.writing"), final.with_name(f"{final.name}.old")
    if _first():
        shutil.rmtree(writing, ignore_errors=True)
    _barrier()
    fresh = _fresh(optimizer)
    with _without_gradients(optimizer if fresh else None):
        state = _state(model.module, optimizer, model.steps)
    if fresh:
        _forgotten(optimizer, state)
    try:
        with _quietly():
            dcp.save(state, checkpoint_id=writing, no_dist=not _distributed())
    except (CheckpointException, OSError) as error:
        raise MachineError(f"the checkpoint {final} was not written ({_reason(error)}); the one from before, if there "
                           "was one, is as it was") from error
    failure = _of_first(_renamed(writing, final, old) if _first() else "")
    if failure:
        raise MachineError(f"the checkpoint {final} was written to {writing} and not renamed ({failure})")


def _renamed(writing: Path, final: Path, old: Path) -> str:
    """Put what was written in its place; what went wrong."""
    try:
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            os.rename(final, old)
        os.rename(writing, final)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        return str(error)
    return ""


def _of_first(word: str) -> str:
    """What the first rank says."""
    said = [word]
    if _distributed():
        dist.broadcast_object_list(said, src=0)
    return said[0]


def load(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Read a checkpoint into the model and the optimizer, whatever plan it was saved under; every rank calls it."""
    final, old = Path(path), Path(path).with_name(f"{Path(path).name}.old")
    found = Path(_of_first(str(final if final.exists() else old)))
    if not (found / ".metadata").exists():
        raise InputError(f"{path} is no checkpoint: it has no .metadata; give the folder that `save` wrote")
    with _without_gradients(optimizer if _fresh(optimizer) else None):
        state = _state(model.module, optimizer, 0)
    try:
        with _quietly():
            unsaved = _unsaved(model, optimizer, state, found)
            dcp.load(state, checkpoint_id=found, no_dist=not _distributed())
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise MismatchError(f"{path} does not fit this model and optimizer ({_reason(error)}); load it into the model "
                            "and the kind of optimizer that it was saved from") from error
    if optimizer is not None:
        for parameter in unsaved:
            optimizer.state.pop(parameter, None)
    stepped = optimizer is not None and any(name.startswith("state.") for name in state["optimizer"])
    with _without_gradients(optimizer if _fresh(optimizer) else None):
        set_state_dict(model.module, optimizer if optimizer is not None and (stepped or not unsaved) else (),
                       model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS)
    model.steps = int(state["steps"])


def _unsaved(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, state: dict[str, Any], found: Path
             ) -> list[nn.Parameter]:
    """Parameters of which the checkpoint has no optimizer state, since none had a gradient before it was saved: what
    is not there is not asked for."""
    if optimizer is None:
        return []
    saved = dcp.FileSystemReader(found).read_metadata().state_dict_metadata
    missing = []
    for name, parameter in model.module.named_parameters():
        mine = [key for key in state["optimizer"] if key.startswith(f"state.{name}.")]
        if mine and not any(f"optimizer.{key}" in saved for key in mine):
            missing.append(parameter)
            for key in mine:
                del state["optimizer"][key]
    return missing


def _reason(error: BaseException) -> str:
    """The first line that says something."""
    inner = error
    if isinstance(error, CheckpointException) and error.failures:
        inner = next(iter(error.failures.values()))[0]
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
