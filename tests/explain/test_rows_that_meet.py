"""Where rows of a batch meet, the mean of the losses of microbatches is not the loss of the batch, and nowhere else."""

from dataclasses import replace

import pytest
import torch
import zoo
from planmaker import cluster_of
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl
from autoddl.capture.capture import capture
from autoddl.explain.assumptions import untried
from autoddl.explain.rows_that_meet import met_rows, where_rows_meet


class Pairs(nn.Module):
    """A contrastive loss: every row of one input beside every row of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = F.normalize(self.left(x), dim=-1) @ F.normalize(self.right(y), dim=-1).t()
        return F.cross_entropy(logits, torch.arange(len(x)))


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        squares: Tensor = self.layer(x).square()
        return squares.mean().sqrt()


def halves_agree(module: nn.Module, args: tuple[Tensor, ...]) -> bool:
    """Whether the mean of the losses of both halves of a batch is its loss."""
    parts = [module(*half) for half in zip(*(x.chunk(2) for x in args), strict=True)]
    return bool(torch.isclose(module(*args), torch.stack(parts).mean(), rtol=1e-4))


@pytest.mark.parametrize(("made", "inputs", "target"), [
    (Pairs, 2, "aten.matmul.default"), (Root, 1, "aten.sqrt.default")])
def test_a_loss_of_pairs_and_the_root_of_a_mean_are_found(made: type[nn.Module], inputs: int, target: str) -> None:
    torch.manual_seed(0)
    module = made()
    rows = torch.tensor([1.0, 1.0, 5.0, 5.0])[:, None]  # halves whose means differ
    args = tuple(rows * torch.randn(4, 8) for _ in range(inputs))
    found = where_rows_meet(capture(module, args).graph)
    assert found is not None and found.target == target
    assert not halves_agree(module, args)


@pytest.mark.parametrize("name", ["gpt", "bert", "t5", "vit", "mixtral", "resnet", "regression"])
def test_rows_of_usual_models_stay_apart(name: str) -> None:
    module, sample = getattr(zoo, name)()
    assert where_rows_meet(capture(module, sample).graph) is None


def test_a_plan_of_microbatches_says_where_rows_meet_and_none_is_told_to_take_them() -> None:
    plan = autoddl.plan(Pairs(), cluster_of("a=2"), (torch.randn(8, 8), torch.randn(8, 8)), microbatches=(2,))
    assert met_rows(plan).startswith("in matmul: each of the 2 microbatches sees its own rows alone there")
    assert met_rows(replace(plan, microbatches=1)) == ""
    sent = replace(plan, predicted=replace(plan.predicted, communication={"a": plan.predicted.seconds}))
    assert not any("--stages" in text for text in untried(sent))
