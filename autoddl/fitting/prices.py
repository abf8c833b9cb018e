"""Prices measured runs and plans that ran, with what each constant of a profile does to their seconds.

The plans of a run are chosen once, by the package's own constants, and priced again with one constant moved after the
other. As long as the same things are waited for, seconds are linear in each factor x:

    T(x) = T + sum over constants of dT/dx (x - x0)          share = dT/dx x0 / T

A share is the part of the step that one constant decides. The shares of a run add up to nearly one.
"""

from dataclasses import dataclass
from functools import partial

from autoddl.core.errors import InputError
from autoddl.cost_models import Cluster
from autoddl.cost_models.profile import SHIPPED, Profile
from autoddl.fitting.ran_plans import RanPlan, plan_cluster, priced_plan, shares_at
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.as_plan_bytes import bytes_as_plan
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.run_parts import Unpriced
from autoddl.validation.runs import Run
from autoddl.validation.software import profile_of
from autoddl.validation.validate import beyond_memory, settled

__all__ = ["At", "Measured", "PricedAt", "machine_of", "price_at"]

Measured = Run | RanPlan
"""What was measured: a run of a table, or a plan that ran."""


@dataclass(frozen=True, slots=True)
class At:
    """A run that is to be priced on a machine with the constants of a profile."""

    run: Measured
    profile: Profile = SHIPPED


@dataclass(frozen=True, slots=True)
class PricedAt:
    """The seconds of a run at a profile; or, without them, the reason."""

    run: Measured
    seconds: float = 0.0
    shares: tuple[float, ...] = ()
    """By constant, d log T / d log x."""
    reason: str = ""
    remark: str = ""
    """Why a row with a price cannot have run as it is described; empty where it can."""


def price_at(asked: At) -> PricedAt:
    """Returns the seconds of a run, and the share of each constant in them, or the reason why there are none."""
    try:
        if isinstance(asked.run, RanPlan):
            return PricedAt(asked.run, *shares_at(priced_plan(asked.run.plan), asked.profile))
        run, microbatch = settled(asked.run)
        return PricedAt(asked.run, *shares_at(partial(_run_seconds, run, microbatch), asked.profile),
                        remark=beyond_memory(run, bytes_as_plan(run, microbatch)))
    except (Unpriced, InputError) as error:
        return PricedAt(asked.run, reason=str(error))


def machine_of(run: Measured) -> tuple[Cluster, str | None]:
    """Returns the cluster of what was measured, with the package's constants, and the name of its software profile."""
    if isinstance(run, RanPlan):
        return plan_cluster(run.plan), None
    return RunPlan.of(*settled(run)).cluster, profile_of(run)


def _run_seconds(run: Run, microbatch: int, profile: Profile) -> float:
    return price_as_plan(run, microbatch, profile, SHIPPED)
