"""Loads batches of a map-style dataset of which every rank reads only the rows that its plan gives it.

    for batch in RankLoader(model, dataset, seed=0):     the planned number of rows, in the same order on every rank
        loss = model.step(batch)

The indices of an epoch are shuffled by (seed, epoch), alike on all ranks, and cut into global batches. Of each, a rank
takes the items at `model.rows()`. These are the rows of its part of the batch: all where the batch is not split, none
on a stage that reads no input. What is left of an epoch, fewer rows than the plan has, is dropped.

Ranks that read the same rows must get the same batch, also where items or `collate_fn` draw random numbers, as mixup
does. So for each batch the random numbers of torch, numpy and Python begin anew, by the seed, the epoch, the batch and
the rows. Ranks of other rows draw others. It is so in workers too. Afterwards these numbers go on as if there had been
no batch.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from autoddl.capture.arguments import check_arguments
from autoddl.core.errors import InputError
from autoddl.runtime.batches import LocalBatch
from autoddl.runtime.parallel_model import ParallelModel

__all__ = ["RankLoader"]

_OPTIONS = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor",
            "persistent_workers", "pin_memory_device")
"""What may be asked of torch's DataLoader besides."""


class RankLoader:
    """Iterates over the batches of an epoch; the next iteration is the next epoch.

        model         what `autoddl.parallelize` returned
        dataset       items by index, as many as `len` says; every item is one row
        shuffle       whether every epoch has an order of its own
        seed          of that order, the same on all ranks
        collate_fn    makes the arguments of a step of a list of items, of this rank's rows alone; by default torch's
        options       of torch's DataLoader, like num_workers and pin_memory

    Its state has the epoch and the batches taken of it, so that `recovery` goes on with the next batch. Raises
    InputError for a dataset of fewer rows than a batch, and for a model that reads no rows.
    """

    def __init__(self, model: ParallelModel, dataset: "Dataset[Any]", *, shuffle: bool = True, seed: int = 0,
                 collate_fn: Callable[[list[Any]], Any] = default_collate, **options: Any) -> None:
        check_arguments("RankLoader(model, dataset)",
                        ("the model", model, ParallelModel, "what autoddl.parallelize returned"))
        wrong = [name for name in options if name not in _OPTIONS]
        if wrong:
            raise InputError(f"RankLoader has no option {wrong[0]!r}: batches are the plan's, their order its own; of "
                             f"torch's DataLoader there are {', '.join(_OPTIONS)}")
        self._model, self._dataset, self._shuffle, self._seed = model, dataset, shuffle, seed
        self._collate, self._options, self._epoch, self._taken = collate_fn, options, 0, 0
        self._rows = next(one.rows() for one in model.batches())
        if not self._rows or len(self) == 0:
            raise InputError(f"the plan reads batches of {self._rows} rows, and the dataset has {self._count()} items: "
                             "give more items, or plan for a smaller batch")

    def __len__(self) -> int:
        """The batches of an epoch."""
        return self._count() // self._rows

    def __iter__(self) -> Iterator[LocalBatch]:
        taken, epoch = self._taken, self._epoch
        numbered = list(enumerate(self._indices(epoch), 1))[taken:]
        made = _Made(self._dataset, self._collate, f"{self._seed} {epoch} {self._model.rows()}")
        loaded = DataLoader(made, batch_sampler=numbered, collate_fn=_as_it_is, **self._options)  # type: ignore[arg-type]
        for number, batch in enumerate(loaded, taken + 1):
            self._epoch, self._taken = (epoch + 1, 0) if number == len(self) else (epoch, number)
            yield self._model.batch_of_rows(batch)

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its batches were taken."""
        return {"epoch": self._epoch, "taken": self._taken, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on behind the batches of a state."""
        self._epoch, self._taken, self._seed = state["epoch"], state["taken"], state["seed"]

    def _indices(self, epoch: int) -> Sequence[list[int]]:
        """By global batch of an epoch, the items that this rank reads."""
        order = torch.arange(self._count())
        if self._shuffle:
            numbers = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self._count(), generator=numbers)
        here = torch.tensor(self._model.rows(), dtype=torch.int64)
        return [order[start:start + self._rows][here].tolist()
                for start in range(0, len(self) * self._rows, self._rows)]

    def _count(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]


class _Made(Dataset[Any]):
    """Makes whole batches of a dataset by (number, indices), each from random numbers of its own.

    Anything else that is asked of it, or set, is the dataset's: workers know no other.
    """

    def __init__(self, dataset: "Dataset[Any]", collate: Callable[[list[Any]], Any], seed: str) -> None:
        self.__dict__.update(_dataset=dataset, _collate=collate, _seed=seed)

    def __getitems__(self, numbered: tuple[int, list[int]]) -> Any:
        """The batch of these items; None without items."""
        number, indices = numbered
        if not indices:
            return None
        with _drawing(f"{self._seed} {number}"):
            together = getattr(self._dataset, "__getitems__", None)
            return self._collate(together(indices) if together else [self._dataset[index] for index in indices])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def _drawing(seed: str) -> Iterator[None]:
    """Lets random numbers on the processor begin anew by a seed; afterwards they are what they were."""
    before = random.getstate(), np.random.get_state()
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=7).digest())
    with torch.random.fork_rng(devices=[]):
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.default_generator.manual_seed(number)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
