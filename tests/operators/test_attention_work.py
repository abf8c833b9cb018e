"""The kernels of attention that is written out, against what PyTorch's lines of it move and multiply."""

import pytest
import torch
from held import moved
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from autoddl.operators.trials.cases import case
from autoddl.operators.work import work


@pytest.mark.parametrize(("dtype", "computed"), [(torch.bfloat16, "float32"), (torch.float32, "")])
def test_attention_whose_mask_gets_a_gradient_is_written_out_in_float32(dtype: torch.dtype, computed: str) -> None:
    shapes = ((4, 2, 48, 32), (4, 2, 64, 32), (4, 2, 64, 32), (1, 2, 48, 64))
    values = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    one = case("aten.scaled_dot_product_attention.default", *values)
    written = work(one.op, one.graph, shapes, (shapes[0],), frozenset((*one.op.inputs, *one.op.outputs)))
    found = moved(lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, attn_mask=mask), *values)
    assert [sum(kernel.nbytes for kernel in side) / values[0].numel() for side in written] == pytest.approx(found,
                                                                                                          rel=0.15)
    products = [[kernel for kernel in side if kernel.flops] for side in written]
    assert [len(side) for side in products] == [2, 4]
    assert {kernel.dtype for side in products for kernel in side} == {computed}
    assert [sum(kernel.flops for kernel in side) for side in products] == [4 * 4 * 2 * 48 * 64 * 32,
                                                                          8 * 4 * 2 * 48 * 64 * 32]
    fused = work(one.op, one.graph, shapes, (shapes[0],), frozenset((*one.op.inputs[:3], *one.op.outputs)))
    assert [kernel.kind for side in fused for kernel in side] == ["attention", "attention backward"]


@pytest.mark.parametrize(("keys", "values"), [(32, 32), (48, 32), (32, 64)])
def test_attention_has_the_flops_of_both_widths(keys: int, values: int) -> None:
    q, k, v, out = (4, 2, 64, keys), (4, 2, 96, keys), (4, 2, 96, values), (4, 2, 64, values)
    tensors = [torch.randn(shape).requires_grad_() for shape in (q, k, v)]
    one = case("aten.scaled_dot_product_attention.default", *tensors)
    (forward,), (backward,) = work(one.op, one.graph, (q, k, v), (out,), frozenset((*one.op.inputs, *one.op.outputs)))
    assert forward.flops == sdpa_flop_count(q, k, v)
    assert backward.flops == sdpa_backward_flop_count(out, q, k, v)
    assert forward.shape == (8, 64, 96, (keys + values) // 2, 0)
