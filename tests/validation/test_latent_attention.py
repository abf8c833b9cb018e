"""Latent attention and shared experts: they have the parameters that were published, and a price under every degree."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from published import run
from sampling import parametrize_or_slow
from torch.utils.flop_counter import FlopCounterMode

from autoddl.capture.capture import capture
from autoddl.core.errors import InputError
from autoddl.core.precision import Precision
from autoddl.validation.layers import Shape
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.runs_file import model_facts
from autoddl.validation.scores import step_flops
from autoddl.validation.templates import _sizes, _template_shape, model, model_graph
from autoddl.validation.validate import price_run

LITE = {"model": "DeepSeek-V2-Lite", "workload": "MoE (MLA)", "layers": 27, "hidden": 2048, "heads": 16, "ffn": 1408,
        "gated_ffn": 1, "vocab": 102400, "seq": 4096, "moe_experts": 64, "moe_topk": 6, "gpu_type": "H100",
        "intra_link": "", "n_gpus": 8, "dp": 8, "tp": 1, "global_batch": 16, "microbatch": 1, "precision": "bf16"}
V3 = LITE | {"model": "DeepSeek-V3", "layers": 61, "hidden": 7168, "heads": 128, "ffn": 2048, "vocab": 129280,
             "moe_experts": 256, "moe_topk": 8}
SMALL = LITE | {"model": "DeepSeek-V3", "layers": 2, "hidden": 512, "heads": 8, "ffn": 256, "vocab": 2048, "seq": 256,
                "moe_experts": 8, "moe_topk": 2, "ep": 2, "q_rank": 192, "kv_rank": 128, "rope_dim": 32, "v_dim": 48,
                "head_dim": 64, "shared_ffn": 384}


@pytest.mark.parametrize(("row", "dense", "ffn", "published"), [
    (LITE, 1, 10944, 15.7e9),
    (LITE | {"model": "Moonlight-16B-A3B", "vocab": 163840}, 1, 11264, 15.96e9),
    (V3 | {"model": "DeepSeek-V2", "layers": 60, "hidden": 5120, "ffn": 1536, "vocab": 102400, "moe_experts": 160,
           "moe_topk": 6, "seq": 4000}, 1, 12288, 236e9),
    (V3, 3, 18432, 671e9),
    (V3 | {"model": "Kimi K2", "heads": 64, "vocab": 163840, "moe_experts": 384, "seq": 4080}, 1, 18432, 1.026e12)])
def test_a_known_model_has_the_parameters_that_were_published(tmp_path: Path, row: dict[str, object], dense: int,
                                                              ffn: int, published: float) -> None:
    """All but those of its first dense layers, which are layers with experts here."""
    one = run(tmp_path, **row)
    built = sum(p.numel() for p in model(RunPlan.of(one, 1).shape, one.layers)[0].parameters())
    more = one.hidden * (3 * (one.experts * one.ffn + one.shared_ffn - ffn) + one.experts)
    assert built - dense * more == pytest.approx(published, rel=0.005)
    assert built == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize(("changed", "precision"), [
    ({}, "bf16"), ({"q_rank": 0}, "bf16-mixed"), ({"written_out": True}, "bf16-mixed"),
    ({"fused": False, "experts": 0, "top_k": 0, "shared": 0}, "bf16")])
def test_a_template_is_its_capture(changed: dict[str, object], precision: str) -> None:
    sizes: dict[str, object] = {"gated": True, "bias": False, "experts": 8, "top_k": 2, "head_dim": 24, "q_rank": 48,
                                "kv_rank": 40, "rope_dim": 16, "v_dim": 20, "shared": 56,
                                "dtype": "float32", "row_dtype": "" if precision == "bf16" else "bfloat16"}
    shape = Shape(128, 4, 4, 96, 512, 4, 32, **sizes | changed)  # type: ignore[arg-type]
    captured = capture(*model(shape, 2), Precision.parse(precision)).graph
    assert captured == model_graph(shape, 2, precision)
    joined = [op for op in captured.ops if op.target == "aten.cat.default"]
    assert {captured.tensors[t].dtype for op in joined for t in op.inputs} == {"bfloat16"}
    again = [size for size, count in Counter(_sizes(_template_shape(shape))).items() if count > 1]
    assert set(again) <= {0, 1, 3, 73}, "73 are heads of queries and of keys"


@parametrize_or_slow("changed", [
    {"dp": 2, "tp": 4, "seq_parallel": 1, "recompute": "full", "precision": "fp8"},
    {"dp": 4, "pp": 2, "zero_stage": 1, "recompute": "selective"},
    {"framework": "torchtitan", "zero_stage": 3, "q_rank": 0}], [
    {}, {"zero_stage": 1}, {"zero_stage": 2, "recompute": "full"}, {"zero_stage": 3, "recompute": "selective"},
    {"dp": 4, "tp": 2}, {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1, "precision": "fp8"},
    {"framework": "eager attention"},
    {"moe_experts": 0, "moe_topk": 0, "ep": 1, "shared_ffn": 0}])
def test_a_run_of_latent_attention_has_a_price_under_every_degree(tmp_path: Path, changed: dict[str, object]) -> None:
    priced = price_run(run(tmp_path, **SMALL | changed))
    assert not priced.reason
    assert priced.seconds and priced.nbytes


def test_tensor_parallelism_splits_the_heads(tmp_path: Path) -> None:
    """A rank of four has a quarter of the weights of heads, experts and vocabulary, whatever kv_heads says."""
    few = V3 | {"layers": 1, "n_gpus": 4, "dp": 1, "tp": 4, "moe_experts": 8, "kv_heads": 1}
    whole, split = (price_run(run(tmp_path, **few | changed)).nbytes for changed in ({"tp": 1, "n_gpus": 1}, {}))
    assert whole and split and split < 0.35 * whole


def test_a_wider_shared_expert_and_wider_ranks_take_longer(tmp_path: Path) -> None:
    plain = price_run(run(tmp_path, **SMALL)).seconds
    assert plain
    for column in ("shared_ffn", "q_rank", "kv_rank", "rope_dim", "v_dim"):
        more = price_run(run(tmp_path, **SMALL | {column: 2048})).seconds
        assert more and more > plain, column


@pytest.mark.parametrize("changed", [{}, {"q_rank": 0}, {"moe_experts": 0, "moe_topk": 0, "ep": 1, "shared_ffn": 0}])
def test_the_flops_of_a_step_are_those_of_its_products(tmp_path: Path, changed: dict[str, object]) -> None:
    one = run(tmp_path, **SMALL | changed)
    module, sample = model(RunPlan.of(one, 1).shape, one.layers)
    with FlopCounterMode(display=False) as counted, torch.device("meta"):
        module(*sample)
    assert step_flops(one) == pytest.approx(3 * counted.get_total_flops() * one.batch / one.dp, rel=0.01)


def test_what_is_known_by_name_is_of_the_longest_beginning(tmp_path: Path) -> None:
    assert model_facts("deepseek-ai/DeepSeek-V2") == model_facts("DeepSeek-V2")
    assert model_facts("DeepSeek V2") == model_facts("deepseek_v2-chat") != model_facts("DeepSeek-V2-Lite")
    assert (model_facts("DeepSeek-V2").q_rank, model_facts("DeepSeek-V2-Lite").q_rank) == (1536, 0)
    assert model_facts("DeepSeek-R1") == model_facts("DeepSeek-V3") == model_facts("Kimi-K2-Base")
    assert model_facts("DeepSeek-R1-Distill-Qwen-7B").kv_rank == 0, "which is a Qwen"
    told = run(tmp_path, **SMALL)
    assert (told.q_rank, told.kv_rank, told.rope_dim, told.v_dim, told.head_dim, told.shared_ffn) == (
        192, 128, 32, 48, 64, 384)
    assert run(tmp_path, **SMALL | {"q_rank": 0}).q_rank == 0
    assert run(tmp_path, **LITE | {"moe_experts": "", "moe_topk": ""}).shared_ffn == 0


def test_latent_attention_without_its_ranks_says_which_columns_to_fill(tmp_path: Path) -> None:
    reason = price_run(run(tmp_path, **LITE | {"model": "Unheard of"})).reason
    assert reason.endswith("fill q_rank, kv_rank, rope_dim, v_dim and head_dim")
    ranks = {"kv_rank": 512, "rope_dim": 64, "v_dim": 128, "head_dim": 128}
    assert not price_run(run(tmp_path, **LITE | {"model": "Unheard of"} | ranks)).reason


@pytest.mark.parametrize(("changed", "said"), [
    ({"kv_rank": 512}, "kv_rank is of latent attention, which has a rope_dim too; fill rope_dim, v_dim, or write 0"),
    ({"q_rank": 512, "v_dim": 64}, "q_rank and v_dim are of latent attention, which has a kv_rank too; fill kv_rank"),
    ({"shared_ffn": 512}, "shared_ffn is 512, and the row has no experts .*; fill moe_experts and moe_topk")])
def test_columns_that_contradict_each_other_are_one_line(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        run(tmp_path, **changed)
