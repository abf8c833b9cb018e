"""Every differentiable operator of torch's database through two random plans on 2 x 2 gloo ranks, against one process.

    python examples/benchmarks/operators.py [share | NAME ...]        needs the package expecttest

Prints a line for each that is not equal, and the numbers of each kind.
"""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tests" / "support"))

from op_sweep import cases, sweep


def main(words: list[str]) -> None:
    """Sweep a share of the operators, or those named."""
    share = float(words[0]) if words and words[0][0].isdigit() else 1.0
    names = words if words and not words[0][0].isdigit() else cases(share)
    counted = Counter[str]()
    for result in sweep(names):
        counted[result.kind] += 1
        if result.kind != "equal":
            print(f"{result.kind:10} {result.name:40} {result.detail}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in counted.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
