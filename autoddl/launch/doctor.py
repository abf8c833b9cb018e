"""Looks at this machine: what is there of what AutoDDL uses, and what each lack prevents.

Planning needs Python and torch, and the packages without which this program does not start. All else is needed by some
verbs, which are named.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version

from autoddl.core.errors import MachineError
from autoddl.core.processes import free_bytes
from autoddl.cost_models import show_bytes
from autoddl.launch.machine import most_ranks
from autoddl.launch.shaped_network import check_machine

__all__ = ["Check", "able_to_plan", "examine"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of looking for one thing."""

    what: str
    """The thing."""
    found: str
    """What there is of it, in words."""
    prevents: str = ""
    """What its lack prevents; empty where nothing is lacking."""
    needed: bool = False
    """Whether planning cannot work without it."""

    @property
    def good(self) -> bool:
        """Whether nothing is lacking."""
        return not self.prevents


def able_to_plan(checks: tuple[Check, ...]) -> bool:
    """Whether planning works on this machine."""
    return all(one.good for one in checks if one.needed)


def examine() -> tuple[Check, ...]:
    """Everything that was looked for, in the order in which it is needed."""
    return (_python(), _torch(), _packages(), _pictures(), _backend(), _devices(), _processors(), _memory(),
            _links(), _compiler())


def _python() -> Check:
    found = sys.version.partition(" ")[0]
    old = sys.version_info < (3, 11)
    return Check("Python", found, "everything: Python 3.11 is needed" if old else "", needed=True)


def _torch() -> Check:
    """torch, and whether it is the version that capture was written for."""
    wanted = next((line.partition("==")[2] for line in requires("autoddl") or () if line.startswith("torch==")), "")
    try:
        found = version("torch")
        import_module("torch")
    except (PackageNotFoundError, ImportError, OSError) as error:
        return Check("torch", f"cannot be imported ({error})", "everything: models are captured with it: pip install "
                     f"torch{'==' * bool(wanted)}{wanted}", needed=True)
    other = wanted and found.partition("+")[0] != wanted
    return Check("torch", found, f"nothing for sure: AutoDDL is tested with {wanted}, and capture may fail with another"
                 if other else "")


def _packages() -> Check:
    """The versions of the packages with which this program has started."""
    names = ("numpy", "ortools", "pydantic", "PyYAML")
    return Check("packages", ", ".join(f"{name} {version(name)}" for name in names))


def _pictures() -> Check:
    try:
        import_module("matplotlib")
    except ImportError as error:
        return Check("matplotlib", f"cannot be imported ({error})", "`draw` as svg or png: pip install matplotlib")
    return Check("matplotlib", version("matplotlib"))


def _backend() -> Check:
    """The libraries by which ranks talk."""
    try:
        import torch.distributed as dist
        there = {"gloo": dist.is_available() and dist.is_gloo_available(),
                 "nccl": dist.is_available() and dist.is_nccl_available()}
    except (ImportError, AttributeError):
        there = {"gloo": False, "nccl": False}
    names = [name for name, found in there.items() if found]
    lacks = [] if there["gloo"] else ["`run`, `verify` and `rehearse` on processors: this torch was built without gloo"]
    return Check("backends", ", ".join(names) or "none", "; ".join(lacks))


def _devices() -> Check:
    """The GPUs, and whether this torch can use them."""
    try:
        import torch
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(i) for i in range(count)]
    except ImportError:
        names = []
    if names:
        each = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Check("devices", each)
    driver = shutil.which("nvidia-smi") is not None
    why = "a driver is there, and this torch does not see its GPUs" if driver else "no GPU"
    return Check("devices", why, "running and measuring on a GPU here; plans for GPUs are made all the same")


def _processors() -> Check:
    return Check("processors", f"{os.cpu_count()} for up to {most_ranks()} ranks of `run` and `verify`")


def _memory() -> Check:
    return Check("memory", f"{show_bytes(free_bytes())} free", "")


def _links() -> Check:
    """The tools and rights that `rehearse` and `measure --shaped` need."""
    try:
        check_machine()
    except MachineError as error:
        return Check("shaped links", str(error).partition(":")[0],
                     f"`rehearse` and `measure --shaped` on slow links:{str(error).partition(':')[2]}")
    return Check("shaped links", "root, ip and tc are there")


def _compiler() -> Check:
    """A compiler for `torch.compile`, which a user's own loop may ask for."""
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    return Check("compiler", found or "none", "" if found else "`torch.compile` in a training script of yours; nothing "
                                                               "of AutoDDL")
