"""What programs do on the device besides the operators of a model, priced: copies, padding, windows, recipes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from held import moved
from published import run

from autoddl.cost_models import elementwise_seconds
from autoddl.cost_models.software import SOFTWARE
from autoddl.operators.expert_rows import BIASED, CLAMPED, clamped_gates, expert_products
from autoddl.schedule.run_step import ROTATED, joined_bytes, ordered_bytes, run_parts
from autoddl.validation import software
from autoddl.validation.as_plan import flat_graphs, flat_plan, price_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_as_plan import RunPlan
from autoddl.validation.software import (
    PROGRAMS,
    profile_of,
    recomputation_of,
    software_of,
    splits_stream,
    visible_share,
)
from autoddl.validation.templates import model_graph
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
    for name, each in (("PyTorch FSDP", 18), ("torchtitan", 4 + 4 + 6)):
        copied = 4 * elementwise_seconds(device, each * values)
        assert without(name, {"packed": 0.0, "unpacked": 0.0}, tmp_path, monkeypatch) == pytest.approx(copied, rel=2e-3)


@pytest.mark.parametrize("tp", [2, 4])
def test_fsdp_copies_the_piece_that_tensor_parallelism_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              tp: int) -> None:
    device = cluster_of(run(tmp_path, **SHARDED)).device
    values = (2 * 12 * WIDTH**2 + 2 * 50_368 * WIDTH + LENGTH * WIDTH) / tp
    copied = 4 * elementwise_seconds(device, (4 + 4 + 6) * values)
    degrees = {"dp": 8 // tp, "tp": tp, "seq_parallel": 1}
    assert without("torchtitan", {"packed": 0.0, "unpacked": 0.0}, tmp_path, monkeypatch, **degrees
                   ) == pytest.approx(tp * copied, rel=0.02)


def test_padding_is_taken_out_around_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tensors a read and a write, of one zeros, a read and a write; backward the other way round."""
    one, device = 2 * LENGTH * WIDTH * 2, cluster_of(run(tmp_path, **SHARDED)).device
    copied = 4 * (elementwise_seconds(device, 2 * 9 * one) + elementwise_seconds(device, 2 * 11 * one))
    assert without("PyTorch FSDP", {"unpads": False}, tmp_path, monkeypatch) == pytest.approx(copied, rel=1e-3)


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
    assert moved(clamped, y) == pytest.approx(CLAMPED, rel=0.01)


def test_turning_by_rows_of_operators_moves_what_its_lines_do() -> None:
    q, cos, sin = (torch.ones(64, n, 64, dtype=torch.bfloat16) for n in (32, 1, 1))

    def turned(q: torch.Tensor) -> torch.Tensor:
        q, rest = q[..., :64], q[..., 64:]
        one, two = q.chunk(2, -1)
        return torch.cat((q * cos + torch.cat((-two, one), -1) * sin, rest), -1)

    rows, once = (moved(function, q.requires_grad_()) for function in (turned, lambda q: q * cos))
    assert [a - b for a, b in zip(rows, once, strict=True)] == pytest.approx(ROTATED, rel=0.02)


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
    turned = sum(ROTATED) * LENGTH * (64 + 8) * 64
    assert added() - added(rotates_apart=False) == pytest.approx(
        elementwise_seconds(device, turned) - device.launch, rel=1e-6)
    assert added(rotates_apart=False) - added(biases_apart=False, rotates_apart=False) == pytest.approx(
        elementwise_seconds(device, each) - device.launch, rel=1e-6)
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


