"""FlexAttention: the kernel against torch's own and against attention written out, its texts, and what is priced."""

from typing import Any

import flexible
import pytest
import torch
from shell import LAPTOP
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import autoddl
from autoddl.capture.capture import Captured, capture
from autoddl.core.errors import CaptureError, InputError
from autoddl.core.graph import Op
from autoddl.core.precision import Precision
from autoddl.operators.flexible import FLEXIBLE, seen_share
from autoddl.operators.kernels import custom_ops
from autoddl.operators.work import work


class Calls(nn.Module):
    """FlexAttention of one projection, with what `call` gives it."""

    def __init__(self, call: Any, width: int = 8) -> None:
        super().__init__()
        self.projection, self.call = nn.Linear(width, width), call

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        y = self.projection(x).unflatten(-1, (2, -1)).transpose(1, 2)
        found: Tensor = self.call(y, numbers)
        return found.square().mean()


def captured(call: Any, length: int = 24, numbers: Tensor | None = None) -> Captured:
    of_tokens = torch.arange(length).div(7, rounding_mode="floor").expand(2, length) if numbers is None else numbers
    return capture(Calls(call), (torch.zeros(2, length, 8), of_tokens))


def flexible_op(found: Captured) -> Op:
    return next(op for op in found.graph.ops if op.target == FLEXIBLE)


def masked(mask: Any) -> Any:
    """A call with a mask that may read the numbers of tokens."""
    def call(y: Tensor, numbers: Tensor) -> Any:
        n = y.shape[2]
        return flex_attention(y, y, y, block_mask=create_block_mask(mask(numbers), 2, None, n, n, device=y.device))
    return call


