"""Configurations by degrees: axes in Megatron's order, cut where levels end, and plans that do what was asked for."""

import re
from functools import lru_cache

import pytest
import torch
from shell import FACTORY, LAPTOP, shell
from tiny import tiny
from torch import Tensor, nn
from torch.nn import functional as F

import autoddl
from autoddl.core.degrees import Degrees
from autoddl.core.errors import InputError
from autoddl.core.graph import graph_from_text
from autoddl.core.layout import B, Split
from autoddl.core.plan import Plan
from autoddl.cost_models import parse_cluster
from autoddl.planner.degree_meshes import degree_mesh
from autoddl.planner.pins import parse_pin, pin_meaning
from autoddl.planner.question import rebuild

NODES = parse_cluster("""
name: nodes
device: H100-80GB
levels:
  - {name: node, size: 8, bandwidth: 300 GB/s, latency: 3 us}
  - {name: net, size: 4, bandwidth: 25 GB/s, latency: 8 us}
""", "test")


@pytest.mark.parametrize(("text", "mesh"), [
    ("tp=8", "dp=4,tp=8"),
    ("tp=4", "dp.1=4,dp.0=2,tp=4"),
    ("tp=16", "dp=2,tp.1=2,tp.0=8"),
    ("cp=2,tp=2,zero=1", "dp.1=4,dp.0=2,cp=2,tp=2"),
    ("dp=32", "dp=32"),
    ("zero=3,shard=8", "copies=4,dp=8"),
    ("zero=3,shard=16,ep=4", "copies=2,dp.1=2,dp.0=2,ep=4"),
    ("tp=4,ep=16", "dp=2,ep.1=2,ep.0=2,tp=4"), ("tp=4,dp=8,ep=32", "ep.1=4,ep.0=2,tp=4")])
def test_axes_have_megatrons_order_and_are_cut_where_levels_end(text: str, mesh: str) -> None:
    assert str(degree_mesh(NODES, Degrees.parse(text))) == mesh


@pytest.mark.parametrize(("text", "message"), [("tp=3", "has 32"), ("shard=3,zero=1", "3 must divide 32"),
                                               ("zero=1,shard=2,ep=4", "ep=4 must divide 2"),
                                               ("tp=4,dp=8,ep=3", "3 must divide 8 or, with those of tp and cp, 32")])
