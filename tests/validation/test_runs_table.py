"""The page on the columns of a table of runs says what the reader does, and wrong tables are one line each."""

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from published import ROW, run, table
from shell import shell

from autoddl.core.errors import InputError
from autoddl.cost_models import load_cluster
from autoddl.validation.clusters import cluster_of, part_of
from autoddl.validation.runs import Run
from autoddl.validation.runs_file import COLUMNS, DESCRIPTIVE, MACHINE, MEASURED, NEEDED, read_runs
from autoddl.validation.validate import price_run

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "runs_table.md").read_text(encoding="utf-8")
ROWS = {name: empty for name, _, empty, _ in (
    [cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `"))}
EXAMPLE = next(csv.DictReader(io.StringIO(PAGE.split("```csv\n")[1].split("```")[0])))


def read(folder: Path, **changed: object) -> Run:
    return replace(run(folder, **EXAMPLE | changed), row="")


def test_the_page_lists_the_columns_of_the_reader() -> None:
    assert [name.strip("`") for name in ROWS] == list(COLUMNS)
    said = {"needed": NEEDED, "one of five": MEASURED, "one of two": MACHINE}
    for words, names in said.items():
        assert tuple(name.strip("`") for name, empty in ROWS.items() if empty == words) == names
    assert tuple(re.findall(r"`(\w+)`", PAGE.split("For readers alone:")[1].split("\n\n")[0])) == DESCRIPTIVE


def test_an_empty_field_stands_for_what_the_page_says(tmp_path: Path) -> None:
    literal = {name.strip("`"): empty.strip("`") for name, empty in ROWS.items() if re.fullmatch("`.*`", empty)}
    filled = literal | {"kv_heads": EXAMPLE["heads"], "ffn": 4 * int(EXAMPLE["hidden"]), "recompute": "none",
                        "schedule": ""}
    assert "cp" in literal and "vocab" in literal
    for name, value in filled.items():
        assert read(tmp_path, **{name: value}) == read(tmp_path, **{name: ""}) or name == "recompute", name
    assert not read(tmp_path, recompute="").recompute


def test_the_example_is_read_with_its_units(tmp_path: Path) -> None:
    one = read_runs(table(tmp_path, dict(EXAMPLE)))[0]
    assert one.seconds == pytest.approx(16 * 8192 / 8 / 5762)
    more = run(tmp_path, **EXAMPLE | {"inter_Gbps_per_node": 400, "peak_mem_GB": 60})
    assert (more.network, more.peak_bytes) == (50e9, 60e9)


def test_the_example_fits_and_without_what_it_says_of_memory_it_is_told_not_to(tmp_path: Path) -> None:
    assert price_run(run(tmp_path, **EXAMPLE)).remark == ""
    plain = price_run(run(tmp_path, **EXAMPLE | {"zero_stage": "", "recompute": "none"}))
    assert plain.seconds is not None and plain.nbytes is not None and plain.nbytes > 2 * 80e9
    assert re.fullmatch(r"does not fit as it is described: \d+ GB on a device of 80 GB; look at zero_stage 0, "
                        "recompute none, microbatch 2, precision bf16", plain.remark)
    path = table(tmp_path, EXAMPLE, *(EXAMPLE | {"zero_stage": "", "row_id": name} for name in ("a", "b")))
    said = shell("validate", str(path)).out
    assert "row a does not fit as it is described" in said and "(and 1 more, --by run has all)" in said
    assert "row a does not fit" in said.splitlines()[3]
    by_run = json.loads(shell("validate", str(path), "--by", "run", "--json").out)
    assert [bool(row["remark"]) for row in by_run] == [False, True, True]
    assert all("does not fit" in row["remark"] and row["predicted_bytes"] > 1.25 * 80e9 for row in by_run[1:])
    fitted = json.loads(shell("calibrate", str(path), "--json").out)
    assert [row["row"] for row in fitted["remarks"]] == ["a", "b"]
    assert "row b does not fit as it is described" in shell("calibrate", str(path)).out


def test_rates_and_seconds_say_the_same(tmp_path: Path) -> None:
    plain = ROW | {"n_gpus": 8, "gated_ffn": 1}
    flops = 3 * 64 * 2048 * (32 * (2 * (4 * 4096**2 + 3 * 4096 * 16384) + 4 * 2048 * 4096) + 2 * 4096 * 51200)
    for column, value in {"tokens_per_s": 64 * 2048 / 9.0, "tokens_per_s_per_gpu": 64 * 2048 / 9.0 / 8,
                          "tflops_per_gpu": flops / 9.0 / 8 / 1e12,
                          "mfu_pct": 100 * flops / 9.0 / 8 / 312e12}.items():
        assert run(tmp_path, **plain | {"iter_time_s": "", column: value}).seconds == pytest.approx(9.0), column


def test_a_run_on_a_cluster_file_has_the_first_of_its_devices(tmp_path: Path) -> None:
    text = load_cluster(ROOT / "examples" / "clusters" / "a100-4x8.yaml").to_yaml()
    (tmp_path / "mine.yaml").write_text(text)
    one = run(tmp_path, gpu_type="", intra_link="", cluster="mine.yaml")
    assert cluster_of(one) == part_of(load_cluster(tmp_path / "mine.yaml"), 8) and one.device == "A100-80GB"
    assert [level.size for level in cluster_of(one).levels] == [8, 1]
    with pytest.raises(InputError, match="12 ranks do not fill whole units of 8"):
        part_of(load_cluster(tmp_path / "mine.yaml"), 12)
    with pytest.raises(InputError, match=r"has 32 devices .* no part of 64"):
        part_of(load_cluster(tmp_path / "mine.yaml"), 64)


@pytest.mark.parametrize(("changed", "said"), [
    ({"iter_time_ms": 5}, "nothing reads the column 'iter_time_ms'; did you mean 'iter_time_s'"),
    ({"iter_time_s": 0.007}, r"TFLOP/s a device, above the peak of 312 of A100.*look at the unit"),
    ({"iter_time_s": ""}, "nothing says how long a step took; fill one of iter_time_s"),
    ({"iter_time_s": "", "mfu_pct": 140}, "mfu_pct is 140, of a peak that is 100; write per cent"),
    ({"gpu_type": "", "cluster": ""}, "this one has neither; fill one"),
    ({"cluster": "none.yaml"}, "cannot read cluster file .*none.yaml"),
    ({"recompute": "foo"}, "recompute is 'foo'; begin with none, full or selective, or leave it empty"),
    ({"overlap": "dp pp"}, "overlap is 'dp pp'; write some of tp dp cp ep, or none"),
    ({"overlap": "none dp"}, "overlap is 'none dp'; write some of tp dp cp ep, or none"),
    ({"dp": 3}, "let the degrees multiply to the GPUs"), ({"global_batch": 63}, "let it divide")])
def test_a_wrong_row_is_one_line(tmp_path: Path, changed: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        run(tmp_path, **changed)
    assert "\n" not in str(error.value)


def test_columns_of_ones_own_are_left_alone(tmp_path: Path) -> None:
    assert replace(run(tmp_path, x_color="red"), row="") == replace(run(tmp_path), row="")


def test_an_unknown_device_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did you mean 'H100', .*\? Any other .* device: \{name, memory"):
        cluster_of(run(tmp_path, gpu_type="H-100"))


@pytest.mark.parametrize(("schedule", "told", "chunks"), [
    ("1F1B", "", 1), ("interleaved", "", 0), ("interleaved", 2, 2), ("", "max", 0)])
def test_an_interleaved_schedule_has_as_many_chunks_as_there_are_layers(tmp_path: Path, schedule: str,
                                                                       told: int | str, chunks: int) -> None:
    assert run(tmp_path, schedule=schedule, interleave_vp=told).chunks == chunks
