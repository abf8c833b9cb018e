"""Wrong texts of targets say what is wrong and what to write; the shell ends with one line."""

import json
import re
from pathlib import Path

import pytest
from shell import FACTORY, shell

from autoddl.core.errors import InputError
from autoddl.export.exported import import_text

TWO_BY_TWO = "examples/clusters/rehearsal-2x2-200.yaml"

WRONG = {
    ("torchtitan", "[parallelism"): "this is no TOML",
    ("torchtitan", "[paralelism]"): "did you mean 'parallelism'",
    ("torchtitan", "[parallelism]\ntensor_paralel_degree = 2"): "did you mean 'tensor_parallel_degree'",
    ("torchtitan", "[parallelism]\ntensor_parallel_degree = 'two'"): "is 'two'; it is a whole number, at least 1",
    ("torchtitan", "[parallelism]\ntensor_parallel_degree = true"): "is True; it is a whole number",
    ("torchtitan", "[parallelism]\ntensor_parallel_degree = 3"): "are no multiple of the other degrees",
    ("torchtitan", "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_schedule = '1F1'"):
        "did you mean '1F1B'",
    ("torchtitan", "[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [['a']]"):
        "one for every stage of 2 ranks",
    ("torchtitan", "[training]\nlocal_batch_size = 3\nglobal_batch_size = 32"): "let them divide",
    ("torchtitan", "[training]\ndtype = 'float16'"): "did you mean 'bfloat16'? It is one of bfloat16, float32",
    ("torchtitan", "training = 3"): "it is a section with settings",
    ("deepspeed", "{"): "this is no JSON",
    ("deepspeed", "[]"): "is one JSON object",
    ("deepspeed", '{"zero_optimisation": {}}'): "did you mean 'zero_optimization'",
    ("deepspeed", '{"zero_optimization": {"stge": 1}}'): "did you mean 'stage'",
    ("deepspeed", '{"zero_optimization": {"stage": 4}}'): "stages are 0, 1, 2 and 3",
    ("deepspeed", '{"train_batch_size": 30, "train_micro_batch_size_per_gpu": 1}'): "let them agree",
    ("deepspeed", '{"tensor_parallel": {"autotp_size": 3}}'): "no multiple of autotp_size 3",
    ("deepspeed", '{"fp16": {"enabled": true}}'): "price bf16 in its place",
    ("deepspeed", '{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}'): "let it divide",
    ("accelerate", "a: ["): "this is no YAML",
    ("accelerate", "8"): "is a YAML mapping",
    ("accelerate", "distributed_typ: FSDP"): "did you mean 'distributed_type'",
    ("accelerate", "distributed_type: TPU"): "is not read here",
    ("accelerate", "mixed_precision: fp8"): "no and bf16 are",
    ("accelerate", "fsdp_config: {fsdp_versio: 2}"): "did you mean 'fsdp_version'",
    ("accelerate", "parallelism_config: {parallelism_config_tp_size: 3}"): "has 3 ranks, and there are 16",
    **{("megatron", f"--pipeline-model-parallel-size {text}"): message for text, message in {
        "2 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24": "3 microbatches are no multiple of 2",
        "2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 8": "no multiple of 3 layers in each stage of 2",
        "2 --num-virtual-stages-per-pipeline-rank 3 --num-layers 8": "no multiple of 3 stages on each of 2",
        "1 --num-virtual-stages-per-pipeline-rank 2": "--pipeline-model-parallel-size is 1",
        "2 --num-layers-per-virtual-pipeline-stage 2": "give both",
        "2 --num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2": "give one"}.items()},
    ("fsdp2", "import torch"): "no configuration is read from it; import from torchtitan, megatron",
}


@pytest.mark.parametrize(("target", "text"), WRONG)
def test_a_wrong_text_says_what_to_write(target: str, text: str) -> None:
    with pytest.raises(InputError, match=re.escape(WRONG[target, text])):
        import_text(text, target, 16)


def test_a_text_without_its_ranks_asks_for_them() -> None:
    for target, text in (("torchtitan", ""), ("deepspeed", "{}"), ("accelerate", "{}")):
        with pytest.raises(InputError, match=r"--devices N"):
            import_text(text, target)


def test_defaults_of_targets_are_those_that_they_have() -> None:
    """A text that says next to nothing."""
    assert str(import_text("", "torchtitan", 8)).startswith("zero-3=8, 1 microbatch of 8 rows a rank, bf16-mixed")
    assert str(import_text("{}", "deepspeed", 8)).startswith("data=8, 1 microbatch of 1 row a rank, float32")
    assert str(import_text("distributed_type: FSDP", "accelerate", 8)).startswith("zero-3=8")
    assert str(import_text("--micro-batch-size 2", "megatron", 8)).startswith("data=8, 1 microbatch of 2 rows")


def test_the_shell_reads_prices_and_compares(tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 1 --micro-batch-size 2 --global-batch-size 8 --use-distributed-optimizer"
    said = shell("import", "--from", "megatron", flags, "--cluster", TWO_BY_TWO, "--factory", FACTORY, "--set",
                 "dropout=0.0", "-o", str(tmp_path / "mine.json"), "--json")
    assert said.code == 0, said.err
    found = json.loads(said.out)
    assert found["configuration"]["degrees"] == [["zero-1", 4]]
    assert found["predicted_seconds"] >= found["found_seconds"] >= found["bound_seconds"]
    again = shell("export", str(tmp_path / "mine.json"), "--to", "megatron", "-o", str(tmp_path / "flags.txt"),
                  "--json")
    assert again.code == 0 and json.loads(again.out)["lost"] == []
    for flag in flags.split(" --"):
        assert flag.removeprefix("--") in (tmp_path / "flags.txt").read_text()


@pytest.mark.parametrize(("words", "error"), [
    (("--from", "megatron", "--bf16", "--factory", FACTORY), "give both --factory and --cluster"),
    (("--from", "megatron", "--bf16", "--cluster", TWO_BY_TWO, "--devices", "8"), "leave --devices out"),
    (("--from", "megatron", "--micro-batch-size", "3", "--cluster", TWO_BY_TWO, "--factory", FACTORY),
     "set the batch of the factory, like --set batch=12"),
    (("--from", "megatron", "--tensor-model-parallel-size", "16", "--cluster", "examples/clusters/a100-4x8.yaml",
      "--num-layer", "3"), "did you mean '--num-layers'")])
def test_the_shell_says_what_it_needs(words: tuple[str, ...], error: str) -> None:
    said = shell("import", *words)
    assert said.code == 2 and error in said.err and len(said.err.strip().splitlines()) == 1


def test_a_long_line_of_flags_is_text_and_a_shorthand_is_known() -> None:
    flags = "--tensor-model-parallel-size 2 --recompute-activations --bf16 " + "--overlap-grad-reduce " * 20
    assert import_text(flags, "megatron", 8).recompute == "selective"
    said = shell("import", "--from", "megatron", flags, "--devices", "8")
    assert said.code == 0, said.err
