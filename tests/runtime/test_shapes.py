"""One plan trains on batches of several shapes, and evaluates: with the same pieces, as one process does."""

import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from planmaker import cluster_of
from ranks import on_ranks, shared
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from autoddl import parallelize
from autoddl.adapters.variants import _Planner
from autoddl.api import plan
from autoddl.capture import capture as capturing
from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample
from autoddl.cli.tables import plan_tables
from autoddl.core.errors import InputError, MismatchError
from autoddl.core.graph import graph_from_text
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.planner.options import Options, PlanOptions
from autoddl.runtime.stage_setup import stage_rows
from autoddl.sampled import residual_bytes, variant_options
from autoddl.sampled_stages import matched_cuts, staged_variant

ROWS, LENGTHS, ODD = 8, (6, 4, 6), 5
SLOW = """name: slow
device: {name: core, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 1 MFLOP/s}}
levels: [{name: all, size: 2, bandwidth: 1 kB/s, latency: 1 us}]
"""


class Series(nn.Module):
    """Two layers with batch norm over all positions, and a mean over them, of series of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.mid = nn.Linear(12, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.last, self.down = nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.norm(self.up(x).transpose(1, 2)))
        h = F.relu(self.last(self.mid(h.transpose(1, 2)).transpose(1, 2)))
        logits = self.down(h.mean(-1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def batch(length: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, length, 12, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 8, (rows,), generator=generator)


@shared
def planned(stages: int) -> Plan:
    """With stages, the plan names the other length; without, it is named where the plan runs."""
    options: dict[str, Any] = {"mesh": "a=2"} if stages == 1 else {
        "stages": (stages,), "microbatches": (2,), "samples": [batch(LENGTHS[1])]}
    return plan(Series().double(), cluster_of("a=2"), batch(LENGTHS[0]), workers=1, **options)


def whole(value: Any) -> Tensor:
    found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, Tensor)
    return found.detach()


def in_one_process(parts: int) -> nn.Module:
    """Trained on every length, a microbatch after the other."""
    model = Series().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in LENGTHS:
        for x, y in zip(*(value.chunk(parts) for value in batch(length)), strict=True):
            (model(x, y)["loss"] / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trained(one: Plan) -> dict[str, Any]:
    """Errors of parameters and of buffers after training, of evaluation; what is refused, and the programs."""
    parallel = parallelize(Series().double(), one, samples=[] if one.pipeline else [batch(LENGTHS[1])])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for length in LENGTHS:
        parallel.train(length != LENGTHS[0]).step(batch(length))  # whatever the mode
        optimizer.step()
        optimizer.zero_grad()
    plain = in_one_process(one.microbatches)
    values = dict(plain.named_parameters()) | dict(plain.named_buffers())
    mine = dict(parallel.named_parameters()) | dict(parallel.module.named_buffers())
    error = max(float((whole(value) - whole(values[name])).abs().max()) for name, value in mine.items())
    with pytest.raises(MismatchError) as refused, torch.no_grad():
        parallel.step(batch(ODD))
    plain.eval()
    found = parallel.eval()(batch(LENGTHS[1]), ("loss", "logits"))
    away = max(float((found[name] - value).abs().max().detach()) for name, value in plain(*batch(LENGTHS[1])).items())
    return {"error": error, "evaluation": away, "refused": str(refused.value), "programs": parallel.programs()}


@pytest.mark.ranks
@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_batches_of_two_lengths_train_and_evaluate_by_programs_of_one_plan(stages: int) -> None:
    for found in on_ranks(2, trained, planned(stages)):
        assert found["error"] < 1e-12 and found["evaluation"] < 1e-12
        assert "pad or cut dim 1" in found["refused"] and "samples=[...]" in found["refused"]
        assert list(found["programs"]) == [f"{what} of x[8, {length}, 12], y[8]" for what, length in (
            ("training", 6), ("training", 4), ("evaluation", 4))]
        first, *others = found["programs"].values()
        assert all(0 < one.predicted.seconds < first.predicted.seconds for one in others)


class Deep(nn.Module):
    """Four layers with an auxiliary loss in training alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() + (x.abs().mean() if self.training else 0)


def test_a_plan_for_samples_is_that_of_the_largest_and_the_others_fit_its_budget() -> None:
    place, lengths = cluster_of("a=2"), (4, 6)
    both = plan(Series().double(), place, batch(lengths[0]), samples=[batch(lengths[1])], workers=1)
    alone = plan(Series().double(), place, batch(lengths[1]), workers=1)
    (other,) = both.source["samples"]
    assert both.predicted == alone.predicted and both.decisions == alone.decisions
    assert other["sample"]["args"][0]["tensor"][1] == lengths[0] and other["seconds"] < both.predicted.seconds
    assert 0 < other["peak_bytes"] <= both.budget
    text = plan_tables.text(plan_tables.plan_table(both))
    assert re.search(r"also for +a batch of \[8, 4, 12\] and \[8\], ", text)


