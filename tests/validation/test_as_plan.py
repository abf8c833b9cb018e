"""A published run is a plan: the same configuration has the same seconds through `plan`, `compare` and `validate`."""

from dataclasses import replace
from pathlib import Path

import pytest
from published import ROW, run, table
from sampling import parametrize_or_slow
from torch import Tensor, nn

import autoddl
from autoddl.core.errors import InputError
from autoddl.core.hubs import add_hubs
from autoddl.cost_models import parse_cluster
from autoddl.planner.options import Options
from autoddl.planner.pipelines.uniform_pipelines import uniform_cuts
from autoddl.planner.question import question_of
from autoddl.schedule.run_step import run_seconds
from autoddl.schedule.timeline import predict_timeline
from autoddl.validation.as_plan import UNBOUND, flat_plan, price_as_plan, stage_plans
from autoddl.validation.as_plan_bytes import bytes_as_plan
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.templates import model, model_graph
from autoddl.validation.validate import validate

SMALL = {"layers": 2, "hidden": 512, "heads": 8, "vocab": 2048, "seq": 256, "global_batch": 16}


TWO = {"n_gpus": 2, "dp": 2, "tp": 1, "microbatch": 4}


def whole(asked: RunPlan, layers: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model of a run with its whole batch, as `plan` takes it."""
    return model(replace(asked.shape, batch=asked.shape.batch * asked.microbatches), layers)


def words(asked: RunPlan) -> Options:
    """The keywords of `plan` that a run stands for."""
    return {"mine": asked.degrees, "precision": asked.precision, "optimizer": asked.optimizer, "workers": 1,
            "budget": UNBOUND, "microbatches": (asked.microbatches,)}


@parametrize_or_slow("changed", [
    {"dp": 1, "tp": 2, "recompute": "full"},
    {"dp": 1, "tp": 2, "seq_parallel": 1, "gated_ffn": 1, "framework": "NeMo"},
    {"n_gpus": 4, "gpus_per_node": 2, "dp": 4}], [
    {"framework": "torchtitan", "precision": "bf16", "zero_stage": 3}])
def test_plan_and_validate_give_the_same_seconds_to_the_bit(tmp_path: Path, changed: dict[str, object]) -> None:
    one = run(tmp_path, **SMALL | TWO | changed)
    asked = RunPlan.of(one, one.microbatch)
    module, sample = whole(asked, one.layers)
    plan = autoddl.plan(module, asked.cluster, sample, **words(asked))
    graph = add_hubs(question_of(plan).graph)
    assert run_seconds(plan, graph, asked.cluster, asked.software) == price_as_plan(one, one.microbatch)
    assert parse_cluster(plan.source["cluster"], "the plan's") == asked.cluster  # a plan keeps what runs it


def test_a_plan_under_pins_compare_and_validate_give_the_same_seconds_to_the_bit(tmp_path: Path) -> None:
    changed = SMALL | TWO | {"framework": "torchtitan", "precision": "bf16", "zero_stage": 3, "recompute": "none",
                             "layers": 1}
    asked = RunPlan.of(run(tmp_path, **changed), 4)
    module, sample = whole(asked, 1)
    mine = next(row for row in autoddl.compare(module, asked.cluster, sample, **words(asked)) if row.name == "mine")
    free = {key: value for key, value in words(asked).items() if key != "mine"}
    pins: Options = {"mesh": "dp=2", "pins": ("dp=zero-3",), "recompute": ("none",)}
    pinned = autoddl.plan(module, asked.cluster, sample, **free | pins)  # type: ignore[arg-type]
    assert mine.plan is not None and mine.plan.predicted.seconds == pinned.predicted.seconds
    published = validate(table(tmp_path, ROW | changed))[0].seconds
    for plan in (mine.plan, pinned):
        assert run_seconds(plan, add_hubs(question_of(plan).graph), asked.cluster, asked.software) == published


def test_layers_beyond_the_second_take_what_the_second_takes(tmp_path: Path) -> None:
    two, four = (price_as_plan(run(tmp_path, **SMALL | {"layers": n}), 4) for n in (2, 4))
    one = price_as_plan(run(tmp_path, **SMALL | {"layers": 1}), 4)
    assert four - two == pytest.approx(2 * (two - one))


def test_a_template_of_a_whole_model_is_its_capture(tmp_path: Path) -> None:
    one = run(tmp_path, **SMALL)
    asked = RunPlan.of(one, 4)
    module, sample = model(asked.shape, 2)
    plan = autoddl.plan(module, asked.cluster, sample, **words(replace(asked, microbatches=1)))
    assert question_of(plan).graph == model_graph(asked.shape, 2, asked.precision)


def test_a_pipeline_takes_what_its_plan_says_and_what_the_program_adds(tmp_path: Path) -> None:
    one = run(tmp_path, **SMALL | {"dp": 1, "tp": 4, "pp": 2, "schedule": "1F1B", "microbatch": 2})
    asked = RunPlan.of(one, 2)
    module, sample = whole(asked, 2)
    plan = autoddl.plan(module, asked.cluster, sample, **words(asked))
    assert plan.predicted.seconds < price_as_plan(one, 2)
    quick = replace(asked.software, host=0.0)
    assert quick.overlaps == frozenset()
    more = price_as_plan(replace(one, layers=4), 2)
    assert more > price_as_plan(one, 2)


def test_gathered_weights_stay_in_a_pipeline(tmp_path: Path) -> None:
    """Several microbatches are in flight, so that nothing that was gathered is freed between forward and backward."""
    changed = {"dp": 2, "tp": 1, "pp": 2, "n_gpus": 4, "microbatch": 2, "recompute": "full", "schedule": "1F1B"}
    kept, anew = (run(tmp_path, **SMALL | changed | {"zero_stage": stage}) for stage in (2, 3))
    assert price_as_plan(anew, 2) == price_as_plan(kept, 2)
    assert bytes_as_plan(anew, 2) == bytes_as_plan(kept, 2)


def test_a_degree_of_whole_nodes_is_one_communicator(tmp_path: Path) -> None:
    """NCCL's rings cross a shared port with all that they reduce, and not with a node's part of it."""
    flat, staged = (RunPlan.of(run(tmp_path, **SMALL | {"layers": 2, "n_gpus": 16, "dp": 16 // pp, "tp": 1, "pp": pp,
                                                        "gpus_per_node": 4, "global_batch": 64}), 4)
                    for pp in (1, 2))
    mesh = flat_plan(flat, model_graph(flat.shape, 2, flat.precision)).plan.mesh
    graph = model_graph(staged.shape, 3, staged.precision)
    parts = stage_plans(staged, graph, uniform_cuts(graph, 3))
    assert mesh.names == ("dp",) and {part.plan.mesh.names for part in parts} == {("dp",)}


def test_tokens_go_to_experts_among_the_ranks_that_share_them_alone(tmp_path: Path) -> None:
    one = run(tmp_path, **SMALL | {"layers": 1, "n_gpus": 4, "dp": 4, "tp": 1, "ep": 2, "moe_experts": 4, "moe_topk": 2,
                                   "gated_ffn": 1, "microbatch": 4})
    asked = RunPlan.of(one, 4)
    found = flat_plan(asked, model_graph(asked.shape, 1, asked.precision))
    sent = [(one.kind, one.axes) for one in predict_timeline(found.plan, found.graph, asked.cluster).step.events]
    assert [axes for kind, axes in sent if kind == "all-to-all"] == ["ep"] * 4  # there and back, and backward


def test_what_is_no_plan_says_why(tmp_path: Path) -> None:
    far = run(tmp_path, moe_experts=6, moe_topk=2, ep=3, dp=2, tp=4, seq=1536)
    with pytest.raises(InputError, match="3 must divide 2 or, with those of tp and cp, 8"):
        price_as_plan(far, 1)


def test_a_run_has_no_price_without_that_of_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one path: where plans have no price, no run has one."""
    def gone(*_: object, **__: object) -> None:
        raise InputError("plans have no price")

    path = table(tmp_path, ROW | SMALL | {"recompute": "none", "layers": 3})
    assert validate(path)[0].seconds == price_as_plan(run(tmp_path, **SMALL | {"recompute": "none", "layers": 3}), 4)
    monkeypatch.setattr("autoddl.pricing.edge_tables._seconds", gone)
    assert validate(table(tmp_path, ROW | SMALL | {"hidden": 256}))[0].reason == "plans have no price"
