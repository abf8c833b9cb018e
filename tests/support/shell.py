"""The program `autoddl` called from a test, and a model of two layers in a file of its own.

    said = shell("plan", FACTORY, LAPTOP, "--json")      said.code, said.out, said.err
"""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

from autoddl.cli.main import main

__all__ = ["FACTORY", "LAPTOP", "PAIR", "Said", "shell"]

ROOT = Path(__file__).parent.parent.parent
LAPTOP = str(ROOT / "examples" / "clusters" / "laptop.yaml")
PAIR = """
name: pair
device: {name: slow, kind: cpu, memory: 1 GB, bandwidth: 1 GB/s, peak: {float32: 10 MFLOP/s}}
levels:
  - {name: net, size: 2, bandwidth: 100 MB/s, latency: 100 us}
"""
"""Two devices so slow that a tiny model is split over them: where two ranks tell what four would."""
FACTORY = f"{Path(__file__).parent / 'tiny.py'}:tiny"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


def shell(*arguments: str) -> Said:
    """What the program prints, and its exit code."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
    return Said(code, out.getvalue(), err.getvalue())
