"""A call returns the outputs that are asked for; evaluation and other numbers of rows run by programs of their own."""

import copy
from typing import Any

import pytest
import torch
from planmaker import cluster_of
from ranks import on_ranks, shared
from staged_plans import even_cuts, staged_plan
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoddl import parallelize
from autoddl.api import plan
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.plan import Plan
from autoddl.runtime import parallelize as runtime

ROWS, SHORT = 16, 5


class Classifier(nn.Module):
    """Statistics that differ in evaluation, dropout, and an output that the loss does not need."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        logits = self.down(self.dropout(F.relu(self.norm(self.up(x)))))
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "best": logits.argmax(-1)}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 12, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 8, (rows,), generator=generator)


def whole(value: Any) -> Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, Tensor)
    return found.detach()


@shared
def planned(dropout: float) -> Plan:
    return plan(Classifier(dropout).double(), cluster_of("a=2,b=2"), batch(ROWS), mesh="a=2,b=2",
                pins=("up.weight: a=S(0)", "up.weight: b=S(1)"))


def evaluated(one: Plan) -> list[Any]:
    """The largest errors of evaluation after a step, whole and split; whether something was split; what is refused."""
    model = Classifier().double()
    parallel = parallelize(model, one)
    with pytest.raises(InputError) as unneeded:
        parallel(batch(ROWS), outputs=("best",))
    with pytest.raises(InputError) as unknown:
        parallel(batch(ROWS), outputs=("logit",))
    parallel.step(batch(ROWS))
    torch.optim.SGD(parallel.parameters(), lr=0.1).step()
    parallel.zero_grad()
    plain = Classifier().double().eval()
    plain.load_state_dict({name: whole(value) for name, value in parallel.state_dict().items()})
    errors, split = [], False
    for rows in (ROWS, SHORT):
        truth = plain(*batch(rows))
        for together in (True, False):
            found = parallel.eval()(batch(rows), ("loss", "logits", "best"), whole=together)
            errors += [float((whole(found[name]) - truth[name]).abs().max()) for name in truth]
            split |= not together and found["logits"].to_local().numel() < truth["logits"].numel()
    loss = parallel.train()(batch(ROWS))
    clean = all(p.grad is None for p in parallel.parameters()) and not torch.equal(loss, parallel.eval()(batch(ROWS)))
    return [max(errors), split, clean, str(unneeded.value), str(unknown.value)]


@pytest.mark.ranks
def test_evaluation_is_planned_with_the_same_pieces_and_gives_every_output() -> None:
    for error, split, clean, unneeded, unknown in on_ranks(4, evaluated, planned(0.5)):
        assert error < 1e-12 and split and clean
        assert "call eval()" in unneeded and "returns 'loss', 'logits', 'best'" in unknown


def shortened(one: Plan) -> float:
    """The largest error of losses and gradients of a whole and a short batch, whose gradients add up."""
    parallel, plain = parallelize(Classifier(0.0).double(), one), Classifier(0.0).double()
    errors = []
    for rows in (ROWS, SHORT):
        loss = plain(*batch(rows))["loss"]
        loss.backward()
        errors.append(float((parallel.step(parallel.local_batch(batch(rows))) - loss).abs()))
    errors += [float((whole(p.grad) - q.grad).abs().max()) for p, q in
               zip(parallel.parameters(), plain.parameters(), strict=True) if q.grad is not None]
    with pytest.raises(MismatchError):
        parallel.step((batch(ROWS)[0][:, 1:], batch(ROWS)[1]))
    return max(errors)


@pytest.mark.ranks
def test_the_short_last_batch_of_an_epoch_trains() -> None:
    assert max(on_ranks(4, shortened, planned(0.0))) < 1e-12


def test_a_step_trains_by_the_training_program_though_calls_evaluate() -> None:
    one = plan(Classifier(0.0).double(), cluster_of("core=1"), batch(ROWS), microbatches=(2,))
    model, other = (parallelize(Classifier(0.0).double(), one) for _ in range(2))
    model.eval()
    for rows in (ROWS, SHORT):
        assert torch.equal(model.step(batch(rows)), other.step(batch(rows)))
    assert list(model.programs()) == list(other.programs())
    assert all(torch.equal(whole(p.grad), whole(q.grad)) for p, q in
               zip(model.parameters(), other.parameters(), strict=True))
    pieces = model.local_batch(batch(ROWS))
    assert torch.equal(model(pieces), model(batch(ROWS)))
    for wrong, said in ((model, "is no training"), (other, "this model has not run")):
        with pytest.raises(MismatchError, match=f"for evaluation of .* which {said}: give the global batch"):
            wrong.step(pieces)


class Chain(nn.Module):
    """Four layers that return what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        between = []
        for layer in self.layers:
            x = layer(x).relu()
            between.append(x)
        return x.square().mean(), between[0], x


@shared
def chained() -> Captured:
    return capture(Chain(), torch.ones(4, 8))


def staged(one: Plan) -> list[Any]:
    x = torch.linspace(-1, 1, 64).view(8, 8)
    parallel, truth = runtime.parallelize(Chain(), one, captured=chained()), Chain()(x)
    found = parallel(x, outputs=("2", "1", "loss"))
    placed = parallel(x, outputs=(0, 2))
    assert list(placed) == [0, 2] and placed[0] == found["loss"] and torch.equal(placed[2], found["2"])
    with pytest.raises(InputError) as error:
        parallel(x, outputs=("1",), whole=False)
    return [list(found), *(float((found[name] - value).abs().max())
                           for name, value in zip(("loss", "1", "2"), truth, strict=True)), str(error.value)]


@pytest.mark.ranks
def test_outputs_of_any_stage_reach_every_rank() -> None:
    one = staged_plan(chained(), even_cuts(chained().graph, 2), "1f1b", "one=1", 2, 0, False)
    for names, loss, first, last, said in on_ranks(2, staged, one):
        assert names == ["2", "1", "loss"] and max(loss, first, last) < 1e-6 and "microbatches" in said


def test_a_model_stays_on_its_device_and_in_its_dtypes() -> None:
    model = Classifier().double()
    one = plan(copy.deepcopy(model), cluster_of("core=1"), batch(ROWS))
    parallel = parallelize(model, one)
    assert parallel.to("cpu") is parallel and parallel.to(torch.float64) is parallel
    for move in (lambda: parallel.to("meta"), lambda: parallel.to(torch.float32), lambda: model.half()):
        with pytest.raises(InputError, match="give parallelize the device, and plan with a precision"):
            move()
