"""A configuration is priced by plans that have it, and a plan is described by the configuration that it has."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import tiny
from sampling import parametrize_or_slow
from shell import FACTORY, shell

import autoddl
from autoddl.core.errors import Infeasible, InputError
from autoddl.core.plan import Plan
from autoddl.cost_models import Cluster, load_cluster
from autoddl.explain.assumptions import batch_of
from autoddl.export.configuration import Configuration, Degree
from autoddl.export.describe import describe_plan
from autoddl.export.exported import TARGETS, export_plan, options_of
from autoddl.export.price import meshes_of, price_configuration
from autoddl.export.subject import Subject, subject_of
from autoddl.planner.options import PlanOptions
from autoddl.planner.task import PlanTask, task_of

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"
LAYERS = 4


def grid(*degrees: tuple[str, int]) -> tuple[Degree, ...]:
    return tuple(Degree(role, size) for role, size in degrees)


CONFIGURATIONS = {
    "data parallel": Configuration(grid(("data", 4)), 2),
    "ZeRO-1": Configuration(grid(("zero-1", 4)), 2),
    "ZeRO-3 in parts": Configuration(grid(("zero-3", 4)), 1, 2),
    "HSDP": Configuration(grid(("data", 2), ("zero-3", 2)), 2),
    "a copy in each node": Configuration(grid(("zero-1", 2), ("zero-3", 2)), 1, 2),
    "a grid": Configuration(grid(("data", 2), ("tensor", 2)), 4),
    "context parallel": Configuration(grid(("zero-1", 2), ("context", 2)), 4),
    "tensor parallel, recomputed": Configuration(grid(("tensor", 4)), 8, recompute="first-2"),
    "a pipeline": Configuration(grid(("data", 2)), 1, 4, 2),
    "an uneven pipeline": Configuration(grid(("zero-1", 2)), 1, 4, 2, layers=(3, 1)),
    "an interleaved pipeline": Configuration(grid(("tensor", 2)), 2, 4, 2, "interleaved:2", recompute="full"),
}


@lru_cache
def cluster() -> Cluster:
    return load_cluster(TWO_BY_TWO)


@lru_cache
def task() -> PlanTask:
    options = PlanOptions(microbatches=(1, 2, 4), workers=1, max_axes=2)
    return task_of(tiny.tiny(LAYERS, dropout=0.0), cluster(), None, options, "tiny", None)


def subject(microbatches: int) -> Subject:
    return Subject("tiny", task().variant(microbatches).original, cluster(), {})


@lru_cache
def best(name: str) -> Plan:
    given = CONFIGURATIONS[name]
    return price_configuration(task(), given, (given.recompute,), subject(given.microbatches))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_plan_of_a_configuration_has_it(name: str) -> None:
    given, plan = CONFIGURATIONS[name], best(name)
    said = describe_plan(plan, subject_of(plan)).configuration
    assert said.degrees == given.degrees and said.recompute == given.recompute and not said.sequence
    assert (said.microbatch, said.microbatches, said.stages, said.schedule, said.layers, said.precision) == (
        given.microbatch, given.microbatches, given.stages, given.schedule, given.layers, given.precision)
    assert batch_of(plan) == (8, 48)


def test_a_split_sequence_is_read_and_is_no_slower() -> None:
    """Sequence parallelism has less to send where norms need no whole rows; without it nothing is split there."""
    plain = CONFIGURATIONS["a grid"]
    split = price_configuration(task(), replace(plain, sequence=True), ("none",), subject(1))
    assert split.predicted.seconds <= best("a grid").predicted.seconds
    pinned = autoddl.plan(tiny.tiny(LAYERS, dropout=0.0), TWO_BY_TWO, workers=1, mesh="dp=2,tp=2", precision="float32",
                          pins=("dp=data", "tp=split tensor", "blocks.*.norm: tp=S(1)"))
    assert describe_plan(pinned, subject_of(pinned)).configuration == replace(plain, sequence=True)


@pytest.mark.parametrize("name", ["ZeRO-1", "a grid", "ZeRO-3 in parts"])
def test_its_options_find_it(name: str) -> None:
    """What `autoddl import` says, given to `autoddl plan`, finds the same seconds."""
    words = options_of(CONFIGURATIONS[name], cluster(), str(best(name).mesh))
    said = shell("plan", FACTORY, TWO_BY_TWO, "--set", f"layers={LAYERS}", "--set", "dropout=0.0", "--json", *words)
    assert said.code == 0, said.err
    assert json.loads(said.out)["predicted_seconds"] == pytest.approx(best(name).predicted.seconds, rel=1e-9)


def test_options_of_a_pipeline_have_its_stages_and_roles() -> None:
    words = options_of(CONFIGURATIONS["an interleaved pipeline"], cluster())
    assert words == ("--stages", "2", "--schedule", "interleaved:2", "--microbatches", "4", "--precision", "float32",
                     "--recompute", "full", "--mesh", "tp=2", "--pin", "tp=whole tensor")


def test_a_degree_that_straddles_levels_becomes_several_axes() -> None:
    wide = load_cluster("examples/clusters/a100-4x8.yaml")
    found = meshes_of(Configuration(grid(("zero-3", 16), ("tensor", 2))), wide)
    assert [(str(one.mesh), dict(one.roles)) for one in found] == [
        ("dp.1=4,dp.0=4,tp=2", {"dp.1": "zero-3", "dp.0": "zero-3", "tp": "whole tensor"})]
    assert [str(one.mesh) for one in meshes_of(Configuration(grid(("zero-3", 32))), wide)] == ["dp=32", "dp.1=4,dp.0=8"]
    with pytest.raises(InputError, match="a degree takes whole factors of its levels, the innermost first"):
        meshes_of(Configuration(grid(("data", 16), ("tensor", 3))), wide)


@pytest.mark.parametrize("target", TARGETS)
def test_an_exported_plan_is_no_faster_than_the_found_one(target: str) -> None:
    made_by = {"file": "tiny.py", "name": "tiny", "arguments": {}}
    found = autoddl.plan(tiny.tiny(2, dropout=0.0), TWO_BY_TWO, precision="float32", workers=1, max_axes=2,
                         factory=made_by)
    made = export_plan(found, target)
    assert made.plan.predicted.seconds >= made.seconds * (1 - 1e-9)
    assert made.seconds == found.predicted.seconds and made.configuration.ranks == 4


def test_a_nearest_configuration_that_does_not_fit_is_refused() -> None:
    """No plan of the configuration takes less than half of the peak of the best one."""
    plan = best("data parallel")
    tight = replace(plan, budget=plan.predicted.peak_bytes / 8)
    with pytest.raises(Infeasible, match=r"no plan takes less than.*Megatron-LM has nothing nearer than data=4"):
        export_plan(tight, "megatron")


def test_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    plan = autoddl.plan(tiny.tiny(1, dropout=0.0), TWO_BY_TWO, workers=1, max_axes=1, precision="float32")
    plan.save(tmp_path / "plan.json")
    said = shell("export", str(tmp_path / "plan.json"), "--to", "megatorn")
    assert said.code == 2 and "did you mean 'megatron'" in said.err
    said = shell("export", str(tmp_path / "plan.json"), "--to", "megatron", "-o", str(tmp_path))
    assert said.code == 2 and "it is a folder" in said.err


def test_a_plan_of_ones_own_degrees_is_exported() -> None:
    made_by = {"file": "tiny.py", "name": "tiny", "arguments": {}}
    mine = autoddl.plan(tiny.tiny(2, dropout=0.0), TWO_BY_TWO, precision="float32", workers=1, mine="tp=2,zero=1,sp",
                        factory=made_by)
    made = export_plan(mine, "megatron")
    assert made.configuration.degree("tensor") == 2 and made.configuration.degree("zero-1") == 2


@parametrize_or_slow("degrees", ["dp=4", "dp=2,pp=2,vp=2"], ["dp=2,pp=2"])
def test_what_megatrons_selective_recomputation_may_keep_is_said(degrees: str) -> None:
    """At most what the same plan holds without recomputation; without that it is the plan's own peak."""
    parts = (4,) if "pp" in degrees else (1,)
    with_, without = (autoddl.plan(tiny.tiny(LAYERS, batch=256 // parts[0], dropout=0.0), cluster(), name="tiny",
                                   workers=1, microbatches=parts, mine=degrees + more)
                      for more in (",recompute=selective", ""))
    made, plain = export_plan(with_, "megatron"), export_plan(without, "megatron")
    assert made.configuration.recompute == "selective" and plain.configuration.recompute == "none"
    assert made.most_bytes > 1.05 * made.plan.predicted.peak_bytes
    assert made.most_bytes == pytest.approx(without.predicted.peak_bytes, rel=0.02)
    assert plain.most_bytes == plain.plan.predicted.peak_bytes
