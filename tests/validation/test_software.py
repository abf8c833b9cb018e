"""What programs do on the device besides the operators of a model, priced: copies, loops, windows, kernels that are not
there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoddl.capture.capture import capture
from autoddl.capture.sample import Sample
from autoddl.cost_models import elementwise_seconds
from autoddl.operators.work import base, work
from autoddl.validation import software
from autoddl.validation.clusters import cluster_of
from autoddl.validation.kernels import has_no_backward
from autoddl.validation.layer_seconds import layer_seconds
from autoddl.validation.layers import Shape
from autoddl.validation.memory import peak_bytes
from autoddl.validation.part import Part, PartSpec
from autoddl.validation.price_part import price_part
from autoddl.validation.run_parts import price_parts
from autoddl.validation.software import PROGRAMS, attention_slowdown, recomputation_of, software_of
from autoddl.validation.step import price_step
from autoddl.validation.validate import assume_recomputation

SHARDED = {"framework": "PyTorch FSDP", "dp": 8, "tp": 1, "zero_stage": 3, "vocab": 50368}


def test_fsdp_copies_what_it_gathers_and_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes per parameter and microbatch as its source says, at the pace of elementwise kernels."""
    for name, moved in (("PyTorch FSDP", 18), ("torchtitan", 4 + 4 + 6)):
        one = run(tmp_path, **SHARDED | {"framework": name})
        with monkeypatch.context() as patch:
            bare = replace(PROGRAMS[name], packed=0.0, unpacked=0.0)
            patch.setattr(software, "PROGRAMS", {name: bare})
            without = price_step(one, 2).seconds
        values = sum(part.values * (32 if kind == "layer" else 1) for kind, part in price_parts(one, 2).items())
        copied = 4 * elementwise_seconds(cluster_of(one).device, moved * values)
        assert price_step(one, 2).seconds - without == pytest.approx(copied, rel=0.05)


def test_padding_is_taken_out_around_attention(tmp_path: Path) -> None:
    """Of three tensors a read and a write, of one zeros, a read and a write; backward the other way round."""
    plain = run(tmp_path, **SHARDED)
    assert software_of(plain).unpads
    shape = Shape(4096, 32, 32, 16384, 51200, 4, 2048)
    padded, bare = (price_part(PartSpec("layer", shape, "dp=1", False, "", False, unpads=unpads), cluster_of(plain))
                    for unpads in (True, False))
    one = 4 * 2048 * 4096 * 2
    device = cluster_of(plain).device
    assert padded.forward - bare.forward == pytest.approx(elementwise_seconds(device, 9 * one))
    assert padded.backward - bare.backward == pytest.approx(elementwise_seconds(device, 11 * one))


def test_every_other_layer_sees_a_window(tmp_path: Path) -> None:
    slowdowns = [attention_slowdown(one, software_of(one)) for one in (
        run(tmp_path, model="GPT-OSS 20B", seq=seq, framework="Megatron-Bridge") for seq in (128, 4096, 131072))]
    assert slowdowns[0] == 1 and slowdowns == sorted(slowdowns, reverse=True)
    assert slowdowns[-1] == pytest.approx(0.5, abs=0.01)
    other = run(tmp_path, framework="Megatron-Bridge")
    assert attention_slowdown(other, software_of(other)) == 1


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear(x).unflatten(-1, (2, 64)).unbind(-2)
        y = x + torch.softmax(gate, -1) * torch.relu(up)
        return (y + self.linear.bias[:64]).sum()


def test_kernels_of_backward_are_those_that_there_are() -> None:
    """A sum of equals and halves need none; a softmax and a relu read what they wrote, the gradient, and write one."""
    graph = capture(_Block(), Sample((torch.zeros(32, 64),))).graph
    passing = [base(op) for op in graph.ops if has_no_backward(graph, op)]
    assert "aten.unbind" in passing and passing.count("aten.add") == 1
    read = 0
    for op in graph.ops:
        shapes = [tuple(graph.tensors[t].shape for t in ts) for ts in (op.inputs, op.outputs)]
        _, backward = work(op, graph, shapes[0], shapes[1], graph.differentiable())
        if base(op) in ("aten.softmax", "aten._softmax", "aten.relu"):
            assert [one.nbytes for one in backward] == [3 * 32 * 64 * 4]
            read += 1
    assert read == 2


def test_copies_of_tokens_are_sorted_by_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = run(tmp_path, framework="Megatron-Bridge", moe_experts=8, moe_topk=2, ep=8, dp=8, tp=1, gated_ffn=1)
    sorted_ = price_parts(mixed, 1)["layer"]
    price_part.cache_clear()
    monkeypatch.setattr("autoddl.validation.price_part.sorting_kernels", lambda *anything: Part())
    plain = price_parts(mixed, 1)["layer"]
    price_part.cache_clear()
    copies, device = 2.0 * 2048 * 2 * 4096, cluster_of(mixed).device
    assert sorted_.forward - plain.forward == pytest.approx(elementwise_seconds(device, 3.5 * copies))
    assert sorted_.backward - plain.backward == pytest.approx(elementwise_seconds(device, 2.5 * copies))


BIASED = {"framework": "Megatron-Bridge", "model": "GPT-OSS-120B", "moe_experts": 8, "moe_topk": 2, "ep": 4, "dp": 4,
          "pp": 2, "tp": 1, "gated_ffn": 1, "layers": 4, "hidden": 1024, "heads": 16, "head_dim": 64, "ffn": 512,
          "gpu_type": "H100-SXM5-80GB", "intra_link": "NVLink4", "precision": "bf16", "recompute": "recipe default",
          "microbatch": 1}