def test_heads_of_queries_and_keys_are_normalised_where_a_model_does_that(tmp_path: Path) -> None:
    """Two norms a layer, of rows as wide as a head."""
    norms = []
    for value in (0, 1):
        made = run(tmp_path, gated_ffn=1, qk_norm=value)
        asked = RunPlan.of(made, 2)
        graph = flat_graphs(made, asked)[1]
        norms.append([graph.tensors[op.inputs[0]].shape for op in graph.ops if op.target.startswith("aten.rms_norm")])
    heads = [shape for shape in norms[1] if shape not in norms[0]]
    assert [shape[2:] for shape in heads] == [(made.heads, asked.shape.head_width),
                                              (made.kv_heads, asked.shape.head_width)] * 2
    assert len(norms[1]) - len(norms[0]) == 4


@pytest.mark.slow
def test_the_host_starts_a_cast_for_every_narrow_product(tmp_path: Path) -> None:
    """Four products of a dense layer cast what they read, and the gradients of what they write."""
    hosts = []
    for precision in ("bf16", "fp8"):
        made = run(tmp_path, framework="Megatron-Bridge", gpu_type="H100-SXM5-80GB", intra_link="", dp=8, tp=1,
                   microbatch=1, global_batch=8, layers=2, precision=precision, recompute="none")
        asked = RunPlan.of(made, 1)
        few = [flat_plan(asked, graph) for graph in flat_graphs(made, asked)]
        one, two = (run_parts(each.plan, each.graph, asked.cluster, asked.software).host for each in few)
        hosts.append((two - one) / asked.software.host)
    assert hosts[1] - hosts[0] == pytest.approx(2 * 4)


def test_rows_of_experts_have_the_dtype_of_products_in_mixed_precision(tmp_path: Path) -> None:
    """The stream stays in it too, and so do the rows that are sent."""
    made = run(tmp_path, **MIXTURE | {"framework": "modern", "model": "any"})
    asked = RunPlan.of(made, 1)
    assert asked.precision == "bf16-mixed"
    graph = flat_graphs(made, asked)[1]
    rows = [graph.tensors[t] for one in expert_products(graph).values() for t in (one.rows, one.tokens)]
    assert rows and {tensor.dtype for tensor in rows} == {"bfloat16"}
    sums = [graph.tensors[op.outputs[0]] for op in graph.ops if op.target.startswith("aten.add.")]
    assert sums and {tensor.dtype for tensor in sums} == {"bfloat16"}


@pytest.mark.parametrize(("framework", "profile"), [
    ("no such program", "eager"), ("", "eager"), ("NeMo Megatron 22.08", "nemo-2022"), ("NeMo / Megatron-Core", "nemo"),
    ("Megatron-Core v0.6.0", "megatron-core"), ("Paxml (JAX)", "paxml"),
    ("Paxml (JAX) with Transformer Engine", "paxml-te")])
def test_a_program_is_known_by_its_longest_beginning_and_others_run_eager(tmp_path: Path, framework: str, profile: str
                                                                          ) -> None:
    assert profile_of(run(tmp_path, framework=framework)) == profile


@pytest.mark.parametrize(("framework", "device", "profile"), [
    ("Megatron-LM", "A100", "megatron-2022"), ("Megatron-LM main", "H100", "megatron-core"),
    ("Megatron-LM", "GH200", "megatron-core"), ("Some recipe / Megatron-Core", "A800", "megatron-core"),
    ("Megatron-DeepSpeed / another", "H100", "megatron-deepspeed")])
def test_a_name_behind_a_slash_tells_a_program_and_a_device_its_release(tmp_path: Path, framework: str, device: str,
                                                                        profile: str) -> None:
    assert profile_of(run(tmp_path, framework=framework, gpu_type=device)) == profile


def test_a_name_tells_that_a_program_was_compiled(tmp_path: Path) -> None:
    plain, made = (software_of(run(tmp_path, framework=f"LitGPT{words}")) for words in ("", ", torch.compile"))
    assert not plain.fuses and made == replace(plain, fuses=True, by_hand=True)


