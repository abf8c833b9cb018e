"""What differs between two plans, in words and in seconds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from planmaker import cluster_of
from shell import shell
from torch import nn

from autoddl import api
from autoddl.core.plan import Plan
from autoddl.explain.diff import difference
from autoddl.planner.question import rebuild

MESH = "net=2,node=2"


@pytest.fixture(scope="module")
def plans() -> tuple[Plan, Plan, Plan]:
    """The best plan, the best with whole heads and wide layers cut otherwise, and one on another mesh."""
    model, place = tiny.tiny(), cluster_of(MESH)
    pins = ("head.weight: net=B", "head.weight: node=B", "blocks.*.up.weight: node=S(1)")
    return (api.plan(model, place, mesh=MESH), api.plan(model, place, mesh=MESH, pins=pins),
            api.plan(model, place, mesh="net-node=4"))


def test_a_plan_does_not_differ_from_itself(plans: tuple[Plan, Plan, Plan]) -> None:
    found = difference(plans[0], plans[0])
    assert not found.words and not found.groups
    assert all(a == b for _, a, b, _ in found.totals)


def test_groups_say_what_differs_and_what_it_is_worth(plans: tuple[Plan, Plan, Plan]) -> None:
    a, b, _ = plans
    found = difference(a, b)
    assert any(text.startswith("pins: none in the first") for text in found.words)
    blocks = {group.block: group for group in found.groups}
    assert any("up" in name for name in blocks)
    assert all(group.seconds is None or group.seconds >= -1e-12 for group in found.groups), "A is the best plan"
    assert any("blocks.0-1.up.weight" in text for group in found.groups for text in group.words)


def test_all_groups_together_are_the_other_plan(plans: tuple[Plan, Plan, Plan]) -> None:
    a, b, _ = plans
    mine, yours = rebuild(a), rebuild(b)
    theirs = {v.name: v.choices[k] for v, k in zip(yours.variables, yours.choice, strict=True)}
    choice = tuple(v.choices.index(theirs[v.name]) for v in mine.variables)
    assert mine.problem.cost(choice) == pytest.approx(b.predicted.seconds)


def test_other_meshes_are_compared_by_totals(plans: tuple[Plan, Plan, Plan]) -> None:
    found = difference(plans[0], plans[2])
    assert not found.groups and any(text.startswith("mesh: ") for text in found.words)
    totals = {part: (x, y) for part, x, y, _ in found.totals}
    assert totals["step"] == (plans[0].predicted.seconds, plans[2].predicted.seconds)


def test_microbatches_are_no_other_model(plans: tuple[Plan, Plan, Plan]) -> None:
    model, place, pins = tiny.tiny(), cluster_of(MESH), tuple(plans[1].source["pins"])
    parts = api.plan(model, place, mesh=MESH, pins=pins, microbatches=(2,))
    found = difference(plans[0], parts)
    assert [text.partition(":")[0] for text in found.words] == ["microbatches", "pins", "conversions"]
    assert any("blocks.0-1.up.weight" in text for group in found.groups for text in group.words)
    assert difference(parts, plans[1]).words == ("microbatches: 2 in the first, 1 in the second",)


def test_what_tells_models_apart_is_said(plans: tuple[Plan, Plan, Plan]) -> None:
    def against(model: nn.Module, microbatches: int = 1) -> list[str]:
        found = difference(plans[0], api.plan(model, cluster_of(MESH), mesh=MESH, microbatches=(microbatches,)))
        assert not found.groups or microbatches > 1, "sums of gradients are split, which are none of one microbatch"
        return [text for text in found.words if not text.startswith(("conversions", "stored"))]

    batch = "inputs: ids is int64[8, 6] in the first, int64[16, 6] in the second; 1 more differ"
    assert against(tiny.tiny(batch=16)) == [batch]
    assert against(tiny.tiny(batch=16), 2) == ["microbatches: 1 in the first, 2 in the second", batch]
    assert against(tiny.tiny(width=8)) == ["parameters: tokens.weight is float32[64, 16] in the first, float32[64, "
                                           "8] in the second; 13 more differ"]
    assert [text.partition(":")[0] for text in against(tiny.tiny(layers=3))] == ["parameters", "operators"]
    assert "p=0.1" in against(tiny.tiny(dropout=0.2))[0] and "p=0.2" in against(tiny.tiny(dropout=0.2))[0]
    old = replace(plans[0], source={}, fingerprints={"model": "another"})
    assert "the models differ in structure, shapes or names of parameters" in difference(plans[0], old).words


def test_clusters_of_one_name_and_sizes_of_buckets_are_compared(plans: tuple[Plan, Plan, Plan]) -> None:
    plan, place = plans[0], cluster_of(MESH)
    near, far = place.levels
    other = replace(place, levels=(near, replace(far, bandwidth=20e9)))
    slower = api.plan(tiny.tiny(), other, mesh=MESH)
    assert difference(plan, slower).words[0] == (
        "cluster test: {name: net, size: 2, bandwidth: 25 GB/s, latency: 1 ns, topology: switch} in the first, "
        "{name: net, size: 2, bandwidth: 20 GB/s, latency: 1 ns, topology: switch} in the second")
    both = api.plan(tiny.tiny(), replace(other, device=replace(place.device, launch=6e-6)), mesh=MESH)
    assert difference(plan, both).words[0] == (
        "cluster test: launch: 5e-06 s in the first, launch: 6 us in the second; 1 more differ")
    assert "cluster: the plans were made for different ones, both of the name test" in difference(
        plan, replace(slower, source={})).words
    assert difference(plan, replace(plan, bucket_bytes=1000)).words == (
        "bytes in a bucket: 26.2 MB in the first, 1 kB in the second",)


class Namesake(nn.Module):
    """A parameter with the name of the op that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(16, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.embedding(ids, self.embedding).exp().sum()
        return loss


def test_a_parameter_with_the_name_of_an_op_is_compared_with_itself() -> None:
    sample = (torch.zeros(8, 4, dtype=torch.int64),)
    a, b = (api.plan(Namesake(), cluster_of(MESH), sample, mesh=MESH, pins=pins)
            for pins in (("embedding: node=B",), ("embedding: node=S(0)",)))
    assert {c.name for c in a.decisions} > {"embedding"}
    groups = difference(a, b).groups
    assert any(text.startswith("embedding: stored") for group in groups for text in group.words), groups
    assert not difference(a, a).groups


def test_the_verb_prints(plans: tuple[Plan, Plan, Plan], tmp_path: Path) -> None:
    for name, plan in zip("abc", plans, strict=True):
        plan.save(tmp_path / name)
    text = shell("diff", str(tmp_path / "a"), str(tmp_path / "b")).out
    assert "blocks.0-1.up.weight: stored" in text and "in the first plan costs" in text, text
    assert json.loads(shell("diff", str(tmp_path / "a"), str(tmp_path / "c"), "--json").out)["groups"] == []
    assert "the plans decide alike" in shell("diff", str(tmp_path / "a"), str(tmp_path / "a")).out


@pytest.fixture(scope="module")
def staged() -> tuple[Plan, Plan, Plan]:
    """Two plans of two stages, the second with wide layers of the last stage cut otherwise, and one of other stages."""
    model, place = tiny.tiny(3), cluster_of(MESH)
    pins = ("blocks.2.up.weight: node=S(1)",)
    return (api.plan(model, place, cut=("blocks.1",), microbatches=(2,)),
            api.plan(model, place, cut=("blocks.1",), microbatches=(2,), pins=pins),
            api.plan(model, place, cut=("blocks.2",), microbatches=(2,)))


def test_equal_stages_are_compared_like_plans(staged: tuple[Plan, Plan, Plan]) -> None:
    a, b, _ = staged
    assert not difference(a, a).words and not difference(a, a).groups
    found = difference(a, b)
    assert found.words[0] == "pins: none in the first, blocks.2.up.weight: node=S(1) in the second"
    assert {group.block.partition(": ")[0] for group in found.groups} >= {"stage 1 of the first"}
    assert any("blocks.2.up.weight: " in text for group in found.groups for text in group.words)


def test_a_pin_holds_in_the_stage_that_has_what_it_names(staged: tuple[Plan, Plan, Plan]) -> None:
    assert staged[1].pipeline is not None
    pinned = {stored.fqn: str(stored.layout) for stage in staged[1].pipeline.stages for stored in stage.plan.stored}
    assert pinned["blocks.2.up.weight"] == "S(1)"
    assert [stage.plan.source["pins"] for stage in staged[1].pipeline.stages] == [[], ["blocks.2.up.weight: node=S(1)"]]


def test_other_stages_are_compared_by_totals(staged: tuple[Plan, Plan, Plan], plans: tuple[Plan, Plan, Plan]) -> None:
    found = difference(staged[0], staged[2])
    assert "cuts: blocks.1.norm in the first, blocks.2.norm in the second" in found.words and not found.groups
    assert found.totals[0] == ("step", staged[0].predicted.seconds, staged[2].predicted.seconds, "s")
    both = difference(staged[0], replace(plans[0], fingerprints=staged[0].fingerprints, source={}))
    assert "stages: the first has 2, the other none; only totals are compared" in both.words and not both.groups
