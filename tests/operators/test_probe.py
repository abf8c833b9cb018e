"""Trying an operator on pieces finds the dims that split, and no other: traps are found out."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import op_cases
import op_cases_images
import op_cases_shape
import op_sweep
import pytest
import torch
from sampling import parametrize_or_slow
from traps import ROWWISE, TRAPS

from autoddl.capture import tried_rules
from autoddl.capture.capture import capture
from autoddl.core.graph import TRIED
from autoddl.core.graph import Tensor as Entry
from autoddl.core.layout import Mesh, Split
from autoddl.operators.rules.dimension_strings import Rule, signatures
from autoddl.operators.rules.table import RULES, has_rule, options
from autoddl.operators.trials.cases import Case, case, fill, recorded
from autoddl.operators.trials.probe import Call, Probed, probe
from autoddl.operators.trials.trial import check

ENOUGH = 20.0
"""Seconds for an operator, however busy this machine is."""


def call_of(one: Case) -> Call:
    return Call(one.fn, one.op.target, one.args, one.kwargs, one.inputs, one.outputs)


def tried(function: Callable[..., Any], *shape: int) -> Probed:
    x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).sin()
    return probe(call_of(recorded(function, f"function.{function.__name__}", (x,))), ENOUGH)


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_found_out(name: str) -> None:
    found = tried(TRAPS[name], 32, 12)
    first = found.text.partition(" ")[0]
    assert first in ("", "."), f"{name} splits along the batch: {found}"
    assert found.text or found.reason


@pytest.mark.parametrize(("name", "says"), [
    ("with_hidden_state", "equal calls of it differ"), ("drawn_in_secret", "equal calls of it differ"),
    ("of_one_number", "the same number everywhere"), ("too_slow", "a small call of it takes 0.3 s"),
    ("written_in_place", "it writes into its arguments"), ("scaled_by_the_largest", "no dim splits")])
def test_a_trap_says_why(name: str, says: str) -> None:
    assert says in tried(TRAPS[name], 32, 12).reason


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("shape", [(32, 12), (16, 16), (48, 5)])
def test_what_splits_is_found_also_where_sizes_are_equal(name: str, shape: tuple[int, int]) -> None:
    function, text = ROWWISE[name]
    assert tried(function, *shape) == Probed(text)


def test_what_draws_writes_or_aliases_is_not_tried() -> None:
    x = torch.rand(8, 4)
    for one, says in ((case("aten.bernoulli.default", x), "draws"), (case("aten.select.int", x, 0, 1), "what it reads"),
                      (case("aten.view_as_real.default", torch.view_as_complex(torch.rand(4, 2))), "reads")):
        found = probe(call_of(one))
        assert not found.text and says in found.reason
    entry = Entry("x", (8, 4), "float32", one.inputs[0].kind)
    writes = Call(torch.ops.aten.relu_.default, "aten.relu_.default", (x,), {}, (entry,), (entry,))
    assert probe(writes).reason == "it writes into its arguments"


def test_the_time_of_an_operator_is_limited() -> None:
    assert probe(call_of(case("aten.linear.default", torch.rand(8, 4), torch.rand(5, 4))), 0.0).reason == \
        "its time was over"


def signatures_of(one: Case, rule: Rule) -> set[tuple[object, object]]:
    """The layouts that a rule allows on one axis, where something is split."""
    every = (*rule.extra, *signatures(rule.text, tuple(t.shape for t in (*one.inputs, *one.outputs))))
    return {(s.inputs, s.outputs) for s in every if s.split}


def known(one: Case) -> set[tuple[object, object]]:
    """Those of the rule that an operator has."""
    made = RULES[one.op.target](one.op, one.inputs, one.outputs)
    return signatures_of(one, Rule(made) if isinstance(made, str) else made)


def with_batch() -> list[Case]:
    """One call of each operator of torch whose rule splits its first input along the first dim."""
    found: dict[str, Case] = {}
    every = [*op_cases.CASES, *op_cases_images.CASES, *(case(t, *a, **k) for t, a, k in op_cases_shape.CASES)]
    for one in every:
        if one.op.target.startswith("aten.") and one.inputs and len(one.inputs[0].shape) > 1 and any(
                inputs[0] == Split(0) for inputs, _ in known(one)):  # type: ignore[index]
            found.setdefault(one.op.target, one)
    return list(found.values())


@parametrize_or_slow("count", [12], [1000])
def test_what_is_found_is_a_part_of_the_rule_that_has_the_batch(count: int) -> None:
    """Where trying says no reason, which it does of views, draws, and results that show nothing."""
    every = with_batch()
    random.Random(1).shuffle(every)
    tried = 0
    for one in every:
        found = probe(call_of(one), ENOUGH)
        if found.text and tried < count:
            allowed, has = known(one), signatures_of(one, Rule(found.text))
            assert has <= allowed, f"{one}: {found.text}"
            tried += any(inputs[0] == Split(0) for inputs, _ in has)  # type: ignore[index]
        if tried == count:
            break
    assert tried >= min(count, 60)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:Fail to import hypothesis:ImportWarning", "default::FutureWarning:copyreg")
def test_what_is_found_for_operators_of_torchs_database_is_right_with_other_values_and_ranks() -> None:
    """Operators without a rule, on three ranks and on two axes."""
    right = set[str]()
    for call in unruled_calls():
        found = probe(call, ENOUGH)
        if not found.text:
            continue
        values = [torch.rand(t.shape, dtype=torch.float64) if t.is_floating else torch.randint(2, t.shape).to(
            getattr(torch, t.dtype)) for t in call.inputs]
        one = recorded(call.fn, call.target, fill(call.args, values), fill(dict(call.kwargs), values))
        for mesh in (Mesh.parse("a=3"), Mesh.parse("a=2,b=2")):
            for chosen in options(one.saying(((TRIED, found.text),)).op, one.graph, mesh):
                assert check(one, chosen, mesh) == (), f"{call.target}: {found.text}"
        right.add(call.target)
    assert len(right) >= 30


def unruled_calls() -> Iterator[Call]:
    """A call of each differentiable operator of the database that is captured and has no rule."""
    met = set[str]()
    for operator in op_sweep._operators().values():
        with suppress(Exception):  # samples of some fail, and some are refused
            module = op_sweep._middle(operator)
            assert module is not None
            captured = capture(module, module.samples)
            nodes = {node.name: node for node in captured.program.graph.nodes}
            for op in captured.graph.ops:
                if not has_rule(op) and op.target not in met:
                    met.add(op.target)
                    yield tried_rules._call(op, nodes[op.name], captured.graph)
