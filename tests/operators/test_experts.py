"""A mixture of experts: what one device computes, against transformers' own loops, and what is planned for it."""

from typing import Any

import pytest
import torch
from held import moved
from op_cases import EXPERTS, OF_GPT_OSS, f, positive, routed
from torch import Tensor

from autoddl.core.errors import InputError
from autoddl.core.graph import Graph, Op
from autoddl.core.layout import Mesh
from autoddl.operators.expert_sizes import expert_sizes, with_expert_load
from autoddl.operators.gate_expressions import calls, gate_passes, kept
from autoddl.operators.kernels.custom_ops import experts
from autoddl.operators.kernels.gates import apply_gate
from autoddl.operators.rules.table import options
from autoddl.operators.trials.cases import case
from autoddl.operators.work import work


def one_by_one(x: Tensor, chosen: Tensor, shares: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None = None,
               down_bias: Tensor | None = None, **how: Any) -> Tensor:
    """Every token times the matrices of every expert, of which the chosen ones count."""
    weight, lower = (w if how.get("transposed") else w.transpose(1, 2) for w in (up, down))
    u = torch.einsum("tk,ekn->ten", x, weight) + (0 if up_bias is None else up_bias)
    halves = (u,) if how.get("halves") == 1 else (u[..., ::2], u[..., 1::2]) if how.get("paired") else u.chunk(2, -1)
    y = torch.einsum("tei,eio->teo", apply_gate(how.get("gate", "mul(silu(a), b)"), *halves), lower)
    y = y + (0 if down_bias is None else down_bias)
    return (shares.unsqueeze(-1) * y.gather(1, chosen.unsqueeze(-1).expand(-1, -1, y.shape[-1]))).sum(1)


@pytest.mark.parametrize("one", EXPERTS, ids=str)
def test_sorted_rows_are_what_every_expert_of_every_token_makes(one: Any) -> None:
    found = []
    for call in (experts, one_by_one):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in one.values]
        y = call(*leaves, **one.kwargs)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        found.append([y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
    assert len(found[0]) == len(one.values)


def test_experts_that_nobody_chose_have_a_gradient_of_zero() -> None:
    up, down = f(4, 6, 4).requires_grad_(), f(4, 4, 3).requires_grad_()
    experts(f(6, 4), routed(6, 4, 2, skewed=True), positive(6, 2), up, down).sum().backward()
    for weight in (up, down):
        assert weight.grad is not None and not weight.grad[-1].any() and weight.grad[0].any()


def test_half_precision_adds_up_in_float32() -> None:
    x, chosen, shares, up, down = f(6, 8), routed(6, 4), positive(6, 2), f(4, 10, 8), f(4, 7, 5)
    low = [t.bfloat16() for t in (x, shares, up, down)]
    found = experts(low[0], chosen, low[1], low[2], low[3])
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), experts(x, chosen, shares, up, down), rtol=0.1, atol=0.5)


@pytest.mark.parametrize(("text", "says"), [
    ("mul(silu(a), ", "is no function of a and b"), ("sum(a)", "elementwise operators"),
    ("mul(a, c)", "'c' is no function"), ("a.exp()", "elementwise operators")])
def test_a_text_that_is_no_gate_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        apply_gate(text, torch.ones(2), torch.ones(2))


def test_equal_calls_run_once_and_backward_keeps_what_it_reads() -> None:
    assert calls("mul(silu(a), b)") == ("silu(a)", "mul(silu(a), b)") and kept("mul(silu(a), b)") == {"silu(a)"}
    assert len(calls(OF_GPT_OSS)) == 7 and len(kept(OF_GPT_OSS)) == 4


SMALL = ("aten.mm", "aten.sort", "aten.new_zeros", "aten.sub", "aten.floor_divide")
"""Products, and what is whole numbers; zeros that only a CPU's products need."""


