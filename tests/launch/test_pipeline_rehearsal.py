"""A plan with stages is rehearsed: it trains, and sends what was planned."""

from pathlib import Path

import pytest
from shell import FACTORY, LAPTOP
from staged_plans import even_cuts, staged_plan

from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.sample import parted, sample_for
from autoddl.launch.rehearse import rehearse


@pytest.mark.ranks
@pytest.mark.slow
def test_a_plan_with_stages_is_rehearsed(tmp_path: Path) -> None:
    factory = Factory.parse(FACTORY, {"dropout": 0.0})
    model, _ = factory.build()
    of = capture(model, parted(sample_for(model), 2))
    plan = staged_plan(of, even_cuts(of.graph, 2), "1f1b", "all=2", 2)
    plan.save(tmp_path / "plan.json")
    found = rehearse(tmp_path / "plan.json", plan, factory, steps=4, lr=1e-2, cluster=Path(LAPTOP), shaped=False,
                     record=tmp_path / "record.jsonl")
    assert found.ranks == 4 and not found.collective_mismatches
    assert found.losses[-1] < found.losses[0] and found.exposed_seconds is not None and found.exposed_seconds > 0