def test_the_kernel_is_attention_written_out_also_for_queries_that_see_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 4, dtype=torch.float64, generator=generator, requires_grad=True)
               for heads in (4, 2, 2))
    slopes, numbers = torch.rand(4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2])

    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i > j) & (numbers[i] == numbers[j])

    def score(s: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * torch.tanh(s / 2) - slopes[h] * (i - j)

    out, lse = custom_ops.flex_attention(q, k, v, [slopes, numbers],
                                         "sub(mul(tanh(div(s, 2)), 2), mul(x0[h], sub(q, k)))",
                                         "bitwise_and(gt(q, k), eq(x1[q], x1[k]))", lse=True)
    i, j = torch.arange(9).view(-1, 1), torch.arange(9)
    scores = score(q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 2, torch.arange(4).view(-1, 1, 1), i, j)
    seen = create_mask(mask, 1, 1, 9, 9, "cpu")
    sums = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    shares = torch.where(seen, (scores - sums.masked_fill(sums.isinf(), 0.0).unsqueeze(-1)).exp(), 0.0)
    truth = shares @ v.repeat_interleave(2, 1)
    torch.testing.assert_close((out, lse), (truth, sums))
    weights = torch.randn(truth.shape, dtype=torch.float64, generator=generator)
    for found in (out, truth):
        total = (found * weights).sum() + (lse if found is out else sums).masked_fill(sums.isinf(), 0.0).square().sum()
        total.backward()
        if found is out:
            mine = [x.grad.clone() for x in (q, k, v, slopes) if x.grad is not None]
            q.grad = k.grad = v.grad = slopes.grad = None
    torch.testing.assert_close(mine, [x.grad for x in (q, k, v, slopes)])


@pytest.mark.parametrize("kind", ["documents", "biased", "outside"])
def test_a_captured_program_computes_what_the_module_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sample = flexible.model(kind, layers=2)
    found = capture(module, sample)
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.no_grad():
        module.requires_grad_(False)  # torch's own has no backward on a CPU
        truth = module(*sample)
        loss = found.program(*module.parameters(), *sample)[0]
    torch.testing.assert_close(loss, truth, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(("mask", "text"), [
    (lambda numbers: lambda b, h, q, k: q >= k, "ge(q, k)"),
    (lambda numbers: lambda b, h, q, k: (q - k).abs() <= 4, "le(abs(sub(q, k)), 4)"),
    (lambda numbers: lambda b, h, q, k: (q >= k) | (k < 3), "bitwise_or(ge(q, k), lt(k, 3))"),
    (lambda numbers: lambda b, h, q, k: numbers[b, q] == numbers[b][k], "eq(x0[b, q], x0[b, k])"),
    (lambda numbers: lambda b, h, q, k: numbers[0, q // 2] < k, "lt(x0[0, floor_divide(q, 2)], k)"),
    (lambda numbers: lambda b, h, q, k: torch.where(h == 0, q >= k, True), "where(eq(h, 0), ge(q, k), True)")])
def test_a_mask_is_written_as_text(mask: Any, text: str) -> None:
    assert flexible_op(captured(masked(mask))).arg("mask") == text


@pytest.mark.parametrize(("given", "text"), [
    ("", "le(k, q)"), ("padding", "bitwise_and(le(k, q), x0[b, k])"),
    ("positions", "bitwise_and(eq(x0[b, q], x0[b, k]), le(x1[b, k], x1[b, q]))")])
def test_transformers_masks_are_written_as_text(given: str, text: str) -> None:
    op = flexible_op(capture(*flexible.library(given)))
    assert op.arg("mask") == text and op.arg("score") == ""


@pytest.mark.parametrize(("call", "says"), [
    (masked(lambda numbers: lambda b, h, q, k: numbers.sum() > k), "mask_mod of flex_attention computes aten.sum"),
    (masked(lambda numbers: lambda b, h, q, k: q >= k if q > 3 else k >= q), "mask_mod of flex_attention cannot be"),
    (masked(lambda numbers: lambda b, h, q, k: numbers[q] == numbers[k]), "computes aten.eq.Tensor")])
def test_what_is_no_function_of_single_elements_is_refused_with_the_way_out(call: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=f"(?s)at .*test_flexible.py.*{says}.*x\\[b, q\\]"):
        captured(call)


def test_a_text_that_is_none_is_refused() -> None:
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(InputError, match="no function of s, b, h, q and k; write one like"):
        custom_ops.flex_attention(q, q, q, mask="__import__('os')")


def test_the_price_counts_the_blocks_that_the_mask_leaves() -> None:
    whole = flexible_op(captured(lambda y, numbers: flex_attention(y, y, y), 1024))
    causal = flexible_op(captured(masked(lambda numbers: lambda b, h, q, k: q >= k), 1024))
    near = flexible_op(captured(masked(lambda numbers: lambda b, h, q, k: (q >= k) & (q - k < 100)), 1024))
    numbers = torch.arange(1024).div(256, rounding_mode="floor").expand(2, 1024)
    packed = captured(masked(lambda numbers: lambda b, h, q, k: numbers[b, q] == numbers[b, k]), 1024, numbers)
    assert [seen_share(op, 1024, 1024) for op in (whole, causal, near, flexible_op(packed))] == [
        1.0, 36 / 64, 15 / 64, 1 / 4]
    assert seen_share(causal, 512, 1024) == (5 + 6 + 7 + 8) / 32  # the later half sees more
    of_packed, op = packed.graph, flexible_op(packed)
    shapes = [tuple(of_packed.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
    (forward,), _ = work(op, of_packed, shapes[0], shapes[1], of_packed.differentiable())
    assert forward.flops == 4 * 2 * 2 * 1024 * 1024 * 4 / 4


def test_what_the_sample_does_not_say_hides_nothing_and_is_no_part_of_the_model() -> None:
    both = masked(lambda numbers: lambda b, h, q, k: (q >= k) & (numbers[b, q] == numbers[b, k]))
    known, unknown = captured(both, 1024), captured(both, 1024, torch.zeros(2, 1024, dtype=torch.int64, device="meta"))
    assert seen_share(flexible_op(unknown), 1024, 1024) == 36 / 64 > seen_share(flexible_op(known), 1024, 1024)
    assert known.graph.fingerprint() == unknown.graph.fingerprint()


def test_keys_and_values_that_ranks_do_not_divide_go_round_no_ring() -> None:
    module, sample = flexible.model("documents", batch=4)
    short = tuple(x[:, :20] for x in sample)
    with pytest.raises(InputError, match=r"\(autoddl.flex_attention\) cannot go .* or under a mask of FlexAttention"):
        autoddl.plan(module, LAPTOP, short, mine="cp=4,ring")


def test_under_autocast_scores_read_tensors_as_they_are() -> None:
    module, sample = flexible.model("biased")
    made = capture(module, sample, Precision.parse("bf16-mixed")).graph
    op = next(op for op in made.ops if op.target == FLEXIBLE)
    assert [made.tensors[t].dtype for t in op.inputs] == ["bfloat16"] * 3 + ["float32"] * 2
    assert [made.tensors[t].dtype for t in op.outputs] == ["bfloat16"]
