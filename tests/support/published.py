"""A published run, written by hand."""

import csv
from pathlib import Path

from autoddl.validation.runs import Run
from autoddl.validation.runs_file import read_runs

ROW = {"row_id": "1", "source_id": "made up", "model": "GPT", "layers": 32, "hidden": 4096, "heads": 32, "n_gpus": 8,
       "dp": 2, "tp": 4, "pp": 1, "seq": 2048, "global_batch": 64, "gpu_type": "A100-SXM4-80GB", "iter_time_s": 700.0,
       "intra_link": "NVLink3", "microbatch": 4, "framework": "Megatron-LM", "precision": "fp16", "vocab": 51200}


def table(folder: Path, *rows: dict[str, object]) -> Path:
    path = folder / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(folder: Path, **changed: object) -> Run:
    return read_runs(table(folder, ROW | changed))[0]