@pytest.mark.parametrize(("framework", "notes", "profile"), [
    ("torchtitan", "not compiled; shape from the config", "torchtitan"),
    ("torchtitan", "whether compiled is not stated", "torchtitan"), ("torchtitan", "", "torchtitan"),
    ("torchtitan", "run without torch.compile", "torchtitan"),
    ("torchtitan", "torch.compile+float8", "torchtitan-compiled"),
    ("torchtitan (torch.compile)", "", "torchtitan-compiled"), ("torchtitan-compiled 0.0.2", "", "torchtitan-compiled"),
    ("torchtitan", "compiled", "torchtitan-compiled"), ("LitGPT, torch.compile", "", "litgpt"),
    ("torchtitan-float8", "", "torchtitan-float8"), ("modern", "", "modern")])
def test_words_tell_whether_a_program_was_compiled_and_names_of_profiles_are_known(
        tmp_path: Path, framework: str, notes: str, profile: str) -> None:
    assert profile_of(run(tmp_path, framework=framework, notes=notes)) == profile


@pytest.mark.parametrize("name", ["torchtitan", "transformers", "paddle-2023", "megatron-2019"])
def test_a_compiled_program_has_no_rows_of_operators_left(tmp_path: Path, name: str) -> None:
    made = software_of(run(tmp_path, framework=f"{name} (torch.compile)"))
    assert made.fuses and made.by_hand
    assert not (made.norms_in_rows or made.masks_apart or made.rotates_apart or made.biases_apart)


def test_a_program_that_is_named_as_compiled_is_priced_as_one_that_says_so(tmp_path: Path) -> None:
    named, said = (price_as_plan(run(tmp_path, **SHARDED | {"framework": name}), 2)
                   for name in ("torchtitan-compiled", "torchtitan (torch.compile)"))
    assert named == said


def test_keys_and_values_of_groups_are_copied_where_attention_is_two_products(tmp_path: Path) -> None:
    made = [RunPlan.of(run(tmp_path, framework="Megatron-LM", tp=1, dp=8, layers=2, kv_heads=heads), 2)
            for heads in (8, 32)]
    groups, alike = (model_graph(one.shape, 2, one.precision) for one in made)
    scores = [[op for op in graph.ops if "softmax" in op.target] for graph in (groups, alike)]
    assert len(scores[0]) == len(scores[1]) == 2
    assert groups.tensors[scores[0][0].outputs[0]].shape == alike.tensors[scores[1][0].outputs[0]].shape


def test_a_name_tells_a_generation_of_fused_attention(tmp_path: Path) -> None:
    plain, told = (software_of(run(tmp_path, framework=f"Megatron-DeepSpeed{words}"))
                   for words in ("", " (DeepSpeed 0.11, FlashAttention-2)"))
    assert plain.attention == "products" and told == replace(plain, attention="flash-2")


def test_a_name_tells_that_attention_is_two_products(tmp_path: Path) -> None:
    plain, told = (software_of(run(tmp_path, framework=f"DeepSpeed 0.11{words}"))
                   for words in ("", " (eager attention)"))
    assert plain.attention == "flash-2" and told == replace(plain, attention="products")


@pytest.mark.parametrize(("framework", "stage", "overlap", "sent"), [
    ("Megatron-Core", 1, "", {"cp"}), ("Megatron-Core", 3, "", {"cp", "dp"}), ("Megatron-LM", 2, "", {"dp"}),
    ("Megatron-Core", 1, "tp dp", {"tp", "dp"}), ("Megatron-Core", 3, "none", set()),
    ("NeMo", 1, "", {"tp", "dp", "cp"}), ("torchtitan", 3, "", {"dp"})])
def test_a_row_or_fsdp_tells_what_is_sent_beside_computation(tmp_path: Path, framework: str, stage: int, overlap: str,
                                                             sent: set[str]) -> None:
    made = software_of(run(tmp_path, framework=framework, zero_stage=stage, overlap=overlap))
    assert made.overlaps == sent


