"""Writes a checkpoint after every N-th step, while the next steps run.

    step k*N done  ->  the state is copied  ->  a thread writes the copy  ->  the first rank names it, removes old ones
                       training waits            training goes on

The ranks' threads meet in a group of their own, over gloo. The first save finds names and a plan for all that follow.
There is one copy at a time: where a checkpoint is still being written when the next is due, training waits for it. A
write that fails raises MachineError at the next step; the checkpoints from before are as they were.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoddl.capture.arguments import check_arguments
from autoddl.core.errors import InputError, MachineError
from autoddl.runtime.checkpoints.checkpoint import check_state, from_first, is_first, write
from autoddl.runtime.checkpoints.checkpoint_folder import places, remove, rename
from autoddl.runtime.checkpoints.checkpoint_series import kept_steps, path_of, prune, settle
from autoddl.runtime.checkpoints.checkpoint_settings import fold_settings, packed
from autoddl.runtime.checkpoints.checkpoint_writer import CheckpointWriter
from autoddl.runtime.checkpoints.other_states import Stateful, check_stateful, packed_safely, random_state
from autoddl.runtime.checkpoints.same_states import compare_names, compare_states
from autoddl.runtime.checkpoints.staging import Staging
from autoddl.runtime.checkpoints.state_collector import StateCollector
from autoddl.runtime.checkpoints.state_pieces import StateParts, own_tensors, piece_key, taken_apart
from autoddl.runtime.collectives.c10d_registry import find_group
from autoddl.runtime.collectives.process_groups import peer_error

if TYPE_CHECKING:
    from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["OTHERS", "RANDOM", "Keeper"]

OTHERS, RANDOM = "others", "random"
"""Parts of a checkpoint: the states of other objects by name, and random numbers by rank."""

GROUP = "autoddl checkpoints"
GRACE_SECONDS = 10.0
"""Seconds in which a checkpoint that is being written may be finished where training ends by an error."""


class Keeper:
    """Keeps the last `keep` checkpoints of every `every`-th step in `folder`; made on every rank, after `parallelize`.

    Steps are calls of `model.step`. Where gradients of several add up, it is the first update at or behind such a call.

        with Keeper("checkpoints", every=100) as keeper:
            ...
            keeper.after_step(model, optimizer, scheduler=scheduler)

    The block ends when the last checkpoint is written. `timeout` is the seconds that the ranks' threads wait for each
    other. Raises InputError where `every` or `keep` is no positive number, or what a crash left cannot be removed.
    """

    def __init__(self, folder: str | Path, every: int, keep: int = 2, timeout: float = 600.0) -> None:
        check_arguments("Keeper(folder, every, keep)", ("the folder", folder, (str, Path), "a path"),
                        ("every", every, int, "a number of steps"), ("keep", keep, int, "a number of checkpoints"))
        if every < 1 or keep < 1:
            raise InputError(f"a checkpoint every {every} steps, of which {keep} are kept: both are 1 or more")
        self.folder, self.every, self.keep = Path(folder).resolve(), every, keep
        if why := from_first(settle(self.folder) if is_first() else ""):
            raise InputError(why)
        self._group, self._first = _group_of_all(timeout), is_first()
        self._collector, self._staging, self._writer = StateCollector(), Staging(), CheckpointWriter()
        self._under_way: Future[None] | None = None
        self._compared = False
        self._before = int(from_first(str(max(kept_steps(self.folder), default=0))))  # steps at the last after_step

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        if kind is None:
            self.finish()
        elif self._under_way is not None and issubclass(kind, Exception):
            wait_for([self._under_way], GRACE_SECONDS)

    def after_step(self, model: "ParallelModel", optimizer: torch.optim.Optimizer | None, **others: Stateful) -> bool:
        """Begins a checkpoint if one is due; called after every step of the optimizer, on every rank.

        The state of each of `others` goes along under its name. Its DTensors are kept in pieces, as the model's are;
        the rest is that of rank 0. The first call compares the ranks' states, and warns where they differ. Returns
        whether a checkpoint was begun. Raises MachineError where the one before could not be written.
        """
        check_state("keeper.after_step(model, optimizer)", model, optimizer, self.folder)
        check_stateful(others)
        if self._under_way is not None and self._under_way.done():
            self.finish()
        self._compare(model, others)
        before, self._before = self._before, model.steps
        if before // self.every >= model.steps // self.every:
            return False
        self.save(model, optimizer, **others)
        return True

    def save(self, model: "ParallelModel", optimizer: torch.optim.Optimizer | None, **others: Stateful) -> None:
        """Begins a checkpoint now, after the one under way; as `after_step`."""
        check_state("keeper.save(model, optimizer)", model, optimizer, self.folder)
        check_stateful(others)
        self.finish()
        self._compare(model, others)
        rank = dist.get_rank() if self._group is not None else 0
        state = fold_settings(self._collector.state(model, optimizer), rank) | {
            f"{RANDOM}.{rank}": packed(random_state()), **_kept(model, others)}
        copied, step = self._staging.copied(state), model.steps
        self._under_way = _in_thread(lambda: self._write(copied, step))

    def _compare(self, model: "ParallelModel", others: Mapping[str, Stateful]) -> None:
        """Compares the states of `others` among the ranks, before the first checkpoint."""
        if not self._compared:
            compare_names(sorted(others))
            states = _parts(model, others)
            for name, one in states.items():
                packed_safely(name, one.rest)
            compare_states(states)
            self._compared = True

    def finish(self) -> None:
        """Waits until the checkpoint under way is written. Raises MachineError where it could not be."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write(self, state: dict[str, Any], step: int) -> None:
        """Writes a copied state; the first rank gives it its name then, when all have written.

        Raises MachineError, and names nothing, where the ranks have parted meanwhile.
        """
        final, writing = places(path_of(self.folder, step))
        try:
            write(state, writing, final, self._group, self._writer)
        except MachineError:
            self._writer = CheckpointWriter()
            if self._first and writing.exists():  # its bytes may be what a full disk lacks
                with suppress(OSError):
                    remove(writing)
            raise
        if self._first:
            if why := rename(writing, final):
                raise MachineError(f"the checkpoint {final} was written to {writing} and not renamed ({why})")
            prune(self.folder, self.keep)


def _parts(model: "ParallelModel", others: Mapping[str, Stateful]) -> dict[str, StateParts]:
    """The states of all objects, in one order on all ranks: asking for them may communicate."""
    own = own_tensors(model)
    return {name: taken_apart(name, others[name].state_dict(), own, model.copies) for name in sorted(others)}


def _kept(model: "ParallelModel", others: Mapping[str, Stateful]) -> dict[str, Any]:
    """What this rank keeps of the objects' states: its pieces, of whole ones those that it is the first to have."""
    found, first = dict[str, Any](), not any(model.groups.coordinate)
    for name, one in _parts(model, others).items():
        found |= {piece_key(name, path): value for path, value in one.pieces.items()
                  if first or isinstance(value, DTensor)}
        if is_first():
            found[f"{OTHERS}.{name}"] = packed_safely(name, one.rest)
    return found


def _group_of_all(timeout: float) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for threads that write; None where there is one process. Made once in a process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = find_group(GROUP)
    try:
        if group is None:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout), group_desc=GROUP)
        return group
    except RuntimeError as error:
        raise peer_error("connecting the ranks for checkpoints", error) from error


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Runs `work` in a thread that ends with the process."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="autoddl checkpoint", daemon=True).start()
    return done
