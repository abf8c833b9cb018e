"""Every signature of every rule, on pieces of one process against the whole call, forward and backward, in float64.

The table of rules is enumerated: a target without cases, or with rules that no case reaches, fails here.
"""

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import op_cases
import op_cases_images
import op_cases_shape
import op_cases_spectra
import pytest
import torch
from sampling import parametrize_or_slow
from torch.nn import functional as F

from autoddl.core.graph import Op
from autoddl.core.layout import B, Layout, Mesh, P, Split, State
from autoddl.core.layout_codes import decode_layout, dual_codes, encode_layout
from autoddl.operators.kernels.reducing import _BatchNorm, _GroupNorm, batch_norm_of_module
from autoddl.operators.kernels.site import Reduce
from autoddl.operators.rules.dimension_strings import Rule, Signature, signatures
from autoddl.operators.rules.nn import inner_collectives
from autoddl.operators.rules.table import RULES, Option, options
from autoddl.operators.trials.cases import Case, case
from autoddl.operators.trials.trial import _Threads, check, option

CASES: list[Case] = [*op_cases.CASES, *op_cases_images.CASES, *op_cases_spectra.CASES,
                     *(case(t, *args, **kwargs) for t, args, kwargs in op_cases_shape.CASES)]
OF_TARGET: dict[str, list[Case]] = {}
for one in CASES:
    OF_TARGET.setdefault(one.op.target, []).append(one)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def every(mesh: str, limit: int | None = None, step: int = 1) -> Iterator[tuple[Case, Option, Mesh]]:
    """Options of every case, or every `step`-th, on a mesh; of each at most `limit`, drawn with a fixed seed."""
    grid, draw = Mesh.parse(mesh), random.Random(0)
    for one in CASES[::step]:
        found = list(options(one.op, one.graph, grid))
        for picked in found if limit is None or len(found) <= limit else draw.sample(found, limit):
            yield one, picked, grid


def wrong(picks: Iterator[tuple[Case, Option, Mesh]]) -> list[str]:
    return [message for one, picked, mesh in picks for message in check(one, picked, mesh)]


def test_every_rule_has_two_cases() -> None:
    assert sorted(set(RULES) - set(OF_TARGET)) == []
    assert [target for target in RULES if len(OF_TARGET[target]) < 2] == []


@parametrize_or_slow("mesh", ["x=2"], ["x=3"])
def test_every_signature_is_right(mesh: str) -> None:
    assert wrong(every(mesh)) == []


@parametrize_or_slow("mesh,limit,step", [("x=2,y=3", 1, 3)], [("x=2,y=3", 2, 1), ("x=2,y=2", 2, 1)])
def test_products_of_signatures_are_right(mesh: str, limit: int, step: int) -> None:
    assert wrong(every(mesh, limit, step)) == []


def test_uneven_pieces_were_among_them() -> None:
    uneven = Counter(one.op.target for one, picked, _ in every("x=2") for entry, layout in zip(
        one.inputs, picked.inputs, strict=True) for s in layout if isinstance(s, Split) and entry.shape[s.dim] % 2)
    assert len(uneven) > 0.5 * len(RULES)


LINEAR = case("aten.linear.default", op_cases.f(5, 6), op_cases.f(7, 6))
SOFTMAX = case("aten.softmax.int", op_cases.f(5, 6), -1)


@pytest.mark.parametrize(("one", "inputs", "output"), [
    (LINEAR, (Split(1), Split(1)), B),       # a sum that nobody takes
    (LINEAR, (B, B), P),                     # twice the output
    (LINEAR, (P, P), P),                     # not linear in both at once
    (LINEAR, (Split(0), B), B),              # half the rows
    (SOFTMAX, (Split(1),), Split(1)),        # along the normalised dim
    (SOFTMAX, (P,), P),                      # not linear
])
def test_a_wrong_signature_is_caught(one: Case, inputs: tuple[State, ...], output: State) -> None:
    assert check(one, Signature(inputs, (output,)), Mesh.parse("x=2"))


def test_a_wrong_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoddl.operators.trials.trial.gradient", lambda picked, k: Layout((B,)))
    assert any("gradient of input 1" in message for message in check(
        LINEAR, Signature((Split(0), B), (Split(0),)), Mesh.parse("x=2")))


def test_wrong_shapes_are_caught_before_native_code_runs() -> None:
    one = case("aten._native_batch_norm_legit_no_training.default", op_cases.f(4, 6), op_cases.f(6), op_cases.f(6),
               op_cases.f(6), op_cases.positive(6), 0.1, 1e-5)
    assert check(one, Signature((Split(1), B, B, B, B), (Split(1), B, B)), Mesh.parse("x=2"))


def test_gradients_and_duals() -> None:
    column = option(Signature((B, Split(0)), (Split(1),)))
    assert column.gradients == (Layout((P,)), Layout((Split(0),)))
    (wanted,) = dual_codes(np.array([encode_layout(Layout((Split(1), B, P)))]), 3).tolist()
    assert decode_layout(wanted, 3) == Layout((Split(1), B, B))
    whole = option(Signature((B, B), (B,)))
    assert whole.gradients[0] == Layout((B,))
    assert option(Signature((P, B), (P,))).gradients[0] == Layout((B,))


