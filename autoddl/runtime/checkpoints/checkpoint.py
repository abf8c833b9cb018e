"""Saves and loads checkpoints that outlive the plan: saved under one, loaded under any other, by any number of ranks.

    check_writable(path)              before training: refuses a path that `save` would not write to
    save(model, optimizer, path)      writes next to `path`, then renames: a failure leaves the old checkpoint as it was
    load(model, optimizer, path)      every rank reads the pieces that its own plan stores

A save writes NAME.writing, moves NAME into it as `.replaced`, and renames it to NAME. So at every moment NAME is whole,
or NAME.writing is, which `load` reads and the next save puts in its place. Only a checkpoint or an empty folder is ever
replaced, and only files that a save wrote are ever deleted.

The format is torch.distributed.checkpoint's: parameters, buffers and optimizer state by the user's own names, the
residuals of sparse sums (`residual_state`) and the recipe of precision. A checkpoint of one recipe is read under any
other: floating tensors are converted to the dtype in which the plan stores them.
"""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autoddl.capture.arguments import check_arguments
from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.runtime.checkpoints.checkpoint_folder import clear, is_whole, places, refusal, rename
from autoddl.runtime.checkpoints.checkpoint_reader import CheckpointReader, quietly, read
from autoddl.runtime.checkpoints.checkpoint_settings import read_settings
from autoddl.runtime.checkpoints.checkpoint_writer import CheckpointWriter
from autoddl.runtime.checkpoints.own_keys import check_own_keys, restore_keys, wanted_keys
from autoddl.runtime.checkpoints.residual_state import residual_state, restore_residuals, wanted_residuals
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.told_values import first_value

if TYPE_CHECKING:
    from autoddl.runtime.parallelize import ParallelModel

__all__ = ["check_state", "check_writable", "completed", "from_first", "is_first", "load", "save", "snapshot", "write"]

RECIPE = "recipe"

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first() -> bool:
    """Whether this process is the first rank, or the only one."""
    return not _distributed() or dist.get_rank() == 0


