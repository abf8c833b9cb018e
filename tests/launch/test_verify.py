"""`verify` finds nothing in a right plan, and what is wrong in a wrong one."""

import json
import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from planmaker import random_plans
from sampling import parametrize_or_slow
from shell import FACTORY, LAPTOP, PAIR, ROOT
from staged_plans import even_cuts, staged_plan
from verified import on_a_rank, verified
from warm_launch import warm_launch

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.sample import parted, sample_for
from autoddl.core.errors import InputError
from autoddl.core.layout import Mesh
from autoddl.launch.check import _gradient_error
from autoddl.launch.run import run
from autoddl.launch.verify import Verification, _check_memory, _seated, shrink_plan, verify
from autoddl.runtime.collectives.sparse_sum import SparseSum

PINS = ["blocks.*.up.weight: pair=S(0)", "blocks.*.down.weight: pair=S(1)", "head.weight: machine=S(0)"]


def planned(factory: Factory, cluster: str, **options: object) -> autoddl.Plan:
    model, sample = factory.build()
    return autoddl.plan(model, cluster, sample, factory=factory.to_json(), **options)  # type: ignore[arg-type]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_plan_computes_what_one_process_does() -> None:
    factory = Factory.parse(FACTORY)
    checked = verify(planned(factory, LAPTOP, mesh="machine=2,pair=2", pins=PINS), factory)
    assert checked.passed and checked.ranks == 4 and checked.note == ""
    assert checked.collective_mismatches == 0 and checked.gradient_error < 1e-12


@pytest.mark.ranks
@parametrize_or_slow("drop,layers", [(0.1, 1)], [(0.0, 2), (0.1, 2)])
def test_a_plan_of_microbatches_computes_what_one_process_does(tmp_path: Path, drop: float, layers: int) -> None:
    factory = Factory.parse(FACTORY, {"dropout": drop, "layers": layers})
    (tmp_path / "two.yaml").write_text(PAIR)
    pins = ["blocks.*.up.weight: net=S(0)", "blocks.*.down.weight: net=S(1)"]
    plan = planned(factory, str(tmp_path / "two.yaml"), pins=pins, microbatches=(4,))
    checked = verified(plan, factory)
    assert plan.microbatches == 4 and checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
def test_a_wrong_plan_does_not_pass(tmp_path: Path) -> None:
    """Every step is legal, but one gradient is called whole that still waits for its reduction."""
    factory = Factory.parse(FACTORY, {"dropout": 0.0, "batch": 64, "width": 64, "layers": 1})
    (tmp_path / "two.yaml").write_text(PAIR)
    plan = planned(factory, str(tmp_path / "two.yaml"), mesh="net=2", pins=["blocks.0.up*: net=S(0)", "*norm*: net=B"])
    edge = next(c for c in plan.conversions if c.backward == ("net: P->B",) and c.tensor.startswith("p_"))
    wrong = tuple(replace(c, gradient=c.wanted, backward=()) if c is edge else c for c in plan.conversions)
    checked = verified(replace(plan, conversions=wrong), factory)
    assert not checked.passed and checked.gradient_error > 1e-6
    model, _ = factory.build()
    captured = capture(model, sample_for(model))  # which forks of this process share
    assert verify(replace(plan, conversions=wrong), factory, captured=captured) == checked
    assert verify(plan, factory, captured=captured).passed


def staged(stages: int, mesh: str, drop: float, layers: int = 2, seed: int = 0) -> tuple[autoddl.Plan, Factory]:
    """A plan of random layouts with stages, of four microbatches."""
    factory = Factory.parse(FACTORY, {"dropout": drop, "layers": layers})
    model, _ = factory.build()
    of = capture(model, parted(sample_for(model), 4))
    return staged_plan(of, even_cuts(of.graph, stages), "1f1b", mesh, 4, seed), factory


@pytest.mark.ranks
@pytest.mark.parametrize(("stages", "mesh"), [(2, "one=1"), pytest.param(2, "all=2", marks=pytest.mark.slow),
                                              pytest.param(4, "one=1", marks=pytest.mark.slow)])
