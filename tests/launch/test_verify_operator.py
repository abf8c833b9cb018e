"""Right rules pass, and each wrong one is caught with the signature that is wrong."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import own_rules
import pytest
from own_functions import Power, Scaled, Shifted, own
from planmaker import random_plans
from sampling import parametrize_or_slow
from shell import ROOT, shell
from verified import verified

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.factory import Factory
from autoddl.capture.own_rules import _MARK, named_operator
from autoddl.cli.tables.own_rules_text import what_to_write
from autoddl.core.errors import InputError
from autoddl.core.graph import graph_to_text
from autoddl.launch.verify_operator import verify_operator
from autoddl.operators.rules.table import has_rule

MLP = "ownlib::fused_mlp"
FILE = f"{ROOT}/tests/support/own_rules.py"


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    kept = [(one, vars(one)[_MARK]) for one in (named_operator(MLP), Shifted)]
    yield
    for one, found in kept:
        setattr(one, _MARK, found)


def sample(name: str) -> Factory:
    """A function of `own_rules`, in the module that this process has."""
    factory = Factory(FILE, name)
    object.__setattr__(factory, "function", lambda: getattr(own_rules, name))
    return factory


@pytest.mark.parametrize("text", [
    own_rules.MLP, "b . ., . ., . e -> b . e | 2", "b s ., . ., . . -> b s .", ". . ., . f, f . -> . . . | sum",
    "b s ., . f, f [e] -> b s [e] | sum"])
def test_a_right_rule_passes(text: str) -> None:
    autoddl.rule(MLP, text)
    checked = verify_operator(MLP, sample("mlp_call"))
    assert checked.passed and len(checked.tried) > 1, checked


@pytest.mark.parametrize(("text", "signature", "difference"), [
    ("b s d, d f, f e -> b s e | 0*1*2", "S(2), S(0), B -> P", "output 0 differs"),   # relu of a part of the sum
    ("b s ., . f, f e -> b s e | 1*2", "B, P, B -> P", "output 0 differs"),           # relu of a part
    ("b s ., . f, . e -> b s e | sum", "B, S(1), B -> P", "fails: mat1 and mat2")])   # rows of down are too many
def test_a_wrong_rule_is_caught(text: str, signature: str, difference: str) -> None:
    autoddl.rule(MLP, text)
    checked = verify_operator(MLP, sample("mlp_call"))
    found = {one.signature: one.difference for one in checked.tried}
    assert difference in found[signature] and not checked.passed, checked


@pytest.mark.parametrize("text", ["s b ., . f, f e -> b s e | sum", "b s ., f ., f e -> b s e | sum"])
def test_a_rule_that_gives_unequal_dims_one_name_is_an_error(text: str) -> None:
    autoddl.rule(MLP, text)
    with pytest.raises(InputError, match=r"rule of ownlib::fused_mlp does not fit its call .* do not make its size"):
        verify_operator(MLP, sample("mlp_call"))


@pytest.mark.parametrize(("text", "wrong"), [
    (own_rules.SHIFTED, ""), ("b d, . -> b d", "S(1), B -> S(1)"), ("b d, d -> b d | 0", "P, B -> P"),
    ("b ., . -> . .", "")])
def test_rules_of_a_function_are_tried(text: str, wrong: str) -> None:
    autoddl.rule(Shifted, text)
    checked = verify_operator("Shifted", sample("shifted_call"))
    assert [one.signature for one in checked.tried if one.difference] == [wrong] * bool(wrong), checked
    assert checked.untried == (("b",) if text == "b ., . -> . ." else ())


def test_a_sample_without_what_it_needs_is_an_error() -> None:
    with pytest.raises(InputError, match="returns no tensors"):
        verify_operator(MLP, sample("model_name"))
    with pytest.raises(InputError, match="has no rule"):
        verify_operator("aten::cosine_similarity", sample("shifted_call"))
    with pytest.raises(InputError, match="fails on the sample in float64"):
        verify_operator(MLP, sample("shifted_call"))


@pytest.mark.ranks
@parametrize_or_slow("seed", [0], [1, 2, 3])
def test_ranks_learn_the_rules_from_the_file_of_the_model(seed: int) -> None:
    factory = Factory.parse(f"{FILE}:model")
    (plan,) = random_plans(*factory.build(), "a=2,b=2", 1, seed=seed)
    split = [d for d in plan.decisions if "fused_mlp" in d.target and "S" in "".join(map(str, d.inputs))]
    checked = verified(plan, factory)
    assert split and not plan.predicted.fallback and checked.passed and not checked.collective_mismatches, checked


def test_the_shell_says_each_signature_and_ends_with_1_where_one_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import autoddl, torch\nfrom own_functions import Shifted\n"
                     "autoddl.rule(Shifted, 'b d, . -> b d')\n"
                     "def call():\n    return torch.randn(5, 4), torch.randn(4)\n")
    said = shell("verify", "--operator", "Shifted", "--sample", f"{wrong}:call", "--json")
    found = {row["signature"]: row["difference"] for row in json.loads(said.out)["tried"]}
    assert said.code == 1 and found["S(0), B -> S(0)"] == "" and "fails: " in found["S(1), B -> S(1)"]
    assert "S(1), B -> S(1)" in shell("verify", "--operator", "Shifted", "--sample", f"{wrong}:call").out
    said = shell("verify", "--operator", MLP)
    assert said.code == 2 and "--operator NAME goes with --sample" in said.err


def test_a_plan_shows_the_rule_to_write_for_an_operator_without_one() -> None:
    (plan,) = random_plans(*own(), "a=2", 1)
    lines = what_to_write(replace(plan, source={"graph": graph_to_text(capture(*own()).graph)}))
    assert lines == ['autoddl.rule(Scaled, ". ., . -> . ., ., .")', 'autoddl.rule(Power, ". ., . . -> . .")']
    try:
        for line in lines:
            exec(line, {"autoddl": autoddl, "Scaled": Scaled, "Power": Power})
        assert all(has_rule(op) for op in capture(*own()).graph.ops), "captured with the rules"
    finally:
        for function in (Scaled, Power):
            delattr(function, _MARK)
