"""A plan that was made with further samples is run and verified by the factory that it is of."""

from pathlib import Path

import pytest
import torch
from planmaker import cluster_of

from autoddl.api import plan
from autoddl.capture.factory import Factory
from autoddl.capture.same_model import check_same_model
from autoddl.capture.sample import as_sample
from autoddl.core.errors import MismatchError
from autoddl.core.plan import Plan
from autoddl.launch.programs import factory_batch, plan_of_batch
from autoddl.launch.run import run
from autoddl.launch.verify import verify

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


def model(length: int = 3):
    return Model(), torch.randn(8, length, 4)
"""


def of_two_lengths(folder: Path) -> tuple[Plan, Path]:
    """A plan for lengths 6 and 3, whose factory makes batches of length 3 by itself, and its file."""
    file = folder / "made.py"
    file.write_text(MODEL)
    model, batch = Factory(str(file), "model").build()
    return plan(model, cluster_of("a=1"), batch, samples=[torch.randn(8, 6, 4)], workers=1), file


def test_a_batch_of_a_further_sample_has_the_plan_of_its_program_and_other_shapes_are_said(tmp_path: Path) -> None:
    made, file = of_two_lengths(tmp_path)
    program, note = plan_of_batch(made, Factory(str(file), "model"))
    assert program.sample["args"][0]["tensor"] == [8, 3, 4] and "x float32[8, 3, 4], is a further sample" in note
    assert program.predicted.seconds == made.source["samples"][0]["seconds"]
    assert plan_of_batch(made, Factory(str(file), "model", {"length": 6})) == (made, "")
    model, batch = factory_batch(Factory(str(file), "model", {"length": 5}))
    with pytest.raises(MismatchError, match=r"for other batches than this one: input x is float32\[8, 5, 4\] .*float32"
                                            r"\[8, 6, 4\] in the plan, or for batches of float32\[8, 3, 4\]. Give"):
        check_same_model(made, model, as_sample(batch))


@pytest.mark.ranks
@pytest.mark.slow
def test_the_program_of_a_further_sample_runs_and_is_verified(tmp_path: Path) -> None:
    made, file = of_two_lengths(tmp_path)
    factory = Factory(str(file), "model")
    checked = verify(made, factory)
    assert checked.passed and "further sample" in checked.note
    made.save(tmp_path / "plan.json")
    ran = run(tmp_path / "plan.json", made, factory, steps=2, lr=0.01)
    assert ran is not None and len(ran.losses) == 2 and ran.predicted_seconds == made.source["samples"][0]["seconds"]
