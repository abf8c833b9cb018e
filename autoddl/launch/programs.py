"""Finds the plan of the program that runs a factory's batch, where a plan is for several shapes (`sampled`).

    the batch of the plan itself    the plan
    one of its `samples`            a plan of its own, which stores the same pieces, made as ranks make it
"""

from typing import TYPE_CHECKING

from autoddl.api import plan_without_stages
from autoddl.capture.factory import Factory
from autoddl.core.plan import Plan
from autoddl.core.precision import Precision

if TYPE_CHECKING:
    from torch import nn

    from autoddl.capture.sample import Sample

__all__ = ["factory_batch", "plan_of_batch"]


def factory_batch(factory: Factory) -> "tuple[nn.Module, Sample]":
    """The factory's model, whose parameters take no memory where that can be, and its batch."""
    from autoddl.capture.sample import as_sample, sample_for

    model, batch, _ = factory.shaped()
    return model, as_sample(batch) if batch is not None else sample_for(model)


def plan_of_batch(plan: Plan, factory: Factory) -> tuple[Plan, str]:
    """The plan, or that of its program for the factory's batch where this is one of its samples; a note that says so.

    Raises as the search does where there is no such program.
    """
    if not plan.source.get("samples"):
        return plan, ""
    from autoddl.capture.same_model import shapes_of
    from autoddl.capture.sample import from_spec
    from autoddl.sampled import capturing, variant, variant_options

    model, batch = factory_batch(factory)
    given = shapes_of(model, batch)
    known = [shapes_of(model, from_spec(one["sample"], "meta")) for one in plan.source["samples"]]
    own = shapes_of(model, from_spec(plan.sample, "meta")) if plan.microbatches == 1 else None
    if given not in known or given == own:
        return plan, ""
    captures = capturing(model, batch, Precision.parse(plan.precision))
    made = variant(plan, model, batch, captures, variant_options(plan), plan_without_stages)
    said = ", ".join(f"{name} {shape}" for name, shape in given.items())
    return made, f"the factory's batch, {said}, is a further sample of the plan: this is the program for it"
