"""What plans send, planned and counted: sudo python examples/benchmarks/bytes_sent.py folder=FOLDER [NAME=VALUE ...]

    plans=found,ZeRO-3   models=gpt-8k,vgg,llama,vit,mixture   steps=3
    clusters=4x1-200,4x1-400,2x2-200,8x1-200,2racks

Rehearses the plans that `predictions.py folder=FOLDER` kept, and tables for every cluster how many collectives of a
step are not as planned, and by how much the bytes on the interfaces exceed the plan's, median and most of the plans:
what came in (headers), and what went out (what a full queue dropped on the way, too). Of all uplinks of a plan
together, which send at least LEAST bytes.
"""

import sys
from itertools import product
from pathlib import Path
from statistics import median

from autoddl.capture.factory import Factory
from autoddl.core.plan import load_plan
from autoddl.launch.rehearse import rehearse

MODELS = str(Path(__file__).parent / "small_models.py")
LEAST = 1e5
"""Bytes a step over all uplinks below which headers and greetings are most of what is counted."""
DEFAULTS = {"plans": "found,ZeRO-3", "models": "gpt-8k,vgg,llama,vit,mixture", "steps": "3",
            "clusters": "4x1-200,4x1-400,2x2-200,8x1-200,2racks", "folder": "."}


def main(options: dict[str, str]) -> None:
    print("| cluster | plans | mismatches | in: median | most | out: median | most |\n|---|---|---|---|---|---|---|")
    for cluster in options["clusters"].split(","):
        more: list[tuple[float, float]] = []
        wrong = count = 0
        for model, name in product(options["models"].split(","), options["plans"].split(",")):
            file = Path(options["folder"], f"rehearsal-{cluster.removeprefix('rehearsal-')}-{model}-{name}.json")
            if not file.exists():
                continue
            factory = Factory(MODELS, "made", {"name": model})
            found = rehearse(file, load_plan(file), factory, steps=int(options["steps"]))
            planned, went, came = (sum(getattr(row, key) for row in found.uplinks)
                                   for key in ("planned", "left", "entered"))
            wrong, count = wrong + found.collective_mismatches, count + 1
            if planned >= LEAST:
                more.append((came / planned - 1, went / planned - 1))
        shown = [f"{100 * of(values):.2f} %" for values in zip(*more, strict=True) for of in (median, max)]
        print(f"| {cluster} | {count} | {wrong} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main(DEFAULTS | dict(word.split("=", 1) for word in sys.argv[1:]))
