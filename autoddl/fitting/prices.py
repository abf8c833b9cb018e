"""Prices measured runs as plans, with what each constant of a profile does to their seconds.

The plans of a run are chosen once, by the package's own constants, and priced again with one constant moved after the
other. As long as the same things are waited for, seconds are linear in each factor x:

    T(x) = T + sum over constants of dT/dx (x - x0)          share = dT/dx x0 / T

A share is the part of the step that one constant decides. The shares of a run add up to nearly one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoddl.core.errors import InputError
from autoddl.cost_models.profile import CONSTANTS, SHIPPED, Profile
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.run_parts import Unpriced
from autoddl.validation.runs import Run
from autoddl.validation.validate import settled

__all__ = ["MOVED", "At", "PricedAt", "price_at"]

MOVED = 1.02
"""Factor by which a constant is moved to see what it does: little, so that the same things are waited for."""


@dataclass(frozen=True, slots=True)
class At:
    """A run that is to be priced on a machine with the constants of a profile."""

    run: Run
    profile: Profile = SHIPPED


@dataclass(frozen=True, slots=True)
class PricedAt:
    """The seconds of a run at a profile; or, without them, the reason."""

    run: Run
    seconds: float = 0.0
    shares: tuple[float, ...] = ()
    """By constant, d log T / d log x."""
    reason: str = ""


def price_at(asked: At) -> PricedAt:
    """Returns the seconds of a run, and the share of each constant in them, or the reason why there are none."""
    try:
        run, microbatch = settled(asked.run)
        here = price_as_plan(run, microbatch, asked.profile, SHIPPED)
        moved = [price_as_plan(run, microbatch, asked.profile.times(name, MOVED), SHIPPED) for name in CONSTANTS]
    except (Unpriced, InputError) as error:
        return PricedAt(asked.run, reason=str(error))
    return PricedAt(asked.run, here, _shares(here, moved))


def _shares(here: float, moved: Sequence[float]) -> tuple[float, ...]:
    return tuple((there / here - 1) / (MOVED - 1) for there in moved)
