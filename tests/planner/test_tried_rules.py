"""Operators without a rule are tried when a model is planned; the plan says what was found, and splits by it."""

from pathlib import Path

import pytest
from planmaker import cluster_of
from shell import shell
from unruled import unruled
from verified import verified

import autoddl
from autoddl.capture import tried_rules
from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.core.graph import graph_from_text
from autoddl.core.layout import Split
from autoddl.core.plan import Plan
from autoddl.explain.explain import explain
from autoddl.operators.own_facts import told_by_trials
from autoddl.operators.trials import probe

FILE = Path(__file__).parent.parent / "support" / "unruled.py"
FOUND = {"unruled.gated.default": "n0 n1 n2, n2 -> n0 n1 n2", "function.Softened": "n0 n1 . -> n0 n1 .",
         "aten.nanmean.default": "n0 n1 . -> n0 n1"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine may be busy."""
    monkeypatch.setattr(probe, "SECONDS", 10.0)
    monkeypatch.setattr(tried_rules, "SECONDS", 60.0)


def planned(cluster: str = "core=2", **options: object) -> Plan:
    factory = Factory(str(FILE), "unruled")
    return autoddl.plan(unruled(), cluster_of(cluster), workers=1, factory=factory.to_json(), **options)  # type: ignore


def test_what_was_found_is_in_the_plan_and_in_its_explanation() -> None:
    plan = planned()
    assert told_by_trials(graph_from_text(plan.source["graph"])) == (FOUND, {})
    assert dict(explain(plan).tried) == FOUND and not plan.predicted.fallback
    read = {d.target: d.inputs[0] for d in plan.decisions}
    assert all(Split(0) in read[target] for target in FOUND)


def test_without_trials_the_operators_are_replicated_and_the_model_is_the_same() -> None:
    plan, tried = planned(probe=False), planned()
    assert set(plan.predicted.fallback) == set(FOUND) and plan.predicted.seconds > tried.predicted.seconds
    assert plan.fingerprints == tried.fingerprints


@pytest.mark.ranks
def test_a_plan_that_splits_by_what_was_found_is_verified() -> None:
    plan = planned("core=2", microbatches=(1, 2))
    assert verified(plan, Factory(str(FILE), "unruled")).passed


@pytest.mark.ranks
def test_a_pipeline_splits_by_it_too() -> None:
    plan = planned("pair=2,core=2", stages=(2,), microbatches=(4,))
    assert verified(plan, Factory(str(FILE), "unruled")).passed


def test_an_operator_that_mixes_the_batch_is_split_elsewhere() -> None:
    graph = tried_rules.with_trials(capture(unruled(mixed=True)))
    found, reasons = told_by_trials(graph)
    assert found == FOUND | {"aten.renorm.default": ". n0 -> . n0"} and not reasons


def test_what_was_not_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried_rules, "SECONDS", 0.0)
    found, reasons = told_by_trials(tried_rules.with_trials(capture(unruled())))
    assert not found and set(reasons) == set(FOUND) and all("of the model were over" in why for why in reasons.values())


def test_the_shell_says_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    said = shell("plan", f"{FILE}:unruled", str(cluster_file(tmp_path)), "-o", str(out))
    assert 'function.Softened splits as "n0 n1 . -> n0 n1 .", found by trying' in " ".join(said.out.split())
    assert "found by trying" in shell("explain", str(out)).out
    plain = shell("plan", f"{FILE}:unruled", str(cluster_file(tmp_path)), "--no-probe").out
    assert "autoddl.rule(Softened" in plain and "found by trying" not in plain


def cluster_file(folder: Path) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(cluster_of("core=2").to_yaml())
    return file
