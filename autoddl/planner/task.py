"""Makes the task of a search: captures the model and checks it against the options.

Where several numbers of microbatches are tried, the first above 1 is captured meanwhile in a second process. Capturing
takes as long as the search.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from os import cpu_count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from autoddl.core.errors import AutoDDLError, InputError
from autoddl.core.graph import Graph
from autoddl.core.hubs import add_hubs
from autoddl.core.precision import Precision
from autoddl.core.processes import forks
from autoddl.cost_models import Cluster, load_cluster
from autoddl.operators.expert_sizes import with_expert_load
from autoddl.operators.ring import with_rings
from autoddl.planner.microbatch_variants import Variant, Variants
from autoddl.planner.options import PlanOptions
from autoddl.planner.process_pool import beside
from autoddl.planner.unused_options import check_of_model
from autoddl.pricing.price import Copies, Counts, Ports
from autoddl.search.limits import Late, never

if TYPE_CHECKING:
    from torch import nn

    from autoddl.capture.capture import Captured

__all__ = ["PlanTask", "planned_graph", "task_of"]


@dataclass(frozen=True, slots=True)
class PlanTask:
    """A model, a cluster and the options: everything that the search on every mesh shares."""

    graph: Graph
    """The planned graph, with hubs, of the whole batch."""
    original: Graph
    """The graph as it was captured."""
    spec: Mapping[str, Any]
    """Names, shapes and dtypes of the sample."""
    cluster: Cluster
    """The devices and links to plan for."""
    budget: float
    """Bytes that a rank may hold."""
    options: PlanOptions
    """The options of planning, checked."""
    about: Mapping[str, Any]
    """The model's name and factory, as the plan says them."""
    capture_seconds: float
    """Seconds that capturing took."""
    began: float
    """When planning began, on the clock of `perf_counter`, in seconds."""
    variants: Variants | None = None
    """Captures the model with one of several microbatches, once each; None: `graph` stands for all."""
    hidden: float = 0.0
    """Part of the seconds of parameters' conversions that is not counted (`Pricing`)."""
    counts: Counts | None = None
    """How often seconds count; None: as often as they come in a step (`Pricing`)."""
    ports: Ports | None = None
    """What messages to other stages take; None: they are not counted (`Pricing`)."""
    copies: Copies | None = None
    """What copies of this stage exchange; None: it is not counted (`Pricing`)."""
    notes: tuple[str, ...] = ()
    """Lines on what is around the module and not in the graph."""
    late: Late = never
    """Tells whether the time is over that the search over stages may take: then no problem is solved further."""

    def has(self, microbatches: int) -> bool:
        """Whether `variant` has it without capturing."""
        return self.variants is None or self.variants.has(microbatches)

    def variant(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, perhaps scaled from others."""
        return self._whole if self.variants is None else self.variants(microbatches)

    def confirmed(self, microbatches: int) -> Variant:
        """The model with one of so many microbatches, captured."""
        return self._whole if self.variants is None else self.variants.confirmed(microbatches)

    @property
    def _whole(self) -> Variant:
        return Variant(self.graph, self.original, self.spec, self.notes)


def task_of(model: "nn.Module", cluster: str | Path | Cluster, sample: object, options: PlanOptions, name: str,
            factory: Mapping[str, Any] | None, captures: "Callable[[int], Captured] | None" = None) -> PlanTask:
    """The task of planning `model` with `sample` on `cluster`, with the model captured.

    `name` and `factory` are written into the plan. `captures` has the model captured with one of so many microbatches;
    by default it is captured here. Raises InputError where the cluster lists no peak for the dtype that
    the options' precision computes in. It also does where an option is about a part that the model has not.
    """
    began = perf_counter()
    _check_kinds(model, cluster)
    place = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    limit, counts, recipe = options.limit(place), options.microbatches, Precision.parse(options.precision)
    _check_peak(recipe, place)
    part = partial(_part, captures or partial(_captured, model, sample, recipe), options)
    start, two = perf_counter(), options.workers != 1 and (cpu_count() or 1) > 1 and forks()
    with ExitStack() as stack:
        others = {n: stack.enter_context(beside(partial(_alone, part), n))
                  for n in [n for n in counts if n > 1][:two]}
        whole = part(1)
        captured = {1: whole}
        for n, result in others.items():
            with suppress(AutoDDLError):  # captured again where it is needed, and that says what is wrong
                captured[n] = result()
    _check_regions(whole.graph, place)
    check_of_model(options, whole.graph)
    options = options.run_by(place, whole.graph)
    about = {"model": name or type(model).__name__, "factory": dict(factory or {})}
    return PlanTask(whole.graph, whole.original, whole.spec, place, limit, options, about, perf_counter() - start,
                    began, Variants(part, captured), notes=whole.notes)


def _check_kinds(model: object, cluster: object) -> None:
    """Raises InputError for a model that is no module, and for a cluster that is none."""
    from torch import nn

    from autoddl.capture.arguments import check_arguments

    check_arguments("plan(model, cluster, sample)", ("the model", model, nn.Module, "a torch.nn.Module"),
                    ("the cluster", cluster, (str, Path, Cluster), "the path of a cluster file, or a Cluster"))


def _check_peak(recipe: Precision, cluster: Cluster) -> None:
    """Raises InputError where the cluster's device lists no peak for the dtype that a recipe asks for."""
    peaks = dict(cluster.device.peaks)
    if recipe.used is not None and recipe.used not in peaks:
        raise InputError(f"precision {recipe} computes in {recipe.used}, for which {cluster.device.name} lists no "
                         f"peak, only for {', '.join(peaks)}: add {recipe.used} there, or plan in another precision")


def _check_regions(graph: Graph, cluster: Cluster) -> None:
    """Raise InputError where a region of autocast uses a dtype that the cluster's device lists no peak for."""
    peaks = dict(cluster.device.peaks)
    missing = next((t for t in graph.tensors if t.master and t.dtype not in peaks), None)
    if missing is not None:
        raise InputError(f"the model uses {missing.fqn} under torch.autocast in {missing.dtype}, for which "
                         f"{cluster.device.name} lists no peak, only for {', '.join(peaks)}: add {missing.dtype} "
                         "there, or disable autocast in the model")


def planned_graph(captured: "Captured", options: PlanOptions) -> Graph:
    """The graph that is planned: with the load of experts that is assumed and the rules that trying finds.

    Where the options ask for rings, sequences of any length may go round one.
    """
    from autoddl.capture.tried_rules import with_trials

    tried = with_trials(captured) if options.probe else captured.graph
    return with_expert_load(with_rings(tried) if options.rings else tried, options.expert_load)


def _captured(model: "nn.Module", sample: object, precision: Precision, microbatches: int) -> "Captured":
    """The model captured with one of so many microbatches."""
    from autoddl.capture.capture import capture
    from autoddl.capture.sample import as_sample, parted, sample_for

    if microbatches > 1:
        sample = parted(sample_for(model) if sample is None else as_sample(sample), microbatches)
    return capture(model, sample, precision)


def _part(captures: "Callable[[int], Captured]", options: PlanOptions, microbatches: int) -> Variant:
    """The model with one of so many microbatches, as the options plan it."""
    made = captures(microbatches)
    graph = planned_graph(made, options)
    return Variant(add_hubs(graph), graph, made.spec, made.notes)


def _alone(part: Callable[[int], Variant], microbatches: int) -> Variant:
    """The model with one of so many microbatches, captured in a forked process, where torch's threads do not exist."""
    import torch

    torch.set_num_threads(1)
    return part(microbatches)
