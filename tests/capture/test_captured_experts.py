"""Experts of transformers become one operator each, which computes what the library does by default and in a loop."""

import sys
from typing import Any

import pytest
import torch
import zoo
from sampling import parametrize_or_slow
from torch import Tensor, nn
from torch.nn import functional as F

from autoddl.capture.capture import Captured, capture
from autoddl.capture.materialize import arguments
from autoddl.capture.rewrites.gate_text import gate_text
from autoddl.capture.sample import Sample
from autoddl.core.errors import CaptureError


def experts_of(captured: Captured) -> list[dict[str, Any]]:
    return [dict(op.args) for op in captured.graph.ops if op.target == "autoddl.experts"]


def gradients(loss: Tensor, module: nn.Module) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None} | {
        "loss": loss.detach()}


@parametrize_or_slow("family,how", [("DeepseekV3", "grouped_mm"), ("GptOss", "grouped_mm"), ("Mixtral", "eager")], [
    (family, how) for family in zoo.ROUTED for how in ("grouped_mm", "eager")])
def test_the_program_computes_what_the_library_does(family: str, how: str) -> None:
    module, sample = zoo.routed(family, layers=1, B=2, T=8, experts_implementation=how)
    captured = capture(module, sample)
    (found,) = experts_of(captured)
    assert found["count"] == (8 if "Deepseek" in family else 4) and found["paired"] == (family == "GptOss")
    truth = gradients(module(**sample.kwargs), module)
    mine = gradients(captured.program(*arguments(module, sample, captured))[0], module)
    assert mine.keys() == truth.keys() and any("experts" in name for name in mine)
    for name, one in truth.items():
        torch.testing.assert_close(mine[name], one, rtol=1e-4, atol=1e-6)


def test_experts_with_a_capacity_drop_what_the_library_drops() -> None:
    module, sample = zoo.switch(layers=1, B=2, T=8, capacity=2)
    kept = list[Tensor]()
    router = module.get_submodule("model.encoder.block.0.layer.1.mlp.router")
    router.register_forward_hook(lambda part, given, out: kept.append(out[0]))
    captured = capture(module, sample)
    assert len(experts_of(captured)) == 2 and len(kept) == 1
    truth = gradients(module(**sample.kwargs), module)
    assert 0 < kept[1].sum() < 16, "some tokens are dropped"
    mine = gradients(captured.program(*arguments(module, sample, captured))[0], module)
    assert any("expert_3.wi" in name for name in mine)
    for name, one in mine.items():
        torch.testing.assert_close(one, truth.get(name, torch.zeros_like(one)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("named", "says"), [
    ({"dropout_rate": 0.1}, "drop 10% of the values between their products"),
    ({"router_dtype": "bfloat16"}, "a router computes in torch.bfloat16 and turns its weights, in torch.float32")])
def test_experts_with_a_capacity_that_are_not_planned_for_say_why(named: dict[str, Any], says: str) -> None:
    module, sample = zoo.switch(layers=1, B=2, T=8, **named)
    with pytest.raises(CaptureError, match=says):
        capture(module, sample)


def test_a_copy_of_a_matrix_for_every_token_stays_where_a_model_asks_for_it() -> None:
    assert not experts_of(capture(*zoo.mixture(layers=1)))


def without_text(self: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate.softmax(-1) * up


def test_experts_whose_gate_is_not_elementwise_run_as_a_matrix_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    module, sample = zoo.routed(layers=1, B=2, T=8)
    monkeypatch.setattr(sys.modules["transformers.models.mixtral.modeling_mixtral"].MixtralExperts, "_apply_gate",
                        without_text)
    captured = capture(module, sample)
    assert not experts_of(captured)
    mine = captured.program(*arguments(module, sample, captured))[0]
    torch.testing.assert_close(mine, module(**sample.kwargs))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(("function", "inputs", "text"), [
    (lambda x: F.silu(x[..., ::2]) * x[..., 1::2], 2, "mul(silu(a), b)"),
    (lambda x: x.chunk(2, -1)[1].clamp(max=-2.5) + 1, 2, "add(clamp(b, None, -2.5), 1)"),
    (lambda x: F.gelu(x, approximate="tanh"), 1, "gelu(a, approximate='tanh')"),
    (lambda x: F.relu(x).square(), 1, "pow(relu(a), 2)"),
    (lambda x: x.softmax(-1), 1, None), (lambda x: x.view(3), 1, None), (lambda x: x + torch.inf, 1, None),
    (Scaled(), 1, None), (lambda x: x, 2, None)])
def test_a_gate_has_a_text_if_it_works_on_single_elements(function: Any, inputs: int, text: str | None) -> None:
    assert gate_text(function, inputs) == text


def test_a_mixture_on_the_meta_device_is_captured() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with torch.device("meta"):
        model = zoo.Loss(Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, num_experts=128)).bfloat16())
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    graph = capture(model, Sample((), {"input_ids": ids, "labels": ids})).graph
    (op,) = (op for op in graph.ops if op.target == "autoddl.experts")
    assert graph.tensors[op.inputs[0]].shape == (4096, 2048) and graph.tensors[op.inputs[3]].shape[0] == 128


class Sorted(nn.Module):
    """A user's own mixture: one expert a token, rows sorted by expert, and grouped products of torch or a library."""

    def __init__(self, product: Any) -> None:
        super().__init__()
        self.product, self.router = product, nn.Linear(16, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 16, 32)), nn.Parameter(torch.randn(4, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort()
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).int()
        y = self.product(self.product(x[order], self.up, ends).relu(), self.down, ends)
        loss: Tensor = (torch.zeros_like(x).index_copy(0, order, y) * shares.unsqueeze(1)).square().mean()
        return loss


def of_torch(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    found: Tensor = F.grouped_mm(rows, weight, offs=ends)
    return found


def of_transformers(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    import transformers.integrations.moe  # noqa: F401

    found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return found


@pytest.mark.parametrize(("product", "dtype"), [(of_torch, torch.bfloat16), (of_transformers, torch.float32)])
def test_grouped_products_of_a_user_are_operators_too(product: Any, dtype: torch.dtype) -> None:
    """torch traces its own in bfloat16 alone."""
    torch.manual_seed(0)
    module, x = Sorted(product).to(dtype), torch.randn(32, 16, dtype=dtype)
    captured = capture(module, (x,))
    assert [op.target for op in captured.graph.ops].count("autoddl.grouped_mm") == 2
    truth = gradients(module(x), module)
    mine = gradients(captured.program(*arguments(module, Sample((x,)), captured))[0], module)
    near = 1e-4 if dtype is torch.float32 else 0.05
    for name, one in truth.items():
        torch.testing.assert_close(mine[name], one, rtol=near, atol=near * float(one.abs().max()))
