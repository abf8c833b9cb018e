"""What programs do on the device besides the operators of a model, priced: copies, padding, windows, recipes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoddl.cost_models import elementwise_seconds
from autoddl.operators.expert_rows import BIASED, CLAMPED, clamped_gates, expert_products
from autoddl.schedule.run_step import ordered_bytes, run_parts
from autoddl.validation import software
from autoddl.validation.as_plan import flat_graphs, flat_plan, price_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.software import PROGRAMS, recomputation_of, visible_share
from autoddl.validation.validate import assume_recomputation

SHARDED = {"framework": "PyTorch FSDP", "dp": 8, "tp": 1, "zero_stage": 3, "vocab": 50368, "layers": 2}
WIDTH, LENGTH = 4096, 2048


def without(one: str, fields: dict[str, object], path: Path, patch: pytest.MonkeyPatch, **words: object) -> float:
    """Seconds that a run takes less where its program does not have these fields."""
    made = run(path, **SHARDED | {"framework": one} | words)
    whole = price_as_plan(made, 2)
    with patch.context() as other:
        other.setattr(software, "PROGRAMS", {one: replace(PROGRAMS[one], **fields)})  # type: ignore[arg-type]
        return whole - price_as_plan(made, 2)


def test_fsdp_copies_what_it_gathers_and_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes per parameter and microbatch as its source says, at the pace of elementwise kernels."""
    device = cluster_of(run(tmp_path, **SHARDED)).device
    values = 2 * 12 * WIDTH**2 + 2 * 50_368 * WIDTH + LENGTH * WIDTH
    for name, moved in (("PyTorch FSDP", 18), ("torchtitan", 4 + 4 + 6)):
        copied = 4 * elementwise_seconds(device, moved * values)
        assert without(name, {"packed": 0.0, "unpacked": 0.0}, tmp_path, monkeypatch) == pytest.approx(copied, rel=2e-3)


def test_padding_is_taken_out_around_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tensors a read and a write, of one zeros, a read and a write; backward the other way round."""
    one, device = 2 * LENGTH * WIDTH * 2, cluster_of(run(tmp_path, **SHARDED)).device
    copied = 4 * (elementwise_seconds(device, 2 * 9 * one) + elementwise_seconds(device, 2 * 11 * one))
    assert without("PyTorch FSDP", {"unpads": False}, tmp_path, monkeypatch) == pytest.approx(copied, rel=1e-3)


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write; a view moves none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.nbytes += sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor))
        return out


def moved(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[float, float]:
    """Bytes a value that a function moves, forward and backward."""
    with Moved() as forth:
        out = function(*inputs)
    gradient = torch.ones_like(out)
    with Moved() as back:
        out.backward(gradient)
    return forth.nbytes / inputs[0].numel(), back.nbytes / inputs[0].numel()


def test_biases_and_clamps_of_experts_move_what_the_kernels_of_their_lines_do() -> None:
    y, p = torch.ones(64, 4096, dtype=torch.bfloat16, requires_grad=True), torch.ones(64, 1, requires_grad=True)
    b = torch.ones(4, 4096, dtype=torch.bfloat16, requires_grad=True)

    def biased(y: torch.Tensor, b: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return torch.cat([t + one * q for t, one, q in zip(y.split(16), b.unbind(), p.split(16), strict=True)]).to(
            y.dtype)

    def clamped(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return torch.cat((gate.clamp(max=7.0), up.clamp(-7.0, 7.0)), -1)

    assert moved(biased, y, b, p) == pytest.approx(BIASED, rel=0.05)
    y.grad = None
    assert moved(clamped, y) == pytest.approx(CLAMPED, rel=0.01)


MIXTURE = {"framework": "Megatron-Bridge", "model": "GPT-OSS-120B", "gpu_type": "H100-SXM5-80GB", "intra_link": "",
           "moe_experts": 16, "moe_topk": 4, "ep": 8, "dp": 8, "tp": 1, "microbatch": 1, "global_batch": 8, "layers": 2,
           "heads": 64, "kv_heads": 8, "hidden": 2880, "ffn": 2880, "gated_ffn": 1, "precision": "bf16", "vocab": 512,
           "recompute": "none"}


def test_rows_are_put_in_the_order_of_experts_and_get_their_biases(tmp_path: Path) -> None:
    """Each rank writes its rows, and sorts and unsorts those that it gets; biases and clamps besides."""
    made, device = run(tmp_path, **MIXTURE), cluster_of(run(tmp_path, **MIXTURE)).device
    rows, asked = 4 * LENGTH * 2880, RunPlan.of(made, 1)
    chosen = [flat_plan(asked, graph) for graph in flat_graphs(made, asked)]

    def added(**fields: object) -> float:
        """Seconds more of the second layer."""
        software = replace(asked.software, host=0.0, **fields)  # type: ignore[arg-type]
        one, two = (run_parts(one.plan, one.graph, asked.cluster, software).device for one in chosen)
        return two - one

    each = sum(BIASED) * rows + sum(CLAMPED) * 2 * rows
    assert added() - added(biases_apart=False) == pytest.approx(elementwise_seconds(device, each) - device.launch,
                                                               rel=1e-6)
    graph, plan = chosen[1].graph, chosen[1].plan
    found = expert_products(graph)
    assert [(one.first, one.last, one.biased) for one in found.values()] == [(True, False, True), (False, True, True)
                                                                             ] * 2
    assert len(clamped_gates(graph)) == 4
    assert ordered_bytes(plan, graph) == 2 * 2 * rows * (1 + 1 / 4 + 2 + 2)


def test_norms_in_the_dtype_of_the_stream_have_no_casts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm in float32 moves 34 bytes an element more: of forward 6, 4 and 6, of backward 6, 6 and 6.

    Its casts are four kernels more.
    """
    alone, device = {"dp": 1, "n_gpus": 1, "zero_stage": 0, "global_batch": 8}, cluster_of(run(tmp_path)).device
    spared = 4 * 5 * (elementwise_seconds(device, 34 * 2 * LENGTH * WIDTH) + 3 * device.launch)
    more = -without("PyTorch FSDP", {"low_norms": False}, tmp_path, monkeypatch, **alone)
    assert more == pytest.approx(spared, rel=1e-9)


def test_every_other_layer_sees_a_window(tmp_path: Path) -> None:
    shares = [visible_share(run(tmp_path, model="GPT-OSS 20B", seq=seq)) for seq in (128, 4096, 131072)]
    assert shares[0] == 1 and shares == sorted(shares, reverse=True) and shares[-1] == pytest.approx(0.5, abs=0.01)
    assert visible_share(run(tmp_path)) == 1


def test_a_recipe_tells_what_is_computed_again(tmp_path: Path) -> None:
    words = {"framework": "Megatron-Bridge", "model": "GPT-OSS-120B", "gpu_type": "H100-SXM5-80GB",
             "intra_link": "NVLink4", "recompute": "recipe default"}
    one = run(tmp_path, **words)
    assert recomputation_of(one) == "modules" and assume_recomputation(one) == one
    assert [recomputation_of(run(tmp_path, **words | changed)) for changed in (
        {"model": "Qwen3-30B-A3B"}, {"gpu_type": "A100-SXM4-80GB"}, {"framework": "NeMo"})] == ["", "", ""]
