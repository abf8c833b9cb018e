"""What planning is asked, read and checked; the model is captured here.

Where several numbers of microbatches are tried, the first of them but one is captured on a second processor meanwhile:
capturing takes as long as the search.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autoddl.core.errors import AutoDDLError, InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import planned
from autoddl.cost_models import Cluster, load_cluster, parse
from autoddl.planner.microbatch_variants import Variant, Variants
from autoddl.planner.process_pool import beside, forks
from autoddl.pricing.price import OPTIMIZERS
from autoddl.search import SOLVERS

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Task", "task_of"]


@dataclass(frozen=True, slots=True)
class Task:
    """What every mesh is solved for. `variants` captures the model with one of several microbatches, once each;
    `hidden` is what `Pricing` leaves out."""

    graph: Graph
    original: Graph
    spec: Mapping[str, Any]
    cluster: Cluster
    budget: float
    optimizer: str
    solver: str
    tolerance: float
    time_limit: float | None
    about: Mapping[str, Any]
    capture_seconds: float
    began: float
    workers: int | None = None
    variants: Variants | None = None
    hidden: float = 0.0

    def has(self, microbatches: int) -> bool:
        """Whether `variant` has it without capturing."""
        return self.variants is None or self.variants.has(microbatches)

    def variant(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, perhaps stretched."""
        return self._whole if self.variants is None else self.variants(microbatches)

    def confirmed(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, captured."""
        return self._whole if self.variants is None else self.variants.confirmed(microbatches)

    @property
    def _whole(self) -> Variant:
        return Variant(self.graph, self.original, self.spec)


def task_of(model: "nn.Module", cluster: str | Path | Cluster, sample: object, budget: float | str | None,
            optimizer: str, solver: str, tolerance: float, time_limit: float | None, name: str,
            factory: Mapping[str, Any] | None, workers: int | None = None, microbatches: Sequence[int] = (1,)) -> Task:
    """The task of `api.plan` with these arguments."""
    began = perf_counter()
    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is not known; its memory is known for {', '.join(OPTIMIZERS)}")
    if solver not in SOLVERS:
        raise InputError(f"there is no solver {solver!r}; there are {', '.join(SOLVERS)}")
    if not 0 <= tolerance < 1:
        raise InputError(f"a tolerance of {tolerance} is none: it is the part of a plan's seconds that the best may "
                         "save, at least 0 and below 1, like 0.001")
    limit = place.device.memory if budget is None else float(parse(budget, "bytes"))
    if limit <= 0:
        raise InputError(f"a memory budget is above 0 bytes, not {budget}")
    start, two = perf_counter(), workers != 1 and (cpu_count() or 1) > 1 and forks()
    with ExitStack() as stack:
        others = {n: stack.enter_context(beside(partial(_alone, model, sample), n))
                  for n in [n for n in microbatches if n > 1][:two]}
        whole = _part(model, sample, 1)
        captured = {1: whole}
        for n, result in others.items():
            with suppress(AutoDDLError):  # captured again where it is needed, and that says what is wrong
                captured[n] = result()
    about = {"model": name or type(model).__name__, "factory": dict(factory or {})}
    return Task(whole.graph, whole.original, whole.spec, place, limit, optimizer, solver, tolerance, time_limit, about,
                perf_counter() - start, began, workers, Variants(partial(_part, model, sample), captured))


def _part(model: "nn.Module", sample: object, microbatches: int) -> Variant:
    """The model with one of so many microbatches."""
    from autoddl.capture.capture import capture
    from autoddl.capture.sample import as_sample, parted, sample_for

    if microbatches > 1:
        sample = parted(sample_for(model) if sample is None else as_sample(sample), microbatches)
    made = capture(model, sample)
    return Variant(planned(made.graph), made.graph, made.spec)


def _alone(model: "nn.Module", sample: object, microbatches: int) -> Variant:
    """The same in a process that was forked: threads that computed before do not exist there."""
    import torch

    torch.set_num_threads(1)
    return _part(model, sample, microbatches)
