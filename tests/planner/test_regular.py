"""Plans of few kinds of blocks: merged where a plan fits and costs next to nothing, under the same bound."""

import pytest
from block_kinds import kinds
from sampling import parametrize_or_slow
from shell import LAPTOP
from tiny import tiny

import autoddl
from autoddl.planner import finish
from autoddl.planner.options import Options
from autoddl.planner.question import rebuild


@parametrize_or_slow("tolerance,fewer", [(0.05, True)], [(0.0, False)])
def test_a_plan_has_fewer_kinds_of_blocks_within_the_tolerance(monkeypatch: pytest.MonkeyPatch, tolerance: float,
                                                               fewer: bool) -> None:
    model, options = tiny(layers=6, width=32, batch=32, dropout=0.0), Options(
        mesh="machine=2,pair=2", budget=500e3, workers=1, tolerance=tolerance)
    with monkeypatch.context() as patched:
        patched.setattr(finish, "regular", lambda task, found, draft: found.best)
        before = autoddl.plan(model, LAPTOP, **options)
    after = autoddl.plan(model, LAPTOP, **options)
    assert (kinds(after) == 1 < kinds(before)) if fewer else kinds(after) <= kinds(before)
    assert after.predicted.seconds <= max(before.predicted.seconds * (1 + 1e-9), before.bound / (1 - tolerance))
    assert after.bound == pytest.approx(before.bound, rel=1e-12) and after.predicted.peak_bytes <= after.budget
    assert rebuild(after).problem.cost(rebuild(after).choice) == pytest.approx(after.predicted.seconds, rel=1e-9)
