"""Plans for batches of several shapes: one plan of the largest, and programs of the others that store the same pieces.

    plan of the largest batch  ->  for each other shape, a search on its mesh with every stored layout pinned;
                                   of a plan with stages, one of every stage on its mesh (`sampled_stages`)

Each has to fit the budget of the plan. What each takes is kept in the plan's `source`: `samples`, a list of

    {"sample": the global batch as `capture.sample` describes it, "seconds": of a step, "peak_bytes": of a rank}

The search of a plan without stages is given as `find` (`api.plan_without_stages`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture.capture import Captured, capture
from autoddl.capture.sample import Sample, as_sample, describe, from_spec, named, parted, sample_for
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan
from autoddl.core.precision import Precision
from autoddl.core.sparse import SparseRule
from autoddl.cost_models import parse_cluster, show_bytes
from autoddl.operators.expert_sizes import BALANCED, expert_load
from autoddl.planner.options import Options, PlanOptions
from autoddl.planner.pins import pins_of_layouts
from autoddl.planner.task import PlanTask, task_of
from autoddl.sampled_stages import divides, staged_variant

__all__ = ["by_size", "capturing", "check_no_momentum", "residual_bytes", "variant",
           "variant_options", "with_samples"]

Find = Callable[[PlanTask], Plan]


def by_size(model: nn.Module, batches: Sequence[object]) -> list[Sample]:
    """The batches, that of most elements first; None stands for the model's own."""
    samples = [sample_for(model) if one is None else as_sample(one) for one in batches]
    return sorted(samples, key=lambda one: -sum(prod(t.shape) for t in _tensors(one)))


def _tensors(sample: Sample) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(leaf, Tensor)]


def with_samples(plan: Plan, module: nn.Module, batches: Sequence[Sample], find: Find) -> Plan:
    """The plan, which says what a program of each other batch takes. Raises InputError where one does not fit."""
    rows, precision = [], Precision.parse(plan.precision)
    own = _inputs(module, from_spec(plan.sample, "meta"))
    for batch in batches:
        if (given := _inputs(module, batch)) != own:
            raise InputError(f"a sample has the inputs {_said(given)}, and the largest {_said(own)}: samples differ in "
                             "sizes alone. Give each the same tensors and plain values, or make a plan of its own")
    for batch in batches:
        try:
            other = variant(plan, module, batch, capturing(module, batch, precision), variant_options(plan), find)
        except Infeasible as error:
            shapes = ", ".join(str(list(t.shape)) for t in _tensors(batch))
            raise InputError(f"a batch of {shapes} has no plan that stores what that of the largest batch does and "
                             f"takes at most {show_bytes(plan.budget)} a rank: {error}. Pad such batches to the "
                             "largest, leave them out, or give a larger budget") from None
        rows.append({"sample": describe(batch), "seconds": other.predicted.seconds,
                     "peak_bytes": other.predicted.peak_bytes + residual_bytes(plan)})
    return replace(plan, source={**plan.source, "samples": rows})


def _inputs(module: nn.Module, batch: Sample) -> dict[str, str]:
    """By name, the number of dims of every tensor of a batch, and every plain value."""
    return {name: f"{leaf.dim()} dims" if isinstance(leaf, Tensor) else
            repr(leaf) if isinstance(leaf, bool | int | float | str) else type(leaf).__name__
            for name, leaf in named(module.forward, batch).items() if leaf is not None}


def _said(inputs: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({what})" for name, what in inputs.items())


def capturing(module: nn.Module, batch: Sample, precision: Precision) -> Callable[[int], Captured]:
    """Returns what captures the module with one of so many microbatches of a batch, once for each number."""
    @cache
    def captures(microbatches: int) -> Captured:
        return capture(module, parted(batch, microbatches), precision)

    return captures


def variant_options(plan: Plan) -> Options:
    """The options of every other program of a plan: its dtypes, optimizer, recomputation, codecs and load of experts.

    Its sums are whole. The budget is that of the plan without the residuals of its sparse sums, which stay meanwhile.
    """
    source = plan.source if plan.pipeline is None else {**plan.pipeline.stages[0].plan.source, **plan.source}
    load = expert_load(graph_from_text(source["graph"])) if "graph" in source else None
    return {"budget": plan.budget - residual_bytes(plan), "precision": plan.precision,
            "tolerance": source.get("tolerance", 1e-3), "workers": 1, "optimizer": source.get("optimizer", "adamw"),
            "recompute": tuple(source.get("recompute", ("none",))), "compress": tuple(source.get("compress", ())),
            "expert_load": BALANCED if load is None else load}


def residual_bytes(plan: Plan) -> float:
    """Bytes of a rank that the residuals of sparse sums take, the most of all stages."""
    stages = () if plan.pipeline is None else [stage.plan for stage in plan.pipeline.stages]
    return max(float(one.predicted.nbytes.get("residuals", 0.0)) for one in (plan, *stages))


def check_no_momentum(rules: Iterable[SparseRule]) -> None:
    """Raises InputError where sparse sums have momentum: a whole sum of another program would leave it out."""
    most = max((rule.momentum for rule in rules), default=0.0)
    if most:
        raise InputError(f"its sparse sums have a momentum of {most:g}, which batches of other shapes would leave out: "
                         "pad them or leave them out, or plan sparse sums without momentum")


def variant(plan: Plan, module: nn.Module, batch: Sample, captures: Callable[[int], Captured], options: Options,
            find: Find) -> Plan:
    """The fastest plan for another batch that stores every parameter as `plan` does, on its mesh and with its stages.

    `captures` has the module captured with one of so many microbatches of the batch. Raises as the search, and
    InputError where the schedule of a plan with stages runs no such batch.
    """
    if "cluster" not in plan.source or (plan.pipeline is not None and "graph" not in plan.source):
        raise InputError("the plan does not say its cluster or its graph: make it by autoddl.plan")
    if plan.pipeline is not None:
        return staged_variant(module, plan, batch, PlanOptions.of(options), captures)
    cluster = parse_cluster(plan.source["cluster"], "the plan's cluster")
    counts = (1, plan.microbatches) if plan.microbatches > 1 and divides(batch, plan.microbatches) else (1,)
    asked = PlanOptions.of({**options, "mesh": str(plan.mesh), "pins": pins_of_layouts(plan, captures(1).graph),
                            "microbatches": counts})
    return find(task_of(module, cluster, batch, asked.configured(), "", None, captures))