def test_a_plan_with_stages_computes_what_one_process_does(stages: int, mesh: str) -> None:
    plan, factory = staged(stages, mesh, 0.1, layers=stages)
    checked = verified(plan, factory)
    assert checked.passed and checked.ranks == plan.mesh.size and not checked.note, checked


@pytest.mark.ranks
@pytest.mark.slow
def test_a_wrong_plan_with_stages_does_not_pass() -> None:
    """Every step is legal, but one gradient of stage 1 is called whole that still waits for its reduction."""
    waits = ("all: P->B",), "p_"
    every = (staged(2, "all=2", 0.0, seed=s) for s in range(9))
    plan, factory, edge = next((plan, factory, c) for plan, factory in every
                               if plan.pipeline is not None for c in plan.pipeline.stages[1].plan.conversions
                               if (c.backward, c.tensor[:2]) == waits)
    assert plan.pipeline is not None
    first, last = plan.pipeline.stages
    wrong = tuple(replace(c, gradient=c.wanted, backward=()) if c is edge else c for c in last.plan.conversions)
    stages = (first, replace(last, plan=replace(last.plan, conversions=wrong)))
    checked = verified(replace(plan, pipeline=replace(plan.pipeline, stages=stages)), factory)
    assert not checked.passed and checked.gradient_error > 1e-6, checked


def test_stages_are_verified_on_smaller_meshes() -> None:
    plan, _ = staged(2, "all=2", 0.0)
    assert plan.pipeline is not None
    large = [replace(stage, ranks=(s * 32, (s + 1) * 32), plan=replace(stage.plan, mesh=Mesh.parse("all=32")))
             for s, stage in enumerate(plan.pipeline.stages)]
    many = replace(plan, mesh=Mesh.parse("pipe=2,rank=32"), pipeline=replace(plan.pipeline, stages=tuple(large)))
    small, note = shrink_plan(many, 8)
    assert small.pipeline is not None and "64 ranks do not fit here" in note
    assert [(stage.ranks, str(stage.plan.mesh)) for stage in small.pipeline.stages] == [
        ((0, 2), "all=2"), ((2, 4), "all=2")] and str(small.mesh) == "pipe=2,rank=2"
    with pytest.raises(InputError, match="needs 4; allow them with --max-ranks 4"):
        shrink_plan(many, 3)
    uneven = (large[0], replace(large[1], plan=replace(large[1].plan, mesh=Mesh.parse("a=3,b=2"))))
    assert many.pipeline is not None
    small, _ = shrink_plan(replace(many, pipeline=replace(many.pipeline, stages=uneven)), 8)
    assert small.pipeline is not None and small.pipeline.ranks == ((0, 2), (2, 8)) and str(small.mesh) == "pipe=8"
    copied = replace(many.pipeline, stages=uneven, name="chimera:1")
    with pytest.raises(InputError, match=r"different sizes \(all=2, a=3,b=2\)"):
        shrink_plan(replace(many, pipeline=copied), 8)


@pytest.mark.ranks
@parametrize_or_slow("place,mesh", [(PAIR, "net=2")], [(Path(LAPTOP).read_text(), "machine-pair=4")])
def test_a_model_with_several_outputs_and_a_buffer_is_verified(tmp_path: Path, place: str, mesh: str) -> None:
    factory = Factory.parse(f"{ROOT}/tests/support/oddities.py:several")
    (tmp_path / "place.yaml").write_text(place)
    with warm_launch():
        checked = verify(planned(factory, str(tmp_path / "place.yaml"), mesh=mesh), factory)
    assert checked.passed, checked


@pytest.mark.ranks
def test_a_plan_for_many_ranks_is_verified_on_fewer() -> None:
    factory = Factory.parse(FACTORY, {"batch": 64, "layers": 1})
    plan = planned(factory, str(ROOT / "examples" / "clusters" / "a100-4x8.yaml"), max_axes=2)
    assert plan.mesh.size == 32
    checked = verified(plan, factory)
    assert checked.passed and checked.ranks <= 8, checked
    assert "32 ranks do not fit here" in checked.note


def _without_velocities(file: str) -> None:
    """Checks with sums that forget their velocities before every step."""
    take = SparseSum._take

    def forgetful(self: SparseSum, gradients: Sequence[torch.Tensor]) -> None:
        self.velocity.zero_()
        take(self, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SparseSum, "_take", forgetful)
        on_a_rank(file)