@pytest.mark.parametrize(("dtypes", "how"), [
    ("float32 bfloat16 float32", {}), ("bfloat16 bfloat16 bfloat16", {}), ("float32 float32 float32", {}),
    ("bfloat16 bfloat16 bfloat16", {"gate": OF_GPT_OSS, "paired": True})], ids=str)
def test_kernels_beside_the_products_move_what_is_counted(dtypes: str, how: dict[str, Any]) -> None:
    x, share, weight = (getattr(torch, name) for name in (dtypes.split()[0], dtypes.split()[2], dtypes.split()[1]))
    values = [f(64, 256).to(x), routed(64, 4), positive(64, 2).to(share), f(4, 1024, 256).to(weight),
              f(4, 256, 512).to(weight), *((f(4, 1024).to(weight), f(4, 256).to(weight)) if how else ())]
    one = case("autoddl.experts", *values, **how)
    flows = frozenset(t for t in (*one.op.inputs, *one.op.outputs) if one.graph.tensors[t].is_floating)
    counted = work(one.op, one.graph, tuple(t.shape for t in one.inputs), tuple(t.shape for t in one.outputs), flows)
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in values]
    found = moved(lambda *given: experts(*given, **how), *inputs, without=SMALL)
    beside = [sum(one.nbytes for one in side if one.kind == "memory" and not one.weight) for side in counted]
    assert [total / values[0].numel() for total in beside] == pytest.approx(found, rel=0.1)


def test_a_gate_reads_its_inputs_and_writes_one_value_a_call() -> None:
    assert gate_passes("mul(silu(a), b)") == (2 + 3, 3 + 2 * 3)
    assert gate_passes("add(a, b)") == (3, 0) and gate_passes("mul(a, a)") == (3, 6 + 3)


def experts_of(graph: Graph) -> Op:
    return next(op for op in graph.ops if op.target == "autoddl.experts")


def test_rows_are_those_of_the_experts_that_are_here() -> None:
    one = case("autoddl.experts", f(8, 6), routed(8, 4), positive(8, 2), f(4, 16, 6), f(4, 6, 8), count=4)
    shapes = [tuple(t.shape) for t in one.values]
    assert expert_sizes(one.op, shapes).rows == 16
    shapes[3], shapes[4] = (1, 16, 6), (1, 6, 8)
    loaded, all_here = (experts_of(with_expert_load(one.graph, load)) for load in (1.5, 100.0))
    assert expert_sizes(one.op, shapes).rows == 4 and expert_sizes(loaded, shapes).rows == 6
    assert expert_sizes(all_here, shapes).rows == 16
    assert expert_sizes(one.op, shapes, sent=True).rows == 16


@pytest.mark.parametrize("split", ["t", "e", "i"])
def test_every_split_shares_the_products_out(split: str) -> None:
    one = case("autoddl.experts", f(8, 6), routed(8, 4), positive(8, 2), f(4, 16, 6), f(4, 6, 8), count=4)
    mesh = Mesh.parse("x=2")
    picked = next(o for o in options(one.op, one.graph, mesh) if o.signatures[0].split == split)
    flows = frozenset(t for t in (*one.op.inputs, *one.op.outputs) if one.graph.tensors[t].is_floating)
    whole = work(one.op, one.graph, tuple(t.shape for t in one.inputs), tuple(t.shape for t in one.outputs), flows)
    parts = [tuple(tuple(n // 2 if str(state) == f"S({d})" else n for d, n in enumerate(t.shape))
                   for t, (state,) in zip(tensors, layouts, strict=True))
             for tensors, layouts in ((one.inputs, picked.inputs), (one.outputs, picked.outputs))]
    here = work(one.op, one.graph, parts[0], parts[1], flows)
    flops = [[sum(kernel.flops for kernel in side) for side in sides] for sides in (whole, here)]
    assert flops[0][0] == 2 * 16 * (6 * 16 + 8 * 6) and flops[0][1] == 2 * flops[0][0]
    assert flops[1] == [flops[0][0] / 2, flops[0][1] / 2]
