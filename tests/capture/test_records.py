"""Batches that are dataclasses or named tuples: planned as they are, and captured again from what a plan keeps."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.sample import Fields, as_sample, describe, from_spec, named
from autoddl.core.plan import Plan

LAPTOP = "examples/clusters/laptop.yaml"


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Inner:
    y: Tensor
    scale: float = 2.0


@dataclass
class Rows:
    x: Tensor
    inner: Inner


class Reads(nn.Module):
    """Classifies rows of either kind of batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> Tensor:
        y, scale = (batch.inner.y, batch.inner.scale) if hasattr(batch, "inner") else (batch[1], 2.0)
        return scale * F.cross_entropy(self.down(torch.relu(self.up(batch.x))), y)


def batch_of(kind: str) -> Any:
    torch.manual_seed(1)
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    return Named(x, y) if kind == "named" else Rows(x, Inner(y))


@pytest.mark.parametrize("kind", ["named", "rows"])
def test_a_plan_keeps_the_fields_of_a_batch(kind: str) -> None:
    sample = as_sample((batch_of(kind),))
    again = from_spec(json.loads(json.dumps(describe(sample))))
    assert isinstance(again.args[0], Fields) and describe(again) == describe(sample)
    module = Reads()
    assert list(named(module.forward, sample)) == list(named(module.forward, again))
    assert capture(module, again).graph.fingerprint() == capture(module, sample).graph.fingerprint()


def test_a_dataclass_alone_is_one_argument() -> None:
    assert as_sample(batch_of("rows")).args[0].inner.scale == 2.0
    x, y = Fields({"x": 1, "y": 2})
    assert (x, y, Fields({"x": 1})[0], len(Fields({}))) == (1, 2, 1, 0)


def _trained(plan: Plan, kind: str) -> float:
    """The loss of one step of a model that is captured from the plan alone."""
    return float(autoddl.parallelize(Reads(), plan).step((batch_of(kind),)))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["named", "rows"])
def test_batches_with_fields_run_as_in_one_process(kind: str) -> None:
    plan = autoddl.plan(Reads(), LAPTOP, (batch_of(kind),), mesh="machine=2,pair=2", pins=("up.weight: pair=S(0)",),
                        workers=1)
    truth = Reads()(batch_of(kind)).item()
    assert all(abs(loss - truth) < 1e-5 for loss in on_ranks(4, _trained, plan, kind))
