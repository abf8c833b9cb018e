"""A cluster file with curves written by hand."""

import json

from autoddl.cost_models import Device, Kernel
from autoddl.cost_models import parse_cluster as parse

LAPTOP = """# A machine.
name: two
device: {name: core, kind: cpu, memory: 4 GB, bandwidth: 10 GB/s, peak: {float32: 96 GFLOP/s}}
levels:
  - {name: all, size: 2, bandwidth: 1 GB/s, latency: 60 us}
"""
COPY = {"name": "copy", "dtype": "float32", "grid": [[1e3, 1e5]], "work": [1e3, 1e5], "seconds": [1e-6, 1e-5]}
MATMUL = {"name": "matmul", "dtype": "float32", "grid": [[1, 100], [10], [10, 1000]], "work": [2e2, 2e4, 2e4, 2e6],
          "seconds": [1e-6, 1e-5, 1e-5, 1e-4]}
MEASURED = {"date": "2026-11-20 12:00", "versions": {"torch": "2.13.0"}, "device": {"name": "core", "kind": "cpu"},
            "curves": [COPY, MATMUL]}


def written(**changes: object) -> str:
    return LAPTOP + json.dumps({"measured": MEASURED | changes})[1:-1].replace('"measured"', "measured") + "\n"


def moved(nbytes: float, name: str = "copy", dtype: str = "float32") -> Kernel:
    return Kernel("memory", (), 0.0, nbytes, dtype, name)


def device() -> Device:
    return parse(written(), "x").device
