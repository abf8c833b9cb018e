"""A call of an autograd Function is one operator with its own backward; what a graph would not show is refused."""

import re
from collections.abc import Callable
from typing import Any

import own_functions
import pytest
import torch
from own_functions import Power
from torch import Tensor, nn

from autoddl.capture.capture import capture
from autoddl.core.errors import CaptureError
from autoddl.core.graph import Op
from autoddl.core.precision import Precision
from autoddl.operators.own_facts import own_saves


def ops_of(model: nn.Module, sample: object, precision: str = "") -> list[Op]:
    captured = capture(model, sample, Precision.parse(precision)) if precision else capture(model, sample)
    return [op for op in captured.graph.ops if op.target.startswith(("function.", "own."))]


@pytest.mark.parametrize("norm", [False, True])
def test_the_program_has_the_gradients_of_the_module(norm: bool) -> None:
    model, x = own_functions.own(norm)
    captured = capture(model, x)
    own = {**dict(model.named_parameters()), **{n: b.clone() for n, b in model.named_buffers()}}
    leaves = [own.get(t.fqn, x) for t in captured.graph.tensors if t.kind.name in ("PARAMETER", "BUFFER", "INPUT")]
    parameters = list(model.parameters())
    found = torch.autograd.grad(captured.program(*leaves)[0], parameters, allow_unused=True)
    for ours, theirs in zip(found, torch.autograd.grad(model(x), parameters, allow_unused=True), strict=True):
        assert (ours is None) == (theirs is None)
        torch.testing.assert_close(ours, theirs)


def test_a_call_is_named_with_its_arguments_and_what_it_keeps() -> None:
    scaled, shifted, power, cubed = ops_of(*own_functions.own())
    assert [op.target for op in (scaled, shifted, power)] == ["function.Scaled", "function.Shifted", "function.Power"]
    assert scaled.slots == ("x", "w") and len(scaled.outputs) == 3 and scaled.arg("scale") == 2.0
    assert re.match(r".*own_functions\.py:\d+$", scaled.source)
    assert (power.arg("p"), cubed.arg("p")) == (2, 3)
    kept = [own_saves(op) for op in (scaled, shifted, power)]
    assert [found.inputs for found in kept if found] == [(0, 1), (), (0, 1)]


def test_gradients_flow_where_the_function_says() -> None:
    model, x = own_functions.own()
    graph = capture(model, x).graph
    flows = {graph.tensors[t].fqn for t in graph.differentiable()}
    assert {"first.weight", "weight", "bias"} <= flows
    assert not {"last.weight", "last.bias"} & flows  # Power has no gradient for what they make


def test_mixed_precision_gives_a_function_what_autocast_would() -> None:
    model, x = own_functions.own()
    graph = capture(model, x, Precision.parse("bf16-mixed")).graph
    op = next(op for op in graph.ops if op.target == "function.Scaled")
    assert [graph.tensors[t].dtype for t in (*op.inputs, op.outputs[0])] == ["bfloat16", "float32", "float32"]
    with pytest.raises(CaptureError, match=r"function_Odd at .*test_own_backward.py:\d+ fails on bfloat16, float32"):
        capture(Called(lambda model, h: function(alike, lambda ctx, g: (g, g)).apply(h, model.layer.weight)),
                x[:4, :4], Precision.parse("bf16-mixed"))


class Called(nn.Module):
    """h is a layer's output."""

    def __init__(self, call: "Callable[[Called, Tensor], Tensor]") -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.call(self, self.layer(x)).square().mean()
        return loss


def function(forward: Callable[..., Any], backward: Callable[..., Any] = lambda ctx, g: (g, None)) -> Any:
    return type("Odd", (torch.autograd.Function,), {"forward": staticmethod(forward),
                                                    "backward": staticmethod(backward)})


