"""Published runs: three rows priced, scores by hand, bytes, and what is wrong in a table."""

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import yaml
from published import ROW, run, table
from shell import shell

from autoddl.cli.tables.validation_tables import run_rows
from autoddl.core.errors import InputError
from autoddl.cost_models import Group, collective, show_seconds
from autoddl.cost_models.intervals import interval_of
from autoddl.cost_models.profile import Profile
from autoddl.validation import validate as validation
from autoddl.validation.as_plan import price_as_plan
from autoddl.validation.as_plan_bytes import bytes_as_plan
from autoddl.validation.clusters import cluster_of
from autoddl.validation.run_parts import stage_layers
from autoddl.validation.runs_file import NEEDED
from autoddl.validation.scores import PricedRun, score_sources
from autoddl.validation.software import recomputation_of
from autoddl.validation.validate import assume_recomputation, price_run, settled, validate


def test_three_runs_make_a_table(tmp_path: Path) -> None:
    path = table(tmp_path, ROW, ROW | {"row_id": "2", "dp": 1, "tp": 8, "iter_time_s": 8.0},
                 ROW | {"row_id": "3", "dp": 1, "pp": 2, "iter_time_s": 8.5, "schedule": "1F1B"})
    said = shell("validate", str(path), "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)["made up"]
    assert set(found) == {"n", "priced", "mape", "max_ape", "bias", "constant_mape", "tau", "regret", "reasons"}
    assert found["n"] == found["priced"] == 3 and found["max_ape"] >= found["mape"] >= abs(found["bias"])
    assert "made up" in shell("validate", str(path)).out
    rows = json.loads(shell("validate", str(path), "--by", "run", "--json").out)
    assert [row["row"] for row in rows] == ["1", "2", "3"]
    for row, kind in zip(rows, ("whole", "whole", "pipeline"), strict=True):
        known, seconds = interval_of(2 if kind == "pipeline" else 1, False, alone=True), row["predicted_seconds"]
        assert row["predicted_interval"] == [seconds * known.low, seconds * known.high]
    lines = shell("validate", str(path), "--by", "run").out.splitlines()
    assert lines[0].split()[-4:] == ["predicted", "low", "high", "error"]
    assert f"{show_seconds(rows[0]['predicted_interval'][1])}  " in lines[1]


def test_a_run_without_a_price_has_no_interval_and_a_profile_narrows_those_of_others(tmp_path: Path) -> None:
    one, known = run(tmp_path), Profile(residual=0.01, runs=40)
    found = [PricedRun(one, 2.0), PricedRun(one, reason="too strange")]
    (low, high), none = (row["predicted_interval"] for row in run_rows(found))
    assert low < high and none is None
    less, more = run_rows(found, known)[0]["predicted_interval"]
    assert high / low > more / less


def test_scores_by_hand(tmp_path: Path) -> None:
    one = run(tmp_path)
    rows = [PricedRun(replace(one, seconds=2.0), 1.0), PricedRun(replace(one, tp=8, dp=1, seconds=4.0), 5.0),
            PricedRun(one, reason="too strange")]
    found = score_sources(rows)["made up"]
    assert (found.n, found.priced, found.reasons) == (3, 2, {"too strange": 1})
    assert found.mape == pytest.approx(0.375) and found.bias == pytest.approx(-0.125)
    assert found.max_ape == 0.5 and found.tau == pytest.approx(1) and found.regret == 0
    assert found.constant_mape == pytest.approx((1 + 0.5) / 2)  # each rate predicted by the other, twice or half of it


def test_repeated_measurements_are_one_member_of_a_group(tmp_path: Path) -> None:
    one = run(tmp_path)
    other = replace(one, tp=8, dp=1, seconds=3.0)
    found = score_sources([PricedRun(replace(one, seconds=2.0), 2.0), PricedRun(replace(one, seconds=5.0), 2.0),
                    PricedRun(other, 4.0)])["made up"]
    assert found.tau == pytest.approx(-1) and found.regret == pytest.approx(3.5 / 3 - 1)


def test_a_price_follows_what_a_run_does(tmp_path: Path) -> None:
    plain = run(tmp_path)
    base = price_as_plan(plain, 4)
    assert price_as_plan(replace(plain, recompute="full"), 4) > 1.2 * base
    assert price_as_plan(replace(plain, batch=128), 4) == pytest.approx(2 * base, rel=0.1)
    assert price_as_plan(replace(plain, device="H100-SXM5-80GB", link="NVLink4"), 4) < base
    assert price_as_plan(replace(plain, tp=8, dp=1), 4) > base
    pipes = [replace(plain, dp=1, tp=1, pp=8, schedule=name) for name in ("1F1B", "ZB-1p", "ZB-2p")]
    seconds = [price_as_plan(one, 1) for one in pipes]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_a_microbatch_that_is_not_stated_is_found(tmp_path: Path) -> None:
    found = price_run(run(tmp_path, microbatch="", recompute="full"))
    assert found.seconds is not None and found.reason == ""


def test_where_no_microbatch_fits_the_least_has_a_price_and_a_remark(tmp_path: Path) -> None:
    huge = price_run(run(tmp_path, microbatch="", layers=400, recompute="none"))
    assert huge.seconds is not None and huge.run.microbatch == 1 and "does not fit as it is described" in huge.remark
    recomputing = price_run(run(tmp_path, microbatch="", layers=400))
    assert recomputing.run.recompute == "full" and recomputing.run.microbatch == 1


@pytest.mark.parametrize(("changed", "message"), [
    ({"n_gpus": 16}, r"row 2 \(row_id 1\): dp 2 \* tp 4 \* pp 1 \* cp 1 = 8, but n_gpus is 16"),
    ({"layers": "many"}, r"layers is 'many'; write a number above 0"),
    ({"global_batch": 65}, r"65 is no multiple of dp 2"),
    ({"kv_heads": 0}, r"kv_heads is '0'; write a number above 0 or leave it empty"),
    ({"gpus_per_node": 0}, r"gpus_per_node is '0'"),
    ({"zero_stage": "none"}, r"zero_stage is 'none'; begin with 0, 1, 2 or 3"),
    ({"heads": 30, "kv_heads": 8}, r"30 heads are no multiple of 8"),
    ({"gated_ffn": "perhaps"}, r"gated_ffn is 'perhaps'; write 1 or 0"),
    ({"moe_experts": 8}, r"moe_topk is 0; each token goes to 1 to 8"),
    ({"moe_experts": 6, "moe_topk": 2, "ep": 4}, r"6 experts are no multiple of ep 4"),
    ({"layers": 1.5}, "whole number")])
def test_a_row_that_contradicts_itself_is_named(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(table(tmp_path, ROW | changed))


def test_what_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    said = shell("validate", str(tmp_path / "none.csv"))
    assert said.code == 2 and "cannot read the runs" in said.err and len(said.err.strip().splitlines()) == 1
    lacking = {key: value for key, value in ROW.items() if key != "tp"}
    said = shell("validate", str(table(tmp_path, lacking)))
    assert said.code == 2 and "the column 'tp' is missing" in said.err
    (tmp_path / "empty.csv").write_text(",".join((*NEEDED, "gpu_type", "iter_time_s")) + "\n")
    with pytest.raises(InputError, match="no rows below the head"):
        validate(tmp_path / "empty.csv")
    assert "gpu_type 'abacus'" in price_run(run(tmp_path, gpu_type="abacus")).reason


def test_layers_are_recomputed_only_as_far_as_the_device_demands(tmp_path: Path) -> None:
    tight = run(tmp_path, framework="NeMo", hidden=8192, layers=80, heads=64, gpu_type="H100-SXM5-80GB", zero_stage=3,
                intra_link="NVLink4", n_gpus=64, dp=64, tp=1, microbatch=2, seq=4096, global_batch=128)
    share = assume_recomputation(tight).recomputed_share
    assert assume_recomputation(tight).recompute == "full" and 0 < share < 1
    assert share * 80 == pytest.approx(round(share * 80))
    times = [price_as_plan(replace(tight, recompute="full", recomputed_share=part), 2)
             for part in (0.0, share, 1.0)]
    assert times == sorted(times) and times[0] == pytest.approx(price_as_plan(replace(tight, recompute="none"), 2))
    assert assume_recomputation(replace(tight, layers=8)).recompute == "none"


def test_a_head_is_as_large_as_the_family_or_the_row_says(tmp_path: Path) -> None:
    assert [run(tmp_path, **row).head_dim for row in ({}, {"model": "Qwen3-30B-A3B"}, {"head_dim": 96})] == [0, 128, 96]
    assert price_as_plan(run(tmp_path, head_dim=256), 4) > price_as_plan(run(tmp_path), 4)


@pytest.mark.parametrize(("changed", "reason"), [
    ({"gpu_type": "abacus"}, "gpu_type 'abacus' is none of"), ({"intra_link": "string"}, "intra_link 'string' is none"),
    ({"precision": "int8"}, "precision 'int8' has no price; those that have one begin with bf16"),
    ({"precision": ""}, "the precision is not stated; write one of bf16"),
    ({"precision": "tf32", "gpu_type": "V100", "intra_link": ""}, "V100-32GB lists no rate of tf32: write another"),
    ({"workload": "T5"}, "the workload 'T5' names T5, and rows are of decoders or encoders alone: plan the model"),
    ({"workload": "ResNet-50"}, "names ResNet"), ({"workload": "latent diffusion"}, "names diffusion"),
    ({"workload": "encoder-decoder"}, "names encoder-decoder"),
    ({"pp": 4, "tp": 1, "schedule": "DualPipe"}, "'DualPipe' has no price"),
    ({"n_gpus": 24, "tp": 24, "dp": 1, "gpus_per_node": 24}, "tp 24 does not divide 32 heads, .*: write a tp that"),
    ({"tp": 8, "dp": 1, "heads": 24, "kv_heads": 12}, "tp 8 neither divides 12 kv_heads nor is a multiple"),
    ({"ffn": 10922}, "tp 4 does not divide ffn 10922"),
    ({"n_gpus": 40, "pp": 40, "tp": 1, "dp": 1}, "pp 40 makes 40 stages of 32 layers, .*: write at most 34 stages"),
    ({"pp": 8, "tp": 1, "dp": 1, "interleave_vp": 5}, "pp 8 x interleave_vp 5 makes 40 stages of 32 layers"),
    ({"n_gpus": 12, "dp": 3, "global_batch": 48}, "12 GPUs do not fill nodes of 8"),
    ({"microbatch": "", "dp": 1, "pp": 8, "tp": 1, "layers": 96, "interleave_vp": 12, "global_batch": 4},
     "no multiple of 8 stages"),
    ({"moe_experts": 24, "moe_topk": 2, "ep": 24, "seq": 2112}, "24 must divide 2 or, with those of tp and cp, 8")])
def test_a_row_without_a_price_is_counted_with_its_reason(tmp_path: Path, changed: dict[str, object], reason: str
                                                          ) -> None:
    found = validate(table(tmp_path, ROW | changed, ROW | {"row_id": "2"}))
    assert re.search(reason, found[0].reason) and found[0].seconds is None and found[1].seconds is not None


@pytest.mark.parametrize("changed", [
    {"layers": 6, "pp": 8, "microbatch": 1}, {"layers": 7, "pp": 8, "microbatch": 1},
    {"layers": 22, "pp": 8, "interleave_vp": "max", "microbatch": 1}])
def test_layers_need_not_be_as_many_in_every_stage(tmp_path: Path, changed: dict[str, object]) -> None:
    one = run(tmp_path, **{"tp": 1, "dp": 1, "hidden": 512, "heads": 8, "vocab": 2048, "seq": 256} | changed)
    assert price_run(one).seconds is not None and sum(stage_layers(one)) == one.layers


def test_ranks_of_tp_copy_key_and_value_heads_that_are_fewer(tmp_path: Path) -> None:
    few, many, least = (run(tmp_path, n_gpus=16, gpus_per_node=16, tp=16, dp=1, gated_ffn=1, framework="NeMo",
                            kv_heads=n) for n in (8, 16, 32))
    assert price_as_plan(few, 4) == price_as_plan(many, 4) < price_as_plan(least, 4)
    assert bytes_as_plan(few, 4) == bytes_as_plan(many, 4)


def test_queries_of_an_encoder_see_all_keys(tmp_path: Path) -> None:
    long = {"framework": "torchtitan", "precision": "bf16", "seq": 8192, "hidden": 2048, "ffn": 1024, "layers": 4,
            "heads": 16, "vocab": 1024}
    plain, named = (price_as_plan(run(tmp_path, **long | {"model": model}), 4) for model in ("GPT", "BERT-large"))
    assert plain == named  # the workload tells, and no name does
    for words in ("BERT", "encoder", "ViT-L", "vision transformer"):
        assert 1.2 * plain < price_as_plan(run(tmp_path, **long | {"workload": words}), 4) < 2 * plain, words


def test_a_run_in_float32_has_products_of_its_rate_and_bytes_of_four(tmp_path: Path) -> None:
    plain, single, tf32 = (run(tmp_path, precision=name, framework="torchtitan") for name in ("bf16", "fp32", "tf32"))
    seconds = [price_as_plan(one, 4) for one in (plain, tf32, single)]
    assert 1.5 * seconds[0] < seconds[1] < seconds[2] / 2  # peaks of an A100: 312, 156 and 19.5 TFLOP/s
    assert bytes_as_plan(single, 4) == bytes_as_plan(tf32, 4) > bytes_as_plan(plain, 4)
    with pytest.raises(InputError, match=r"above the peak of 20 .*at precision"):
        run(tmp_path, precision="fp32", iter_time_s=20)


def test_a_table_of_one_source_says_why_nothing_is_told_of_intervals(tmp_path: Path) -> None:
    small = ROW | {"layers": 1, "hidden": 512, "heads": 8, "vocab": 2048, "seq": 256, "source_id": ""}
    rows = [small | {"row_id": str(i), "precision": "fp16" if i else "int8"} for i in range(4)]
    said = shell("validate", str(table(tmp_path, *rows))).out
    assert "inside the 80 %" not in said and "counted in intervals of other sources" in said
    lines = said.splitlines()
    assert any(line.startswith("1 not priced: the precision 'int8'") for line in lines)
    assert lines[1].split()[:2] == ["4", "3"] and lines[1].startswith("        4")  # the column is as wide as its head
    two = [row | {"source_id": f"source {i % 2}"} for i, row in enumerate(rows * 2)]
    assert "inside the 80 %" in shell("validate", str(table(tmp_path, *two))).out


def test_words_are_read_whatever_their_case(tmp_path: Path) -> None:
    one = run(tmp_path, precision="BF16", recompute="Full", seq_parallel="True", gated_ffn="1.0", intra_link="nvlink3")
    other = run(tmp_path, precision="bf16", recompute="full", seq_parallel=1, gated_ffn=1)
    assert one.recompute == "full" and one.sequence_parallel and one.gated
    assert price_as_plan(one, 4) == price_as_plan(other, 4)


def test_links_that_are_not_stated_are_those_of_the_reference_system(tmp_path: Path) -> None:
    assert price_as_plan(run(tmp_path, intra_link=""), 4) == price_as_plan(run(tmp_path), 4)
    assert price_run(run(tmp_path, intra_link="", gpu_type="MI250X")).seconds is not None


def test_two_devices_of_a_full_mesh_have_the_one_link_between_them(tmp_path: Path) -> None:
    """47.7 GB/s were measured between two of eight MI300X."""
    pair = cluster_of(run(tmp_path, gpu_type="MI300X", intra_link="xGMI3", n_gpus=2, dp=1, tp=2))
    sent = collective(pair, "all-reduce", Group(((2, 1),)), 1e9).seconds
    assert 1e9 / sent == pytest.approx(47.7e9, rel=0.05)


def test_selective_recomputation_is_what_the_program_means_by_it(tmp_path: Path) -> None:
    found = {name: recomputation_of(run(tmp_path, framework=name, recompute="selective"))
             for name in ("Megatron-LM", "NeMo", "torchtitan")}
    assert found == {"Megatron-LM": "core", "NeMo": "core", "torchtitan": "operators"}


def test_peak_bytes_are_those_of_the_plan_and_grow_with_what_is_in_flight(tmp_path: Path) -> None:
    small = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 2048, "seq": 256, "dp": 1, "tp": 1, "n_gpus": 4, "pp": 4,
             "global_batch": 16, "microbatch": 1}
    nbytes = {name: bytes_as_plan(run(tmp_path, **small | {"schedule": name}), 1)
              for name in ("1F1B", "GPipe", "ZB-2p")}
    assert nbytes["1F1B"] < nbytes["ZB-2p"] < nbytes["GPipe"]
    flat = small | {"pp": 1, "n_gpus": 1}
    two, three, four = (bytes_as_plan(run(tmp_path, **flat | {"layers": n}), 1) for n in (2, 3, 4))
    assert 0 < three - two == pytest.approx(four - three)
    again = bytes_as_plan(run(tmp_path, **flat | {"recompute": "full"}), 1)
    assert again < bytes_as_plan(run(tmp_path, **flat), 1)


def test_several_tables_are_one(tmp_path: Path) -> None:
    """Errors are by source, whatever its table, and intervals rest on all of them."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    one = table(folders[0], ROW | {"source_id": "both"}, ROW | {"source_id": "first", "row_id": "2"})
    other = table(folders[1], ROW | {"source_id": "both", "row_id": "3"})
    said = shell("validate", str(one), str(other), "--json", "--intervals", str(tmp_path / "intervals.yaml"))
    assert said.code == 0, said.err
    assert {source: row["n"] for source, row in json.loads(said.out).items()} == {"both": 2, "first": 1}
    known = yaml.safe_load((tmp_path / "intervals.yaml").read_text())["regimes"]
    assert {row["runs"] for row in known.values()} == {3}
    last = [line for line in shell("validate", str(one), str(other)).out.splitlines() if line.startswith("mean of")]
    assert len(last) == 1 and last[0].startswith("mean of 2 sources")


def test_tokens_that_do_not_go_evenly_to_experts_are_rounded(tmp_path: Path) -> None:
    """256 tokens of which each goes to 2 of 24 experts: 252 do, and no multiple of 12 * 16 is near 100."""
    mixture = {"moe_experts": 24, "moe_topk": 2, "gated_ffn": 1, "layers": 2}
    near, even = (price_as_plan(run(tmp_path, **mixture, seq=seq, tp=1, dp=8), 4) for seq in (256, 252))
    assert near == pytest.approx(even * 256 / 252)
    reason = price_run(run(tmp_path, **mixture, seq=100)).reason
    assert reason.startswith("100 tokens do not go evenly to 24 experts, and no multiple of 12 is within 2%: write one")


def test_a_table_without_any_price_is_an_error_and_says_why_in_every_form(tmp_path: Path) -> None:
    path = table(tmp_path, ROW | {"precision": "int8"})
    for asked in ((), ("--json",), ("--by", "run")):
        said = shell("validate", str(path), *asked)
        assert said.code == 2 and "no run has a price: the precision 'int8'" in said.err
    assert list(json.loads(shell("validate", str(path), "--json").out)["made up"]["reasons"].values()) == [1]


def test_a_framework_that_is_not_known_is_named(tmp_path: Path) -> None:
    said = " ".join(shell("validate", str(table(tmp_path, ROW | {"framework": "torchtitn"}))).out.split())
    assert "is not known, so that the program is taken to run eager; did you mean 'torchtitan'" in said


def test_a_microbatch_may_fit_where_a_smaller_one_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One microbatch adds no gradients up, which several have to keep."""
    monkeypatch.setattr(validation, "bytes_as_plan", lambda run, size: 0.0 if size == 4 else inf)
    assert settled(run(tmp_path, microbatch="", recompute="full"))[1] == 4