@pytest.mark.ranks
@parametrize_or_slow("rule", ["0.05,warmup=7,falls=9,momentum=0.9"], ["0.05", "0.05,warmup=1", "0.05,momentum=0.5"])
def test_sparse_sums_are_verified_with_their_momentum_and_a_step_of_their_warmup(tmp_path: Path, rule: str) -> None:
    factory = Factory.parse(FACTORY, {"layers": 1, "dropout": 0.1})
    (tmp_path / "slow.yaml").write_text(PAIR.replace("100 MB/s", "10 kB/s").replace("10 MFLOP/s", "1 GFLOP/s"))
    plan = planned(factory, str(tmp_path / "slow.yaml"), sparse=rule, mine="dp=2")
    assert plan.sparse_sums
    checked = verified(plan, factory)
    assert checked.passed and checked.sparse_loss < 1e-6, checked
    if "momentum" in rule:
        wrong = verified(plan, factory, _without_velocities)
        assert not wrong.passed and wrong.sparse_loss > 0.01, wrong


@pytest.mark.ranks
@pytest.mark.slow
def test_a_model_on_the_meta_device_is_verified() -> None:
    factory = Factory.parse(FACTORY.replace(":tiny", ":on_meta"))
    checked = verify(planned(factory, LAPTOP, mesh="machine-pair=4"), factory)
    assert checked.passed


@pytest.mark.ranks
def test_a_tensor_on_the_meta_device_that_is_no_buffer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "turning.py").write_text(textwrap.dedent("""
        import torch
        from torch import nn

        class Turning(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.angles = nn.Linear(4, 4), torch.arange(4.0)

            def forward(self, x):
                return (self.linear(x) * self.angles.cos()).square().mean()

        def turning():
            with torch.device("meta"):
                return Turning(), torch.zeros(8, 4)
    """))
    factory = Factory.parse(f"{tmp_path / 'turning.py'}:turning")
    with pytest.raises(InputError, match=r"^the model holds a tensor on the meta device that is no buffer, angles"):
        verify(planned(factory, LAPTOP, mesh="machine=2,pair=2"), factory)


@pytest.mark.parametrize(("mesh", "smaller"), [("net=16,node=8", "net=2,node=2"), ("net=9,node=4", "net=3,node=2"),
                                               ("net=2,node=4", "net=2,node=4")])
def test_a_smaller_mesh_divides_the_plans(mesh: str, smaller: str) -> None:
    plan = replace(planned(Factory.parse(FACTORY), LAPTOP, mesh="machine=2,pair=2"), mesh=Mesh.parse(mesh))
    assert str(shrink_plan(plan, 8)[0].mesh) == smaller


