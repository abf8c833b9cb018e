"""Limits of this machine: how many ranks may start here, and how much memory is free."""

import os

from autoddl.core.errors import InputError
from autoddl.core.plan import Plan
from autoddl.core.processes import free_bytes

__all__ = ["check_memory", "check_ranks", "most_ranks", "over_gloo"]

PROCESS_BYTES = 0.25e9
"""Bytes of a rank before it has a model: the interpreter and torch."""


def check_memory(ranks: int, peak: float) -> None:
    """Raises InputError where so many ranks of `peak` bytes each do not fit into the memory that is free here."""
    needed, free = ranks * (peak + PROCESS_BYTES), free_bytes()
    if needed > free:
        raise InputError(f"{ranks} ranks of this plan need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free here: "
                         "plan for fewer ranks, or a smaller model or batch")


def most_ranks() -> int:
    """Returns how many ranks may start here: four per CPU core, and sixteen on any machine."""
    return max(16, 4 * (os.cpu_count() or 1))


def over_gloo(plan: Plan) -> str:
    """Says that a plan for another library runs over gloo here, for want of GPUs; empty where it does not."""
    import torch

    if plan.backend == "gloo" or torch.cuda.is_available():
        return ""
    return (f"priced for {plan.backend.upper()} and run over gloo on processors, as no GPU is here: the predicted "
            "seconds are not those of this run")


def check_ranks(ranks: int, instead: str) -> None:
    """Raises InputError where `ranks` are more than may start here; `instead` says what to do."""
    most = most_ranks()
    if ranks > most:
        raise InputError(f"{ranks} ranks, and this machine takes {most} (4 a core, at least 16): {instead}, like "
                         "examples/clusters/rehearsal-4x1-200.yaml")
