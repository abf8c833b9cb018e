"""A rule of the user's own is checked when it is registered and when its operator is called; then plans split by it."""

from collections.abc import Iterator
from typing import Any

import own_rules
import pytest
import torch
from own_functions import Shifted

import autoddl
from autoddl.capture.capture import capture
from autoddl.capture.own_rules import _MARK, named_operator
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.layout import Mesh
from autoddl.operators.footprints.table import whole_footprint
from autoddl.operators.own_facts import own_rule
from autoddl.operators.rules.table import has_rule, options
from autoddl.operators.work import work

MLP = "ownlib::fused_mlp"


@pytest.fixture(autouse=True)
def rules() -> Iterator[None]:
    kept = [(one, vars(one)[_MARK]) for one in (named_operator(MLP), Shifted)]
    yield
    for one, found in kept:
        setattr(one, _MARK, found)


def test_a_rule_goes_into_the_graph_and_says_the_layouts() -> None:
    graph = capture(*own_rules.model()).graph
    mlp, shifted = (next(op for op in graph.ops if name in op.target) for name in ("fused_mlp", "Shifted"))
    assert own_rule(mlp) == own_rules.MLP and own_rule(shifted) == own_rules.SHIFTED
    assert has_rule(mlp) and "B, S(1), S(0) -> P" in map(str, options(mlp, graph, Mesh.parse("x=2")))
    other = own_rules.model()[0]
    autoddl.rule(Shifted, "b ., . -> b .")
    assert capture(other, own_rules.model()[1]).graph.fingerprint() != graph.fingerprint()


def test_flops_of_a_piece_are_its_share_and_backward_has_twice_as_many() -> None:
    graph = capture(*own_rules.model()).graph
    op, flows = next(op for op in graph.ops if "fused_mlp" in op.target), graph.differentiable()
    whole = [graph.tensors[t].shape for t in (*op.inputs, *op.outputs)]
    (forward,), (backward,) = work(op, graph, tuple(whole[:3]), tuple(whole[3:]), flows)
    assert forward.flops == 2 * 4 * 5 * 2 * 8 * 12 and backward.flops == 2 * forward.flops
    (half,), _ = work(op, graph, ((2, 5, 8), (8, 6), (6, 8)), ((2, 5, 8),), flows)
    assert half.flops == forward.flops / 4
    assert whole_footprint(op, graph, flows).saves == (0, 1, 2)


def test_a_subclass_has_no_rule_of_its_parent() -> None:
    child: Any = type("Child", (Shifted,), {})
    assert _MARK not in vars(child) and autoddl.rule(child, "b d, . -> b d") is child
    assert vars(child)[_MARK] != vars(Shifted)[_MARK]


@pytest.mark.parametrize(("operator", "text", "says"), [
    (MLP, "b s d, d f -> b s f", r"has 2 inputs, and ownlib::fused_mlp has 3"),
    (MLP, "b s ., . f, f e -> b s e, b", r"has 2 outputs, and ownlib::fused_mlp has 1"),
    (MLP, "b s ., . f, f e", "has no '->'"), (MLP, "b s+ ., . f, f e -> b s e", "is no dim name"),
    (MLP, "b s ., . f, f e -> b s e | 0*3", "names an input that the rule does not have"),
    (MLP, "b s ., . f, f e -> b s e | up*down", "is no sum of products of input positions"),
    (MLP, "b s ., . f, f e -> b s e g", "has the dim 'g' in an output and in no input"),
    ("ownlib::fused", "a -> a", "there is no operator 'ownlib::fused'"),
    ("fused_mlp", "a -> a", "there is no operator"),
    ("aten::linear", "b k, n k -> b n", "has a rule already"), ("aten::relu_", "a -> a", "writes into its arguments"),
    (torch.relu, "a -> a", "is no operator"), (Shifted, "b d, d, e -> b d", "has 3 inputs, and Shifted has 1 to 2")])
def test_what_does_not_fit_is_refused_when_it_is_registered(operator: object, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        autoddl.rule(operator, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "more", "says"), [
    ("b s d, d -> b s d", {}, "does not fit tensors of shapes"), ("b d, d d -> b d", {}, "does not fit tensors"),
    ("b d, d -> b d", {"saves": ["weight"]}, "says that 'weight' is kept; there are x, bias, output.0, output"),
    ("b d, d -> b d", {"flops": lambda x: x[0]}, r"the flops of Shifted fail for tensors of \[\(20, 8\), \(8,\)\]")])
def test_what_does_not_fit_a_call_is_refused_with_its_line(text: str, more: Any, says: str) -> None:
    autoddl.rule(Shifted, text, **more)
    with pytest.raises(CaptureError, match=says):
        capture(*own_rules.model())


def test_whole_numbers_are_no_partial_sums() -> None:
    from own_functions import Scaled, own

    autoddl.rule(Scaled, "b ., . -> b ., b, b | 0*1")
    try:
        with pytest.raises(CaptureError, match=r"adds up pieces of a tensor of int64, \[8\]"):
            capture(*own())
    finally:
        delattr(Scaled, _MARK)