def _state(module: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    model, state = get_state_dict(module, optimizer or (), options=_OPTIONS)
    return {"model": model, "optimizer": state, "steps": torch.tensor(0)}


def completed(model: "ParallelModel", module: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The state of this rank that a checkpoint holds, of that of its module and its optimizer.

    Without parameters that another stage saves, whose pieces would overlap with those of its own."""
    firsts = tuple(f"{part}.{name}." for name in model.copies for part in ("state", "param_groups"))
    return {"model": {name: value for name, value in module.items() if name not in model.copies},
            "optimizer": {name: value for name, value in optimizer.items() if not name.startswith(firsts)},
            "steps": torch.tensor(model.steps), RECIPE: model.plan.precision, **residual_state(model)}


def _fresh(optimizer: torch.optim.Optimizer | None) -> bool:
    return optimizer is not None and not optimizer.state


def _forget_state(optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> None:
    """Takes back the state that torch made by an empty step, which counts as a step."""
    if optimizer is not None:
        optimizer.state.clear()
    for name in [name for name in state["optimizer"] if name.startswith("state.")]:
        del state["optimizer"][name]


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Removes all gradients for a while: torch gives a new optimizer its state only where there are none."""
    groups = [] if optimizer is None else optimizer.param_groups
    gradients = [(p, p.grad) for group in groups for p in group["params"]]
    for p, _ in gradients:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient


def check_writable(path: str | Path) -> None:
    """Raises InputError unless `save` may write `path`; called before training, so that no training is lost."""
    if why := refusal(path):
        raise InputError(why)


def check_state(call: str, model: object, optimizer: object, path: object) -> None:
    """Raises InputError for arguments of the wrong kind; `call` says how they are given."""
    from autoddl.runtime.parallel_model import ParallelModel

    check_arguments(
        call, ("the folder", path, (str, Path), "a path"),
        ("the model", model, ParallelModel, "what autoddl.parallelize returned"),
        ("the optimizer", optimizer, (torch.optim.Optimizer, NoneType), "a torch.optim.Optimizer, or None"))


def save(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Writes parameters, buffers, optimizer state and step count; every rank calls it.

    Other files in the folder of the replaced checkpoint stay there. Raises InputError where the path must not be
    written, MachineError where writing fails.
    """
    check_state("checkpoint.save(model, optimizer, folder)", model, optimizer, path)
    final, writing = places(path)
    why = from_first(refusal(path) or clear(writing, final) if is_first() else "")
    if why:
        raise InputError(why)
    write(snapshot(model, optimizer), writing, path)
    failure = from_first(rename(writing, final) if is_first() else "")
    if failure:
        raise MachineError(f"the checkpoint {path} was written to {writing} and not renamed ({failure})")


def snapshot(model: "ParallelModel", optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The state of this rank that a checkpoint holds. Its tensors are the model's own, not copies."""
    fresh = _fresh(optimizer)
    check_own_keys(model, optimizer)
    with _without_gradients(optimizer if fresh else None):
        state = completed(model, *get_state_dict(model.module, optimizer or (), options=_OPTIONS))
    if fresh:
        _forget_state(optimizer, state)
    return state


def write(state: Mapping[str, Any], writing: Path, path: str | Path, group: dist.ProcessGroup | None = None,
          writer: CheckpointWriter | None = None) -> None:
    """Writes a state into the folder `writing`; every rank of `group` calls it. Errors are about `path`.

    A `writer` that wrote the state before does it for less. The folder is whole when the first rank comes back. Raises
    MachineError where writing fails, on every rank; also where the ranks of `group` part before it is written."""
    alone, writer = group is None and not _distributed(), writer or CheckpointWriter()
    try:
        with quietly() if alone else nullcontext():
            dcp.save(dict(state), checkpoint_id=writing, storage_writer=writer, planner=writer.planner,
                     process_group=group, no_dist=alone)
        if not alone and not _distributed():
            raise RuntimeError("the process group was destroyed before all ranks had written: leave the keeper's "
                               "`with` block, or call its finish(), first")
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise MachineError(f"the checkpoint {path} was not written ({_reason(error)}); the one from before, if there "
                           "was one, is as it was") from error


def from_first(word: str) -> str:
    """The word of the first rank, on every rank."""
    if not _distributed():
        return word
    try:
        return str(first_value(word))
    except RuntimeError as error:
        raise peer_error("telling all ranks what to do with the checkpoint", error) from error


def load(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Reads a checkpoint into the model and the optimizer, whatever plan it was saved under; every rank calls it.

    Raises InputError where there is no checkpoint, MismatchError where it does not fit.
    """
    check_state("checkpoint.load(model, optimizer, folder)", model, optimizer, path)
    found = Path(from_first(str(_readable(path))))
    if not is_whole(found):
        raise InputError(f"{path} is no checkpoint: it has no .metadata; give the folder that `save` wrote")
    with _without_gradients(optimizer if _fresh(optimizer) else None):
        state = _state(model.module, optimizer)
    try:
        reader = CheckpointReader(found)
        saved = reader.read_metadata().state_dict_metadata
        unsaved = _unsaved(model, optimizer, state, saved)
        _check_dtypes(model, state, saved, found)
        settings = {name: value for name, value in read_settings(reader, saved).items() if name in state["optimizer"]}
        for name in settings:
            del state["optimizer"][name]
        residuals, own = wanted_residuals(model, saved), wanted_keys(model, optimizer, state["optimizer"], saved)
        wanted = state | residuals | own
        read(wanted, reader, no_dist=not _distributed())
        state["optimizer"].update(settings)
    except RuntimeError as error:
        raise peer_error(f"reading the checkpoint {path}", error) from error
    except (CheckpointException, ValueError) as error:
        raise _unread(path, error) from error
    if optimizer is not None:
        for parameter in unsaved:
            optimizer.state.pop(parameter, None)
    stepped = optimizer is not None and any(name.startswith("state.") for name in state["optimizer"])
    with _without_gradients(optimizer if _fresh(optimizer) else None):
        set_state_dict(model.module, optimizer if optimizer is not None and (stepped or not unsaved) else (),
                       model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS)
    restore_keys(model, optimizer, {name: wanted[name] for name in own})
    restore_residuals(model, residuals)
    model.steps = int(state["steps"])


def _readable(path: str | Path) -> Path:
    """The folder; if it is no checkpoint, one that a save which was cut off had finished, here or as NAME.old."""
    final, writing = places(path)
    folders = (final, writing, final.parent / f"{final.name}.old")
    return next((folder for folder in folders if is_whole(folder)), final)


def _unsaved(model: "ParallelModel", optimizer: torch.optim.Optimizer | None, state: dict[str, Any],
             saved: Mapping[str, Any]) -> list[nn.Parameter]:
    """Parameters whose optimizer state is not in the checkpoint, since they had no gradient; removed from `state` too.

    So nothing is asked for that is not there.
    """
    if optimizer is None:
        return []
    missing = []
    for name, parameter in model.module.named_parameters():
        mine = [key for key in state["optimizer"] if key.startswith(f"state.{name}.")]
        if mine and not any(f"optimizer.{key}" in saved for key in mine):
            missing.append(parameter)
            for key in mine:
                del state["optimizer"][key]
    return missing


def _check_dtypes(model: "ParallelModel", state: dict[str, Any], saved: Mapping[str, Any], found: Path) -> None:
    """Raises MismatchError where a tensor is a float and what was saved is none, or the other way round."""
    for part in ("model", "optimizer"):
        for name, value in state[part].items():
            there = getattr(saved.get(f"{part}.{name}"), "properties", None)
            if isinstance(value, Tensor) and there is not None and _kind(there.dtype) != _kind(value.dtype):
                said: dict[str, Any] = {RECIPE: "of before recipes"}
                if RECIPE in saved:
                    read(said, CheckpointReader(found), no_dist=True)
                before, here = (str(dtype).removeprefix("torch.") for dtype in (there.dtype, value.dtype))
                raise MismatchError(f"{found} does not fit this model: {name} is {before} there, saved under the recipe"
                                    f" {said[RECIPE]}, and {here} here, under {model.plan.precision}; only floats are "
                                    "converted: load it into a model with this tensor as it was saved")


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """A key that is equal for dtypes that are converted into each other."""
    return dtype.is_floating_point, dtype.is_complex


def _unread(path: str | Path, error: BaseException) -> MismatchError:
    """The error of a checkpoint that was not read: its files are damaged, or it is of another model."""
    inner = _inner(error)
    if isinstance(inner, OSError | EOFError | pickle.UnpicklingError) or "PytorchStreamReader" in str(inner):
        said = _reason(error).partition(". ")[0]
        return MismatchError(f"{path} is damaged: its files are not as they were written ({said}); load another "
                             "checkpoint, or take this one away to go on from the one before")
    return MismatchError(f"{path} does not fit this model and optimizer ({_reason(error)}); load it into the model and "
                         "the kind of optimizer that it was saved from")


def _inner(error: BaseException) -> BaseException:
    """The error of the first rank that has one."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def _reason(error: BaseException) -> str:
    """The first line of the error's text, or its type."""
    inner = _inner(error)
    return str(inner).splitlines()[0] if str(inner) else type(inner).__name__