def test_a_plan_with_stages_for_samples_has_programs_of_the_same_stages_within_its_budget() -> None:
    both, words = planned(2), Options(stages=(2,), microbatches=(2,), workers=1)
    (other,) = both.source["samples"]
    assert both.pipeline is not None and other["sample"]["args"][0]["tensor"] == [ROWS, LENGTHS[1], 12]
    assert 0 < other["seconds"] < both.predicted.seconds and 0 < other["peak_bytes"] < both.predicted.peak_bytes
    largest, long = torch.randn(64, 4, 4), torch.randn(2, 100, 4)
    budget = 1.2 * plan(Pairs(), cluster_of("a=2"), largest, **words).predicted.peak_bytes
    with pytest.raises(InputError, match=r"a batch of \[2, 100, 4\] has no plan that stores .* larger budget"):
        plan(Pairs(), cluster_of("a=2"), largest, samples=[long], **words | Options(budget=budget))


class Pairs(nn.Module):
    """All pairs of the positions of a series."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers[1](self.layers[0](x).tanh())
        return (y @ y.transpose(1, 2)).tanh().square().mean()


def test_a_batch_of_fewer_numbers_that_takes_more_bytes_than_the_budget_is_refused() -> None:
    place, largest, long = cluster_of("a=1"), torch.randn(64, 4, 4), torch.randn(1, 200, 4)
    budget = 1.2 * plan(Pairs(), place, largest, workers=1).predicted.peak_bytes
    assert plan(Pairs(), place, largest, samples=[largest[:32]], budget=budget, workers=1).predicted.peak_bytes < budget
    with pytest.raises(InputError, match=r"a batch of \[1, 200, 4\] has no plan that stores .* larger budget"):
        plan(Pairs(), place, largest, samples=[long], budget=budget, workers=1)


def test_what_a_plan_was_made_for_is_planned_when_it_first_comes() -> None:
    made = plan(Series().double(), cluster_of("a=1"), batch(6), samples=[batch(4)], workers=1)
    parallel = parallelize(Series().double(), made)
    assert len(parallel.programs()) == 1
    plain = Series().double()(*batch(4))["loss"].detach()
    assert abs(float(parallel.step(batch(4)) - plain)) < 1e-12 and len(parallel.programs()) == 2
    with pytest.raises(MismatchError, match=r"pad or cut dim 1"):
        parallel.step(batch(ODD))


def test_programs_of_other_shapes_have_codecs_and_load_of_the_plan_and_leave_room_for_residuals() -> None:
    words = Options(mesh="all=2", pins=("linear*: all=S(0)",), workers=1, optimizer="sgd")
    place = parse_cluster(SLOW, "slow")
    coded = plan(Deep(), place, torch.zeros(8, 8), **words | Options(compress=("gradients=int8",)))
    assert variant_options(coded)["compress"] == ("gradients=int8",) and variant_options(coded)["expert_load"] == 1
    sparse = plan(Deep(), place, torch.zeros(8, 8), samples=[torch.zeros(4, 8)], **words | Options(sparse="0.1"))
    assert sparse.sparse_sums and variant_options(sparse)["budget"] == sparse.budget - residual_bytes(sparse)
    assert sparse.source["samples"][0]["peak_bytes"] > residual_bytes(sparse) > 0


def test_sums_with_momentum_train_on_no_other_shapes() -> None:
    place, said = parse_cluster(SLOW, "slow"), r"momentum of 0.9, which batches of other shapes would leave out"
    words = Options(sparse="0.1,momentum=0.9", optimizer="sgd", mesh="all=2", workers=1,
                    pins=("linear*: all=S(0)",))
    with pytest.raises(InputError, match=said):
        plan(Deep(), place, torch.zeros(8, 8), samples=[torch.zeros(4, 8)], **words)
    planner = _Planner(Deep(), plan(Deep(), place, torch.zeros(8, 8), **words))
    with pytest.raises(InputError, match=said):
        planner(Sample((torch.zeros(4, 8),)), True)
    _, evaluation = planner(Sample((torch.zeros(4, 8),)), False)
    assert evaluation.predicted.seconds > 0


class Weighed(nn.Module):
    """A model with an input that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        y = self.linear(x)
        loss: Tensor = (y if w is None else y * w).square().mean()
        return loss


