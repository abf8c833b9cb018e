"""Joins the processes that torchrun or SLURM started, and checks that they agree before the first step.

A restarted worker must not read the addresses that its last attempt left in the store, so every attempt has a prefix of
its own. Collectives that ranks run in different orders give silently wrong sums, so ranks first compare their programs.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from autoddl.core.errors import InputError, MachineError, MismatchError
from autoddl.core.layout import Mesh
from autoddl.core.processes import STORE, is_rank
from autoddl.cost_models.backends import EXECUTABLE
from autoddl.runtime.collectives.process_groups import peer_error
from autoddl.runtime.collectives.told_values import gather_values

__all__ = ["announce", "check_agreement", "device_of", "join_processes", "set_current_device"]


def device_of(backend: str, device: torch.device | str | None = None) -> torch.device:
    """The `device` if given, else that of the plan's backend.

    For gloo this is the CPU, even on a machine with GPUs. For nccl it is this process' GPU, or the CPU of a machine
    without GPUs. Raises InputError for a library over which no plan runs.
    """
    if device is not None:
        return torch.device(device)
    if backend not in EXECUTABLE:
        raise InputError(f"this plan is for devices that talk by {backend}, over which no plan runs yet, only over "
                         f"{' and '.join(EXECUTABLE)}: check it on CPUs with `autoddl verify`, or give device='cpu'")
    if backend == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def set_current_device(device: torch.device) -> None:
    """Makes a GPU this process' current one, as NCCL needs it; a bare `cuda` is that already.

    Raises InputError where the machine has no such GPU, MachineError where it cannot be used.
    """
    if device.type != "cuda" or device.index is None:
        return
    count = torch.cuda.device_count()
    if device.index >= count:
        raise InputError(f"this process is to run on {device}, and its machine shows it {count} GPUs: start at most "
                         "one process per GPU on a machine, or show every process all of them")
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        raise MachineError(f"this process cannot use {device}: {str(error).splitlines()[0]}") from error


def join_processes(mesh: Mesh, device: torch.device, timeout: timedelta) -> None:
    """Initialises the process group of `mesh`, unless it exists or one process is enough.

    Raises MismatchError where another number of processes runs, MachineError where they cannot reach each other.
    """
    ready = dist.is_initialized()
    world = dist.get_world_size() if ready else int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    if world != mesh.size:
        raise MismatchError(f"the plan is for {mesh.size} processes (mesh '{mesh}'), and {world} run: start "
                            f"{mesh.size}, as with torchrun --nproc-per-node, or plan for {world}")
    set_current_device(device)
    if ready or not is_rank():
        return
    try:
        if STORE in os.environ:
            store, rank = dist.FileStore(os.environ[STORE], world), int(os.environ["RANK"])
            store.set_timeout(timeout)
        else:
            store, rank, world = next(iter(dist.rendezvous("env://", timeout=timeout)))
        prefix = f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.PrefixStore(prefix, store),
                                rank=rank, world_size=world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise MachineError(f"this process cannot reach the others at {os.environ.get('MASTER_ADDR')}:"
                           f"{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}") from error


def announce(text: str) -> None:
    """Logs a line on rank 0, as a warning: a program without logging of its own prints it."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logging.getLogger("autoddl").warning(text)


def check_agreement(what: dict[str, Iterable[object]], way_out: str = "load one file, and build the model from one "
                    "seed or checkpoint") -> None:
    """Raises MismatchError on every rank unless all ranks have the same rows under every name of `what`."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = {name: hashlib.sha256("\n".join(map(str, rows)).encode()).hexdigest() for name, rows in what.items()}
    try:
        every = gather_values(mine)
    except RuntimeError as error:
        raise peer_error(f"comparing the {' and the '.join(what)} of the ranks", error) from error
    for name in what:
        prints = [theirs.get(name) for theirs in every]
        other = next((rank for rank, found in enumerate(prints) if found != prints[0]), None)
        if other is not None:
            raise MismatchError(f"rank {other} has another {name} than rank 0; all ranks need the same: "
                                f"{way_out}")
