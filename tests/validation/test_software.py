"""What programs do on the device besides the operators of a model, priced: copies, padding, windows, recipes."""

from dataclasses import replace
from pathlib import Path

import pytest
from published import run

from autoddl.cost_models import elementwise_seconds
from autoddl.validation import software
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.clusters import cluster_of
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