def test_too_few_ranks_for_the_shape_is_an_error() -> None:
    plan = planned(Factory.parse(FACTORY), LAPTOP, mesh="machine=2,pair=2")
    with pytest.raises(InputError, match=r"'machine=2,pair=2', needs 4; allow them with --max-ranks 4"):
        shrink_plan(plan, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_an_error(value: float) -> None:
    model, sample = zoo.regression(torch.float64)
    parallel = autoddl.parallelize(model, random_plans(model, sample, "one=1", 1)[0])
    parallel.step(sample)
    trained = {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}
    truth = {name: gradient.clone() for name, gradient in trained.items()} | {"none": torch.empty(0)}
    assert len(trained) > 1 and _gradient_error(parallel, truth) == 0.0
    for gradient in trained.values():
        kept = gradient.flatten()[0].item()
        gradient.flatten()[0] = value
        assert _gradient_error(parallel, truth) == math.inf
        gradient.flatten()[0] = kept


@pytest.mark.parametrize("errors", [(math.nan, 0.0), (0.0, math.nan), (0.0, math.inf)])
def test_an_error_that_is_no_number_does_not_pass(errors: tuple[float, float]) -> None:
    checked = Verification(*errors, collective_mismatches=0, ranks=1)
    assert not checked.passed and None in checked.to_json().values()
    json.dumps(checked.to_json(), allow_nan=False)


def test_a_rank_that_yields_nan_fails_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(ranks: int, command: Sequence[str], **_: object) -> None:
        for rank in range(ranks):
            result = {"loss_error": 0.0, "gradient_error": math.nan if rank == 2 else 1e-16, "mismatches": [],
                      "twice_error": 0.0, "coded_error": 0.0, "coded_share": 0.0, "sparse_loss": 0.0,
                      "besides": 0}
            Path(command[-1]).with_name(f"result-{rank}.json").write_text(json.dumps(result))

    factory = Factory.parse(FACTORY)
    plan = planned(factory, LAPTOP, mesh="machine=2,pair=2")
    monkeypatch.setattr("autoddl.launch.verify.launch", launched)
    checked = verify(plan, factory)
    assert not checked.passed and checked.gradient_error == math.inf


@pytest.mark.ranks
@pytest.mark.parametrize(("start", "said"), [
    (-1.0, "already gets a loss of nan"), (0.0, "already gets a gradient of weight that is not finite")])
def test_a_model_that_yields_nan_itself_is_refused(tmp_path: Path, start: float, said: str) -> None:
    (tmp_path / "sick.py").write_text(textwrap.dedent(f"""
        import torch

        class Sick(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.full((8,), {start}))

            def forward(self, x):
                return (x * self.weight.sqrt()).mean()

        def sick():
            return Sick(), torch.ones(4, 8)
    """))
    factory = Factory.parse(f"{tmp_path / 'sick.py'}:sick")
    with pytest.raises(InputError, match=said):
        verify(planned(factory, LAPTOP, mesh="machine=2,pair=2"), factory)


def test_memory_that_caches_hold_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 0)
    _check_memory(1000, 2)
    monkeypatch.setattr("autoddl.launch.verify.free_bytes", lambda: 40_000.0)
    with pytest.raises(InputError, match="3 processes with 0 million weights in float64 need"):
        _check_memory(1000, 2)
    with pytest.raises(InputError, match=r"allow fewer ranks \(--max-ranks 3\), or plan and verify a smaller model"):
        _check_memory(600, 5)


def test_what_does_not_fit_is_refused_before_a_model_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    factory = Factory.parse(FACTORY)
    made = planned(factory, LAPTOP, mesh="machine=2,pair=2")
    monkeypatch.setattr(Factory, "build", lambda self: pytest.fail("a model was made"))
    monkeypatch.setattr("autoddl.launch.verify.free_bytes", lambda: 40_000.0)
    with pytest.raises(InputError, match="5 processes with 0 million weights"):
        verify(made, factory)
    monkeypatch.setattr("autoddl.launch.machine.free_bytes", lambda: 40_000.0)
    with pytest.raises(InputError, match=r"4 ranks of this plan need 1\.0 GB"):
        run(tmp_path / "plan.json", made, factory, steps=1, lr=0.1)


def test_ranks_that_outnumber_the_gpus_verify_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(planned(Factory.parse(FACTORY), LAPTOP, mesh="machine=2,pair=2"), backend="nccl")
    for gpus, backend in ((1, "gloo"), (4, "nccl")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert _seated(plan).backend == backend


@pytest.mark.ranks
@parametrize_or_slow("seed", [0], [1, 2, 3])
def test_a_plan_with_backwards_of_its_own_computes_what_one_process_does(seed: int) -> None:
    """Every rank runs them whole, between layers that are split; what they do not keep is not brought back."""
    factory = Factory.parse(f"{ROOT}/tests/support/own_functions.py:own", {"norm": True})
    (plan,) = random_plans(*factory.build(), "a=2,b=2", 1, seed=seed)
    checked = verified(plan, factory)
    assert checked.passed and checked.collective_mismatches == 0, checked


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["decoder", "recurrent", "bagged"])
def test_decoders_recurrent_layers_and_bags_compute_what_one_process_does(name: str, seed: int) -> None:
    factory = Factory.parse(f"{ROOT}/tests/support/decoders.py:{name}")
    (plan,) = random_plans(*factory.build(), "a=2,b=2", 1, seed=seed)
    checked = verified(plan, factory)
    assert checked.passed and checked.collective_mismatches == 0, checked
