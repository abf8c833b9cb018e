"""Losses of sequences are an operator of rows: the numbers of torch, whatever form targets and lengths have."""

from typing import Any

import pytest
import torch
from planmaker import random_plans
from ranks import on_ranks, shared
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import CaptureError
from autoddl.core.plan import Plan
from autoddl.runtime.parallelize import parallelize

ROWS, STEPS, CLASSES = 4, 9, 6


class Speech(nn.Module):
    """Labels are 1 to 5, and -100 where there is none, also in front."""

    def __init__(self, form: str, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.form, self.reduction = nn.Linear(8, CLASSES).double(), form, reduction

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        p = self.head(x).log_softmax(-1).transpose(0, 1)
        steps: Any = torch.full((x.shape[0],), STEPS)
        mask = labels >= 0
        targets: Any = labels[:, 1:].clamp(min=1)
        lengths: Any = torch.full((x.shape[0],), 2)
        if self.form == "selected":
            targets, lengths = labels.masked_select(mask), mask.sum(-1)
        elif self.form == "lists":
            steps, lengths = [STEPS] * x.shape[0], [2] * x.shape[0]
        elif self.form == "line":
            targets = targets.flatten()
        loss = F.ctc_loss(p, targets, steps, lengths, reduction=self.reduction, zero_infinity=True)
        return loss.mean()


def sample() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(1, CLASSES, (ROWS, 4), generator=generator)
    labels[0, 0] = labels[1, 3] = labels[2, 1] = -100
    return torch.randn(ROWS, STEPS, 8, dtype=torch.float64, generator=generator), labels


@shared
def captured(form: str, reduction: str) -> Captured:
    return capture(Speech(form, reduction), sample())


def gradient(parameters: Any) -> Tensor:
    found: Tensor = next(iter(parameters)).grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found


@pytest.mark.parametrize("form", ["rows", "lists", "selected"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_torchs(form: str, reduction: str) -> None:
    model, program = Speech(form, reduction), captured(form, reduction)
    assert [op.target for op in program.graph.ops].count("autoddl.ctc_loss") == 1
    assert "masked_select" not in str([op.target for op in program.graph.ops])
    constants = list(program.constants.values())
    found = program.program(*model.parameters(), *constants, *sample())[0]
    torch.testing.assert_close(found, model(*sample()))


def test_a_line_of_targets_of_unknown_rows_is_refused() -> None:
    with pytest.raises(CaptureError, match="ctc_loss"):
        capture(Speech("line"), sample())


def trained(plan: Plan) -> tuple[Tensor, Tensor]:
    model = Speech("selected")
    parallel = parallelize(model, plan, captured=captured("selected", "mean"))
    return parallel.step(sample()), gradient(parallel.parameters())


@pytest.mark.ranks
def test_rows_are_split_over_ranks() -> None:
    model = Speech("selected")
    loss = model(*sample())
    loss.backward()
    for plan in random_plans(model, sample(), "a=2", 3, seed=2, captured=captured("selected", "mean")):
        for found, grad in on_ranks(2, trained, plan):
            torch.testing.assert_close(found, loss.detach())
            torch.testing.assert_close(grad, gradient(model.parameters()))
