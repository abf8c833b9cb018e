"""A refactor changes no plan: these are byte-compared. Where a change of price or rule means to change one, write them
anew with `python tests/test_plans.py` and say the predicted seconds before and after."""

import json
from pathlib import Path

import pytest
import zoo

from autoddl.api import compare, plan
from autoddl.plan import Plan

HERE = Path(__file__).parent
CLUSTERS = HERE.parent / "examples" / "clusters"
CASES = [("gpt", "laptop"), ("llama", "a100-4x8"), ("vgg_bn", "frontier"), ("mixture", "two-racks-10g")]


def made(model: str, cluster: str) -> str:
    """The plan as text, but for how long it took and what it was made from."""
    module, sample = getattr(zoo, model)()
    found: Plan = plan(module, CLUSTERS / f"{cluster}.yaml", sample, name=model, max_axes=2)
    data = json.loads(found.to_json())
    for key in ("timings", "source"):
        del data[key]
    return json.dumps(data, indent=1) + "\n"


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_the_plan_is_the_one_on_record(model: str, cluster: str) -> None:
    assert made(model, cluster) == (HERE / "plans" / f"{model}-{cluster}.json").read_text()


@pytest.mark.parametrize(("model", "cluster"), CASES[:2])
def test_no_strategy_beats_the_plan(model: str, cluster: str) -> None:
    module, sample = getattr(zoo, model)()
    found, *others = compare(module, CLUSTERS / f"{cluster}.yaml", sample, name=model, max_axes=2)
    assert found.plan is not None and [one.name for one in others] == [
        "data parallel", "ZeRO-3", "tensor parallel", "tensor x data grid"]
    for one in others:
        assert one.plan is None or found.plan.predicted.seconds <= one.plan.predicted.seconds * (1 + 1e-9), one.name


if __name__ == "__main__":
    for model, cluster in CASES:
        (HERE / "plans" / f"{model}-{cluster}.json").write_text(made(model, cluster))
