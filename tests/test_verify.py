"""`verify` finds nothing in a right plan, and what is wrong in a wrong one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shell import FACTORY, LAPTOP, ROOT, shell

import autoddl
from autoddl.errors import InputError
from autoddl.factory import Factory
from autoddl.layout import Mesh
from autoddl.verify import shrunk, verify

PINS = ["blocks.*.up.weight: pair=S(0)", "blocks.*.down.weight: pair=S(1)", "head.weight: machine=S(0)"]


def planned(factory: Factory, cluster: str, **options: object) -> autoddl.Plan:
    model, sample = factory.build()
    return autoddl.plan(model, cluster, sample, factory=factory.to_json(), **options)  # type: ignore[arg-type]


def test_a_plan_computes_what_one_process_does() -> None:
    factory = Factory.parse(FACTORY)
    checked = verify(planned(factory, LAPTOP, mesh="machine=2,pair=2", pins=PINS), factory)
    assert checked.passed and checked.ranks == 4 and checked.note == ""
    assert checked.collective_mismatches == 0 and checked.gradient_error < 1e-12


@pytest.mark.parametrize("drop", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
def test_a_plan_of_microbatches_computes_what_one_process_does(drop: float) -> None:
    factory = Factory.parse(FACTORY, {"dropout": drop})
    plan = planned(factory, LAPTOP, mesh="machine=2,pair=2", pins=PINS, microbatches=(4,))
    checked = verify(plan, factory)
    assert plan.microbatches == 4 and checked.passed and checked.collective_mismatches == 0, checked


def test_a_wrong_plan_does_not_pass(tmp_path: Path) -> None:
    """Without the reduction of one gradient."""
    factory = Factory.parse(FACTORY, {"dropout": 0.0, "batch": 64, "width": 64})
    plan = planned(factory, LAPTOP, mesh="machine=4", pins=["blocks.0.up*: machine=S(0)"])
    edge = next(c for c in plan.conversions if c.backward == ("machine: P->B",) and c.tensor.startswith("p_"))
    wrong = tuple(replace(c, backward=()) if c is edge else c for c in plan.conversions)
    replace(plan, conversions=wrong).save(tmp_path / "wrong.json")
    said = shell("verify", str(tmp_path / "wrong.json"), FACTORY, "--json")
    data = json.loads(said.out)
    assert said.code == 1 and not data["passed"] and data["gradient_error"] > 1e-6


def test_a_plan_for_many_ranks_is_verified_on_fewer() -> None:
    factory = Factory.parse(FACTORY, {"batch": 64})
    plan = planned(factory, str(ROOT / "examples" / "clusters" / "a100-4x8.yaml"), max_axes=2)
    assert plan.mesh.size == 32
    checked = verify(plan, factory)
    assert checked.passed and checked.ranks <= 8, checked
    assert "32 ranks do not fit here" in checked.note


@pytest.mark.slow
def test_a_model_on_the_meta_device_is_verified() -> None:
    factory = Factory.parse(FACTORY.replace(":tiny", ":on_meta"))
    checked = verify(planned(factory, LAPTOP, mesh="machine-pair=4"), factory)
    assert checked.passed


@pytest.mark.parametrize(("mesh", "smaller"), [("net=16,node=8", "net=2,node=2"), ("net=9,node=4", "net=3,node=2"),
                                               ("net=2,node=4", "net=2,node=4")])
def test_a_smaller_mesh_divides_the_plans(mesh: str, smaller: str) -> None:
    plan = replace(planned(Factory.parse(FACTORY), LAPTOP, mesh="machine=2,pair=2"), mesh=Mesh.parse(mesh))
    assert str(shrunk(plan, 8)[0].mesh) == smaller


def test_too_few_ranks_for_the_shape_is_an_error() -> None:
    plan = planned(Factory.parse(FACTORY), LAPTOP, mesh="machine=2,pair=2")
    with pytest.raises(InputError, match=r"'machine=2,pair=2', needs 4; allow them with --max-ranks 4"):
        shrunk(plan, 2)
