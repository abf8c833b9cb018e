"""Loads batches of a map-style dataset of which every rank reads only the rows that its plan gives it.

    for batch in RankLoader(model, dataset, seed=0):     the planned number of rows, in the same order on every rank
        loss = model.step(batch)

The indices of an epoch are shuffled by (seed, epoch), alike on all ranks, and cut into global batches. Of each, a rank
takes the items at `model.rows()`. These are the rows of its part of the batch: all where the batch is not split, none
on a stage that reads no input. What is left of an epoch, fewer rows than the plan has, is dropped.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

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
        collate_fn    makes the arguments of a step of a list of items; by default torch's
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
        loaded = DataLoader(self._dataset, batch_sampler=self._indices(epoch)[taken:],
                            collate_fn=_OrNone(self._collate), **self._options)
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


class _OrNone:
    """Collates items; no items are None."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        return self._collate(items) if items else None