def test_degrees_that_do_not_fit_a_cluster_say_why(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        degree_mesh(NODES, Degrees.parse(text))


class Experts(nn.Module):
    """Every token goes through all of four experts, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.gate, self.head = nn.Embedding(16, 8), nn.Linear(8, 4), nn.Linear(8, 16)
        self.up = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        found = torch.einsum("bsd,edf->ebsf", x, self.up).relu()
        mixed = torch.einsum("ebsf,bse->bsf", found, self.gate(x).softmax(-1))
        return F.cross_entropy(self.head(mixed).flatten(0, 1), ids.flatten())


@lru_cache
def planned(mine: str) -> Plan:
    """The plan of a configuration of a tiny model, of Experts where it has `ep`."""
    model = Experts() if "ep" in mine else tiny(dropout=0.0)
    return autoddl.plan(model, LAPTOP, (torch.zeros(8, 4, dtype=torch.int64),) if "ep" in mine else None, mine=mine)


def _reads(plan: Plan, name: str) -> list[tuple[object, ...]]:
    """The layouts that the op of a module reads."""
    ops = {op.name: op for op in graph_from_text(plan.source["graph"]).ops}
    return [one.inputs for one in plan.decisions if one.name in ops and ops[one.name].module == name
            and ops[one.name].target == "aten.linear.default"]


def test_tensor_parallel_ranks_read_split_weights_and_whole_sequences() -> None:
    plan = planned("tp=2,zero=1")
    assert str(plan.mesh) == "dp=2,tp=2" and plan.source["mine"] == "tp=2,zero=1"
    for name in ("blocks.0.up", "blocks.1.down"):
        (x, weight, *_), = _reads(plan, name)
        assert x[0] == Split(0) and weight[0] == B and isinstance(weight[1], Split)  # type: ignore[index]
    assert not any(layout[1] == Split(1) and len(layout) for one in plan.decisions if "norm" in one.name
                   for layout in one.outputs)
    assert all(one.layout[0] != B and one.depths[0] == 0 for one in plan.stored if one.fqn.endswith("weight"))


def test_context_parallel_ranks_split_the_length() -> None:
    plan = planned("cp=2,dp=2")
    (x, weight, *_), = _reads(plan, "blocks.0.up")
    assert tuple(x) == (Split(0), Split(1)) and tuple(weight) == (B, B)  # type: ignore[arg-type]


def test_experts_lie_apart() -> None:
    up = next(one for one in planned("ep=2,zero=1").stored if one.fqn == "up")
    assert up.layout[1] == Split(0)


def test_experts_lie_apart_over_tensor_parallel_ranks_too_where_ep_is_more_than_dp_holds() -> None:
    plan = planned("tp=2,ep=4,zero=1")
    assert str(plan.mesh) == "ep=2,tp=2"
    up = next(one for one in plan.stored if one.fqn == "up")
    assert tuple(up.layout) == (Split(0), Split(0))
    products = [one.inputs for one in plan.decisions if "einsum" in one.name]
    assert any(tuple(layout) == (Split(0), Split(0)) for layout in products[0])


@pytest.mark.parametrize(("mine", "message"), [
    ("ep=2", "no parameter of this model has 3 dims"), ("tp=8", "the cluster has 4"),
    ("cp=2,recompute=full", "recomputes full, and recompute asks for selective")])
def test_what_a_model_or_another_option_does_not_allow_is_refused(mine: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        autoddl.plan(tiny(), LAPTOP, mine=mine, recompute=("selective",) if "recompute" in mine else ("none",))


def test_a_plan_of_degrees_is_a_question_within_them() -> None:
    found = rebuild(planned("tp=2,zero=1"))
    assert all(choice.outputs[0][0] != B for v in found.variables if v.name == "blocks.0.up.weight"
               for choice in v.choices)


def test_recomputation_and_stages_are_degrees_too() -> None:
    plan = planned("pp=2,recompute=full")
    assert plan.pipeline is not None and len(plan.pipeline.stages) == 2
    assert all(stage.plan.recompute == (f"blocks.{k}",) for k, stage in enumerate(plan.pipeline.stages))


def test_a_virtual_pipeline_is_a_degree_too() -> None:
    plan = autoddl.plan(tiny(4, dropout=0.0), LAPTOP, mine="pp=2,vp=2", microbatches=(2,), workers=1)
    assert plan.pipeline is not None and plan.pipeline.name == "interleaved:2"
    assert [stage.ranks[0] for stage in plan.pipeline.stages] == [0, 2, 0, 2] and plan.source["mine"] == "pp=2,vp=2"
    with pytest.raises(InputError, match="leave schedule out"):
        autoddl.plan(tiny(4), LAPTOP, mine="pp=2,vp=2", microbatches=(2,), schedule=("zb-h1",))


def test_compare_sets_mine_beside_the_found_plan_with_degrees() -> None:
    rows = {row.name: row for row in autoddl.compare(tiny(), LAPTOP, mine="tp=2,sp,zero=1", workers=1)}
    assert list(rows)[:2] == ["found", "mine"]
    assert rows["mine"].detail == "tp=2,dp=2,zero=1,sp" and rows["ZeRO-2"].detail == "dp=4,zero=2"
    assert rows["HSDP"].detail == "dp=4,zero=3,shard=2"
    assert rows["tensor parallel"].detail == "tp=4; what tp splits is free"
    found, mine = (rows[name].plan for name in ("found", "mine"))
    assert found is not None and mine is not None and found.predicted.seconds <= mine.predicted.seconds


def test_the_shell_says_what_degrees_and_pins_fix() -> None:
    said = shell("plan", FACTORY, LAPTOP, "--mine", "tp=2", "--pin", "head.weight: tp=S(0)", "--set", "dropout=0.0")
    assert said.code == 0, said.err
    assert "tp=2: the batch over dp, weights of products over tp, length not," in said.out
    assert "'head.weight: tp=S(0)' fixes how 1 parameter is stored; operators may read another" in said.out
    assert "no plan of this configuration takes less than" in said.out


@pytest.mark.parametrize(("pin", "words"), [
    ("dp=4", "leaves meshes with an axis dp of 4 ranks"), ("blocks.*.up: dp=S(0)", "fixes what 2 operators write"),
    ("blocks.*.up.weight: dp=OG", "fixes that 2 parameters are stored split")])
def test_a_pin_says_what_it_fixes(pin: str, words: str) -> None:
    assert pin_meaning(parse_pin(pin), graph_from_text(planned("tp=2,zero=1").source["graph"])).startswith(words)


@pytest.mark.parametrize(("options", "message"), [
    ("--mine dp=4 --set batch=2", "dp splits rows over 4 ranks, and the batch has 2: take a batch of 4 rows or a "
                                  "multiple, or a smaller dp beside tp or cp"),
    ("--mine tp=2 --microbatches 1,8", "dp splits rows over 2 ranks, and each of 8 microbatches has 1: take a batch of "
                                       "16 rows or a multiple, a smaller dp beside tp or cp, or fewer microbatches")])
def test_data_parallel_ranks_without_a_row_each_are_refused(options: str, message: str) -> None:
    for verb in ("plan", "compare"):
        said = shell(verb, FACTORY, LAPTOP, "--workers", "1", *options.split())
        assert (said.code, said.out) == (2, "") and message in said.err and said.err.count("\n") == 1, said


def test_a_strategy_whose_ranks_get_no_row_each_says_so() -> None:
    rows = {row.name: row for row in autoddl.compare(tiny(1, batch=2), LAPTOP, workers=1, max_axes=1)}
    assert "dp=4; dp does not divide 2 rows, so it splits other dims too" in rows["data parallel"].detail
    assert "rows" not in rows["tensor parallel"].detail
