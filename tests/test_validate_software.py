"""What programs do on the device besides the operators of a model, priced: copies, loops, windows, kernels that are not
there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_validate import run
from torch import Tensor, nn

from autoddl import validate_layer, validate_software
from autoddl.capture import capture
from autoddl.cost_models import elementwise_seconds
from autoddl.sample import Sample
from autoddl.validate_kernels import Asked, passes_on
from autoddl.validate_layer import part
from autoddl.validate_model import Shape
from autoddl.validate_parts import parts_of
from autoddl.validate_places import cluster_of
from autoddl.validate_software import SOFTWARE, attention_slowdown, software_of
from autoddl.validate_step import step
from autoddl.work import base, work

SHARDED = {"framework": "PyTorch FSDP", "dp": 8, "tp": 1, "zero_stage": 3, "vocab": 50368}


def test_fsdp_copies_what_it_gathers_and_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes per parameter and microbatch as its source says, at the pace of elementwise kernels."""
    for name, moved in (("PyTorch FSDP", 18), ("torchtitan", 4 + 4 + 6)):
        one = run(tmp_path, **SHARDED | {"framework": name})
        with monkeypatch.context() as patch:
            bare = replace(SOFTWARE[name], packed=0.0, unpacked=0.0)
            patch.setattr(validate_software, "SOFTWARE", {name: bare})
            without = step(one, 2).seconds
        values = sum(part.values * (32 if kind == "layer" else 1) for kind, part in parts_of(one, 2).items())
        copied = 4 * elementwise_seconds(cluster_of(one).device, moved * values)
        assert step(one, 2).seconds - without == pytest.approx(copied, rel=0.05)


def test_padding_is_taken_out_around_attention(tmp_path: Path) -> None:
    """Of three tensors a read and a write, of one zeros, a read and a write; backward the other way round."""
    plain = run(tmp_path, **SHARDED)
    assert software_of(plain).unpads
    shape = Shape(4096, 32, 32, 16384, 51200, 4, 2048)
    padded, bare = (part(Asked("layer", shape, "dp=1", False, "", False, unpads=unpads), cluster_of(plain))
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
    passing = [base(op) for op in graph.ops if passes_on(graph, op)]
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
    sorted_ = parts_of(mixed, 1)["layer"]
    part.cache_clear()
    monkeypatch.setattr(validate_layer, "_add_sorting", lambda *anything: None)
    plain = parts_of(mixed, 1)["layer"]
    part.cache_clear()
    copies, device = 2.0 * 2048 * 2 * 4096, cluster_of(mixed).device
    assert sorted_.forward - plain.forward == pytest.approx(elementwise_seconds(device, 3.5 * copies))
    assert sorted_.backward - plain.backward == pytest.approx(elementwise_seconds(device, 2.5 * copies))