def test_samples_of_other_inputs_are_refused_and_not_expected() -> None:
    x, w = torch.zeros(8, 6, 4), torch.zeros(8, 3, 1)
    with pytest.raises(InputError, match=r"has the inputs x \(3 dims\), w \(3 dims\), and the largest x \(3 dims\): "):
        plan(Weighed(), cluster_of("a=1"), x, samples=[(x[:, :3], w)], workers=1)
    parallel = parallelize(Weighed(), plan(Weighed(), cluster_of("a=1"), (x, x[..., :1]), workers=1))
    parallel.expect(x[:, :3])
    assert not parallel._sampled


def rows_of(number: int) -> Tensor:
    return torch.linspace(-1, 1, 8 * number, dtype=torch.float64).view(number, 8)


@shared
def scheduled(name: str) -> Plan:
    return plan(Deep().double(), cluster_of("a=2"), rows_of(8), workers=1, stages=(2,), schedule=(name,),
                microbatches=(4,))


def with_rows(name: str, rows: int) -> Plan:
    return staged_variant(Deep().double(), scheduled(name), Sample((rows_of(rows),), {}), PlanOptions(workers=1))


@parametrize_or_slow("name,rows,found", [("chimera:1", 6, ("chimera:1", 2))], [
    ("chimera:1", 4, ("chimera:1", 4)), ("zb-h1", 5, ("1f1b", 1)), ("dualpipe-v", 6, ("zb-v", 2))])
def test_another_number_of_rows_has_stages_of_the_microbatches_that_a_schedule_of_its_places_runs(
        name: str, rows: int, found: tuple[str, int]) -> None:
    one, other = scheduled(name), with_rows(name, rows)
    assert one.pipeline is not None and other.pipeline is not None
    assert (other.pipeline.name, other.microbatches) == found
    assert [stage.ranks for stage in other.pipeline.stages] == [stage.ranks for stage in one.pipeline.stages]
    tuple(stage_rows(other, graph_from_text(other.source["graph"])))  # raises unless stages and schedule are alike


def test_rows_of_which_no_schedule_runs_the_microbatches_are_refused() -> None:
    with pytest.raises(InputError, match=r"no more than 1 of the plan's 4 microbatches.*multiples of 2.*pad its rows"):
        with_rows("chimera:1", 5)


def test_a_program_for_other_rows_and_one_of_evaluation_take_one_capture_each(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = plan(Deep().double(), cluster_of("a=1"), rows_of(8), workers=1)
    parallel = parallelize(Deep().double(), alone)
    counted = Mock(wraps=capturing._captured)
    monkeypatch.setattr(capturing, "_captured", counted)
    parallel.step(rows_of(4))
    assert counted.call_count == 1
    parallel.eval()(rows_of(8))
    assert counted.call_count == 2 and len(parallel.programs()) == 3


def changed_rows(one: Plan, numbers: tuple[int, ...]) -> float:
    """The largest error of losses and gradients of batches of such numbers of rows, and of their evaluation.

    That of the planned rows is evaluated too.
    """
    parallel = parallelize(Deep().double(), one)
    errors = [abs(float(parallel.eval()(rows_of(8)) - Deep().double().eval()(rows_of(8))))]
    for number in numbers:
        plain = Deep().double()
        loss = plain(rows_of(number))
        loss.backward()
        errors.append(abs(float(parallel.step(rows_of(number)) - loss)))
        truth = dict(plain.named_parameters())
        errors += [float((whole(p.grad) - whole(truth[name].grad)).abs().max())
                   for name, p in parallel.named_parameters()]
        parallel.zero_grad()
        errors.append(abs(float(parallel.eval()(rows_of(number)) - plain.eval()(rows_of(number)))))
    return max(errors)


@pytest.mark.ranks
@parametrize_or_slow("name,numbers", [("chimera:1", (4,))], [
    ("zb-h1", (4, 5)), ("zb-v", (6,)), ("dualpipe-v", (4, 6)), ("interleaved:2", (6,)), ("1f1b", (5,))])
def test_batches_of_other_rows_train_and_evaluate_under_every_schedule(name: str, numbers: tuple[int, ...]) -> None:
    assert max(on_ranks(2, changed_rows, scheduled(name), numbers)) < 1e-12


def test_stages_of_evaluation_begin_where_those_of_training_do() -> None:
    training = capture(Series().double(), batch(6)).graph
    evaluation = capture(Series().double().eval().requires_grad_(False), batch(4)).graph
    kept = [op.target != "aten.add.Tensor" for op in training.ops]  # evaluation has no counters of batches
    assert sum(kept) == len(evaluation.ops) == len(kept) - 2
    for cut in range(1, len(kept)):
        assert matched_cuts(training, evaluation, (cut,)) == (sum(kept[:cut]),)