def alike(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
    if x.dtype != y.dtype:
        raise TypeError("wants one dtype")
    return x + y


def around(model: Called, h: Tensor) -> Tensor:
    found: Tensor = function(lambda ctx, x: model.layer(x)).apply(h)
    return found


def cast(model: Called, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found: Tensor = Power.apply(h, h)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize(("call", "says"), [
    (lambda model, h: function(lambda ctx, x: x * torch.rand_like(x)).apply(h), "draws random numbers"),
    (lambda model, h: function(lambda ctx, x: x.mul_(2)).apply(h.clone()), r"x\.clone\(\)"),
    (lambda model, h: function(lambda ctx, x: x.numpy()).apply(h), "its forward fails on tensors without values"),
    (lambda model, h: function(lambda ctx, x: 2 * x, lambda ctx, g: g * g.max().item()).apply(h), "its backward fails"),
    (lambda model, h: function(lambda ctx, x, layer: layer(x)).apply(h, model.layer), "not those of its forward"),
    (lambda model, h: function(lambda ctx, x, layer: layer(x).numpy()).apply(h, model.layer), "cannot be tried"),
    (lambda model, h: function(lambda ctx, x, more: x).apply(h, object()), "takes a object"),
    (lambda model, h: function(lambda ctx, x, more: x + more[0]).apply(h, [h]), "takes a list"),
    (lambda model, h: h + function(lambda ctx, x: 3).apply(h), "returns no tensor"),
    (around, "from around its class"), (cast, "in a region of autocast")])
def test_what_a_graph_does_not_show_is_refused(call: Any, says: str) -> None:
    with pytest.raises(CaptureError, match=says) as caught:
        capture(Called(call), torch.randn(4, 4))
    assert "test_own_backward.py:" in str(caught.value) and "\n" not in str(caught.value)


def test_reversible_layers_are_their_forward_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = own_functions.stack()
    captured = capture(model, x)
    parameters = list(model.parameters())
    loss = captured.program(*parameters, x)[0]
    found = torch.autograd.grad(loss, parameters)
    model(x).backward()
    assert torch.equal(loss, model(x))
    for ours, theirs in zip(found, parameters, strict=True):
        torch.testing.assert_close(ours, theirs.grad)
    monkeypatch.setattr(own_functions.Reversible, "strength", 1.1)
    for scale in (0.5, 1e-4):  # with the second, layers have next to no gradient
        monkeypatch.setattr(model, "scale", scale)
        with pytest.raises(CaptureError, match="runs modules again, and its gradients are not those of its forward"):
            capture(model, x)


def test_an_operator_of_a_library_keeps_its_own_backward() -> None:
    with torch.library._scoped_library("own", "FRAGMENT"):
        twice = torch.library.custom_op("own::twice", lambda x, s: x * s, mutates_args=(),
                                        schema="(Tensor x, float s) -> Tensor")
        twice.register_fake(lambda x, s: torch.empty_like(x))
        twice.register_autograd(lambda ctx, g: (3 * g, None), setup_context=lambda ctx, inputs, output: None)
        model, x = Called(lambda model, h: twice(h, 2.0)), torch.randn(4, 4)
        captured = capture(model, x)
        (op,) = [op for op in captured.graph.ops if op.target == "own.twice.default"]
        assert op.slots == ("x",) and op.arg("s") == 2.0
        found = torch.autograd.grad(captured.program(*model.parameters(), x)[0], list(model.parameters()))
        torch.testing.assert_close(found, torch.autograd.grad(model(x), list(model.parameters())))


def test_an_operator_of_a_library_that_writes_is_refused() -> None:
    with torch.library._scoped_library("own", "FRAGMENT"):
        double = torch.library.custom_op("own::double_", lambda x: None, mutates_args=("x",),
                                         schema="(Tensor(a!) x) -> ()")
        model = Called(lambda model, h: [y := h.clone(), double(y)][0])
        with pytest.raises(CaptureError, match=r"own.double_.default at .* writes into its arguments"):
            capture(model, torch.randn(4, 4))


def test_the_activation_of_bloom_is_one_operator() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2, use_cache=False)
    ids = torch.randint(32, (2, 4))
    (op,) = ops_of(transformers.BloomForCausalLM(config), {"input_ids": ids, "labels": ids})
    assert op.target == "function.GeLUFunction"


def test_outside_of_a_trace_functions_are_untouched() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    capture(*own_functions.own())
    (found,) = torch.autograd.grad(Power.apply(x, y).sum(), x)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, 2 * x.detach() * y)