N, E, W, H = 2048 * 2, 2, 1024, 512
"""Rows sent to the experts of a rank, its experts, widths."""


class _Counted(TorchDispatchMode):
    """Kernels, and the values of two bytes that they move; views and new memory are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels, self.values = 0, 0.0

    def __torch_dispatch__(self, function: Callable[..., object], types: object, args: tuple[object, ...] = (),
                           kwargs: dict[str, object] | None = None) -> object:
        done = function(*args, **(kwargs or {}))
        if not any(name in str(function) for name in ("split", "slice", "view", "detach", "expand", "empty")):
            self.kernels += 1
            self.values += sum(t.numel() * t.element_size() / 2 for t in tree_leaves((args, kwargs, done))
                               if isinstance(t, Tensor))
        return done


def _counted(function: Callable[[], Tensor]) -> tuple[tuple[int, float], tuple[int, float]]:
    """Of forward and of backward."""
    with _Counted() as there:
        done = function()
    gradient = torch.empty_like(done)
    with _Counted() as back:
        done.backward(gradient)
    return (there.kernels, there.values), (back.kernels, back.values)


def _clamped() -> Tensor:
    gate, up = torch.empty(N, 2 * H, dtype=torch.bfloat16, device="meta", requires_grad=True).chunk(2, -1)
    return torch.cat((gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)), -1)


def _added() -> Tensor:
    rows, weights = (torch.empty(N, width, dtype=torch.bfloat16, device="meta", requires_grad=True).split(N // E)
                     for width in (W, 1))
    biases = [torch.empty(W, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(E)]
    return torch.cat([row + bias * weight for row, bias, weight in zip(rows, biases, weights, strict=True)])


def test_biases_of_experts_and_clamps_are_kernels_of_their_own(tmp_path: Path) -> None:
    """As many as the operators dispatch, by the bytes that they read and write, and each with its launch."""
    one = run(tmp_path, **BIASED)
    with_ = price_parts(one, 1)["layer"]
    without = price_parts(run(tmp_path, **BIASED | {"expert_biases": 0}), 1)["layer"]
    (clamp, clamp_back), (bias, bias_back) = _counted(_clamped), _counted(_added)
    device = cluster_of(one).device

    def seconds(*found: tuple[int, float]) -> float:
        return sum(count * elementwise_seconds(device, 2 * values / count) for count, values in found)

    there = (clamp, bias, (1, 2 * N / 2 * W))
    back = (clamp_back, bias_back, (1, N / 2 * W), (2 * E + 2, 3 * E * (2 * H + W)))
    assert with_.forward - without.forward == pytest.approx(seconds(*there), rel=1e-3)
    assert with_.backward - without.backward == pytest.approx(seconds(*back), rel=1e-3)
    assert with_.host_forward == pytest.approx(device.launch * sum(count for count, _ in there))
    assert with_.host_backward == pytest.approx(device.launch * sum(count for count, _ in back))
    assert without.host_forward == without.awaited == 0
    torchtitan = run(tmp_path, **BIASED | {"framework": "torchtitan"})
    assert price_parts(torchtitan, 1)["layer"].host_forward == 0


def test_a_recipe_tells_what_is_computed_again(tmp_path: Path) -> None:
    """The second norm and the experts' activation: less than an eighth of the layer, and their outputs are not kept."""
    one = run(tmp_path, **BIASED)
    assert recomputation_of(one) == "modules" and assume_recomputation(one) == one
    assert [recomputation_of(run(tmp_path, **BIASED | changed)) for changed in (
        {"model": "Qwen3-30B-A3B"}, {"gpu_type": "A100-SXM4-80GB"}, {"framework": "NeMo"})] == ["", "", ""]
    layer, none = price_parts(one, 1)["layer"], replace(one, recompute="none")
    device = cluster_of(one).device
    assert layer.modules == pytest.approx(5 * elementwise_seconds(device, 2 * 13 * N * H / 5)
                                          + 2 * elementwise_seconds(device, 2 * 4 * N / 2 * W / 2))
    software = replace(software_of(one), host=0.0)
    times, plain = (layer_seconds(each, software, layer) for each in (one, none))
    assert times[1] - plain[1] == pytest.approx(layer.modules) and times[::2] == plain[::2]
    assert layer.modules_saved == 2 * (N * H + N / 2 * W)
    assert peak_bytes(one, 1) < peak_bytes(none, 1) < peak_bytes(one, 1) + 2 * 4 * layer.modules_saved


def test_the_host_waits_for_the_activation_of_experts(tmp_path: Path) -> None:
    """Behind what the host did before, the device does all from the tokens' order to the activation; a host that takes
    no time, or a device that is never done, changes nothing."""
    one = run(tmp_path, **BIASED)
    layer, software = price_parts(one, 1)["layer"], software_of(one)
    ahead = replace(layer, awaited=0.0, awaited_operators=0.0)
    assert 0 < layer.awaited_operators < layer.operators / 4 and layer.awaited < layer.forward + layer.dispatch_forward
    slow = replace(software, host=layer.awaited / layer.awaited_operators / 2)
    late = layer_seconds(one, slow, layer)[0] - slow.host * layer.operators - layer.host_forward
    assert late == pytest.approx(layer.awaited / 2)
    for host in (0.0, 1.0):
        other = replace(software, host=host)
        assert layer_seconds(one, other, layer)[0] == layer_seconds(one, other, ahead)[0]
