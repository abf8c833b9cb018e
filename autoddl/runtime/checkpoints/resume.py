"""Starts from the newest checkpoint of a folder, whatever plan it was saved under."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autoddl.core.errors import InputError, MismatchError
from autoddl.runtime.checkpoints.checkpoint import check_state, from_first, is_first, load
from autoddl.runtime.checkpoints.checkpoint_folder import is_whole
from autoddl.runtime.checkpoints.checkpoint_reader import CheckpointReader, read
from autoddl.runtime.checkpoints.checkpoint_series import kept_steps, path_of, settle
from autoddl.runtime.checkpoints.checkpoint_settings import unpacked
from autoddl.runtime.checkpoints.keeper import OTHERS, RANDOM
from autoddl.runtime.checkpoints.other_states import Stateful, check_stateful, set_random_state
from autoddl.runtime.checkpoints.state_pieces import paths_of, piece_key, put_together, wanted_pieces

if TYPE_CHECKING:
    from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["resume"]


def resume(folder: str | Path, model: "ParallelModel", optimizer: torch.optim.Optimizer | None = None,
           **others: Stateful) -> int:
    """Loads the newest checkpoint of `folder` and returns its number of steps, `model.steps`; 0 where there is none.

    Every rank calls it, with the objects that the `Keeper` was given, under the same names. Random numbers are those of
    the checkpoint afterwards. Raises MismatchError where the checkpoint does not fit or is damaged.
    """
    check_state("recovery.resume(folder, model, optimizer)", model, optimizer, folder)
    check_stateful(others)
    said = from_first(_newest(folder) if is_first() else "")
    if not said:
        return 0
    if not said.isdecimal():
        raise InputError(said)
    path = path_of(folder, int(said))
    load(model, optimizer, path)
    _load_others(path, model, others)
    return model.steps


def _newest(folder: str | Path) -> str:
    """The step of the newest checkpoint, "" without one; or the words of why there is none that can be read."""
    path = Path(folder)
    if path.is_file():
        return f"{folder} is a file: give the folder that the keeper was given"
    if is_whole(path):
        return (f"{folder} is one checkpoint: give the folder above it, that the keeper was given, or read it with "
                "autoddl.checkpoint.load")
    why = settle(folder)
    steps = kept_steps(folder)
    return why or (str(steps[-1]) if steps else "")


def _load_others(path: Path, model: "ParallelModel", others: Mapping[str, Stateful]) -> None:
    """Gives each object its state, and this process its random numbers."""
    reader = CheckpointReader(path)
    saved = reader.read_metadata().state_dict_metadata
    kept = {name.removeprefix(f"{OTHERS}.") for name in saved if name.startswith(f"{OTHERS}.")}
    if kept != others.keys():
        raise MismatchError(f"{path} holds the states of {_listed(kept)} beside the model and its optimizer, and "
                            f"{_listed(others.keys())} were given: give what the keeper was given, by the same names")
    before = {name: others[name].state_dict() for name in sorted(others)}  # in one order: they may communicate
    pieces = {name: wanted_pieces(name, one, before[name], model, saved) for name, one in others.items()}
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    mine = f"{RANDOM}.{rank}" if f"{RANDOM}.{rank}" in saved else f"{RANDOM}.0"
    state: dict[str, Any] = {mine: b""} | {f"{OTHERS}.{name}": b"" for name in others}
    state |= {piece_key(name, at): value for name in others for at, value in pieces[name].items()}
    try:
        read(state, reader, no_dist=True)
        found = {name: unpacked(data) for name, data in state.items() if isinstance(data, bytes)}
    except (CheckpointException, RuntimeError, ValueError) as error:
        raise MismatchError(f"{path} is damaged: the states beside the model cannot be read; take it away, and the one "
                            "before is gone on from") from error
    for name, one in others.items():
        every = paths_of(name, saved)
        one.load_state_dict(put_together(found[f"{OTHERS}.{name}"], pieces[name], every, before[name]))
    set_random_state(found[mine])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
