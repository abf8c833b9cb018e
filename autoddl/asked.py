"""What planning is asked, read and checked; the model is captured here.

Where several numbers of microbatches are tried, the first of them but one is captured on a second processor meanwhile:
capturing takes as long as the search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autoddl.candidates import Task
from autoddl.cost_models import Cluster, load_cluster, parse
from autoddl.errors import InputError
from autoddl.hubs import planned
from autoddl.price import OPTIMIZERS
from autoddl.variants import Variant, Variants
from autoddl.workers import beside

if TYPE_CHECKING:
    from torch import nn

__all__ = ["as_compiled", "task_of"]


def task_of(model: "nn.Module", cluster: str | Path | Cluster, sample: object, budget: float | str | None,
            optimizer: str, solver: str, tolerance: float, time_limit: float | None, name: str,
            factory: Mapping[str, Any] | None, workers: int | None = None, microbatches: Sequence[int] = (1,),
            compiled: bool = False) -> Task:
    """The task of `api.plan` with these arguments."""
    began = perf_counter()
    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    place = as_compiled(place) if compiled else place
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is not known; its memory is known for {', '.join(OPTIMIZERS)}")
    limit = place.device.memory if budget is None else float(parse(budget, "bytes"))
    if limit <= 0:
        raise InputError(f"a memory budget is above 0 bytes, not {budget}")
    start, more = perf_counter(), [n for n in microbatches if n > 1][:1]
    two = bool(more) and workers != 1 and (cpu_count() or 1) > 1
    with beside(partial(_alone, model, sample), *more or [1], on=two) as second:
        whole = _part(model, sample, 1)
        captured = {1: whole} | ({more[0]: second()} if two else {})
    about = {"model": name or type(model).__name__, "factory": dict(factory or {})}
    return Task(whole.graph, whole.original, whole.spec, place, limit, optimizer, solver, tolerance, time_limit, about,
                perf_counter() - start, began, workers, Variants(partial(_part, model, sample), captured))


def as_compiled(cluster: Cluster) -> Cluster:
    """The same machines, whose programs are compiled."""
    return replace(cluster, device=replace(cluster.device, compiled=True),
                   parts=tuple((replace(device, compiled=True), ranks) for device, ranks in cluster.parts))


def _part(model: "nn.Module", sample: object, microbatches: int) -> Variant:
    """The model with one of so many microbatches."""
    from autoddl.capture import capture
    from autoddl.sample import as_sample, parted, sample_for

    if microbatches > 1:
        sample = parted(sample_for(model) if sample is None else as_sample(sample), microbatches)
    made = capture(model, sample)
    return Variant(planned(made.graph), made.graph, made.spec)


def _alone(model: "nn.Module", sample: object, microbatches: int) -> Variant:
    """The same in a process that was forked: threads that computed before do not exist there."""
    import torch

    torch.set_num_threads(1)
    return _part(model, sample, microbatches)