def test_an_operator_without_a_rule_is_whole() -> None:
    op = Op("op", "aten.unheard_of.default", (0, 1), ("self", "other"), (2,))
    (only,) = options(op, LINEAR.graph, Mesh.parse("x=2,y=2"))
    assert only.signatures == (Signature((B, B), (B,)),) * 2


def test_options_leave_nobody_empty_and_nothing_uneven_that_must_be_even() -> None:
    heads = case("aten.reshape.default", op_cases.f(2, 12), [2, 6, 2])
    assert not any("S(1)" in str(o) for o in options(heads.op, heads.graph, Mesh.parse("x=4")))
    rows = [str(o.inputs[0]) for o in options(LINEAR.op, LINEAR.graph, Mesh.parse("x=2,y=3"))]
    assert "S(0) S(0)" not in rows and "S(1) S(1)" in rows


def test_three_axes_of_a_matrix_product() -> None:
    big = case("aten.mm.default", op_cases.f(8, 8), op_cases.f(8, 8))
    assert len(options(big.op, big.graph, Mesh.parse("x=2,y=2,z=2"))) == 6**3


@pytest.mark.parametrize("target", ["autoddl.token_loss", "aten._native_batch_norm_legit_functional.default"])
def test_kernels_issue_the_reductions_that_are_priced(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[tuple[tuple[int, ...], int]] = []
    original = _Threads.reduce

    def recording(threads: _Threads, at: tuple[int, ...]) -> Reduce:
        reduce = original(threads, at)

        def record(value: torch.Tensor, kind: str, axes: tuple[int, ...]) -> torch.Tensor:
            if not any(at):
                issued.append((axes, value.nbytes))
            return reduce(value, kind, axes)
        return record

    monkeypatch.setattr(_Threads, "reduce", recording)
    for one, mesh in ((one, Mesh.parse(text)) for one in OF_TARGET[target] for text in ("x=2", "x=2,y=2")):
        for picked in (o for o in options(one.op, one.graph, mesh) if o.inner):
            issued.clear()
            assert check(one, picked, mesh) == ()
            priced = inner_collectives(one.op, one.graph, picked.inputs, picked.inner, mesh, (0,) * len(mesh.axes))
            assert issued == [(axes, nbytes) for _, _, axes, nbytes in priced]


def test_batch_norm_as_a_module_calls_it_is_the_functional_one() -> None:
    x, weight, bias = torch.randn(4, 6, 5), torch.randn(6), torch.randn(6)
    mean, variance, found = torch.randn(6), torch.rand(6), []
    calls: tuple[Any, ...] = (torch.ops.aten._native_batch_norm_legit_functional.default, batch_norm_of_module)
    for call in calls:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        outputs: Any = call(*leaves, mean, variance, True, 0.1, 1e-5)
        outputs[0].square().sum().backward()
        found.append([outputs[0], outputs[3], outputs[4], *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*found)


def test_batch_norm_of_far_values_keeps_float32_precision() -> None:
    x = (op_cases.f(6, 5, 4) + 1000).float()
    one = case("aten._native_batch_norm_legit_functional.default", x, torch.ones(5), torch.zeros(5), torch.zeros(5),
               torch.ones(5), True, 0.1, 1e-5)
    inner = next(o for o in options(one.op, one.graph, Mesh.parse("x=3")) if o.inner)
    assert check(one, inner, Mesh.parse("x=3"), tolerance=1e-3) == ()


@pytest.mark.parametrize("groups", [0, 2])
def test_norms_of_pieces_are_those_of_torch_and_their_gradients_have_the_dtypes_of_their_vectors(groups: int) -> None:
    alone = SimpleNamespace(option=SimpleNamespace(inner=((0,),)), reduce=lambda x, *_: x)
    x, weight, bias = torch.randn(3, 6, 5), torch.randn(6).bfloat16(), torch.randn(6).bfloat16()
    leaves, known = ([t.clone().requires_grad_() for t in (x, weight, bias)] for _ in range(2))
    norm, sizes = (_GroupNorm, (groups, 15)) if groups else (_BatchNorm, (15,))
    found: Any = norm.apply(*leaves, alone, *sizes, 1e-5)  # type: ignore[no-untyped-call]
    made = found if groups else found[0]
    vectors = known[1].float(), known[2].float()
    whole = F.group_norm(known[0], groups, *vectors) if groups else F.batch_norm(known[0], None, None, *vectors, True)
    torch.testing.assert_close(made, whole)
    upstream = torch.randn_like(whole)
    whole.backward(upstream)
    for gradient, leaf in zip(made.grad_fn.apply(upstream)[:3], known, strict=True):
        torch.testing.assert_close(gradient, leaf.grad)


def test_vocabulary_loss_of_half_precision_logits_is_summed_in_float32() -> None:
    one = case("autoddl.token_loss", op_cases.f(6, 8).bfloat16(), op_cases.labels(8, 6))
    inner = next(o for o in options(one.op, one.graph, Mesh.parse("x=2")) if o.inner)
    assert one.outputs[0].dtype == "float32"
    assert check(one, inner, Mesh.parse("x=2"), tolerance=2e-2) == ()


def test_rules_are_strings_or_rules() -> None:
    for one in CASES:
        rule = RULES[one.op.target](one.op, one.inputs, one.outputs)
        text = rule.text if isinstance(rule, Rule) else rule
        assert signatures(text, tuple(t.shape for t in (*one.inputs, *one.outputs)))
