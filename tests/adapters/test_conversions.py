"""Scripts of other people's kind are converted by few lines, and train as they did."""

import json
import os
import runpy
import sys
import warnings
from contextlib import nullcontext
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from loops import alone, launched
from ranks import on_ranks

FOLDER = Path(__file__).parents[2] / "examples" / "conversions"
ARGUMENTS = {
    "resnet": ["--epochs", "2", "--images", "40", "--output", "{folder}/losses.json"],
    "nanogpt": ["{folder}/losses.json"],
    "clm": ["--output_dir", "{folder}", "--num_train_epochs", "2", "--use_cpu", "--report_to", "none",
            "--logging_steps", "1", "--eval_strategy", "epoch", "--disable_tqdm", "True", "--words", "120",
            "--learning_rate", "0.01", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "{rows}",
            "--per_device_eval_batch_size", "{rows}"]}
"""What is given to each script."""

CLUSTER = {"resnet": ["--cluster"], "nanogpt": [], "clm": ["--cluster"]}
"""What stands before the file of the cluster."""


def losses(script: str, words: list[str], folder: Path, rows: int) -> list[float]:
    """Runs a script as a program; returns what it found."""
    folder.mkdir(parents=True, exist_ok=True)
    before, sys.argv = sys.argv, [script, *(word.format(folder=folder, rows=rows) for word in words)]
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
            warnings.simplefilter("ignore")
            output, sys.stdout = sys.stdout, nowhere
            try:
                runpy.run_path(str(FOLDER / script), run_name="__main__")
            finally:
                sys.stdout = output
    finally:
        sys.argv = before
    if dist.get_rank() != 0:
        return []
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


def compared(name: str, cluster: str, folder: str) -> tuple[list[float], list[float]]:
    world, rank = dist.get_world_size(), dist.get_rank()
    with alone() if name == "clm" else nullcontext():
        plain = losses(f"{name}_plain.py", ARGUMENTS[name], Path(folder, f"plain{rank}"), 8)
    with launched():
        words = [*ARGUMENTS[name], *CLUSTER[name], cluster]
        shared: Any = Path(folder, "planned" if name == "clm" else f"planned{rank}")
        return plain, losses(f"{name}_planned.py", words, shared, 8 // world)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", ["nanogpt", "resnet", "clm"])
def test_a_converted_script_has_the_same_losses(name: str, tmp_path: Path) -> None:
    text = (FOLDER.parent / "clusters" / "laptop.yaml").read_text()
    (tmp_path / "two.yaml").write_text("".join(line for line in text.splitlines(True) if "name: machine" not in line))
    plain, planned = on_ranks(2, compared, name, str(tmp_path / "two.yaml"), str(tmp_path))[0]
    assert len(plain) >= 9 and planned == pytest.approx(plain, rel=2e-5)


@pytest.mark.parametrize("name", ["resnet", "nanogpt", "clm"])
def test_at_most_ten_lines_of_a_converted_script_differ(name: str) -> None:
    """A line that is changed counts once; the lines that say how to run it do not."""
    plain, planned = ([line for line in (FOLDER / f"{name}_{kind}.py").read_text().splitlines()
                       if line and not line.startswith("Run: ")] for kind in ("plain", "planned"))
    changed = sum(max(i2 - i1, j2 - j1) for word, i1, i2, j1, j2 in SequenceMatcher(
        None, plain, planned, autojunk=False).get_opcodes() if word != "equal")
    assert 0 < changed <= 10