def test_gated_models_train_without_dropout(tmp_path: Path) -> None:
    gpt, llama = (software_of(run(tmp_path, gated_ffn=gated)) for gated in (0, 1))
    assert gpt.dropout and llama == replace(gpt, dropout=False)


def test_masks_of_their_own_move_scores_twice_more_in_each_direction(tmp_path: Path) -> None:
    made = run(tmp_path, framework="DeepSpeed 0.3.0", tp=1, dp=8, layers=2)
    asked = RunPlan.of(made, 4)
    assert asked.software.masks_apart and not asked.software.fuses
    apart, plain = (_compute(replace(asked, shape=replace(asked.shape, masks_apart=masks))) for masks in (True, False))
    scores, device = 2 * 4 * 32 * LENGTH**2 * 2, asked.cluster.device
    assert apart - plain == pytest.approx(4 * 2 * 2 * elementwise_seconds(device, scores), rel=0.01)


def _compute(asked: RunPlan) -> float:
    """Seconds of the kernels of a step of two layers."""
    return flat_plan(asked, model_graph(asked.shape, 2, asked.precision)).plan.predicted.compute


def test_the_host_starts_again_what_backward_computes_again(tmp_path: Path) -> None:
    hosts = []
    for recompute in ("none", "full"):
        made = run(tmp_path, framework="eager", tp=1, dp=8, layers=2, recompute=recompute)
        asked = RunPlan.of(made, 4)
        few = [flat_plan(asked, graph) for graph in flat_graphs(made, asked)]
        one, two = (run_parts(each.plan, each.graph, asked.cluster, asked.software).host for each in few)
        hosts.append(two - one)
    assert hosts[1] == pytest.approx(1.5 * hosts[0], rel=0.05)


def test_padding_copies_rows_once_more_at_either_end(tmp_path: Path) -> None:
    made = run(tmp_path, **MIXTURE | {"framework": "torchtitan", "ep": 1})
    asked = RunPlan.of(made, 1)
    chosen = flat_plan(asked, flat_graphs(made, asked)[1])
    plain, padded = (ordered_bytes(chosen.plan, chosen.graph, padded) for padded in (False, True))
    rows = made.seq * made.top_k * made.hidden * 2
    assert asked.software.pads_rows and padded - plain == pytest.approx(2 * rows * (2 + 2))


@pytest.mark.parametrize(("sharded", "streams"), [(1, [4, 4]), (0, [0, 0])])
def test_shards_of_a_sequence_are_joined_and_cut_by_copies(tmp_path: Path, sharded: int, streams: list[int]) -> None:
    """Of a layer four whole streams in forward and in backward; an all-reduce needs no copy."""
    made = run(tmp_path, framework="torchtitan", tp=4, dp=2, seq_parallel=sharded, recompute="none", layers=2)
    asked = RunPlan.of(made, 4)
    one, two = (joined_bytes(each.plan, each.graph)
                for each in (flat_plan(asked, graph) for graph in flat_graphs(made, asked)))
    each = 2 * 4 * LENGTH * WIDTH * 2
    assert [(b - a) / each for a, b in zip(one, two, strict=True)] == streams


@pytest.mark.parametrize(("framework", "said", "split"), [
    ("Megatron-LM", "", False), ("NeMo", "", True), ("NeMo", 0, False), ("Megatron-LM", 1, True)])
def test_a_row_or_its_program_tells_whether_the_stream_is_split(tmp_path: Path, framework: str, said: int | str,
                                                                split: bool) -> None:
    one = run(tmp_path, framework=framework, seq_parallel=said)
    assert one.tp > 1 and splits_stream(one) == split and not splits_stream(replace(one, tp=1))


def test_graphs_of_the_whole_step_need_no_host(tmp_path: Path) -> None:
    plain, graphs = (run(tmp_path, framework="Megatron-Bridge", cuda_graphs=word) for word in ("", 1))
    assert software_of(plain).host > software_of(graphs).host == SOFTWARE["megatron-bridge-graphs"].host == 0.0
