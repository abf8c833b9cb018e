"""States beside those of the model and its optimizer, as bytes of a checkpoint: schedulers, loaders, random numbers.

A state is what `state_dict()` of an object returns. It is packed by torch.save, and read without running what someone
may have written there: numbers, texts, tensors and containers of them. The first rank's state is what all ranks get.

Random numbers of Python, numpy and torch are packed for every rank. A rank that starts again gets its own. One that the
checkpoint does not know gets those of the first rank: there are more ranks now. Masks of dropout do not depend on them:
they are drawn by step and position.
"""

import pickle
import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from autoddl.capture.arguments import said_kind
from autoddl.core.errors import InputError
from autoddl.runtime.checkpoints.checkpoint_settings import packed, unpacked

__all__ = ["Stateful", "check_stateful", "packed_safely", "random_state", "set_random_state"]


class Stateful(Protocol):
    """An object whose state goes along: a scheduler, a GradScaler, a loader that knows its position."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Takes a state that `state_dict` returned."""
        ...


def check_stateful(others: Mapping[str, object]) -> None:
    """Raises InputError for an object that cannot say its state, or take it."""
    for name, one in others.items():
        if not callable(getattr(one, "state_dict", None)) or not callable(getattr(one, "load_state_dict", None)):
            raise InputError(f"{name} is {said_kind(one)} without state_dict and load_state_dict, so its state cannot "
                             "be kept: leave it out and skip its first model.steps batches yourself, or give one that "
                             "has them, like torchdata's StatefulDataLoader")


def packed_safely(name: str, state: Mapping[str, Any]) -> bytes:
    """The state as bytes. Raises InputError where it holds what could not be read back."""
    try:
        data = packed(state)
        unpacked(data)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        said = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).partition("\n")[0])
        raise InputError(f"the state of {name} cannot be kept in a checkpoint: it holds more than numbers, texts and "
                         f"tensors ({said.strip()}); leave that out of its state_dict") from None
    return data


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's random numbers in this process, of its GPU too if it has one."""
    numbers: dict[str, Any] = dict(np.random.get_state(legacy=False))
    numbers["state"] = {**numbers["state"], "key": torch.from_numpy(numbers["state"]["key"].astype(np.int64))}
    version, words, extra = random.getstate()
    found = {"python": (version, torch.tensor(words), extra), "numpy": numbers, "torch": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    """Sets random numbers as they were."""
    version, words, extra = state["python"]
    random.setstate((version, tuple(words.tolist()), extra))
    inner = state["numpy"]["state"]
    np.random.set_state({**state["numpy"], "state": {**inner, "key": inner["key"].numpy().astype(np.uint32)}})
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
